"""The finiteness check: whether every number of a pytree is finite.

A step whose gradients hold a NaN or an infinity must be skipped, so every step reads
all of its gradients once before it applies any. Reading them is what the check costs.
So the two numbers that some loss scales and skip rules measure, the largest gradient
and the global norm, are computed in the same pass.

`_reduce_tree` takes the floating-point and complex leaves of a tree, all others being
finite, and puts leaves of one type into groups. What is computed of them is a
`_Measure`, such as the sum of squares. The leaves of a group are combined elementwise
(`_combined_leaves`), and the array that results is reduced to one number. `_reduced`
does so in the obvious way, and XLA's compilers for GPU and TPU compute several measures
in one pass. The compiler for CPUs does not, so there `_reduced_and_checked` takes its
place.

Under `jit` alone, arrays are global, and the compiler inserts what communication a
reduction needs. Under `pmap` and `shard_map`, the check sees the numbers of one
replica, and the results of all replicas are reduced to one by `across`.
"""

import collections
import functools
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from optax_lossscale._arrays import validation
from optax_lossscale._arrays.placement import is_on_several_devices
from optax_lossscale._arrays.precision import T, at_least_float32, is_inexact_leaf

AxisName = Hashable  # the name of a mapped axis, or a tuple of such names
Groups = list[list[jax.Array]]  # each a list of leaves of one type that share a kernel


class _Measure(NamedTuple):
    """What is computed of each number, and how the results of all become one.

    Attributes:
      function: from a leaf to an array of its shape.
      operation: from two results to one.
      initial: the neutral element of `operation`.
    """

    function: Callable
    operation: Callable
    initial: np.generic


# How many numbers of a large leaf are summed one after the other, on CPU
_LONGEST_ROW = 2**16
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
    infinite, though all numbers may be finite. CPUs flush the squares of numbers below
    about 1e-19 to zero, so the norm of many such numbers is 0.
    """
    sum_of_squares, finite = _reduce_tree(
        tree, _squares_and_flags_on_cpu, _squares_and_flags
    )
    return jnp.sqrt(sum_of_squares), finite


def _reduce_tree(
    tree: Any, cpu_reduction: Callable[[Groups], T], reduction: Callable[[Groups], T]
) -> T:
    """Reduces groups of a tree's leaves in the way that suits the platform.

    Both functions take groups and return the same. Which one runs is chosen when the
    program is lowered. But if any leaf is known to lie on several devices, all
    platforms take `reduction`, with a group for each leaf.
    """
    leaves = _real_leaves(tree)
    if any(map(is_on_several_devices, leaves)):
        return reduction(_groups(leaves, 1))
    # Leaves that share a kernel compile faster, and fewer kernels are launched. But on
    # CPU there must be enough kernels to keep all cores busy. A GPU's compiler computes
    # the norm of a clip in the same pass for groups of four, but not of eight. A TPU's
    # compiler would keep more gradients waiting in main memory.
    size_for_32_kernels = len(leaves) // 32
    size_on_cpu = min(max(size_for_32_kernels, 1), 8)
    return lax.platform_dependent(
        leaves,
        cpu=lambda leaves: cpu_reduction(_groups(leaves, size_on_cpu)),
        tpu=lambda leaves: reduction(_groups(leaves, 1)),
        default=lambda leaves: reduction(_groups(leaves, 4)),
    )


def _real_leaves(tree: Any) -> list[jax.Array]:
    """The floating-point leaves, and both parts of complex ones; if none, one zero."""
    leaves = []
    for leaf in filter(is_inexact_leaf, jax.tree.leaves(tree)):
        x = jnp.asarray(leaf)
        if jnp.iscomplexobj(x):
            leaves += [x.real, x.imag]
        else:
            leaves.append(x)
    return leaves or [jnp.float32(0)]


def _groups(leaves: list[jax.Array], size: int) -> Groups:
    """Groups of at most `size` leaves, each of leaves of the same shape and dtype."""
    leaves_of_type = collections.defaultdict(list)
    for x in leaves:
        leaves_of_type[jax.typeof(x)].append(x)
    groups = []
    for alike in leaves_of_type.values():
        starts = range(0, len(alike), size)
        groups += [alike[start : start + size] for start in starts]
    return groups


def _combined_leaves(groups: Groups, measure: _Measure) -> list[jax.Array]:
    """One array for each group: the results of its leaves, combined elementwise."""
    arrays = []
    for leaves in groups:
        results = map(measure.function, leaves)
        array = functools.reduce(measure.operation, results)
        arrays.append(array)
    return arrays


# --- on GPU and TPU, and of arrays on several devices ---
#
# XLA computes several reductions of the same numbers in one pass. If leaves are
# partitioned, their groups are single leaves, and a reduction takes one all-reduce, of
# a number for each leaf.


def _all_finite(groups: Groups) -> jax.Array:
    """Whether all numbers are finite; bool, shape ()."""
    return _reduced(groups, _FLAGS)


def _largest(groups: Groups) -> jax.Array:
    """The largest absolute value, or infinity if a number is not finite; shape ()."""
    return _reduced(groups, _MAGNITUDES)


def _squares_and_flags(groups: Groups) -> tuple[jax.Array, jax.Array]:
    """The sum of squares, and whether all numbers are finite; both of shape ()."""
    return _reduced(groups, _SQUARES), _reduced(groups, _FLAGS)


def _reduced(groups: Groups, measure: _Measure) -> jax.Array:
    """A measure of all numbers, by way of one result for each group; shape ()."""
    _, operation, initial = measure
    results = []
    for x in _combined_leaves(groups, measure):
        result = lax.reduce(x, initial, operation, range(x.ndim))
        results.append(result)
    return lax.reduce(jnp.stack(results), initial, operation, [0])


# --- on CPU ---
#
# XLA compiles a reduction with one output to several passes, through an array of the
# leaf's size. A reduction with two outputs becomes a single pass at the speed of
# memory, in every dtype and with the unscaling fused into it. So `_reduced_and_checked`
# reduces the flags of finiteness beside whatever else is computed. The check alone
# needs one output, so it adds a dummy, a sum of zeros.
#
# For two outputs of partitioned leaves, XLA makes no all-reduce: these leaves take the
# reductions above. If leaves are not known to be partitioned, the result is the
# same, but devices exchange more: the results for each leaf, and whole leaves where a
# group holds leaves that are partitioned along different axes, or where the norm cuts
# leaves into rows.


def _all_finite_on_cpu(groups: Groups) -> jax.Array:
    """Whether all numbers are finite; bool, shape ()."""
    zero, finite = _reduced_and_checked(groups, _ZEROS)
    return finite & (zero == 0)  # uses the dummy, so that no compiler removes it


def _largest_on_cpu(groups: Groups) -> jax.Array:
    """The largest absolute value, or infinity if a number is not finite; shape ()."""
    maximum, finite = _reduced_and_checked(groups, _MAGNITUDES)
    return jnp.where(
        finite, maximum, jnp.inf
    )  # uses the flag, so that no compiler removes it


def _squares_and_flags_on_cpu(groups: Groups) -> tuple[jax.Array, jax.Array]:
    """The sum of squares, and whether all numbers are finite; both of shape ()."""
    # The reduction adds one number after the other, and a float32 sum that has reached
    # 2**24 does not grow by adding 1. So large leaves are summed row by row.
    in_rows: Groups = []
    for leaves in groups:
        matrices_of_leaves = map(_rows, leaves)
        in_rows += map(list, zip(*matrices_of_leaves, strict=True))
    return _reduced_and_checked(in_rows, _SQUARES, first_axis=1)


def _reduced_and_checked(
    groups: Groups, measure: _Measure, first_axis: int = 0
) -> tuple[jax.Array, jax.Array]:
    """A measure of all numbers, and whether all are finite; both of shape ().

    The axes of each leaf from `first_axis` on are reduced in one pass, and what is left
    of all leaves after it.
    """
    _, operation, initial = measure
    arrays = _combined_leaves(groups, measure)
    # Flags combined by `and` would not be vectorized, as sums of zeros and NaNs are.
    sums = _combined_leaves(groups, _ZEROS)
    results = []
    flags = []
    for x, zeros in zip(arrays, sums, strict=True):
        result, flag = lax.reduce(
            (x, lax.is_finite(zeros)),
            (initial, np.True_),
            _with_flag(operation),
            range(first_axis, x.ndim),
        )
        results.append(result.reshape(-1))
        flags.append(flag.reshape(-1))
    # Without the barrier, these would be fused with what is computed from them, to a
    # kernel with an argument for every leaf, which compiles in quadratic time.
    vectors = (jnp.concatenate(results), jnp.concatenate(flags))
    all_results, all_flags = lax.optimization_barrier(vectors)
    result = lax.reduce(all_results, initial, operation, [0])
    return result, all_flags.all()


@functools.cache  # JAX traces the function returned only once if it is the same one
def _with_flag(operation: Callable) -> Callable:
    """An operation on pairs `(x, flag)`: `operation` of the xs, `and` of the flags."""

    def on_pairs(so_far, new):
        x, flag = so_far
        new_x, new_flag = new
        return operation(x, new_x), lax.bitwise_and(flag, new_flag)

    return on_pairs


def _rows(x: jax.Array) -> list[jax.Array]:
    """The numbers of a leaf in one matrix, or in two with rows of different lengths.

    Up to `_LONGEST_ROW` numbers are one row. Otherwise, a row's length is the largest
    power of two up to `_LONGEST_ROW` that divides the leaf's size. If that is less than
    `_SHORTEST_ROW`, rows have `_LONGEST_ROW` numbers, and the remaining numbers are a
    row of their own.
    """
    size = x.size
    if size <= _LONGEST_ROW:
        return [x.reshape(1, size)]
    divisor = size & -size  # the largest power of two that divides
    length = min(divisor, _LONGEST_ROW)
    if length < _SHORTEST_ROW:
        length = _LONGEST_ROW
    flat = x.reshape(-1)
    end = size - size % length
    rows = flat[:end].reshape(-1, length)
    if end == size:
        return [rows]
    return [rows, flat[end:].reshape(1, -1)]


# --- measures ---


def _square(x: jax.Array) -> jax.Array:
    """The square of each number, as float32."""
    return jnp.square(x.astype(jnp.float32))


def _magnitude(x: jax.Array) -> jax.Array:
    """The absolute value of each number, as float32; infinity unless it is finite.

    So a max does not lose a NaN, as it does on CPU. A float64 that is more than float32
    holds counts as the largest float32 number.
    """
    magnitude = jnp.abs(x.astype(jnp.float32))
    bounded = jnp.minimum(magnitude, validation.LARGEST)
    return jnp.where(lax.is_finite(x), bounded, jnp.inf)


def _zero_if_finite(x: jax.Array) -> jax.Array:
    """Zero for each finite number, and NaN for any other, as float32.

    It is computed in float32 or wider, as a CPU rounds 16-bit numbers one by one.
    """
    wide = at_least_float32(x)
    difference = lax.sub(wide, wide)
    return difference.astype(jnp.float32)


_FLAGS = _Measure(lax.is_finite, lax.bitwise_and, np.True_)
_MAGNITUDES = _Measure(_magnitude, lax.max, np.float32(0))
_SQUARES = _Measure(_square, lax.add, np.float32(0))
_ZEROS = _Measure(_zero_if_finite, lax.add, np.float32(0))


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
    try:
        hash(axis_name)  # JAX would take a list for a tuple
        lax.axis_size(axis_name)  # under shard_map, `reduce` would not name the axis
        return reduce(x, axis_name)
    except (NameError, TypeError, ValueError) as error:
        raise ValueError(
            f"axis_name={axis_name!r} is not an axis of a pmap or shard_map around "
            "this step, nor a tuple of such axes, each once. Under jit alone, leave "
            "axis_name out: the check already covers all devices"
        ) from error
