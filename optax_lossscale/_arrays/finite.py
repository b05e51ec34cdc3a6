"""Whether every element of a pytree is finite, and how large the elements are.

A step whose gradients contain a NaN or an infinity is skipped, so each step reads all
of its gradients once before it applies any. That read is the cost of the check. The
same read yields the norm of the gradients; a loss scale that wants the largest of them
takes one more on a CPU.

On GPU and TPU, a leaf is reduced to one number, with a mark in place of each element
that is not finite (`_marked`). XLA's compiler for CPU makes of a reduction with one
result several passes, which write and read an array as large as the leaf. One with two
results becomes a single pass at the speed of memory, so there a leaf is reduced as
pairs of a number and a flag (`_in_pairs`).

Under `jit` alone, arrays are global, and the compiler inserts the communication that a
reduction needs. Under `pmap` and `shard_map`, the check reads the arrays of one replica
alone; `replicas.py` reduces the results of all to one.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType

from optax_lossscale._arrays.precision import at_least_float32, is_inexact_leaf

LARGEST_FLOAT32 = float(np.finfo(np.float32).max)
"""The largest finite float32 number."""


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
    squares are flushed to zero, is 0. If an element is not finite, it is infinite. On
    CPU, where a few running sums take all of a leaf, the norm of 2**25 elements is off
    by 1e-3, and that of 2**29 by 5%: enough for logs and for rules of skipping.
    """
    # A sum of squares may be infinite, but only a mark makes it NaN.
    sum_of_squares = _read(_real_leaves(tree), _SQUARES)
    finite = ~jnp.isnan(sum_of_squares)
    return jnp.where(finite, jnp.sqrt(sum_of_squares), jnp.inf), finite


def largest(tree: Any) -> jax.Array:
    """Returns the largest absolute value in a tree, or infinity if any is not finite.

    A complex number counts as the larger of its two parts, and a finite float64 number
    beyond float32's range as the largest float32 number. The result is float32, shape
    (). It is 0 for a tree without floating-point and complex leaves.
    """
    return _read(_real_leaves(tree), _MAGNITUDES)


class _Reduction(NamedTuple):
    """What to compute of each element, and how to combine the results.

    Attributes:
      function: maps an array to a float32 array.
      combine: combines two results; its neutral element is 0.
      mark: the result if an element is not finite, which no finite ones give.
    """

    function: Callable[[jax.Array], jax.Array]
    combine: Callable[[jax.Array, jax.Array], jax.Array]
    mark: float


def _square(x: jax.Array) -> jax.Array:
    return jnp.square(x.astype(jnp.float32))


def _magnitude(x: jax.Array) -> jax.Array:
    return jnp.minimum(jnp.abs(x.astype(jnp.float32)), LARGEST_FLOAT32)


_SQUARES = _Reduction(_square, lax.add, np.nan)
_MAGNITUDES = _Reduction(_magnitude, lax.max, np.inf)


# Outside of `jit`, all leaves are then read by one program.
@partial(jax.jit, static_argnames="reduction", inline=True)
def _read(leaves: list[jax.Array], reduction: _Reduction) -> jax.Array:
    """Reads each element once; returns a float32 number, shape ()."""
    in_pairs = partial(_in_pairs, reduction=reduction)
    marked = partial(_marked, reduction=reduction)
    if any(map(_is_on_several_devices, leaves)):
        # XLA makes one all-reduce of one result a leaf, but gathers leaves for pairs.
        return marked(leaves)
    return lax.platform_dependent(leaves, cpu=in_pairs, default=marked)


def _in_pairs(leaves: list[jax.Array], reduction: _Reduction) -> jax.Array:
    """Reduces each leaf once, as pairs of a number and a flag."""
    function, combine, mark = reduction

    def combine_pairs(pair, other):
        return combine(pair[0], other[0]), lax.bitwise_and(pair[1], other[1])

    pairs = []
    for x in leaves:
        operands = (function(x), lax.is_finite(x))
        neutral = (np.float32(0), np.True_)
        pairs.append(lax.reduce(operands, neutral, combine_pairs, range(x.ndim)))
    # Without the barrier, XLA would fuse all leaves into a kernel with as many
    # arguments, which compiles in quadratic time.
    numbers, flags = lax.optimization_barrier(
        tuple(map(jnp.stack, zip(*pairs, strict=True)))
    )
    number = lax.reduce(numbers, np.float32(0), combine, [0])
    return jnp.where(flags.all(), number, mark)


def _marked(leaves: list[jax.Array], reduction: _Reduction) -> jax.Array:
    """Reduces each leaf once, with a mark in place of what is not finite."""
    function, combine, mark = reduction
    numbers = []
    for x in leaves:
        operand = jnp.where(lax.is_finite(x), function(x), mark)
        numbers.append(lax.reduce(operand, np.float32(0), combine, range(x.ndim)))
    return lax.reduce(jnp.stack(numbers), np.float32(0), combine, [0])


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
