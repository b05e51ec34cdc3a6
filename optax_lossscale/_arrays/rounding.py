"""A float32 number as its rounding to 16 bits, and what the rounding dropped.

For bfloat16 that is the lower half of the number: 16 bits, with ties rounded away from
zero, and not to even as by `astype`. Then 2**16 float32 numbers round to each bfloat16
one, as many as 16 bits tell apart; with ties to even, it would be 2**16 + 1 for every
other one. Of float16, which drops more than that, the whole number is kept.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from optax_lossscale._arrays import validation
from optax_lossscale._arrays.precision import at_least_float32, dtype_of

# A bfloat16 number is the upper half of a float32 one. Half of its last place is added
# before the lower half is cut off, so this is the lower half that says "nothing was
# dropped".
_HALF = np.uint32(0x8000)
_UPPER = np.uint32(0xFFFF0000)
_UNSIGNED = np.uint32(0x7FFFFFFF)
_SMALLEST = np.uint32(0x00010000)
_INFINITE = np.uint32(0x7F800000)


def split(number: jax.Array, dtype: np.dtype) -> tuple[jax.Array, jax.Array]:
    """A float32 number rounded to 16 bits, still as float32, and what else `join` needs.

    That is a uint16 array for bfloat16, and the number itself for float16.
    """
    if dtype == jnp.bfloat16:
        bits = lax.bitcast_convert_type(number, jnp.uint32) + _HALF
        upper = lax.bitcast_convert_type(bits & _UPPER, jnp.float32)
        rounded = jnp.where(jnp.isfinite(number), upper, number)
        return rounded, bits.astype(jnp.uint16)
    validation.one_of("the dtype of a parameter", str(dtype), ("float16", "bfloat16"))
    return number.astype(dtype).astype(jnp.float32), number


def join(rounded: jax.Array, rest: Any) -> jax.Array:
    """The float32 number that `split` was given, or one that rounds to another `rounded`.

    Such a one replaces a number kept whole; 16 bits change it by at most half of its
    last place.
    """
    rounded = at_least_float32(rounded)
    if narrow_dtype(rest) == jnp.float16:
        return _or_replaced(rest, rounded)
    bits = lax.bitcast_convert_type(rounded, jnp.uint32)
    size = bits & _UNSIGNED
    joined_bits = bits + rest.astype(jnp.uint32) - _HALF
    joined = lax.bitcast_convert_type(joined_bits, jnp.float32)
    # Numbers that round to zero are smaller than what float32 arithmetic keeps.
    has_bits = (size >= _SMALLEST) & (size < _INFINITE)
    return jnp.where(has_bits, joined, rounded)


def narrow_dtype(rest: Any) -> np.dtype:
    """The dtype of 16 bits whose numbers a rest belongs to."""
    is_bits = jnp.issubdtype(dtype_of(rest), jnp.integer)
    return jnp.dtype(jnp.bfloat16 if is_bits else jnp.float16)


def _or_replaced(number: jax.Array, rounded: jax.Array) -> jax.Array:
    """A number kept whole, or `rounded` where that is no longer its rounding to float16."""
    # Adding an update turns -0.0 into 0.0, so the sign of a zero does not count. Bits
    # are compared, as compilers may leave out the rounding of a number that is
    # compared.
    is_zero = rounded == 0
    unsigned = jnp.where(is_zero, jnp.abs(number), number)
    own_bits = _float16_bits(unsigned)
    bits = _float16_bits(jnp.where(is_zero, 0, rounded))
    return jnp.where(own_bits == bits, number, rounded)


def _float16_bits(number: jax.Array) -> jax.Array:
    """The bits of a number's rounding to float16."""
    return lax.bitcast_convert_type(number.astype(jnp.float16), jnp.uint16)
