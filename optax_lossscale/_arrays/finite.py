"""The finiteness check: whether every number of a pytree is finite.

A step whose gradients hold a NaN or an infinity must be skipped, so every step reads
all of its gradients once before it applies any. Reading them is what the check costs.
So the two numbers that some loss scales and skip rules measure, the largest gradient
and the global norm, are computed in the same pass.

`_reduce_tree` takes the floating-point and complex leaves of a tree, all others being
finite, and puts leaves of one type into groups. The leaves of a group are combined
elementwise (`_joined`) and reduced to one number by one kernel. Each reduction is
written twice, for XLA's compiler for CPUs and for all others.

Under `jit` alone, arrays are global, and the compiler inserts what communication a
reduction needs. Under `pmap` and `shard_map`, the check sees the numbers of one
replica, and the results of all replicas are reduced to one by `across`.
"""

import functools
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from optax_lossscale._arrays import validation
from optax_lossscale._arrays.placement import is_on_several_devices
from optax_lossscale._arrays.precision import T, at_least_float32, is_inexact_leaf

AxisName = Hashable  # the name of a mapped axis, or a tuple of such names
Groups = list[list[jax.Array]]  # each a list of leaves of one type that share a kernel

# How many numbers of a large leaf are summed one after the other, on CPU
_ROW = 2**16
_SHORTEST_ROW = 2**8


def all_finite(tree: Any) -> jax.Array:
    """Whether all numbers of a tree are finite: no NaN, no infinity.

    Args:
      tree: any pytree of arrays and Python numbers. `None`, integer, bool and float0
        leaves are always finite. Other numbers are taken as JAX converts them: unless
        64-bit types are enabled, 1e300 is infinite.

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
    return _reduce_tree(tree, _all_finite_on_cpu, _all_finite)


def largest(tree: Any) -> jax.Array:
    """The largest absolute value in a tree, or infinity if a number is not finite.

    A complex number counts as its larger part. The result is float32, shape (); 0 for a
    tree without floating-point and complex leaves.
    """
    return _reduce_tree(tree, _largest_on_cpu, _largest)


def norm_and_all_finite(tree: Any) -> tuple[jax.Array, jax.Array]:
    """The global L2 norm and the result of `all_finite`, in one pass; both of shape ().

    The norm is float32, as is the sum of squares under its root. So from 2**64 on it is
    infinite, though all numbers may be finite. Below about 1e-19 it may be 0, as CPUs
    flush subnormal squares to zero.
    """
    sum_of_squares, finite = _reduce_tree(tree, _squares_on_cpu, _squares)
    return jnp.sqrt(sum_of_squares), finite


def _reduce_tree(
    tree: Any, cpu_reduction: Callable[[Groups], T], reduction: Callable[[Groups], T]
) -> T:
    """Reduces groups of a tree's leaves in the way that suits the platform.

    Both functions take groups and return the same. Which one runs is chosen when the
    program is lowered.

    If any leaf is known to lie on several devices, all platforms take `reduction`, with
    a group for each leaf. If leaves are partitioned and that is not known, the result
    is the same, but devices exchange more. On CPU they exchange results for each leaf.
    And they exchange whole leaves where a group holds leaves that are partitioned along
    different axes, or where the norm cuts leaves into rows.
    """
    inexact_leaves = filter(is_inexact_leaf, jax.tree.leaves(tree))
    leaves = [jnp.asarray(x) for x in inexact_leaves]
    if not leaves:
        leaves = [jnp.float32(0)]
    if any(map(is_on_several_devices, leaves)):
        return reduction(_groups(leaves, 1))
    # Leaves that share a kernel compile faster, and fewer kernels are launched. But on
    # CPU there must be enough kernels to keep all cores busy. A GPU's compiler computes
    # the norm of a clip in the same pass for groups of four, but not of eight. A TPU's
    # compiler would keep more gradients waiting in main memory.
    size_on_cpu = min(max(len(leaves) // 32, 1), 8)
    return lax.platform_dependent(
        leaves,
        cpu=lambda leaves: cpu_reduction(_groups(leaves, size_on_cpu)),
        tpu=lambda leaves: reduction(_groups(leaves, 1)),
        default=lambda leaves: reduction(_groups(leaves, 4)),
    )


def _groups(leaves: list[jax.Array], size: int) -> Groups:
    """Groups of at most `size` leaves, each of leaves of the same shape and dtype."""
    leaves_of_type: dict[Any, list[jax.Array]] = {}
    for x in leaves:
        leaves_of_type.setdefault(jax.typeof(x), []).append(x)
    groups = []
    for alike in leaves_of_type.values():
        starts = range(0, len(alike), size)
        groups += [alike[start : start + size] for start in starts]
    return groups


def _joined(groups: Groups, function: Callable, operation: Callable) -> list[jax.Array]:
    """One array for each group: `function` of every leaf, combined by `operation`.

    Both work elementwise, so the array has the shape of the leaves.
    """
    arrays = []
    for leaves in groups:
        results = map(function, leaves)
        joined = functools.reduce(operation, results)
        arrays.append(joined)
    return arrays


# --- by default ---
#
# If leaves are partitioned, their groups are single leaves, and a reduction of the tree
# takes one all-reduce, of a number for each leaf.


def _all_finite(groups: Groups) -> jax.Array:
    """Whether all numbers are finite; bool, shape ()."""
    arrays_of_flags = _joined(groups, _is_finite, lax.bitwise_and)
    return _reduced(jnp.all, arrays_of_flags)


def _largest(groups: Groups) -> jax.Array:
    """The largest absolute value, or infinity if a number is not finite; shape ()."""
    magnitudes = _joined(groups, _magnitude_or_infinity, lax.max)
    largest_or_zero = functools.partial(jnp.max, initial=0)
    return _reduced(largest_or_zero, magnitudes)


def _squares(groups: Groups) -> tuple[jax.Array, jax.Array]:
    """The sum of squares, and whether all are finite: two reductions in one pass."""
    squares = _joined(groups, _square, lax.add)
    sum_of_squares = _reduced(jnp.sum, squares)
    return sum_of_squares, _all_finite(groups)


def _reduced(reduce: Callable, arrays: list[jax.Array]) -> jax.Array:
    """The reduction of several arrays to one number, by way of one number for each."""
    of_each = [reduce(x) for x in arrays]
    return reduce(jnp.stack(of_each))


# --- on CPU ---
#
# XLA compiles a reduction with one output to several passes, through an array of the
# leaf's size. A reduction with two outputs becomes a single pass at the speed of
# memory, in every dtype and with the unscaling fused into it. So each function below
# reduces two things at once: what it computes, and the flags of finiteness. The check
# needs one output only, so it adds a dummy, `x == x`, for the single pass. (The largest
# value alone would not show a NaN, as a max loses NaNs on CPU.) Of partitioned leaves,
# XLA makes no all-reduce for two outputs, but gathers the results of all devices for
# each leaf: hence the other reduction for these.


def _all_finite_on_cpu(groups: Groups) -> jax.Array:
    """Whether all numbers are finite; bool, shape ()."""
    sums = _finite_sums(groups)
    dummy = [lax.eq(x, x) for x in sums]  # XLA fuses only a two-output reduction
    no_nan, finite = _reduced_beside_check(lax.bitwise_and, np.True_, dummy, sums)
    flags = no_nan & finite  # uses the dummy, so that no compiler removes it
    return flags.all()


def _largest_on_cpu(groups: Groups) -> jax.Array:
    """The largest absolute value, or infinity if a number is not finite; shape ()."""
    magnitudes = _joined(groups, _magnitude, lax.max)
    sums = _finite_sums(groups)
    maxima, finite = _reduced_beside_check(lax.max, np.float32(0), magnitudes, sums)
    return jnp.where(finite.all(), maxima.max(), jnp.inf)


def _squares_on_cpu(groups: Groups) -> tuple[jax.Array, jax.Array]:
    """The sum of squares, and in the same pass whether all numbers are finite."""
    # Such a reduction adds one number after the other, and a float32 sum that has
    # reached 2**24 does not grow by adding 1. So large leaves are summed row by row.
    squares = _in_rows(_joined(groups, _square, lax.add))
    sums = _in_rows(_finite_sums(groups))
    sums_of_rows, finite = _reduced_beside_check(
        lax.add, np.float32(0), squares, sums, first_axis=1
    )
    return sums_of_rows.sum(), finite.all()


def _finite_sums(groups: Groups) -> list[jax.Array]:
    """One array for each group, finite in each place where all its leaves are."""
    return [_finite_sum(leaves) for leaves in groups]


def _finite_sum(leaves: list[jax.Array]) -> jax.Array:
    """An array of the leaves' shape, finite in each place where all of them are."""
    if len(leaves) == 1:
        return leaves[0]
    # x - x is zero if x is finite, and NaN otherwise, and so is the sum. Flags combined
    # by `and` would not be vectorized. The sum is in float32, as a CPU rounds 16-bit
    # numbers one by one.
    wide = map(at_least_float32, leaves)
    zeros = [lax.sub(x, x) for x in wide]
    return functools.reduce(lax.add, zeros)


def _in_rows(arrays: list[jax.Array]) -> list[jax.Array]:
    """The numbers of the arrays in matrices, whose rows are short enough to sum."""
    matrices = []
    for x in arrays:
        matrices += _rows(x)
    return matrices


def _rows(x: jax.Array) -> list[jax.Array]:
    """The numbers of an array in one matrix, or in two with rows of different lengths.

    Up to `_ROW` numbers are one row. Otherwise, a row's length is the largest power of
    two that divides the array's size, but at most `_ROW`. If that is less than
    `_SHORTEST_ROW`, rows have `_ROW` numbers, and the remaining ones are a row of their
    own.
    """
    size = x.size
    if size <= _ROW:
        return [x.reshape(1, size)]
    divisor = size & -size  # the largest power of two that divides
    length = min(divisor, _ROW)
    if length < _SHORTEST_ROW:
        length = _ROW
    rest = size % length
    end = size - rest
    flat = x.reshape(-1)
    rows = flat[:end].reshape(-1, length)
    if not rest:
        return [rows]
    last_row = flat[end:].reshape(1, rest)
    return [rows, last_row]


def _reduced_beside_check(
    operation: Callable,
    initial: np.generic,
    arrays: list[jax.Array],
    checked: list[jax.Array],
    first_axis: int = 0,
) -> tuple[jax.Array, jax.Array]:
    """Reduces each array and, in the same pass, checks the one beside it.

    `operation` combines two numbers, of which `initial` leaves the other as it is. The
    axes from `first_axis` on are reduced. Returns the results of all arrays as one
    vector, and as another one whether the numbers of `checked` that belong to each
    result are finite.
    """
    reduced = []
    flags = []
    for x, numbers in zip(arrays, checked, strict=True):
        result, flag = lax.reduce(
            (x, _is_finite(numbers)),
            (initial, np.True_),
            _beside_and(operation),
            range(first_axis, x.ndim),
        )
        reduced.append(result.reshape(-1))
        flags.append(flag.reshape(-1))
    # Without the barrier, these would be fused with what is computed from them, to a
    # kernel with an argument for every leaf, which compiles in quadratic time.
    all_reduced = jnp.concatenate(reduced)
    all_flags = jnp.concatenate(flags)
    return lax.optimization_barrier((all_reduced, all_flags))


@functools.cache  # JAX traces the function returned only once if it is the same one
def _beside_and(operation: Callable) -> Callable:
    """An operation on pairs `(x, flag)`: `operation` of the xs, `and` of the flags."""

    def on_pairs(so_far, new):
        x, flag = so_far
        new_x, new_flag = new
        return operation(x, new_x), lax.bitwise_and(flag, new_flag)

    return on_pairs


# --- numbers ---


def _is_finite(x: jax.Array) -> jax.Array:
    """A bool for each number: whether it is finite."""
    if jnp.iscomplexobj(x):
        return jnp.isfinite(x)
    return lax.is_finite(x)  # quicker to trace


def _square(x: jax.Array) -> jax.Array:
    """The square of each absolute value, as float32."""
    if jnp.iscomplexobj(x):
        return _square(x.real) + _square(x.imag)
    return jnp.square(x.astype(jnp.float32))


def _magnitude(x: jax.Array) -> jax.Array:
    """The absolute value of each number as float32, finite if the number is.

    For a complex number, the larger of the absolute values of its parts.
    """
    if jnp.iscomplexobj(x):
        return jnp.maximum(_magnitude(x.real), _magnitude(x.imag))
    if x.dtype.itemsize > 4:  # a float64 may be more than float32 holds
        x = jnp.clip(x, -validation.LARGEST, validation.LARGEST)
    return jnp.abs(x.astype(jnp.float32))


def _magnitude_or_infinity(x: jax.Array) -> jax.Array:
    """`_magnitude`, but infinity for NaN, which a max may lose, and for infinity."""
    return jnp.where(_is_finite(x), _magnitude(x), jnp.inf)


# --- over replicas ---


def on_all_replicas(flag: jax.Array, axis_name: AxisName | None) -> jax.Array:
    """Whether a flag is True on every replica along the named axes.

    If replicas with the same parameters decided alone, one would skip a step that the
    others apply, and their parameters would differ from then on. So they reduce their
    flags to one, by a minimum, and all skip if the gradients of one overflow.
    """
    if axis_name is None:
        return flag
    smallest = across(lax.pmin, flag.astype(jnp.int32), axis_name)
    return smallest.astype(bool)


def largest_on_all_replicas(tree: Any, axis_name: AxisName | None) -> jax.Array:
    """`largest` over all replicas along the named axes; float32, shape ()."""
    return across(lax.pmax, largest(tree), axis_name)


def across(reduce: Callable, x: jax.Array, axis_name: AxisName | None) -> jax.Array:
    """`x` reduced over the replicas along the named axes, by `lax.pmin` or its like.

    Without axes, `x` itself. A name that is no axis around the step, or is given twice,
    raises a `ValueError`.
    """
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
    """Whether a `pmap` or `shard_map` around the step maps an axis of this name."""
    if isinstance(name, (tuple, list)):
        return False  # JAX would take it for several axes, and return their product
    try:
        lax.axis_size(name)
    except (NameError, TypeError, ValueError):
        return False
    return True
