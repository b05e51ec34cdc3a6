"""Float32 numbers in two parts: the number rounded to 16 bits, and the remainder.

`with_master_weights` trains 16-bit parameters as if they were float32. `split` rounds a
float32 number: the model gets the rounded number, and the optimizer's state the
remainder. On the next step, `join` restores the float32 number::

    rounded, remainder = split(number, jnp.bfloat16)
    number == join(rounded, remainder)

A bfloat16 number is the upper half of a float32 number, so the remainder of a number
that is rounded to bfloat16 fits into 16 bits. Ties are rounded away from zero, because
then exactly 2**16 float32 numbers round to each bfloat16 number other than zero and
infinity, and 16 bits tell them apart. With ties to even, as `astype` rounds them,
2**16 + 1 float32 numbers would round to every other bfloat16 number. Numbers that round
to zero or to infinity are lost: `join` returns the zero or the infinity.

Rounding to float16 drops more than 16 bits of small and of large numbers, so there the
remainder is the whole float32 number, and nothing is lost.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from optax_lossscale._arrays import checks
from optax_lossscale._arrays.precision import at_least_float32, dtype_of

# Half of a unit in the last place of a bfloat16 number. It is added before the lower
# half of the bits is cut off, so that the upper half is rounded. The remainder of a
# number that bfloat16 represents exactly is therefore 0x8000.
_HALF = np.uint32(0x8000)
# The bits of a float32 number that are also those of a bfloat16 number
_UPPER_MASK = np.uint32(0xFFFF0000)
# All bits but the sign
_MAGNITUDE_MASK = np.uint32(0x7FFFFFFF)
_MAGNITUDE_MASK_OF_16_BITS = np.uint16(0x7FFF)
# As float32: the smallest positive bfloat16 number and infinity
_SMALLEST_BITS = np.uint32(0x00010000)
_INFINITY_BITS = np.uint32(0x7F800000)


def split(number: jax.Array, dtype: np.dtype) -> tuple[jax.Array, jax.Array]:
    """Rounds float32 numbers to float16 or bfloat16; returns `(rounded, remainder)`.

    Both have the shape of `number`. `rounded` is still a float32 array, but the 16-bit
    dtype can represent its elements. `remainder` is uint16 for bfloat16, and for
    float16 it is `number` itself. Infinities and NaNs stay as they are.
    """
    narrow = ("float16", "bfloat16")
    checks.one_of("the dtype of a parameter", str(dtype), narrow)
    if dtype == jnp.float16:
        rounded = number.astype(jnp.float16)
        return rounded.astype(jnp.float32), number
    bits = lax.bitcast_convert_type(number, jnp.uint32)
    bits = bits + _HALF
    upper = lax.bitcast_convert_type(bits & _UPPER_MASK, jnp.float32)
    rounded = jnp.where(jnp.isfinite(number), upper, number)
    remainder = bits.astype(jnp.uint16)  # the lower half
    return rounded, remainder


def join(rounded: jax.Array, remainder: Any) -> jax.Array:
    """Restores the float32 numbers that `split` rounded.

    `rounded` may have changed since then, for example because other weights were
    loaded. A changed float16 number is returned as it is. A changed bfloat16 number is
    joined with the old remainder, so the result differs from that number by at most
    half of a unit in its last place.
    """
    rounded = at_least_float32(rounded)
    if narrow_dtype(remainder) == jnp.float16:
        return _number_unless_replaced(remainder, rounded)
    bits = lax.bitcast_convert_type(rounded, jnp.uint32)
    magnitude_bits = bits & _MAGNITUDE_MASK
    remainder_bits = remainder.astype(jnp.uint32)
    joined_bits = bits + remainder_bits - _HALF
    joined = lax.bitcast_convert_type(joined_bits, jnp.float32)
    # The remainder is not added to zero: the sum would be a subnormal number, which
    # float32 arithmetic on most devices flushes to zero. Nor is it added to infinity,
    # which it would turn into another number.
    is_nonzero = magnitude_bits >= _SMALLEST_BITS
    is_finite = magnitude_bits < _INFINITY_BITS
    return jnp.where(is_nonzero & is_finite, joined, rounded)


def narrow_dtype(remainder: Any) -> np.dtype:
    """Returns float16 or bfloat16, whichever `split` rounded to for this remainder."""
    is_bits = jnp.issubdtype(dtype_of(remainder), jnp.integer)
    dtype = jnp.bfloat16 if is_bits else jnp.float16
    return jnp.dtype(dtype)


def _number_unless_replaced(number: jax.Array, rounded: jax.Array) -> jax.Array:
    """Returns `number` where it rounds to `rounded` in float16, elsewhere `rounded`."""
    # Bits are compared, because a compiler might leave out the rounding of a value that
    # is only compared. The sign of a zero does not count, because adding an update of
    # 0.0 turns -0.0 into 0.0.
    own_bits = _float16_bits(number)
    bits = _float16_bits(rounded)
    magnitude_bits = (own_bits | bits) & _MAGNITUDE_MASK_OF_16_BITS
    are_zeros = magnitude_bits == 0
    is_its_rounding = (own_bits == bits) | are_zeros
    return jnp.where(is_its_rounding, number, rounded)


def _float16_bits(number: jax.Array) -> jax.Array:
    """Rounds numbers to float16 and returns their bits as uint16."""
    rounded = number.astype(jnp.float16)
    return lax.bitcast_convert_type(rounded, jnp.uint16)
