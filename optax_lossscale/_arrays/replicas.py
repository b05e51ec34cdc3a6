"""Reductions over the replicas of a `pmap` or `shard_map`, so that all decide alike.

If each replica decided for itself, one might skip a step that the others apply, and
their parameters would differ from then on.
"""

from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

AxisName = Hashable
"""The name of a mapped axis or a tuple of such names."""


def on_all_replicas(flag: jax.Array, axis_name: AxisName | None) -> jax.Array:
    """Whether a flag is True on every replica along the named axes; bool, shape ()."""
    if axis_name in (None, ()):
        return flag
    return reduce_replicas(lax.pmin, flag.astype(jnp.int32), axis_name).astype(bool)


def reduce_replicas(
    reduce: Callable[..., jax.Array], x: jax.Array, axis_name: AxisName | None
) -> jax.Array:
    """Reduces `x` over the replicas along the named axes, with `lax.pmin` or the like.

    Returns `x` itself if no axis is named. Raises a `ValueError` if a name is given
    twice or names no axis of an enclosing `pmap` or `shard_map`.
    """
    if axis_name in (None, ()):
        return x
    if not _names_axes(axis_name):
        raise ValueError(
            f"axis_name={axis_name!r} is not an axis of a pmap or shard_map around "
            "this step, nor a tuple of such axes without repetition. Under jit alone, "
            "leave axis_name out: the check already covers all devices"
        )
    return reduce(x, axis_name)


def _names_axes(axis_name: AxisName) -> bool:
    """Whether each name is that of an enclosing `pmap` or the like, and none twice."""
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    try:
        # For an unknown name, this raises where a reduction would fail an assertion.
        lax.axis_size(names)
        return len(set(names)) == len(names)
    except (NameError, TypeError, ValueError):
        return False


def varying_axes(x: jax.Array) -> frozenset:
    """Returns the axes of a `shard_map` along which replicas may have different values.

    JAX tracks these axes only with `check_vma`. Without it, the set is empty.
    """
    abstract: Any = jax.typeof(x)
    if hasattr(abstract, "vma"):
        return abstract.vma or frozenset()
    # Since jax 0.10, `manual_axis_type` has replaced `vma`.
    axes = abstract.manual_axis_type
    return getattr(axes, "varying", axes) or frozenset()
