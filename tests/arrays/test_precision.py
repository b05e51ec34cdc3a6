"""Products that are rounded once, and which leaves are scaled, in which dtypes."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lossscale as ols

SCALES = st.floats(2.0**-20, 2.0**40, width=32)


@hypothesis.given(scale=SCALES, factor=st.sampled_from([1 / 3, 0.3, 0.7, 0.1]))
def test_a_scale_times_a_factor_that_is_no_float32_is_rounded_once(scale, factor):
    loss_scale = ols.DynamicLossScale(scale, backoff_factor=factor, min_scale=2.0**-40)
    expected = np.float32(np.float64(np.float32(scale)) * factor)
    assert loss_scale.adjust(False)() == expected


@pytest.mark.parametrize(
    ("dtype", "unscaled"),
    [
        (jnp.float8_e5m2, jnp.float32),
        (jnp.float16, jnp.float32),
        (jnp.bfloat16, jnp.float32),
        (jnp.float32, jnp.float32),
        (jnp.complex64, jnp.complex64),
    ],
)
def test_what_is_narrower_than_float32_is_unscaled_to_it(dtype, unscaled):
    result = ols.DynamicLossScale(8.0).unscale(jnp.asarray(2, dtype))
    assert (result.dtype, result) == (unscaled, 0.25)


def test_integers_flags_and_keys_are_not_scaled():
    tree = {"count": jnp.array(3), "flag": jnp.array(True), "key": jax.random.key(0)}
    result = ols.DynamicLossScale(8.0).unscale(tree)
    assert all(result[name] is tree[name] for name in tree)
