"""Gradients accumulated inside the wrapper, where a bad micro-batch is left out alone."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols

PARAMS = {"w": jnp.array([[1.0, -2.0], [0.5, 3.0]]), "b": jnp.array([0.25, 0.0])}
WINDOW = 3
BATCHES = jnp.asarray(
    np.random.default_rng(0).normal(size=(2 * WINDOW, 4, 2)), jnp.float32
)
INNER = optax.MultiSteps(optax.adam(0.1), WINDOW)
TX = ols.with_loss_scale(INNER, ols.DynamicLossScale(1024.0, 4))


def loss_fn(params, batch):
    return jnp.mean((batch @ params["w"] + params["b"]) ** 2)


@jax.jit
def scaled_step(params, state, batch):
    _, grads = ols.value_and_scaled_grad(loss_fn, state)(params, batch)
    return TX.apply_gradients(grads, state, params)


@jax.jit
def plain_step(params, state, batch):
    updates, state = INNER.update(jax.grad(loss_fn)(params, batch), state, params)
    return optax.apply_updates(params, updates), state


@pytest.mark.parametrize("bad", [(), (0,), (1,), (4, 5, 6), (0, 2, 4, 8)])
def test_bad_micro_batches_leave_no_trace_wherever_they_are_in_a_window(bad):
    params, state = PARAMS, TX.init(PARAMS)
    plain = (PARAMS, INNER.init(PARAMS))
    good = iter(BATCHES)
    for at in range(len(BATCHES) + len(bad)):
        if at in bad:
            after, skipped = scaled_step(params, state, jnp.inf * BATCHES[0])
            chex.assert_trees_all_equal(after, params)
            chex.assert_trees_all_equal(skipped.inner_state, state.inner_state)
            state = skipped
            continue
        batch = next(good)
        params, state = scaled_step(params, state, batch)
        plain = plain_step(*plain, batch)
        chex.assert_trees_all_close((params, state.inner_state), plain, rtol=1e-5)
    assert state.skipped_steps == len(bad)


def test_the_loss_scale_adapts_from_micro_batch_to_micro_batch():
    params, state, scales = PARAMS, TX.init(PARAMS), []
    for at in range(6):
        batch = jnp.inf * BATCHES[0] if at == 1 else BATCHES[at]
        params, state = scaled_step(params, state, batch)
        scales.append(float(state.loss_scale()))
    assert scales == [1024, 512, 512, 512, 512, 1024]


OUTSIDE = {
    "alone": lambda tx: tx,
    "chain": lambda tx: optax.chain(optax.clip(1.0), tx),
    "masked": lambda tx: optax.masked(tx, {"w": True, "b": True}),
}


@pytest.mark.parametrize("around", OUTSIDE.values(), ids=OUTSIDE)
def test_accumulation_around_the_wrapper_is_refused_and_the_other_order_named(around):
    """It keeps the NaN of the first overflow for good, or never lowers the loss scale."""
    scaled = ols.with_loss_scale(optax.adam(0.1))
    state = optax.MultiSteps(around(scaled), 4).init(PARAMS)
    for take in (
        lambda state: ols.value_and_scaled_grad(loss_fn, state)(PARAMS, BATCHES[0]),
        lambda state: ols.scale_gradient(1.0, {"opt_state": state}),
        ols.get_loss_scale,
        ols.metrics,
    ):
        said = r"with_loss_scale\(optax\.MultiSteps\(inner, …\)\)"
        with pytest.raises(ValueError, match=said):
            take(state)


@pytest.mark.parametrize("wrap", [lambda tx: tx, ols.with_master_weights])
def test_the_accumulated_optimizer_gets_the_loss_and_extra_arguments(wrap):
    inner = optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau())
    tx = ols.with_loss_scale(wrap(optax.MultiSteps(inner, 1)))
    loss, _, state = tx.minimize(loss_fn, tx.init(PARAMS), PARAMS, BATCHES[0])
    assert optax.tree.get(state, "best_value") == loss
