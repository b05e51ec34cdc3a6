import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
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
    loss, grad = transform(jax.value_and_grad(scaled))(W)
    assert loss == transform(loss_fn)(W)
    chex.assert_trees_all_close(grad, GRADIENT, rtol=1e-6)
    remat = jax.grad(jax.checkpoint(scaled))(W)
    chex.assert_trees_all_close(remat, GRADIENT, rtol=1e-6)


def test_forward_mode_scales_the_tangent():
    loss, tangent = jax.jvp(scaled, (W,), (X,))
    assert loss == loss_fn(W)
    chex.assert_trees_all_close(tangent, GRADIENT @ X, rtol=1e-6)
    chex.assert_trees_all_close(jax.jacfwd(scaled)(W), GRADIENT, rtol=1e-6)
    hessian = 1024 * jax.hessian(loss_fn)(W)
    chex.assert_trees_all_close(jax.hessian(scaled)(W), hessian, rtol=1e-5)


def test_under_vmap_each_loss_has_its_own_scale():
    scales = jax.vmap(lambda s: LS.replace(loss_scale=s))(jnp.array([2.0, 8.0]))
    grad = lambda ls: jax.grad(lambda w: ols.scale_gradient(loss_fn(w), ls))(W)
    expected = jnp.stack([2 * jax.grad(loss_fn)(W), 8 * jax.grad(loss_fn)(W)])
    chex.assert_trees_all_close(jax.vmap(grad)(scales), expected, rtol=1e-6)


def test_under_shard_map():
    mesh = jax.make_mesh((2,), ("data",))

    def step(w, x):
        return jax.grad(
            lambda w: ols.scale_gradient(jax.lax.pmean(loss_fn(w, x), "data"), LS)
        )(w)

    sharded = jax.shard_map(step, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    batch = jax.device_put(jnp.stack([X, 2 * X]), NamedSharding(mesh, P("data")))
    expected = 1024 * jax.grad(lambda w: (loss_fn(w, X) + loss_fn(w, 2 * X)) / 2)(W)
    chex.assert_trees_all_close(jax.jit(sharded)(W, batch), expected, rtol=1e-5)


def test_a_float16_loss_does_not_overflow_by_the_scale():
    half = lambda w: (w * 100).sum().astype(jnp.float16)
    loss, grad = jax.value_and_grad(lambda w: ols.scale_gradient(half(w), 1024))(
        jnp.ones(2)
    )
    assert (loss.dtype, loss) == (jnp.float32, 200)
    assert grad.dtype == jnp.float32
    chex.assert_trees_all_equal(grad, jnp.full(2, 102400.0))


def test_keeps_a_wider_loss():
    with jax.enable_x64(True):
        loss, grad = jax.value_and_grad(lambda w: ols.scale_gradient(w**2, LS))(
            jnp.float64(0.1)
        )
        assert (loss.dtype, grad.dtype) == (jnp.float64, jnp.float64)
        assert loss == np.float64(0.1) ** 2
        np.testing.assert_allclose(grad, 1024 * 0.2, rtol=1e-15)


def test_the_loss_scale_gets_no_gradient():
    of_scale = lambda s: ols.scale_gradient(s * 2.0, LS.replace(loss_scale=s))
    assert jax.grad(of_scale)(jnp.float32(8.0)) == 16.0


def test_a_scale_of_one_adds_no_operation():
    unscaled = lambda w: ols.scale_gradient(loss_fn(w), ols.FixedLossScale(1))
    products = lambda f: jax.jit(jax.grad(f)).lower(W).as_text().count("multiply")
    assert products(unscaled) == products(loss_fn) < products(scaled)


@pytest.mark.parametrize(
    "wrap", [lambda tx: tx, optax.chain, lambda tx: optax.named_chain(("scaled", tx))]
)
def test_takes_an_optimizer_state(wrap):
    state = wrap(ols.with_loss_scale(optax.sgd(0.1), LS)).init(W)
    grad = jax.grad(lambda w: ols.scale_gradient(loss_fn(w), state))(W)
    chex.assert_trees_all_close(grad, GRADIENT, rtol=1e-6)


def test_a_loss_that_is_no_real_scalar_is_refused():
    for loss, said in [((1.0, 2.0), "has_aux"), (W, r"shape \(3,\)"), (True, "real")]:
        with pytest.raises(TypeError, match=said):
            ols.scale_gradient(loss, LS)


def test_several_states_are_one_loss_scale_too_many():
    state = ols.with_loss_scale(optax.sgd(0.1), LS).init(W)
    with pytest.raises(ValueError, match=r"found 2 in a tuple.*one LossScale"):
        ols.value_and_scaled_grad(loss_fn, (state, state))
    with pytest.raises(ValueError, match="found 2"):
        ols.scale_gradient(1.0, (state, state))


def test_an_integer_is_no_loss():
    with pytest.raises(TypeError, match="the loss must be a floating-point number"):
        ols.scale_gradient(3, 8)
