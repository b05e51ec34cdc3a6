"""How a step is applied or skipped: by a branch, or by a select."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

T = TypeVar("T")
Branch = Literal["cond", "select"]


def apply_or_skip(
    should_apply: jax.Array,
    apply: Callable[..., T],
    apply_always: Callable[..., T],
    skip: Callable[..., T],
    given: tuple[Any, ...],
    branch: Branch | None,
) -> T:
    """What a step computes if it is applied, or what it leaves if it is skipped.

    A conditional computes one of the two, and on CPU its results stay in place. A GPU's
    compiler gives those results buffers of their own and copies them afterwards, and a
    TPU's does so with updates; a select is part of the kernel that computes its result, and
    stays in place, but then the step is computed every time.

    Args:
      should_apply: a bool, shape ().
      apply: the step, run only where it is applied.
      apply_always: the same, run at every step: it makes do with numbers that are not finite.
      skip: what stands in for the results of either.
      given: the arguments of all three, a pytree each. What they close over instead takes
        longer to trace.
      branch: `"cond"`, `"select"`, or None for the first on CPU and the second elsewhere,
        chosen by the platform that the program is lowered for. In a step that is not compiled
        the first is a Python `if`, and None means that, too.
    """

    def cond(should_apply, *given):
        return lax.cond(should_apply, apply, skip, *given)

    def select(should_apply, *given):
        choose = partial(lax.select, should_apply)
        return jax.tree.map(choose, apply_always(*given), skip(*given))

    if branch == "select":
        return select(should_apply, *given)
    if not isinstance(should_apply, jax.core.Tracer):
        # Not compiled, so Python can branch. A `lax.cond` would be compiled anew at each step, as
        # its functions are new ones, and what they close over kept for good as its constants.
        # Copies, as a compiled step returns: they may be donated, and zeros share one array.
        return apply(*given) if should_apply else jax.tree.map(jnp.copy, skip(*given))
    if branch == "cond":
        return cond(should_apply, *given)
    return lax.platform_dependent(should_apply, *given, cpu=cond, default=select)
