"""The check: is every number of a tree finite? In the same pass: the largest, and the norm.

Each looks at the numbers at hand; `across` replicas, its answer is made one.
"""

import functools
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from optax_lossscale._arrays.placement import is_partitioned
from optax_lossscale._arrays.precision import at_least_float32, is_inexact

T = TypeVar("T")
AxisName = Hashable


def all_finite(tree: Any) -> jax.Array:
    """Whether no leaf holds a NaN or an infinity.

    Args:
      tree: any pytree of arrays and Python numbers. `None`, integer, bool and
        float0 leaves are always finite.

    Returns:
      A bool scalar, shape (); True for an empty tree.

    Example:
      >>> import jax.numpy as jnp
      >>> import optax_lossscale as ols
      >>> bool(ols.all_finite({"w": jnp.ones(3), "b": None, "n": 7}))
      True
      >>> bool(ols.all_finite({"w": jnp.array([1.0, jnp.nan])}))
      False
    """
    leaves = _inexact_leaves(tree)
    return _reduce(leaves, _all_finite_on_cpu, _all_finite) if leaves else jnp.array(True)


def largest(tree: Any) -> jax.Array:
    """The largest absolute value in a tree; infinity if a number in it is not finite.

    It costs the one pass over the tree that `all_finite` costs, and says what that says.

    Args:
      tree: any pytree of arrays and Python numbers; leaves that `all_finite` does not look
        at are left out.

    Returns:
      A float32 scalar, shape (), never NaN: 0 for an empty tree, the larger of its two parts
      for a complex number, and the largest float32 for a wider number above it.
    """
    leaves = _inexact_leaves(tree)
    return _reduce(leaves, _largest_on_cpu, _largest) if leaves else jnp.float32(0)


def norm_and_all_finite(tree: Any) -> tuple[jax.Array, jax.Array]:
    """The global L2 norm, and what `all_finite` says, in the one pass that it takes.

    Args:
      tree: any pytree of arrays and Python numbers; leaves that `all_finite` does not look
        at are left out.

    Returns:
      `(norm, finite)`, float32 and bool scalars, shape (). The norm of an empty tree is 0. It is
      infinite or NaN if a number is not finite, and infinite where the squares come to more than
      float32 holds: from a norm of 2**64 on, though all may be finite.
    """
    leaves = _inexact_leaves(tree)
    if not leaves:
        return jnp.float32(0), jnp.array(True)
    square, finite = _reduce(leaves, _squares_on_cpu, _squares)
    return jnp.sqrt(square), finite


def _inexact_leaves(tree: Any) -> list[jax.Array]:
    return [jnp.asarray(x) for x in jax.tree.leaves(tree) if is_inexact(x)]


def _reduce(
    leaves: list[jax.Array],
    on_cpu: Callable[[list[jax.Array]], T],
    elsewhere: Callable[..., T],
) -> T:
    if any(map(is_partitioned, leaves)):
        return elsewhere(leaves)
    # Where leaves share a kernel, a TPU's compiler keeps more gradients waiting in main memory.
    on_tpu = functools.partial(elsewhere, together=1)
    # Chosen when the program is lowered, by the platform that it is lowered for.
    return lax.platform_dependent(leaves, cpu=on_cpu, tpu=on_tpu, default=elsewhere)


def _all_finite(leaves: list[jax.Array], together: int = 4) -> jax.Array:
    # Partitioned, this takes one all-reduce, of a flag for each leaf.
    groups = _groups(leaves, together)
    flags = [functools.reduce(lax.bitwise_and, map(_is_finite, xs)) for xs in groups]
    return jnp.stack([lax.reduce_and(x, range(x.ndim)) for x in flags]).all()


def _all_finite_on_cpu(leaves: list[jax.Array]) -> jax.Array:
    # A max is no way out: XLA's loses NaNs there. And a reduction of one output it compiles to
    # several passes, through an array of the leaf's size. But one of two outputs becomes a
    # single pass at the speed of memory, in every dtype and with the unscaling fused into it.
    # Hence a second question to each number, whose answer the first implies.
    sums = [_finite_sum(xs) for xs in _groups_on_cpu(leaves)]
    flags = [flag for x in sums for flag in _both_all(_is_finite(x), lax.eq(x, x))]
    # The barrier keeps the flags from being fused with their conjunction: a kernel that has
    # an argument for every leaf compiles in quadratic time.
    return lax.optimization_barrier(jnp.stack(flags)).all()


def _largest(leaves: list[jax.Array], together: int = 4) -> jax.Array:
    # Partitioned, this takes one all-reduce, of a number for each leaf.
    or_infinity = lambda x: jnp.where(_is_finite(x), _size(x), jnp.inf)
    groups = _groups(leaves, together)
    sizes = [functools.reduce(lax.max, map(or_infinity, xs)) for xs in groups]
    return jnp.stack([jnp.max(x, initial=0) for x in sizes]).max()


def _largest_on_cpu(leaves: list[jax.Array]) -> jax.Array:
    # Two outputs again, of which the flag is needed besides: it knows of the NaNs that the
    # maximum loses.
    groups = _groups_on_cpu(leaves)
    sizes = [functools.reduce(lax.max, map(_size, xs)) for xs in groups]
    flags = [_is_finite(_finite_sum(xs)) for xs in groups]
    sizes, flags = zip(*map(_max_and_all, sizes, flags), strict=True)
    sizes, flags = lax.optimization_barrier((jnp.stack(sizes), jnp.stack(flags)))
    return jnp.where(flags.all(), sizes.max(), jnp.inf)


def _squares(leaves: list[jax.Array], together: int = 4) -> tuple[jax.Array, jax.Array]:
    groups = _groups(leaves, together)
    squares = [functools.reduce(lax.add, map(_square, xs)) for xs in groups]
    sums = [jnp.sum(x).astype(jnp.float32) for x in squares]
    return jnp.stack(sums).sum(), _all_finite(leaves, together)


def _squares_on_cpu(leaves: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
    # Two outputs once more. Such a reduction adds one number after the other, and a float32 sum of
    # 2**24 and more stops growing, so large leaves are summed row by row.
    groups = _groups_on_cpu(leaves)
    squares = [functools.reduce(lax.add, map(_square, xs)) for xs in groups]
    sums = [_finite_sum(xs) for xs in groups]
    rows = lambda arrays: [row for x in arrays for row in _rows(x)]
    sums, flags = zip(*map(_sum_and_all, rows(squares), map(_is_finite, rows(sums))), strict=True)
    joined = lambda xs, dtype: jnp.concatenate([jnp.ravel(x).astype(dtype) for x in xs])
    sums, flags = joined(sums, jnp.float32), joined(flags, bool)
    sums, flags = lax.optimization_barrier((sums, flags))
    return sums.sum(), flags.all()


def _groups(leaves: list[jax.Array], together: int) -> list[list[jax.Array]]:
    """Leaves of one type, so many of which share a kernel; partitioned ones, each by itself.

    Of four a GPU's compiler still takes the norm of a clip in the same pass, of eight not.
    """
    return _of_one_type(leaves, 1 if any(map(is_partitioned, leaves)) else together)


def _groups_on_cpu(leaves: list[jax.Array]) -> list[list[jax.Array]]:
    """Leaves of one type, up to eight of which share a kernel; but that leaves all cores busy."""
    return _of_one_type(leaves, min(max(len(leaves) // 32, 1), 8))


def _of_one_type(leaves: list[jax.Array], size: int) -> list[list[jax.Array]]:
    """Leaves of one type, a few together: they compile sooner, and fewer kernels are launched."""
    of_type: dict[Any, list[jax.Array]] = {}
    for x in leaves:
        of_type.setdefault(jax.typeof(x), []).append(x)
    return [xs[i : i + size] for xs in of_type.values() for i in range(0, len(xs), size)]


def _finite_sum(xs: list[jax.Array]) -> jax.Array:
    """A number for each place, finite if those of all the arrays are."""
    if len(xs) == 1:
        return xs[0]
    # x - x is zero or NaN. A conjunction of flags would not be vectorized, and a CPU rounds each
    # 16-bit sum by itself.
    return functools.reduce(lax.add, [lax.sub(x, x) for x in map(at_least_float32, xs)])


def _is_finite(x: jax.Array) -> jax.Array:
    return jnp.isfinite(x) if jnp.iscomplexobj(x) else lax.is_finite(x)  # quicker to trace


def _rows(x: jax.Array) -> list[jax.Array]:
    """A leaf's numbers, large ones' in rows of at most `_ROW`, and in a last, shorter one."""
    size, flat = x.size, x.reshape(-1)
    if size <= _ROW:
        return [flat]
    row = min(size & -size, _ROW)  # the largest power of two that divides
    row = row if row >= _SHORTEST_ROW else _ROW
    head = size - size % row
    rows = [flat[:head].reshape(-1, row)]
    return rows if head == size else [*rows, flat[head:]]


_ROW, _SHORTEST_ROW = 2**16, 2**8


def _square(x: jax.Array) -> jax.Array:
    """The square of the absolute value, as float32 or wider."""
    if jnp.iscomplexobj(x):
        return _square(x.real) + _square(x.imag)
    return jnp.square(at_least_float32(x))


def _size(x: jax.Array) -> jax.Array:
    """The absolute value as float32, which is infinite for no finite number."""
    if jnp.iscomplexobj(x):
        return jnp.maximum(_size(x.real), _size(x.imag))
    if x.dtype.itemsize > 4:
        x = jnp.clip(x, -_LARGEST, _LARGEST)
    return jnp.abs(x.astype(jnp.float32))


_LARGEST = float(np.finfo(np.float32).max)


def _max_and_all(a: jax.Array, b: jax.Array) -> list[jax.Array]:
    return lax.reduce((a, b), (np.float32(0), np.True_), _max_and, range(a.ndim))


def _max_and(a, b):
    return lax.max(a[0], b[0]), lax.bitwise_and(a[1], b[1])


def _sum_and_all(a: jax.Array, b: jax.Array) -> list[jax.Array]:
    return lax.reduce((a, b), (a.dtype.type(0), np.True_), _sum_and, (a.ndim - 1,))


def _sum_and(a, b):
    return lax.add(a[0], b[0]), lax.bitwise_and(a[1], b[1])


def _both_all(a: jax.Array, b: jax.Array) -> list[jax.Array]:
    return lax.reduce((a, b), (np.True_, np.True_), _both_and, range(a.ndim))


def _both_and(a, b):
    return lax.bitwise_and(a[0], b[0]), lax.bitwise_and(a[1], b[1])


def on_all_replicas(flag: jax.Array, axis_name: AxisName | None) -> jax.Array:
    """Whether a flag is True on every replica."""
    if axis_name is None:
        return flag
    return across(lax.pmin, flag.astype(jnp.int32), axis_name).astype(bool)


def across(
    reduce: Callable[..., jax.Array], x: jax.Array, axis_name: AxisName | None
) -> jax.Array:
    """A reduction over replicas, such as `lax.pmin`; over no axes it is what was given."""
    axes = () if axis_name is None else axes_of(axis_name)
    return reduce(x, axes) if axes else x


def axes_of(axis_name: AxisName) -> tuple[Hashable, ...]:
    """The axes that are named, if each of them is one around this step."""
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    given = f"axis_name={axis_name!r}"
    for name in names:
        if not _is_axis(name):
            one = f"{name!r} in {given}" if name is not axis_name else given
            several = " Several names are a tuple." if isinstance(name, (list, set)) else ""
            raise ValueError(
                f"{one} is no axis of a pmap or shard_map around this step.{several} Under jit "
                "alone leave axis_name out: the check already is of all devices"
            )
    if len(set(names)) < len(names):
        raise ValueError(f"{given} names an axis twice: name each once")
    return names


def _is_axis(name: Any) -> bool:
    try:
        lax.axis_size(name)
    except (NameError, TypeError, ValueError):
        return False
    return not isinstance(name, (tuple, list))  # of which it gives the product
