"""Float32 numbers in two parts: their rounding to 16 bits, and the rest.

`split` takes a number apart, and `join` puts it together again: the rounded number is a
parameter, and the rest is what the optimizer keeps beside it.

For bfloat16, which is the upper half of a float32 number, the rest is 16 bits. Ties are
rounded away from zero, and not to even as `astype` rounds them: then exactly 2**16
float32 numbers round to each bfloat16 number, so 16 bits tell them apart. With ties to
even, 2**16 + 1 would round to every other one. Only numbers that round to zero or to
infinity are lost: `join` gives the zero or the infinity.

Rounding to float16 drops more than 16 bits of small and of large numbers, so there the
rest is the whole float32 number, and nothing is lost.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from optax_lossscale._arrays import validation
from optax_lossscale._arrays.precision import at_least_float32, dtype_of

# Half of a bfloat16 number's last place. It is added before the lower half of the bits
# is cut off, which rounds the upper half; the rest of an exact bfloat16 number is
# therefore 0x8000.
_HALF = np.uint32(0x8000)
_UPPER_MASK = np.uint32(0xFFFF0000)
_MAGNITUDE_MASK = np.uint32(0x7FFFFFFF)
_MAGNITUDE_MASK_OF_16_BITS = np.uint16(0x7FFF)
_SMALLEST_BITS = np.uint32(0x00010000)  # of the smallest positive bfloat16 number
_INFINITY_BITS = np.uint32(0x7F800000)


def split(number: jax.Array, dtype: np.dtype) -> tuple[jax.Array, jax.Array]:
    """Rounds float32 numbers to a 16-bit dtype; returns `(rounded, rest)`.

    `rounded` is still a float32 array. `rest`, of the same shape, is uint16 for
    bfloat16, and for float16 the float32 numbers themselves. Infinities and NaNs stay
    as they are.
    """
    validation.one_of("the dtype of a parameter", str(dtype), ("float16", "bfloat16"))
    if dtype == jnp.float16:
        rounded = number.astype(jnp.float16)
        return rounded.astype(jnp.float32), number
    bits = lax.bitcast_convert_type(number, jnp.uint32) + _HALF
    upper = lax.bitcast_convert_type(bits & _UPPER_MASK, jnp.float32)
    rounded = jnp.where(jnp.isfinite(number), upper, number)
    rest = bits.astype(jnp.uint16)  # the lower half
    return rounded, rest


def join(rounded: jax.Array, rest: Any) -> jax.Array:
    """The float32 numbers that `split` took apart, from their two parts.

    If `rounded` was changed since then, a float16 number is the result as it is; to a
    bfloat16 number, the old rest is added, which changes it by at most half of its last
    place.
    """
    rounded = at_least_float32(rounded)
    if narrow_dtype(rest) == jnp.float16:
        return _number_unless_replaced(rest, rounded)
    bits = lax.bitcast_convert_type(rounded, jnp.uint32)
    size = bits & _MAGNITUDE_MASK
    joined_bits = bits + rest.astype(jnp.uint32) - _HALF
    joined = lax.bitcast_convert_type(joined_bits, jnp.float32)
    # A rest beside zero would be a subnormal number, which float32 arithmetic on most
    # devices flushes to zero; one beside infinity would turn it into another number.
    is_nonzero = size >= _SMALLEST_BITS
    is_finite = size < _INFINITY_BITS
    return jnp.where(is_nonzero & is_finite, joined, rounded)


def narrow_dtype(rest: Any) -> np.dtype:
    """The 16-bit dtype of the parameters to which a rest of `split` belongs."""
    is_bits = jnp.issubdtype(dtype_of(rest), jnp.integer)
    dtype = jnp.bfloat16 if is_bits else jnp.float16
    return jnp.dtype(dtype)


def _number_unless_replaced(number: jax.Array, rounded: jax.Array) -> jax.Array:
    """`number` where `rounded` is still its rounding to float16, else `rounded`."""
    # The bits are compared, not the values, as a compiler may leave out the rounding of
    # a value that is only compared. But adding an update turns -0.0 into 0.0, so the
    # sign of a zero does not count.
    own_bits = _float16_bits(number)
    bits = _float16_bits(rounded)
    are_zeros = (own_bits | bits) & _MAGNITUDE_MASK_OF_16_BITS == 0
    is_its_rounding = (own_bits == bits) | are_zeros
    return jnp.where(is_its_rounding, number, rounded)


def _float16_bits(number: jax.Array) -> jax.Array:
    """The numbers rounded to float16, as uint16 arrays of their bits."""
    rounded = number.astype(jnp.float16)
    return lax.bitcast_convert_type(rounded, jnp.uint16)
