"""`value_and_scaled_grad`: the true loss, and gradients times the loss scale."""

import chex
import jax
import jax.numpy as jnp
import numpy as np

import optax_lossscale as ols

PARAMS = {"w": jnp.array([1.0, -2.0]), "b": jnp.array(0.5)}
LS = ols.DynamicLossScale(initial_scale=1024)


def loss_fn(params, x=1.0):
    return jnp.sin(params["w"] * x).sum() / 3 + params["b"] ** 2


def test_the_loss_is_the_functions_own_bit_for_bit():
    loss, _ = jax.jit(ols.value_and_scaled_grad(loss_fn, LS))(PARAMS)
    assert loss == jax.jit(loss_fn)(PARAMS)
    half = lambda p: loss_fn(p).astype(jnp.float16)
    loss, _ = ols.value_and_scaled_grad(half, 1024)(PARAMS)
    assert loss.dtype == jnp.float16
    assert loss == half(PARAMS)


def test_gradients_are_still_scaled():
    _, grads = ols.value_and_scaled_grad(loss_fn, LS)(PARAMS, x=2.0)
    expected = jax.tree.map(lambda g: g * 1024, jax.grad(loss_fn)(PARAMS, x=2.0))
    chex.assert_trees_all_equal(grads, expected)


def test_rescues_gradients_that_float16_flushes():
    tiny = lambda p: jnp.sum(p.astype(jnp.float16).astype(jnp.float32)) * 1e-8
    params = jnp.ones(3)
    assert (jax.grad(tiny)(params) == 0).all()
    rescued = LS.unscale(ols.value_and_scaled_grad(tiny, LS)(params)[1])
    np.testing.assert_allclose(rescued, 1e-8, rtol=1e-2)


def test_takes_the_options_of_value_and_grad():
    fun = lambda x, y: (x * y, {"aux": x + y})
    grad = ols.value_and_scaled_grad(fun, LS, argnums=(0, 1), has_aux=True)
    value, grads = grad(2.0, 3.0)
    assert value == (6.0, {"aux": 5.0})
    assert grads == (3072.0, 2048.0)
    _, g = ols.value_and_scaled_grad(lambda n: n * 1.0, LS, allow_int=True)(3)
    assert g.dtype == jax.dtypes.float0


def test_is_named_as_the_function():
    assert ols.value_and_scaled_grad(loss_fn, LS).__name__ == "loss_fn"
