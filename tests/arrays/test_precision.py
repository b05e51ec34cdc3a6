"""Which leaves are scaled, in which dtypes."""

import jax
import jax.numpy as jnp
import pytest

import optax_lossscale as ols


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
