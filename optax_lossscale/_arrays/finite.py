"""The check: is every number of a tree finite? In the same pass: the largest, and the norm.

Each looks at local numbers; `across` makes the answers of all replicas one.
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
Groups = list[list[jax.Array]]  # of leaves of one type that share a kernel

_LARGEST = float(np.finfo(np.float32).max)
_ROW = 2**16  # numbers
_SHORTEST_ROW = 2**8  # numbers


def all_finite(tree: Any) -> jax.Array:
    """Whether all numbers of a tree are finite: no NaN, no infinity.

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
    return _by_platform(tree, _all_finite_on_cpu, _all_finite)


def largest(tree: Any) -> jax.Array:
    """The largest absolute value, float32, in the same pass; infinity if one is not finite."""
    return _by_platform(tree, _largest_on_cpu, _largest)


def norm_and_all_finite(tree: Any) -> tuple[jax.Array, jax.Array]:
    """The global L2 norm, float32, and what `all_finite` says, in the one pass that it takes."""
    # From 2**64 on, the norm is infinite: the sum of squares is more than float32
    # holds.
    square, finite = _by_platform(tree, _squares_on_cpu, _squares)
    return jnp.sqrt(square), finite


def _by_platform(
    tree: Any, on_cpu: Callable[[Groups], T], elsewhere: Callable[[Groups], T]
) -> T:
    """What is asked of a tree, computed as suits the platform that the program is lowered for."""
    leaves = [jnp.asarray(x) for x in jax.tree.leaves(tree) if is_inexact(x)]
    if not leaves:
        leaves = [jnp.float32(0)]
    if any(is_partitioned(x) for x in leaves):
        return elsewhere(_groups(leaves, 1))
    # Some leaves share a kernel: kernels compile faster, and fewer are launched. But on
    # CPU all cores must stay busy; a GPU's compiler takes the norm of a clip in the
    # same pass with groups of four, not of eight; and a TPU's would keep more gradients
    # waiting in main memory.
    size_on_cpu = min(max(len(leaves) // 32, 1), 8)
    return lax.platform_dependent(
        leaves,
        cpu=lambda leaves: on_cpu(_groups(leaves, size_on_cpu)),
        tpu=lambda leaves: elsewhere(_groups(leaves, 1)),
        default=lambda leaves: elsewhere(_groups(leaves, 4)),
    )


def _groups(leaves: list[jax.Array], size: int) -> Groups:
    """Groups of leaves of one type, each of at most `size`."""
    leaves_of_type: dict[Any, list[jax.Array]] = {}
    for x in leaves:
        leaves_of_type.setdefault(jax.typeof(x), []).append(x)
    groups = []
    for alike in leaves_of_type.values():
        for start in range(0, len(alike), size):
            groups.append(alike[start : start + size])
    return groups


def _joined(groups: Groups, function: Callable, operation: Callable) -> list[jax.Array]:
    """An array for each group: a function of every number, joined place by place."""
    return [functools.reduce(operation, map(function, leaves)) for leaves in groups]


# --- elsewhere: partitioned, each takes one all-reduce, of a number for each leaf ---


def _all_finite(groups: Groups) -> jax.Array:
    """Whether all are: a reduction of flags for each group."""
    arrays_of_flags = _joined(groups, _is_finite, lax.bitwise_and)
    return _reduced(jnp.all, arrays_of_flags)


def _largest(groups: Groups) -> jax.Array:
    """The largest size, which is infinite where one is not finite."""
    arrays_of_sizes = _joined(groups, _size_or_infinity, lax.max)
    return _reduced(_max, arrays_of_sizes)


def _squares(groups: Groups) -> tuple[jax.Array, jax.Array]:
    """The sum of squares, and whether all are finite: two reductions that share a pass."""
    squares = _joined(groups, _square, lax.add)
    return _reduced(jnp.sum, squares), _all_finite(groups)


def _reduced(reduce: Callable, arrays: list[jax.Array]) -> jax.Array:
    """The reduction of all arrays, by that of each."""
    of_each = [reduce(x) for x in arrays]
    return reduce(jnp.stack(of_each))


def _max(sizes: jax.Array) -> jax.Array:
    """The largest of some sizes, or 0 if there are none."""
    return jnp.max(sizes, initial=0)


# --- on CPU ---
#
# A max does not help: XLA's loses NaNs on CPU. And a reduction with one output is
# compiled to several passes, through an array of the leaf's size. But one with two
# outputs becomes a single pass at the speed of memory, in every dtype and with the
# unscaling fused into it. Hence a second question about each number, even where the
# first implies its answer.


def _all_finite_on_cpu(groups: Groups) -> jax.Array:
    """Whether all are; the second question is whether a number equals itself."""
    sums = _finite_sums(groups)
    equal_itself = [lax.eq(x, x) for x in sums]
    no_nan, finite = _reduced_beside_check(lax.bitwise_and, equal_itself, sums)
    return (no_nan & finite).all()


def _largest_on_cpu(groups: Groups) -> jax.Array:
    """The largest size, and in the same pass whether all are finite."""
    arrays_of_sizes = _joined(groups, _size, lax.max)
    sums = _finite_sums(groups)
    sizes, finite = _reduced_beside_check(lax.max, arrays_of_sizes, sums)
    return jnp.where(finite.all(), sizes.max(), jnp.inf)


def _squares_on_cpu(groups: Groups) -> tuple[jax.Array, jax.Array]:
    """The sum of squares, and in the same pass whether all are finite."""
    # Such a reduction adds one number after the other, and a float32 sum of 2**24 and
    # more stops growing, so large leaves are summed row by row.
    squares = _in_rows(_joined(groups, _square, lax.add))
    sums = _in_rows(_finite_sums(groups))
    sums_of_rows, finite = _reduced_beside_check(lax.add, squares, sums, by_row=True)
    return sums_of_rows.sum(), finite.all()


def _finite_sums(groups: Groups) -> list[jax.Array]:
    """An array for each group, whose numbers are finite where those of all its leaves are."""
    return [_finite_sum(leaves) for leaves in groups]


def _finite_sum(leaves: list[jax.Array]) -> jax.Array:
    """A number for each place, finite if those of all the leaves are."""
    if len(leaves) == 1:
        return leaves[0]
    # x - x is zero or NaN. Flags would not be vectorized, and a CPU rounds 16-bit sums
    # one by one.
    wide = map(at_least_float32, leaves)
    zeros = [lax.sub(x, x) for x in wide]
    return functools.reduce(lax.add, zeros)


def _in_rows(arrays: list[jax.Array]) -> list[jax.Array]:
    """The numbers of arrays, each in one row or in a matrix of rows."""
    return [row for x in arrays for row in _rows(x)]


def _rows(x: jax.Array) -> list[jax.Array]:
    """A leaf's numbers; those of a large one in rows of at most `_ROW`, the last one shorter."""
    size = x.size
    flat = x.reshape(-1)
    if size <= _ROW:
        return [flat]
    length = min(size & -size, _ROW)  # the largest power of two that divides
    if length < _SHORTEST_ROW:
        length = _ROW
    rest = size % length
    head = size - rest
    rows = [flat[:head].reshape(-1, length)]
    if rest:
        rows.append(flat[head:])
    return rows


def _reduced_beside_check(
    operation: Callable,
    arrays: list[jax.Array],
    checked: list[jax.Array],
    by_row: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """The reductions of arrays, and whether other arrays are finite, each pair in one pass."""
    reduced = []
    flags = []
    for x, numbers in zip(arrays, checked, strict=True):
        initial = x.dtype.type(x.dtype == bool)  # True or 0
        result, flag = lax.reduce(
            (x, _is_finite(numbers)),
            (initial, np.True_),
            _beside_and(operation),
            [x.ndim - 1] if by_row else range(x.ndim),
        )
        reduced.append(result.reshape(-1))
        flags.append(flag.reshape(-1))
    # The barrier keeps these from being fused with what is made of them: a kernel that
    # has an argument for every leaf compiles in quadratic time.
    all_reduced = jnp.concatenate(reduced)
    all_flags = jnp.concatenate(flags)
    return lax.optimization_barrier((all_reduced, all_flags))


@functools.cache  # one function is traced once
def _beside_and(operation: Callable) -> Callable:
    """An operation on the first of two pairs' members, and a conjunction of the second."""

    def on_pairs(so_far, new):
        reduced, all_flags = so_far
        x, flag = new
        return operation(reduced, x), lax.bitwise_and(all_flags, flag)

    return on_pairs


# --- numbers ---


def _is_finite(x: jax.Array) -> jax.Array:
    """Which numbers are finite."""
    if jnp.iscomplexobj(x):
        return jnp.isfinite(x)
    return lax.is_finite(x)  # quicker to trace


def _square(x: jax.Array) -> jax.Array:
    """The square of the absolute value, as float32."""
    if jnp.iscomplexobj(x):
        return _square(x.real) + _square(x.imag)
    return jnp.square(x.astype(jnp.float32))


def _size(x: jax.Array) -> jax.Array:
    """The absolute value as float32, finite for every finite number."""
    if jnp.iscomplexobj(x):
        return jnp.maximum(_size(x.real), _size(x.imag))
    if x.dtype.itemsize > 4:
        x = jnp.clip(x, -_LARGEST, _LARGEST)
    return jnp.abs(x.astype(jnp.float32))


def _size_or_infinity(x: jax.Array) -> jax.Array:
    """The absolute value as float32, infinite for what is not finite; a NaN would be lost."""
    return jnp.where(_is_finite(x), _size(x), jnp.inf)


# --- over replicas ---


def on_all_replicas(flag: jax.Array, axis_name: AxisName | None) -> jax.Array:
    """Whether a flag is True on every replica."""
    if axis_name is None:
        return flag
    number = flag.astype(jnp.int32)
    return across(lax.pmin, number, axis_name).astype(bool)


def across(reduce: Callable, x: jax.Array, axis_name: AxisName | None) -> jax.Array:
    """A reduction over replicas, such as `lax.pmin`; over no axes, what was given."""
    if axis_name in (None, ()):
        return x
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    are_axes = all(_is_axis(name) for name in names)
    if not are_axes or len(set(names)) < len(names):
        raise ValueError(
            f"axis_name={axis_name!r} is not an axis of a pmap or shard_map around "
            "this step, nor a tuple of such axes, each once. Under jit alone, leave "
            "axis_name out: the check already covers all devices"
        )
    return reduce(x, names)


def _is_axis(name: Any) -> bool:
    """Whether a name is that of one mapped axis around what is traced."""
    if isinstance(name, (tuple, list)):
        return False  # JAX would return the product of their sizes
    try:
        lax.axis_size(name)
    except (NameError, TypeError, ValueError):
        return False
    return True
