"""`scale_gradient`: the loss as it is, with a gradient times the loss scale."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import optax_lossscale as ols

LS = ols.DynamicLossScale(initial_scale=1024)
W, X = jnp.array([1.0, -2.0, 0.3]), jnp.array([0.5, 0.25, 3.0])


def loss_fn(w, x=X):
    return jnp.sin(w * x).sum() / 3


def scaled(w, x=X):
    return ols.scale_gradient(loss_fn(w, x), LS)


GRADIENT = 1024 * jax.grad(loss_fn)(W)


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit, jax.checkpoint])
def test_the_loss_is_the_true_one_and_its_gradient_is_scaled(transform):
    loss, grad = jax.value_and_grad(transform(scaled))(W)
    assert loss == transform(loss_fn)(W)
    chex.assert_trees_all_close(grad, GRADIENT, rtol=1e-6)


def test_forward_mode_scales_the_tangent():
    loss, tangent = jax.jvp(scaled, (W,), (X,))
    assert loss == loss_fn(W)
    chex.assert_trees_all_close(tangent, GRADIENT @ X, rtol=1e-6)
    hessian = 1024 * jax.hessian(loss_fn)(W)
    chex.assert_trees_all_close(jax.hessian(scaled)(W), hessian, rtol=1e-5)


def test_under_vmap_each_loss_has_its_own_scale():
    scales = jax.vmap(lambda s: LS.replace(loss_scale=s))(jnp.array([2.0, 8.0]))
    grad = lambda ls: jax.grad(lambda w: ols.scale_gradient(loss_fn(w), ls))(W)
    expected = jnp.stack([2 * jax.grad(loss_fn)(W), 8 * jax.grad(loss_fn)(W)])
    chex.assert_trees_all_close(jax.vmap(grad)(scales), expected, rtol=1e-6)


def test_under_shard_map():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    mean_loss = lambda w, x: jax.lax.pmean(loss_fn(w, x), "data")
    step = jax.grad(lambda w, x: ols.scale_gradient(mean_loss(w, x), LS))
    sharded = jax.shard_map(step, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    expected = 1024 * jax.grad(lambda w: (loss_fn(w, X) + loss_fn(w, 2 * X)) / 2)(W)
    found = jax.jit(sharded)(W, jnp.stack([X, 2 * X]))
    chex.assert_trees_all_close(found, expected, rtol=1e-5)


def test_a_float16_loss_does_not_overflow_by_the_scale():
    half = lambda w: (w * 100).sum().astype(jnp.float16)
    scaled = lambda w: ols.scale_gradient(half(w), 1024)
    loss, grad = jax.value_and_grad(scaled)(jnp.ones(2))
    assert (loss.dtype, loss) == (jnp.float32, 200)
    chex.assert_trees_all_equal(grad, jnp.full(2, 102400.0))


def test_keeps_a_wider_loss():
    with jax.enable_x64(True):
        square = lambda w: ols.scale_gradient(w**2, LS)
        loss, grad = jax.value_and_grad(square)(jnp.float64(0.1))
        assert loss == np.float64(0.1) ** 2
        np.testing.assert_allclose(grad, 1024 * 0.2, rtol=1e-15)


def test_the_loss_scale_gets_no_gradient():
    of_scale = lambda s: ols.scale_gradient(s * 2.0, LS.replace(loss_scale=s))
    assert jax.grad(of_scale)(jnp.float32(8.0)) == 16.0


def test_a_scale_of_one_adds_no_operation():
    unscaled = lambda w: ols.scale_gradient(loss_fn(w), ols.FixedLossScale(1))
    products = lambda f: jax.jit(jax.grad(f)).lower(W).as_text().count("multiply")
    assert products(unscaled) == products(loss_fn) < products(scaled)
