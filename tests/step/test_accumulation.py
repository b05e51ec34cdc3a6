"""Gradients accumulated inside the wrapper, where a bad micro-batch is left out alone."""

import functools

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
    np.random.default_rng(0).normal(size=(3 * WINDOW, 4, 2)), jnp.float32
)


def loss_fn(params, batch):
    return jnp.mean((batch @ params["w"] + params["b"]).astype(jnp.float32) ** 2)


def accumulating(inner):
    return optax.MultiSteps(inner, WINDOW).gradient_transformation()


OPTIMIZERS = {
    "adam": (accumulating(optax.adam(0.1)), PARAMS),
    "masters": (
        accumulating(ols.with_master_weights(optax.adam(0.1))),
        jax.tree.map(lambda p: p.astype(jnp.bfloat16), PARAMS),
    ),
}


@functools.cache
def scaled_step(name, door):
    tx = ols.with_loss_scale(OPTIMIZERS[name][0], ols.DynamicLossScale(1024.0, 4))

    @jax.jit
    def step(params, state, average, batch, is_bad):
        if door == "minimize":
            planted = lambda params, batch: (
                loss_fn(params, batch) * jnp.where(is_bad, jnp.inf, 1)
            )
            loss, params, state = tx.minimize(planted, state, params, batch)
        else:
            loss, grads = ols.value_and_scaled_grad(loss_fn, state)(params, batch)
            grads["w"] = jnp.where(is_bad, grads["w"].at[0, 1].set(jnp.inf), grads["w"])
            loss = jnp.where(is_bad, jnp.nan, loss)  # to average, not to decide by
            if door == "apply_gradients":
                params, state = tx.apply_gradients(grads, state, params)
            else:
                updates, state = tx.update(grads, state, params)
                params = optax.apply_updates(params, updates)
        average = ols.where_applied(state, 0.5 * (average + loss), average)
        return params, state, average

    return tx, step


@functools.cache
def plain_run(name):
    """The same optimizer's parameters and averages of the loss, on good batches in float32."""
    tx, params = OPTIMIZERS[name]
    state, average, seen = tx.init(params), jnp.float32(0), []

    @jax.jit
    def step(params, state, average, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, 0.5 * (average + loss)

    for batch in BATCHES:
        params, state, average = step(params, state, average, batch)
        seen.append((params, average))
    return seen


@pytest.mark.parametrize(
    ("name", "door"),
    [("adam", "apply_gradients"), ("adam", "minimize"), ("masters", "update")],
)
@pytest.mark.parametrize("bad", [(), (0,), (1,), (2,), (5,), (4, 5, 6), (0, 2, 4, 10)])
def test_bad_micro_batches_leave_no_trace_wherever_they_are_in_a_window(
    name, door, bad
):
    tx, step = scaled_step(name, door)
    params = OPTIMIZERS[name][1]
    state, average, good = tx.init(params), jnp.float32(0), 0
    for at in range(len(BATCHES) + len(bad)):
        before = params, state.inner_state, average
        batch = BATCHES[min(good, len(BATCHES) - 1)]
        params, state, average = step(params, state, average, batch, at in bad)
        assert state.should_apply == (at not in bad)
        if at in bad:
            chex.assert_trees_all_equal((params, state.inner_state, average), before)
            continue
        rtol = 1e-5 if name == "adam" else 1e-2  # of bfloat16
        chex.assert_trees_all_close((params, average), plain_run(name)[good], rtol=rtol)
        good += 1
        accumulated = state.inner_state
        assert accumulated.mini_step == good % WINDOW
        assert accumulated.gradient_step == good // WINDOW
    assert state.skipped_steps == len(bad)


def test_the_loss_scale_adapts_from_micro_batch_to_micro_batch():
    tx, step = scaled_step("adam", "apply_gradients")
    params, state, average, scales = PARAMS, tx.init(PARAMS), jnp.float32(0), []
    for at in range(7):
        params, state, average = step(params, state, average, BATCHES[at], at == 1)
        scales.append(float(state.loss_scale()))
    assert scales == [1024, 512, 512, 512, 512, 1024, 1024]


OUTSIDE = {
    "alone": lambda tx: tx,
    "chain": lambda tx: optax.chain(optax.clip(1.0), tx),
    "masked": lambda tx: optax.masked(tx, {"w": True, "b": True}),
    "hyperparameters": lambda tx: optax.inject_hyperparams(
        lambda factor: optax.chain(tx, optax.scale(factor))
    )(0.5),
}


@pytest.mark.parametrize("around", OUTSIDE.values(), ids=OUTSIDE)
@pytest.mark.parametrize("skip", [None, optax.skip_not_finite], ids=["sums", "skips"])
def test_accumulation_around_the_wrapper_is_refused_and_the_other_order_named(
    around, skip
):
    """It keeps the NaN of the first overflow for good, or never lowers the loss scale."""
    scaled = ols.with_loss_scale(optax.adam(0.1))
    steps = optax.MultiSteps(around(scaled), 4, should_skip_update_fn=skip)
    state = steps.init(PARAMS)
    for take in (
        lambda state: ols.value_and_scaled_grad(loss_fn, state)(PARAMS, BATCHES[0]),
        jax.jit(
            lambda state: ols.value_and_scaled_grad(loss_fn, state)(PARAMS, BATCHES[0])[
                1
            ]
        ),
        lambda state: ols.scale_gradient(1.0, {"opt_state": state}),
        ols.get_loss_scale,
        ols.metrics,
    ):
        with pytest.raises(
            ValueError, match=r"with_loss_scale\(optax\.MultiSteps\(inner, …\)\)"
        ):
            take(state)


@pytest.mark.parametrize(
    "wrap", [lambda tx: tx, ols.with_master_weights], ids=["alone", "master weights"]
)
def test_the_accumulated_optimizer_gets_the_loss_and_extra_arguments(wrap):
    inner = optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau())
    tx = ols.with_loss_scale(wrap(optax.MultiSteps(inner, 1)))
    _, _, state = tx.minimize(loss_fn, tx.init(PARAMS), PARAMS, BATCHES[0])
    best_value = optax.tree.get(state, "best_value")
    np.testing.assert_allclose(best_value, loss_fn(PARAMS, BATCHES[0]))
