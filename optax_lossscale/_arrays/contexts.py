"""Settings that apply while a function is traced and are part of JAX's cache keys.

For example, `diagnose` traces a loss function under `with DIAGNOSING(True):`. A call of
`scale_gradient` inside that function reads `DIAGNOSING.value` and scales nothing. A
program that was compiled under one value never runs under another, which a global
variable could not promise.

A new setting changes the key of every function that JAX has compiled, so that each is
compiled once more. So a setting is made by its first user: importing this package makes
none, and nor does a training step.
"""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import jax


class _Waiting(threading.local):
    """The `with` blocks of a thread that it entered before the setting existed.

    Attributes:
      blocks: the value of each, and where to enter it; the outermost first.
    """

    def __init__(self):
        self.blocks: list[tuple[Any, contextlib.ExitStack]] = []


class Context:
    """A user context of JAX that does not exist before `create` is called."""

    def __init__(self):
        self._context: Any = None
        self._waiting = _Waiting()

    def create(self) -> None:
        """Makes the setting, if it was not made before; also inside of a `with`."""
        if self._context is None:
            self._context = jax.make_user_context(None)
        while self._waiting.blocks:
            value, stack = self._waiting.blocks.pop(0)
            stack.enter_context(self._context(value))

    @property
    def value(self) -> Any:
        """The current value; None by default, and before `create` is called."""
        return None if self._context is None else self._context.value

    @contextlib.contextmanager
    def __call__(self, value: Any) -> Iterator[None]:
        """Sets the value in a `with` block."""
        with contextlib.ExitStack() as stack:
            if self._context is not None:
                stack.enter_context(self._context(value))
                yield
                return
            block = (value, stack)
            self._waiting.blocks.append(block)
            try:
                yield
            finally:
                if block in self._waiting.blocks:
                    self._waiting.blocks.remove(block)


AUTOCAST_DTYPE = Context()
"""The dtype of products in a function that `autocast` traces; made by `cast_inputs`."""

DIAGNOSING = Context()
"""Whether `diagnose` is tracing the function; made by `diagnose`.

If it is, this package issues no warnings and `scale_gradient` scales nothing, because
`diagnose` itself reports on dtypes and tries loss scales.
"""
