"""A float32 number is its rounding and what the rounding dropped."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optax_lossscale._arrays.rounding import join, split

BFLOAT16 = jnp.dtype(jnp.bfloat16)
EVERY_BFLOAT16 = np.arange(2**16, dtype=np.uint16).view(BFLOAT16)
LOW_HALVES = [0, 1, 0x1234, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xABCD, 0xFFFE, 0xFFFF]


@jax.jit
def there_and_back(number):
    rounded, rest = split(number, BFLOAT16)
    return rounded, rest, join(rounded.astype(jnp.bfloat16), rest)


@jax.jit
def back_and_there(narrow, rest):
    joined = join(narrow, rest)
    return joined, join(narrow.astype(jnp.float32), rest), split(joined, BFLOAT16)[0]


def bits(x):
    return np.asarray(x).view(np.uint32)


def with_low_halves(low):
    """Float32 numbers of every sign, exponent and upper seven bits, with each lower half."""
    upper = np.arange(2**16, dtype=np.uint32)[:, None] << 16
    return (upper | np.array(low, np.uint32)).ravel().view(np.float32)


@hypothesis.given(low=st.lists(st.integers(0, 2**16 - 1), min_size=10, max_size=10))
@hypothesis.example(low=LOW_HALVES)
def test_every_float32_number_comes_back_from_bfloat16_and_16_bits(low):
    number = with_low_halves(low)
    rounded, rest, back = map(np.asarray, there_and_back(number))
    assert rest.dtype == np.uint16
    size = np.abs(number)
    # Below half of the smallest bfloat16 number it is zero, above the largest infinite.
    kept = np.isfinite(rounded) & (bits(size) >= 0x8000)
    np.testing.assert_array_equal(bits(back[kept]), bits(number[kept]))
    assert not back[bits(size) < 0x8000].any()
    np.testing.assert_array_equal(back[~kept], rounded[~kept])
    np.testing.assert_array_equal(np.isnan(back), np.isnan(number))


def test_it_rounds_to_the_nearest_bfloat16_number_and_ties_away_from_zero():
    number = with_low_halves(LOW_HALVES)
    number = number[~np.isnan(number)]
    rounded, is_tie = (
        np.asarray(there_and_back(number)[0]),
        bits(number) & 0xFFFF == 0x8000,
    )
    assert not (bits(rounded) & 0xFFFF).any()
    to_even = number.astype(BFLOAT16).astype(np.float32)
    np.testing.assert_array_equal(rounded[~is_tie], to_even[~is_tie])
    assert (np.abs(rounded[is_tie]) > np.abs(number[is_tie])).all()


@pytest.mark.parametrize("rest", LOW_HALVES)
def test_whatever_the_16_bits_the_number_rounds_to_the_parameter(rest):
    rests = np.full(EVERY_BFLOAT16.shape, rest, np.uint16)
    joined, joined_wide, rounded = map(
        np.asarray, back_and_there(EVERY_BFLOAT16, rests)
    )
    param = EVERY_BFLOAT16.astype(np.float32)
    np.testing.assert_array_equal(rounded, param)
    np.testing.assert_array_equal(joined_wide, joined)
    itself = (param == 0) | ~np.isfinite(param)
    np.testing.assert_array_equal(joined[itself], param[itself])
    np.testing.assert_array_equal(np.signbit(joined), np.signbit(param))


def test_a_number_kept_whole_comes_back_unless_its_rounding_was_changed():
    dtype = jnp.float16
    number = jnp.array([1.001, -3e-9, 0.0, -0.0, 7e-6, -1e5, jnp.inf, 1.003, jnp.nan])
    rounded, rest = split(number, jnp.dtype(dtype))
    stored = rounded.astype(dtype)
    for narrow in (stored, stored + jnp.zeros((), dtype)):  # which makes 0.0 of -0.0
        is_itself = np.isfinite(stored.astype(jnp.float32)) | np.isinf(number)
        np.testing.assert_array_equal(join(narrow, rest)[is_itself], number[is_itself])
    changed = stored.at[jnp.array([0, 1, 2])].set(jnp.array([2.0, 0.5, -1.0], dtype))
    np.testing.assert_array_equal(join(changed, rest)[:3], [2.0, 0.5, -1.0])
    assert np.isnan(join(changed, rest)[-1])
