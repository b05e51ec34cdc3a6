"""A function called in a process of its own, which may die without harm to this one."""

import multiprocessing
import textwrap
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

_WIDTH = 120  # of a reason, which is a cell of a table


class CallError(Exception):
    """That there is no result, and why, in a line."""


def call(function: Callable[..., Any], *args: Any, seconds: float) -> Any:
    """What the function returns, from a process that starts for it and ends with it.

    Args:
      function: one that a new process can import, with arguments that can be pickled.
      *args: its arguments.
      seconds: how long it may take.

    Raises:
      CallError: if it raises, takes longer, or its process dies.
    """
    # A forked process would share what this one has of a device.
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(sender, function, args), daemon=True)
    process.start()
    sender.close()  # the other process has its own, whose end is heard if it dies
    try:
        if not receiver.poll(seconds):
            raise CallError(f"took longer than {seconds:.0f} s")
        result, reason = receiver.recv()
    except EOFError:
        process.join()
        raise CallError(
            f"its process ended with exit code {process.exitcode}"
        ) from None
    finally:
        process.kill()
        process.join()
        receiver.close()
    if reason:
        raise CallError(reason)
    return result


def _send(
    sender: Connection, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    try:
        sender.send((function(*args), ""))
    except Exception as error:
        sender.send((None, reason(error)))


def reason(error: Exception) -> str:
    """What went wrong, in a line that fits into a table."""
    text = str(error)
    if "RESOURCE_EXHAUSTED" in text:
        return "out of memory"
    line = f"{type(error).__name__}: {text}".strip().splitlines()[0].replace("|", "/")
    return textwrap.shorten(line, _WIDTH, placeholder=" …")
