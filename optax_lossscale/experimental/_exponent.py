"""The power of two that a cotangent goes by: how it is chosen, handed on and taken away."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from optax_lossscale._arrays.finite import largest
from optax_lossscale._arrays.placement import varying_axes
from optax_lossscale._arrays.precision import at_least_float32, dtype_of, is_inexact
from optax_lossscale._diagnosis.tap import Probe
from optax_lossscale._scales.loss_scale import AxisName, across, axes_of

# The cotangent of the scalar beside the activations is the exponent of theirs, plus this for each
# use of them: JAX sums cotangents, so two uses are seen as such.
_USE = 1024.0
_BOUND = 126  # of exponents, so that 2**k and 2**-k are normal in float32


def zero_tally(tree: Any) -> jax.Array:
    """A float32 zero that is mapped, or varies over devices, as the tree does.

    Were it not, JAX would sum the exponents of all that are mapped into one.
    """
    numbers = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(dtype_of(x), jnp.number)]
    nothing = [jnp.sum(jnp.asarray(x).real[None][:0], dtype=jnp.float32) for x in numbers]
    return sum(nothing, start=jnp.zeros((), jnp.float32))


def as_varying(x: jax.Array, like: jax.Array) -> jax.Array:
    """`x`, varying over the devices over which another scalar does."""
    return x + jnp.zeros_like(like)


def exponent_of_one_use(tally: jax.Array) -> jax.Array:
    """The exponent in the cotangent of a tally; NaN where it is not that of one use or none."""
    uses = jnp.round(tally / _USE)
    exponent = tally - uses * _USE
    is_one = (uses == 1) & (jnp.abs(exponent) <= _BOUND) & (exponent == jnp.round(exponent))
    return jnp.where(is_one | (tally == 0), exponent, jnp.nan)


def fit(
    cotangent: Any,
    exponent: jax.Array,
    dtypes: Any,
    margin: int,
    rounded_to: Any = None,
    axis_name: AxisName | None = None,
) -> tuple[Any, jax.Array, jax.Array]:
    """The cotangent with its largest number `margin` bits below overflow.

    Args:
      cotangent: any pytree, times two to the `exponent`.
      exponent: float32, shape ().
      dtypes: those in which it is returned.
      margin: in bits.
      rounded_to: a dtype that it is rounded to on the way, if any.
      axis_name: over which all replicas choose alike.

    Returns:
      The cotangent, its new exponent, and the cotangent of the tally: of one use, or of none
      where all is zero.
    """
    size = largest(lax.stop_gradient(cotangent))
    size_exponent = _exponent_of(size)
    fitting = jnp.clip(exponent + _top(dtypes, margin) - size_exponent, -_BOUND, _BOUND)
    # An infinite exponent fits zeros as well as any; what is not finite stays as it is.
    new = jnp.where(size > 0, jnp.where(jnp.isfinite(size), fitting, exponent), jnp.inf)
    new, exponent = _materialized(new, lax.stop_gradient(exponent))
    new = _alike(new, axis_name)
    all_zero = new == jnp.inf
    new = jnp.where(all_zero, 0, new)
    bits = new - exponent
    if rounded_to is None:
        factors = _powers(bits)
        to_fit = lambda x: _times(x, factors)
    else:
        # Below the highest binade, so that rounding up does not overflow.
        to_range = jnp.finfo(rounded_to).maxexp - 1 - size_exponent
        there, back = _powers(to_range), _powers(bits - to_range)
        to_fit = lambda x: _times(_times(x, there).astype(rounded_to), back)
    fitted = lambda x, dtype: to_fit(x).astype(dtype) if is_inexact(x) else x
    use = jnp.where(all_zero, 0, _USE + new)
    return jax.tree.map(fitted, cotangent, dtypes), new, use


def _alike(exponent: jax.Array, axis_name: AxisName | None) -> jax.Array:
    """The least exponent of all replicas.

    Where their gradients are summed inside the block, before they are unscaled, they must be at
    the same scale. With `check_vma`, `shard_map` says over which axes that can be.
    """
    names = () if axis_name is None else axes_of(axis_name)
    return across(lax.pmin, exponent, tuple({*names, *varying_axes(exponent)}))


def unscale(grads: Any, exponent: jax.Array) -> Any:
    """Gradients at the scale of the loss. The records of taps are none, and stay as they are."""
    factors = _powers(-exponent)
    is_record = lambda x: isinstance(x, Probe)
    of_array = lambda x: _times(x, factors).astype(x.dtype) if is_inexact(x) else x
    return jax.tree.map(lambda x: x if is_record(x) else of_array(x), grads, is_leaf=is_record)


def _times(x: jax.Array, factors: Sequence[jax.Array]) -> jax.Array:
    """The product, in float32 or wider."""
    x = at_least_float32(x)
    for factor in factors:
        x = x * factor
    return x


def _powers(exponent: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Two float32 numbers whose product is a power of two; NaN if the exponent is."""
    half = jnp.floor(exponent / 2)
    return _power(half), _power(exponent - half)


def _power(exponent: jax.Array) -> jax.Array:
    """A normal power of two, from its bits: `exp2` is inexact on CPU, `ldexp` many operations."""
    biased = (jnp.clip(exponent, -126, 127) + 127).astype(jnp.int32)
    power = lax.bitcast_convert_type(lax.shift_left(biased, np.int32(23)), jnp.float32)
    return jnp.where(jnp.isnan(exponent), jnp.nan, power)


def _exponent_of(size: jax.Array) -> jax.Array:
    """As of `frexp`, but float32, and -126 for subnormal numbers: sizes are below two to it."""
    bits = lax.bitcast_convert_type(size, jnp.int32)
    return (lax.shift_right_logical(bits, np.int32(23)) - 126).astype(jnp.float32)


def _materialized(a: jax.Array, b: jax.Array) -> list[jax.Array]:
    """The same two scalars, which kernels that use them read instead of computing them.

    An exponent depends on those of all blocks above it. Fused into the kernels of every
    block, this took compilers quadratic time. A reduction of two outputs they fuse into nothing.
    """
    pairs = [jnp.stack([x, jnp.zeros_like(x)]) for x in (a, b)]
    add = lambda x, y: (x[0] + y[0], x[1] + y[1])
    return lax.reduce(pairs, [np.float32(0), np.float32(0)], add, [0])


def _top(dtypes: Any, margin: int) -> int:
    """The exponent that the largest number is to have: nothing rounds to overflow in 8 bits."""
    narrow = [jnp.finfo(d).maxexp - 1 for d in jax.tree.leaves(dtypes) if _is_8_bits(d)]
    return min([jnp.finfo(jnp.float16).maxexp - margin, *narrow])


def _is_8_bits(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize == 1
