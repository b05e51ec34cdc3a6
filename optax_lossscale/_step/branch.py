"""How a step is applied or skipped: by a branch, or by a select."""

from collections.abc import Callable
from functools import partial
from typing import Literal, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

T = TypeVar("T")
Branch = Literal["cond", "select"]


def apply_or_skip(
    should_apply: jax.Array,
    apply: Callable[[jax.Array | bool], T],
    skipped: Callable[[T], T],
    branch: Branch | None,
) -> T:
    """What `apply` computes, or what is `skipped` in its place.

    A conditional computes one of the two, and on CPU its results stay in place. A GPU's
    compiler gives those results buffers of their own and copies them afterwards, and a
    TPU's does so with updates; a select is part of the kernel that computes its result, and
    stays in place, but then `apply` runs at every step.

    Args:
      should_apply: a bool, shape ().
      apply: told whether it runs only where all is finite; traced once, whatever the platforms.
      skipped: from the results, or their shapes, to what stands in for them.
      branch: `"cond"`, `"select"`, or None for the first on CPU and the second elsewhere,
        chosen by the platform that the program is lowered for. In a step that is not compiled
        the first is a Python `if`, and None means that, too.
    """
    if branch == "select":
        return _select(should_apply, apply(jnp.zeros_like(should_apply)), skipped)
    if not isinstance(should_apply, jax.core.Tracer):
        # Not compiled, so Python can branch. A `lax.cond` would be compiled anew at each step, as
        # its functions are new ones, and what they close over kept for good as its constants.
        if should_apply:
            return apply(True)
        # Copies, as a compiled step returns: they may be donated, and zeros share one array.
        return jax.tree.map(jnp.copy, skipped(jax.eval_shape(partial(apply, True))))
    if branch == "cond":
        return _cond(should_apply, partial(apply, True), skipped)
    # A predicate that is a constant costs nothing: the compiler puts the branch that is always
    # taken in the conditional's place, and the case that is always selected in the select's.
    taken, selected, finite = lax.platform_dependent(
        should_apply, cpu=_branched, default=_selected
    )
    return _select(selected, _cond(taken, partial(apply, finite), skipped), skipped)


def _branched(should_apply: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    always = jnp.ones_like(should_apply)
    return should_apply, always, always


def _selected(should_apply: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    return jnp.ones_like(should_apply), should_apply, jnp.zeros_like(should_apply)


def _cond(taken: jax.Array, apply: Callable[[], T], skipped: Callable[[T], T]) -> T:
    apply = jax.jit(apply)  # whose trace serves twice
    return lax.cond(taken, apply, lambda: skipped(jax.eval_shape(apply)))


def _select(selected: jax.Array, new: T, skipped: Callable[[T], T]) -> T:
    return jax.tree.map(partial(lax.select, selected), new, skipped(new))
