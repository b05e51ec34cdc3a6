"""Steps that are not compiled: nothing compiles twice, and nothing stays in memory."""

import gc

import chex
import jax
import jax.numpy as jnp
import optax
import pytest

import optax_lossscale as ols

PARAMS = {"w": jnp.full((16, 16), 0.1), "b": jnp.zeros(16)}
X = jnp.ones((4, 16))
BAD = jnp.inf * X
LS = ols.DynamicLossScale(1024.0, growth_interval=3)
OVERFLOW = jax.tree.map(lambda p: p + jnp.inf, PARAMS)

compiled = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, seconds, **_: "backend_compile" in event and compiled.append(event)
)


def loss_fn(params, x):
    return jnp.mean((jnp.tanh(x @ params["w"]) + params["b"]) ** 2)


def through(door, tx):
    def update(params, state, x):
        _, grads = ols.value_and_scaled_grad(loss_fn, state)(params, x)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def minimize(params, state, x):
        return tx.minimize(loss_fn, state, params, x)[1:]

    return {"update": update, "minimize": minimize}[door]


def cost(step, state):
    """Programs compiled, and live arrays added, by ten steps after three."""
    params = PARAMS
    for x in (X, BAD, X):
        params, state = step(params, state, x)
    gc.collect()
    gc.disable()  # what only a collection would free is a leak, too
    try:
        before = len(compiled), len(jax.live_arrays())
        for x in [X] * 4 + [BAD] * 2 + [X] * 4:
            params, state = step(params, state, x)
        return len(compiled) - before[0], len(jax.live_arrays()) - before[1]
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("door", "loss_scale", "branch"),
    [
        ("minimize", LS, None),
        ("update", LS, "select"),
        pytest.param("minimize", "headroom", "cond", marks=pytest.mark.slow),
        pytest.param("minimize", 64, None, marks=pytest.mark.slow),
    ],
)
def test_steps_compile_nothing_and_keep_nothing(door, loss_scale, branch):
    tx = ols.with_loss_scale(optax.adam(1e-2), loss_scale, branch=branch)
    assert cost(through(door, tx), tx.init(PARAMS)) == (0, 0)


def test_what_compiles_or_keeps_arrays_is_seen():
    kept = []

    def step(params, state, x):
        kept.append(jax.jit(lambda x: x + 1)(x))
        return params, state

    assert cost(step, ()) == (10, 10)


def test_steps_are_those_of_a_compiled_one():
    tx = ols.with_loss_scale(optax.adam(1e-2), LS)
    eager = through("minimize", tx)
    runs = []
    for step in (eager, jax.jit(eager)):
        params, state = PARAMS, tx.init(PARAMS)
        for x in (X, BAD, X, X, BAD):
            params, state = step(params, state, x)
        runs.append((params, state))
    chex.assert_trees_all_equal_shapes_and_dtypes(*runs)
    chex.assert_trees_all_close(*runs, rtol=1e-4, atol=1e-6)
    assert not any(x.weak_type for x in jax.tree.leaves(runs[0]))


def test_inner_does_not_run_at_a_skipped_step():
    seen = []

    def update(updates, state, params=None):
        jax.debug.callback(lambda: seen.append(1))
        return updates, state

    inner = optax.GradientTransformation(lambda params: optax.EmptyState(), update)
    tx = ols.with_loss_scale(inner, LS)
    state = tx.init(PARAMS)
    for grads in (PARAMS, OVERFLOW, PARAMS):
        _, state = tx.update(grads, state, PARAMS)
    jax.effects_barrier()
    assert len(seen) == 2


def test_what_a_skipped_step_returns_may_be_donated():
    tx = ols.with_loss_scale(optax.adam(1e-2), LS)
    state = tx.init(PARAMS)
    updates, skipped = tx.update(OVERFLOW, state, PARAMS)
    plus_1 = lambda tree: jax.tree.map(lambda x: x + 1, tree)
    consumed = jax.jit(plus_1, donate_argnums=0)((updates, skipped.inner_state))
    chex.assert_trees_all_equal(consumed[0], jax.tree.map(jnp.ones_like, PARAMS))
    chex.assert_trees_all_equal(state.inner_state, tx.init(PARAMS).inner_state)
