"""What an argument may be, and that an error about it says so in few words."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lossscale as ols


@pytest.mark.parametrize("number", [8, 8.0, np.float32(8), np.array(8), jnp.array(8.0)])
def test_a_number_may_be_an_array_of_one(number):
    assert ols.DynamicLossScale(number) == ols.DynamicLossScale(8.0)


@pytest.mark.parametrize(
    "value", [True, "8", None, np.ones(2), np.nan, 1 + 0j, 0, -8.0]
)
def test_what_is_no_number_that_fits_is_refused_with_what_is_allowed_and_what_was_given(
    value,
):
    said = r"initial_scale must be a number between .* and .*, got "
    with pytest.raises(ValueError, match=said):
        ols.DynamicLossScale(value)


def test_a_traced_number_is_refused():
    with pytest.raises(ValueError, match="initial_scale must be a number"):
        jax.jit(lambda x: ols.DynamicLossScale(x)())(8.0)


@pytest.mark.parametrize(
    "make",
    [
        ols.FixedLossScale,
        lambda x: ols.DynamicLossScale(x, min_scale=None),
        lambda x: ols.DynamicLossScale(growth_factor=x),
        lambda x: ols.HeadroomLossScale(x, min_scale=2.0**-60),
    ],
)
def test_the_bounds_that_an_error_names_are_allowed(make):
    with pytest.raises(ValueError, match="must be a number") as error:
        make(-1.0)
    least, most = re.search(r"between (\S+) and (\S+), got", str(error.value)).groups()
    make(eval(least))
    make(eval(most))


LONG = {
    "text": "x" * 10**6,
    "list": [0] * 10**5,
    "array": np.ones(10**5),
}


@pytest.mark.parametrize("value", LONG.values(), ids=LONG)
def test_an_error_is_short_whatever_was_given(value):
    with pytest.raises(ValueError, match="backoff_factor must be") as error:
        ols.DynamicLossScale(backoff_factor=value)
    assert len(str(error.value)) < 600
