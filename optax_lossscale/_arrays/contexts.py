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
from collections.abc import Iterator
from typing import Any

import jax


class Context:
    """A user context of JAX that does not exist before `create` is called."""

    def __init__(self):
        self._context: Any = None
        # The values of `with` blocks that were entered before it existed, outermost
        # first, and where to enter them in it
        self._entered: list[tuple[Any, contextlib.ExitStack]] = []

    def create(self) -> None:
        """Makes the setting, if it was not made before; also inside of a `with`."""
        if self._context is None:
            self._context = jax.make_user_context(None)
            for value, stack in self._entered:
                stack.enter_context(self._context(value))

    @property
    def value(self) -> Any:
        """The current value; None by default."""
        return None if self._context is None else self._context.value

    @contextlib.contextmanager
    def __call__(self, value: Any) -> Iterator[None]:
        """Sets the value in a `with` block."""
        with contextlib.ExitStack() as stack:
            if self._context is not None:
                stack.enter_context(self._context(value))
                yield
                return
            self._entered.append((value, stack))
            try:
                yield
            finally:
                self._entered.pop()


AUTOCAST_DTYPE = Context()
"""The dtype of products in a function that `autocast` traces; made by `cast_inputs`."""

DIAGNOSING = Context()
"""Whether `diagnose` is tracing the function; made by `diagnose`.

If it is, this package issues no warnings and `scale_gradient` scales nothing, because
`diagnose` itself reports on dtypes and tries loss scales.
"""
