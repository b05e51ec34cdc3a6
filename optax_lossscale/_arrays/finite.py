"""The finiteness check: whether every element of a pytree is finite.

A step whose gradients contain a NaN or an infinity must be skipped, so every step reads
all of its gradients once before it applies any. That read is the cost of the check. The
same pass can compute the largest gradient or the global norm, which some loss scales
and skip rules need.

A *measure* says what to compute: a function of each element, such as its square, and an
operation that combines the results, such as a sum. Leaves of the same shape and dtype
form *groups*, and one kernel reads a group. If two leaves `x` and `y` form a group, the
sum of their squares takes three steps::

    [[x, y]]            # `_reduce_tree` groups leaves of the same shape and dtype
    [x**2 + y**2]       # `_combined_leaves` makes one array of each group
    sum(x**2 + y**2)    # `_reduced` reduces all arrays to one number

Only floating-point and complex leaves are read, because the elements of all others are
finite. XLA's compilers for GPU and TPU compute several measures of the same elements in
one pass, but its compiler for CPU does not, so `_reduced_and_checked` replaces
`_reduced` there.

Under `jit` alone, arrays are global, and the compiler inserts the communication that a
reduction needs. Under `pmap` and `shard_map`, the check reads the arrays of only one
replica, and `reduce_replicas` then reduces the results of all replicas to one.

What this file says about XLA was read from programs compiled with jax 0.10 to 0.12.
Only three things were measured: the speed of the check on CPU (see "Why the check is
cheap" in docs/benchmarks/findings.md), compile times, and the accuracy of the norm.
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

AxisName = Hashable
"""The name of a mapped axis or a tuple of such names."""

Groups = list[list[jax.Array]]
"""Groups of leaves of the same shape and dtype; one kernel reads a group."""


class _Measure(NamedTuple):
    """What to compute of each element, and how to combine the results.

    Attributes:
      function: maps a leaf to an array of the same shape, with the dtype of `neutral`.
      combine: combines two such arrays elementwise, or two of their elements.
      neutral: the identity of `combine`, such as 0 for a sum; float32 or bool.
    """

    function: Callable[..., jax.Array]
    combine: Callable[..., jax.Array]
    neutral: np.generic


# How many leaves go into a group. A heuristic: larger groups compile faster and launch
# fewer kernels, but a CPU needs enough kernels to keep all cores busy.
_LEAST_KERNELS_ON_CPU = 32
_LARGEST_GROUP_ON_CPU = 8
# These sizes were chosen by reading compiled programs, which were not timed. With
# groups of four leaves, but not of eight, the compiler for GPUs computes the norm for
# clipping in the same pass. With groups of more than one leaf, the compiler for TPUs
# keeps more gradients waiting in main memory.
_GROUP_SIZE_ON_GPU = 4
_GROUP_SIZE_ON_TPU = 1

# Bounds on the length of the rows into which `_as_matrices` cuts large leaves, for sums
# on CPU. The relative error of a float32 sum of n squares is at most n * 2**-24, so for
# the longest row, it is at most 2**-8. With rows of 2**8 elements or more, the second
# reduction reads at most 1 element for every 256 of the leaf.
_LONGEST_ROW = 2**16
_SHORTEST_ROW = 2**8


def all_finite(tree: Any) -> jax.Array:
    """Whether every element of a tree is finite: no NaN, no infinity.

    By default, `with_loss_scale` checks the gradients of each step in this way. Call
    `all_finite` yourself in a step that you write without the wrapper, or to check
    activations and batches. It reads each element once.

    Under `jit`, the result is about the arrays of all devices. Under `pmap` or
    `shard_map`, it is about one replica: to decide for all replicas alike, pass
    `axis_name` to `with_loss_scale` or to `LossScale.update`.

    Args:
      tree: any pytree of arrays and Python numbers. `None`, integer, bool and float0
        leaves are always finite. Python and NumPy numbers are first converted as JAX
        converts them: unless 64-bit types are enabled, 1e300 becomes infinite.

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
    """Returns the largest absolute value in a tree, or infinity if any is not finite.

    A complex number counts as the larger of its two parts, and a finite float64 number
    beyond float32's range as the largest float32 number. The result is float32, shape
    (). It is 0 for a tree without floating-point and complex leaves.
    """
    return _reduce_tree(tree, _largest_on_cpu, _largest)


def norm_and_all_finite(tree: Any) -> tuple[jax.Array, jax.Array]:
    """Returns the global L2 norm and whether every element is finite; shapes ().

    Both are computed in one pass over the elements. The norm and the sum of squares
    under its root are float32, so a norm of 2**64 or more is infinite, even if every
    element is finite. The squares of elements of magnitude below about 1e-19 are
    subnormal, and XLA flushes them to zero on CPU, so the norm of such elements is 0,
    however many there are.
    """
    sum_of_squares, finite = _reduce_tree(
        tree, _squares_and_flags_on_cpu, _squares_and_flags
    )
    return jnp.sqrt(sum_of_squares), finite


def _reduce_tree(
    tree: Any, cpu_reduction: Callable[[Groups], T], reduction: Callable[[Groups], T]
) -> T:
    """Reduces the leaves of a tree, in groups, with the reduction for the platform.

    Both reductions return the same up to rounding, but on CPU, `cpu_reduction` takes
    fewer passes. JAX chooses between the two when it lowers the program for a platform,
    unless a leaf is known to be on several devices. Then every platform uses
    `reduction`, with a group for each leaf.
    """
    leaves = _real_leaves(tree)
    if any(map(is_on_several_devices, leaves)):
        return reduction(_groups(leaves, 1))
    size_for_all_cores = len(leaves) // _LEAST_KERNELS_ON_CPU
    size_on_cpu = min(max(size_for_all_cores, 1), _LARGEST_GROUP_ON_CPU)
    return lax.platform_dependent(
        leaves,
        cpu=lambda leaves: cpu_reduction(_groups(leaves, size_on_cpu)),
        tpu=lambda leaves: reduction(_groups(leaves, _GROUP_SIZE_ON_TPU)),
        default=lambda leaves: reduction(_groups(leaves, _GROUP_SIZE_ON_GPU)),
    )


def _real_leaves(tree: Any) -> list[jax.Array]:
    """Returns the floating-point leaves and the parts of complex ones, or one zero."""
    leaves = []
    inexact = filter(is_inexact_leaf, jax.tree.leaves(tree))
    for x in map(jnp.asarray, inexact):
        if jnp.iscomplexobj(x):
            leaves += [x.real, x.imag]
        else:
            leaves.append(x)
    return leaves or [jnp.float32(0)]


def _groups(leaves: list[jax.Array], size: int) -> Groups:
    """Groups leaves of the same shape and dtype, at most `size` of them in a group."""
    leaves_of_type = collections.defaultdict(list)
    for x in leaves:
        leaves_of_type[jax.typeof(x)].append(x)
    groups = []
    for alike in leaves_of_type.values():
        for start in range(0, len(alike), size):
            groups.append(alike[start : start + size])
    return groups


def _combined_leaves(groups: Groups, measure: _Measure) -> list[jax.Array]:
    """Applies a measure to all leaves; returns one combined array for each group."""
    arrays = []
    for leaves in groups:
        measured = map(measure.function, leaves)
        array = functools.reduce(measure.combine, measured)
        arrays.append(array)
    return arrays


# --- reductions on GPU and TPU, and of arrays on several devices ---
#
# XLA computes several reductions of the same elements in one pass. Leaves that are
# sharded over devices are in groups of one leaf, so that a reduction of them needs a
# single all-reduce, of one number for each leaf.


def _all_finite(groups: Groups) -> jax.Array:
    """Whether every element is finite; bool, shape ()."""
    return _reduced(groups, _FLAGS)


def _largest(groups: Groups) -> jax.Array:
    """Returns the largest absolute value, or infinity if any is not finite."""
    return _reduced(groups, _MAGNITUDES)


def _squares_and_flags(groups: Groups) -> tuple[jax.Array, jax.Array]:
    """Returns the sum of squares and whether every element is finite."""
    sum_of_squares = _reduced(groups, _SQUARES)
    finite = _reduced(groups, _FLAGS)
    return sum_of_squares, finite


def _reduced(groups: Groups, measure: _Measure) -> jax.Array:
    """Reduces each group to one number, and these numbers to one; shape ()."""
    results = []
    for x in _combined_leaves(groups, measure):
        result = lax.reduce(x, measure.neutral, measure.combine, range(x.ndim))
        results.append(result)
    vector = jnp.stack(results)
    return lax.reduce(vector, measure.neutral, measure.combine, [0])


# --- reductions on CPU ---
#
# XLA compiles a reduction with one output to several passes, which write and read an
# array as large as the leaf. A reduction with two outputs becomes a single pass at the
# speed of memory, in every dtype and with the unscaling fused into it.
# `_reduced_and_checked` therefore always has two outputs: a measure, and whether every
# element is finite. The check alone needs only the second, so it adds a dummy measure,
# a sum of zeros.
#
# XLA makes no all-reduce for two outputs, so leaves that are known to be on several
# devices use the reductions above. Sometimes this is known only when the program is
# compiled. The reductions below are then still correct, but devices exchange more than
# one number for each leaf. They exchange whole leaves in two cases: if the leaves of a
# group are sharded along different axes, and if the norm cuts a leaf into rows.


def _all_finite_on_cpu(groups: Groups) -> jax.Array:
    """Returns what `_all_finite` returns."""
    zero, finite = _reduced_and_checked(groups, _ZEROS)
    # `zero` is 0 if every element is finite, and NaN otherwise, so the flag alone would
    # do, but a compiler would remove an unused `zero`, and with it the second output.
    return finite & (zero == 0)


def _largest_on_cpu(groups: Groups) -> jax.Array:
    """Returns what `_largest` returns."""
    maximum, finite = _reduced_and_checked(groups, _MAGNITUDES)
    # `maximum` is infinite already if the flag is False. The flag is read only so that
    # no compiler removes it, and with it the second output.
    return jnp.where(finite, maximum, jnp.inf)


def _squares_and_flags_on_cpu(groups: Groups) -> tuple[jax.Array, jax.Array]:
    """Returns what `_squares_and_flags` returns, up to rounding."""
    # The reduction has only a few running sums, and the larger a sum is, the more
    # digits of the next square it loses: 2**24 + 1 is 2**24 in float32. Large leaves
    # are therefore summed row by row. For 2**25 normally distributed elements on an x86
    # CPU, the relative error of the sum of squares was 5e-4 without rows and 2e-8 with
    # them.
    groups_in_rows: Groups = []
    for leaves in groups:
        matrices_of_leaves = map(_as_matrices, leaves)
        for matrices in zip(*matrices_of_leaves, strict=True):
            groups_in_rows.append(list(matrices))
    return _reduced_and_checked(groups_in_rows, _SQUARES, first_axis=1)


def _reduced_and_checked(
    groups: Groups, measure: _Measure, first_axis: int = 0
) -> tuple[jax.Array, jax.Array]:
    """Returns a measure of all elements and whether all are finite; both of shape ().

    The array of each group is reduced in one pass along its axes from `first_axis` on.
    The results of all groups are then reduced together.
    """
    combined = _combined_leaves(groups, measure)
    # One array for each group: its elements are 0 where all leaves of the group are
    # finite, and NaN elsewhere. The zeros of a group's leaves are added up, because XLA
    # for CPU vectorizes such a sum, but would not vectorize an `and` of flags.
    combined_zeros = _combined_leaves(groups, _ZEROS)
    results = []
    flags = []
    for x, zeros in zip(combined, combined_zeros, strict=True):
        result, flag = lax.reduce(
            (x, lax.is_finite(zeros)),
            (measure.neutral, np.True_),
            _with_flag(measure.combine),
            range(first_axis, x.ndim),
        )
        results.append(result.reshape(-1))
        flags.append(flag.reshape(-1))
    # Without the barrier, XLA would fuse these vectors with the reductions below into a
    # kernel with an argument for every leaf, which compiles in quadratic time.
    vector = jnp.concatenate(results)
    flag_vector = jnp.concatenate(flags)
    vector, flag_vector = lax.optimization_barrier((vector, flag_vector))
    result = lax.reduce(vector, measure.neutral, measure.combine, [0])
    return result, flag_vector.all()


@functools.cache  # so that JAX traces `combine_pairs` once for each `combine`
def _with_flag(combine: Callable[..., jax.Array]) -> Callable[..., Any]:
    """Combines pairs `(x, flag)`: `x` by `combine`, and the flags by `and`."""

    def combine_pairs(pair, other_pair):
        x, flag = pair
        other_x, other_flag = other_pair
        return combine(x, other_x), lax.bitwise_and(flag, other_flag)

    return combine_pairs


def _as_matrices(x: jax.Array) -> list[jax.Array]:
    """Reshapes a leaf to a matrix, or to two with rows of different lengths.

    Up to `_LONGEST_ROW` elements form a single row. For larger leaves, the length of a
    row is the largest power of two up to `_LONGEST_ROW` that divides the leaf's size.
    If that is less than `_SHORTEST_ROW`, rows have `_LONGEST_ROW` elements instead, and
    the remaining elements form a second matrix of one row.
    """
    size = x.size
    if size <= _LONGEST_ROW:
        return [x.reshape(1, size)]
    divisor = size & -size  # the largest power of two that divides the size
    length = min(divisor, _LONGEST_ROW)
    if length < _SHORTEST_ROW:
        length = _LONGEST_ROW
    flat = x.reshape(-1)
    end = size - size % length
    rows = flat[:end].reshape(-1, length)
    if end == size:
        return [rows]
    remainder = flat[end:].reshape(1, -1)
    return [rows, remainder]


# --- measures ---


def _square(x: jax.Array) -> jax.Array:
    """Returns the square of each element, as float32."""
    return jnp.square(x.astype(jnp.float32))


def _magnitude(x: jax.Array) -> jax.Array:
    """Returns absolute values as float32, and infinity for NaNs and infinities.

    A maximum would lose a NaN on CPU, but it keeps an infinity. A finite float64 number
    beyond float32's range becomes the largest float32 number.
    """
    magnitude = jnp.abs(x.astype(jnp.float32))
    bounded = jnp.minimum(magnitude, validation.LARGEST_FLOAT32)
    return jnp.where(lax.is_finite(x), bounded, jnp.inf)


def _zero_if_finite(x: jax.Array) -> jax.Array:
    """Returns 0 for each finite element, and NaN for any other, as float32.

    The difference `x - x` is computed in float32 or wider, because most CPUs take
    longer for 16-bit arithmetic: they compute each result in float32 and then round it.
    """
    wide = at_least_float32(x)
    difference = lax.sub(wide, wide)
    return difference.astype(jnp.float32)


_FLAGS = _Measure(lax.is_finite, lax.bitwise_and, np.True_)
_MAGNITUDES = _Measure(_magnitude, lax.max, np.float32(0))
_SQUARES = _Measure(_square, lax.add, np.float32(0))
_ZEROS = _Measure(_zero_if_finite, lax.add, np.float32(0))


# --- reductions over replicas ---


def on_all_replicas(flag: jax.Array, axis_name: AxisName | None) -> jax.Array:
    """Whether a flag is True on every replica along the named axes; bool, shape ().

    If each replica decided for itself, one might skip a step that the others apply, and
    their parameters would differ from then on. All replicas therefore use the minimum
    of their flags: if the gradients of one replica overflow, all skip the step.
    """
    if axis_name in (None, ()):
        return flag
    number = flag.astype(jnp.int32)
    smallest = reduce_replicas(lax.pmin, number, axis_name)
    return smallest.astype(bool)


def largest_on_all_replicas(tree: Any, axis_name: AxisName | None) -> jax.Array:
    """Returns the `largest` of all replicas along the named axes; float32, shape ()."""
    return reduce_replicas(lax.pmax, largest(tree), axis_name)


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
