"""Whether every element of a pytree is finite, and how large the elements are.

A step whose gradients contain a NaN or an infinity is skipped, so each step reads all
of its gradients once before it applies any. That read is the cost of the check. The
same read yields the norm of the gradients; a loss scale that wants the largest of them
takes one more on a CPU.

XLA decides how often the gradients are read. Its compilers for GPU and TPU fuse several
reductions of one array into one pass. Its compiler for CPU makes of a reduction with
one result several passes, which write and read an array as large as the leaf; one with
two results becomes a single pass at the speed of memory. So on CPU a leaf is reduced as
pairs of a number and a flag (`_in_pairs`), and elsewhere number and flag are reduced
apart (`_apart`). docs/benchmarks/findings.md has the measurements.

Under `jit` alone, arrays are global, and the compiler inserts the communication that a
reduction needs. Under `pmap` and `shard_map`, the check reads the arrays of one replica
alone; `replicas.py` reduces the results of all to one.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType

from optax_lossscale._arrays.checks import LARGEST_FLOAT32
from optax_lossscale._arrays.precision import at_least_float32, is_inexact_leaf

Combine = Callable[[jax.Array, jax.Array], jax.Array]
"""An operation on two numbers with the neutral element 0: `lax.add` or `lax.max`."""


def all_finite(tree: Any) -> jax.Array:
    """Whether every element of a tree is finite: no NaN, no infinity.

    `with_loss_scale` checks the gradients of each step. Call `all_finite` yourself in a
    step that you write without the wrapper, or to check activations and batches. It
    reads each element once.

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
    _, finite = norm_and_all_finite(tree)
    return finite


def norm_and_all_finite(tree: Any) -> tuple[jax.Array, jax.Array]:
    """Returns the global L2 norm and whether every element is finite; shapes ().

    The norm and the sum of squares under its root are float32: a norm of 2**64 or more
    is infinite even if every element is finite, and that of elements below 1e-19, whose
    squares are flushed to zero, is 0. On CPU, where a few running sums take all of a
    leaf, the norm of 2**25 elements is off by 1e-3, and that of 2**29 by 5%.
    """
    sum_of_squares, finite = _read(tree, jnp.square, lax.add)
    return jnp.sqrt(sum_of_squares), finite


def largest(tree: Any) -> jax.Array:
    """Returns the largest absolute value in a tree, or infinity if any is not finite.

    A complex number counts as the larger of its two parts, and a finite float64 number
    beyond float32's range as the largest float32 number. The result is float32, shape
    (). It is 0 for a tree without floating-point and complex leaves.
    """
    maximum, finite = _read(tree, jnp.abs, lax.max)
    # A maximum may have lost a NaN, but the flag has not.
    return jnp.where(finite, jnp.minimum(maximum, LARGEST_FLOAT32), jnp.inf)


def _read(
    tree: Any, function: Callable[[jax.Array], jax.Array], combine: Combine
) -> tuple[jax.Array, jax.Array]:
    """Reads each element once; returns a float32 number and a flag of shapes ().

    The number combines `function` of all elements. The flag is whether all are finite.
    """
    return _read_leaves(_real_leaves(tree), function, combine)


# Where nothing else is compiled, this is, once.
@partial(jax.jit, static_argnames=("function", "combine"), inline=True)
def _read_leaves(leaves, function, combine):
    in_pairs = partial(_in_pairs, function=function, combine=combine)
    apart = partial(_apart, function=function, combine=combine)
    if any(map(_is_on_several_devices, leaves)):
        # XLA makes one all-reduce of one result a leaf, but gathers leaves for pairs.
        return apart(leaves)
    return lax.platform_dependent(leaves, cpu=in_pairs, default=apart)


def _in_pairs(leaves, function, combine):
    """Reduces each leaf once, as pairs of a number and a flag."""

    def combine_pairs(pair, other):
        return combine(pair[0], other[0]), lax.bitwise_and(pair[1], other[1])

    pairs = []
    for x in leaves:
        operands = function(x.astype(jnp.float32)), lax.is_finite(x)
        neutral = np.float32(0), np.True_
        pairs.append(lax.reduce(operands, neutral, combine_pairs, range(x.ndim)))
    # The barrier keeps the pairs in one pass where only one of the two is read, and
    # XLA from fusing all leaves into a kernel with as many arguments, which compiles in
    # quadratic time.
    numbers, flags = lax.optimization_barrier(
        tuple(map(jnp.stack, zip(*pairs, strict=True)))
    )
    return lax.reduce(numbers, np.float32(0), combine, [0]), flags.all()


def _apart(leaves, function, combine):
    """Reduces each leaf twice; XLA for GPU and TPU reads it once."""
    numbers = []
    flags = []
    for x in leaves:
        operand = function(x.astype(jnp.float32))
        numbers.append(lax.reduce(operand, np.float32(0), combine, range(x.ndim)))
        flags.append(lax.is_finite(x).all())
    number = lax.reduce(jnp.stack(numbers), np.float32(0), combine, [0])
    return number, jnp.stack(flags).all()


def _real_leaves(tree: Any) -> list[jax.Array]:
    """Returns the floating-point leaves and the parts of complex ones, or one zero."""
    leaves = []
    for x in filter(is_inexact_leaf, jax.tree.leaves(tree)):
        x = jnp.asarray(at_least_float32(x))  # Most CPUs compute slowly in 16 bits.
        leaves += [x.real, x.imag] if jnp.iscomplexobj(x) else [x]
    return leaves or [jnp.float32(0)]


def _is_on_several_devices(x: jax.Array) -> bool:
    """Whether an array is known, while it is traced, to be on several devices.

    The axes of a `shard_map` do not count: along these, the array is one replica's. It
    is not known if only `in_shardings` will put the arguments on several devices. The
    results are then right as well, but devices exchange more.
    """
    mesh = jax.typeof(x).sharding.mesh
    axes = zip(mesh.axis_sizes, mesh.axis_types, strict=True)
    return any(size > 1 and kind != AxisType.Manual for size, kind in axes)
