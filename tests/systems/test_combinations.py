"""With what else Optax has: around the wrapper, inside it, and extra arguments through it."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

import optax_lossscale as ols

LS = ols.DynamicLossScale(initial_scale=1024, growth_interval=10**6)
PARAMS = {"w": jnp.array([[1.0, -2.0], [0.5, 3.0]]), "b": jnp.array([0.25, 0.5])}
X = jnp.array([[1.0, 2.0], [0.5, -1.0]])
LABELS = {"w": "matrix", "b": "vector"}
IS_MATRIX = {"w": True, "b": False}
ADAM = optax.adam(1e-2)


def loss_fn(params):
    return jnp.mean((X @ params["w"] + params["b"]) ** 2)


def no_extra(loss, grads):
    return {}


@functools.cache
def plain_run(tx, steps=5, extra=no_extra):
    """Parameters and state after training without loss scaling."""

    @jax.jit
    def step(params, state):
        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, state = tx.update(grads, state, params, **extra(loss, grads))
        return optax.apply_updates(params, updates), state

    params, state = PARAMS, tx.init(PARAMS)
    for _ in range(steps):
        params, state = step(params, state)
    return params, state


@functools.cache
def scaled_run(tx, steps=5, extra=no_extra, overflow=None):
    """The same through `tx.update` of scaled gradients, which overflow at one step."""

    @jax.jit
    def step(params, state, bad):
        loss, grads = ols.value_and_scaled_grad(loss_fn, state)(params)
        true = ols.get_loss_scale(state).unscale(grads)
        grads = jax.tree.map(lambda g: jnp.where(bad, jnp.inf, g), grads)
        updates, state = tx.update(grads, state, params, **extra(loss, true))
        return optax.apply_updates(params, updates), state

    params, state = PARAMS, tx.init(PARAMS)
    for i in range(steps):
        params, state = step(params, state, i == overflow)
    return params, state


INSIDE = {
    "chain": optax.chain(optax.clip_by_global_norm(0.1), ADAM),
    "named_chain": optax.named_chain(("clip", optax.clip(0.1)), ("adam", ADAM)),
    "masked": optax.masked(ADAM, IS_MATRIX),
    "partition": optax.partition({"matrix": ADAM, "vector": optax.sgd(0.1)}, LABELS),
    "inject_hyperparams": optax.inject_hyperparams(optax.adam)(
        optax.linear_schedule(0.1, 0, 9)
    ),
    "apply_if_finite": optax.apply_if_finite(ADAM, 3),
    "schedule_free": optax.contrib.schedule_free_adamw(1e-2),
    "multi_steps": optax.MultiSteps(ADAM, 2),
    "ema": optax.chain(ADAM, optax.ema(0.9)),
}


@pytest.mark.parametrize("inner", INSIDE.values(), ids=INSIDE)
def test_inside_the_wrapper_it_steps_as_without_and_an_overflow_leaves_no_trace(inner):
    tx = ols.with_loss_scale(inner, LS)
    params, state = scaled_run(tx)
    chex.assert_trees_all_close(
        (params, state.inner_state), plain_run(inner), rtol=1e-5
    )
    skipped, after = scaled_run(tx, steps=6, overflow=2)
    chex.assert_trees_all_equal(skipped, params)
    chex.assert_trees_all_equal(after.inner_state, state.inner_state)
    assert after.loss_scale() == 512


AROUND = {
    "chain": lambda tx: optax.chain(tx, optax.scale(0.5)),
    "named_chain": lambda tx: optax.named_chain(
        ("scaled", tx), ("half", optax.scale(0.5))
    ),
    "inject_hyperparams": lambda tx: optax.inject_hyperparams(
        lambda factor: optax.chain(tx, optax.scale(factor))
    )(0.5),
    "with_extra_args": optax.with_extra_args_support,
}


@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
def test_around_the_wrapper_it_steps_as_without_and_an_overflow_moves_nothing(around):
    tx = around(ols.with_loss_scale(ADAM, LS))
    params, _ = scaled_run(tx)
    chex.assert_trees_all_close(params, plain_run(around(ADAM))[0], rtol=1e-5)
    after, state = scaled_run(tx, steps=6, overflow=5)
    chex.assert_trees_all_equal(after, params)
    assert ols.get_loss_scale(state)() == 512


PARTLY = {
    "masked": lambda tx: optax.masked(tx, IS_MATRIX),
    "partition": lambda tx: optax.partition(
        {"matrix": tx, "vector": optax.sgd(0.1)}, LABELS
    ),
}


@pytest.mark.parametrize("around", PARTLY.values(), ids=PARTLY)
def test_what_would_leave_some_gradients_scaled_is_refused(around):
    said = "Wrap the whole of it instead: with_loss_scale"
    with pytest.raises(ValueError, match=said):
        scaled_run(around(ols.with_loss_scale(optax.sgd(1.0), LS)))


def test_update_takes_the_keywords_of_optax():
    tx = ols.with_loss_scale(optax.adamw(0.1), LS)
    state = tx.init(PARAMS)
    by_name = tx.update(updates=PARAMS, state=state, params=PARAMS)
    chex.assert_trees_all_equal(by_name, tx.update(PARAMS, state, PARAMS))


def test_lbfgs_is_given_true_values_and_gradients():
    """It compares gradients with values, so all that it is given beside the gradients is true."""
    extra = lambda loss, grads: {"value": loss, "grad": grads, "value_fn": loss_fn}
    params, _ = scaled_run(ols.with_loss_scale(optax.lbfgs(), LS), 5, extra)
    expected, _ = plain_run(optax.lbfgs(), 5, extra)
    chex.assert_trees_all_close(params, expected, rtol=1e-4)
    assert loss_fn(params) < 1e-3 * loss_fn(PARAMS)


def test_sam_that_shows_its_adversarial_steps_is_not_given_the_loss():
    adversary = optax.chain(optax.contrib.normalize(), optax.sgd(0.05))
    inner = optax.contrib.sam(optax.adam(0.1), adversary)
    tx = ols.with_loss_scale(inner, LS)
    step = jax.jit(lambda state, params: tx.minimize(loss_fn, state, params))
    params, state = PARAMS, tx.init(PARAMS)
    for _ in range(6):
        _, params, state = step(state, params)
    chex.assert_trees_all_close(params, plain_run(inner, 6)[0], rtol=1e-5)
    _, state = tx.update(PARAMS, state, params, value=jnp.nan)
    assert not state.should_apply


def test_lookahead_inside_and_around_steps_as_without():
    fast = optax.adam(1e-1)
    make = lambda inner: optax.lookahead(inner, sync_period=2, slow_step_size=0.5)

    def run(tx, grad_fn):
        now = optax.LookaheadParams.init_synced(PARAMS)
        state = tx.init(now)
        for _ in range(4):
            updates, state = tx.update(grad_fn(now.fast, state), state, now)
            now = optax.apply_updates(now, updates)
        return now

    plain = run(make(fast), lambda params, _: jax.grad(loss_fn)(params))
    scaled = lambda params, s: ols.value_and_scaled_grad(loss_fn, s)(params)[1]
    for tx in (ols.with_loss_scale(make(fast)), make(ols.with_loss_scale(fast))):
        chex.assert_trees_all_close(run(tx, scaled), plain)


@pytest.mark.parametrize("number", [0.05, np.float64(0.05), jnp.float32(0.05), 1])
def test_a_hyperparameter_set_to_a_number_between_eager_steps(number):
    inner = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
    tx = ols.with_loss_scale(inner, LS)
    params, state = PARAMS, tx.init(PARAMS)
    grads = jax.tree.map(jnp.ones_like, PARAMS)
    for _ in range(2):
        state.inner_state.hyperparams["learning_rate"] = number
        params, state = tx.apply_gradients(grads, state, params)
    expected = jax.tree.map(lambda p: p - 2 * number / 1024, PARAMS)
    chex.assert_trees_all_close(params, expected, rtol=1e-6)
