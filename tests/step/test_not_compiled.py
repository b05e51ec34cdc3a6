"""Steps that are not compiled: nothing compiles twice, and nothing stays in memory."""

import functools
import gc

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols

PARAMS = {
    "w": jnp.full((16, 16), 0.1),
    "v": jnp.full((16, 16), 0.2),
    "b": jnp.zeros(16),
}
X = jnp.ones((4, 16))
BAD = jnp.inf * X
INNER = optax.adam(1e-2)
LS = ols.DynamicLossScale(1024.0, growth_interval=3)

compiled = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, seconds, **_: (
        compiled.append(event) if "backend_compile" in event else None
    )
)


def loss_fn(params, x):
    return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"] + params["b"]) ** 2)


def bare(params, state, x):
    updates, state = INNER.update(jax.grad(loss_fn)(params, x), state, params)
    return optax.apply_updates(params, updates), state


def through(door, tx):
    def apply_gradients(params, state, x):
        loss, grads = ols.value_and_scaled_grad(loss_fn, state)(params, x)
        return tx.apply_gradients(grads, state, params, value=loss)

    def update(params, state, x):
        updates, state = tx.update(
            ols.value_and_scaled_grad(loss_fn, state)(params, x)[1], state, params
        )
        return optax.apply_updates(params, updates), state

    def minimize(params, state, x):
        _, params, state = tx.minimize(loss_fn, state, params, x)
        return params, state

    return {f.__name__: f for f in (apply_gradients, update, minimize)}[door]


def cost(step, state):
    """Programs compiled, and live arrays and bytes added, by ten steps after three."""
    params = PARAMS
    for x in (X, BAD, X):
        params, state = step(params, state, x)
    gc.collect()
    gc.disable()  # what only a collection would free is a leak, too
    try:
        programs, live = len(compiled), jax.live_arrays()
        arrays, size = len(live), sum(x.nbytes for x in live)
        del live
        for x in [X] * 4 + [BAD] * 2 + [X] * 4:
            params, state = step(params, state, x)
        live = jax.live_arrays()
        return (
            len(compiled) - programs,
            len(live) - arrays,
            sum(x.nbytes for x in live) - size,
        )
    finally:
        gc.enable()


slow = functools.partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("door", "loss_scale", "branch"),
    [
        ("apply_gradients", LS, None),
        slow("update", LS, None),
        slow("minimize", LS, None),
        slow("apply_gradients", LS, "cond"),
        ("update", LS, "select"),
        slow("update", "headroom", None),
        ("minimize", 64, None),
    ],
)
def test_steps_compile_nothing_and_keep_nothing(door, loss_scale, branch):
    tx = ols.with_loss_scale(INNER, loss_scale, branch=branch)
    assert cost(through(door, tx), tx.init(PARAMS)) == (0, 0, 0)


def test_as_steps_of_the_bare_optimizer_do():
    assert cost(bare, INNER.init(PARAMS)) == (0, 0, 0)


def test_what_compiles_or_keeps_arrays_is_seen():
    kept = []

    def step(params, state, x):
        kept.append(jax.jit(lambda x: x + 1)(x))
        return params, state

    programs, arrays, size = cost(step, ())
    assert (programs, arrays, size) == (10, 10, 10 * X.nbytes)


@pytest.mark.parametrize(
    ("door", "branch"),
    [("apply_gradients", None), slow("update", None), slow("update", "select")],
)
def test_steps_are_those_of_a_compiled_one(door, branch):
    tx = ols.with_loss_scale(INNER, LS, branch=branch)
    eager = through(door, tx)
    runs = []
    for step in (eager, jax.jit(eager)):
        params, state = PARAMS, tx.init(PARAMS)
        for x in (X, BAD, X, X, BAD):
            params, state = step(params, state, x)
        runs.append((params, state))
    chex.assert_trees_all_equal_shapes_and_dtypes(*runs)
    chex.assert_trees_all_close(*runs, rtol=1e-4, atol=1e-6)
    assert runs[0][1].skipped_steps == 2
    assert not any(x.weak_type for x in jax.tree.leaves(runs[0]))


def test_inner_does_not_run_at_a_skipped_step():
    seen = []

    def update(updates, state, params=None):
        jax.debug.callback(lambda: seen.append(1))
        return updates, state

    inner = optax.GradientTransformation(lambda params: optax.EmptyState(), update)
    tx = ols.with_loss_scale(inner, LS)
    state = tx.init(PARAMS)
    for grads in (PARAMS, jax.tree.map(lambda p: p * jnp.nan, PARAMS), PARAMS):
        _, state = tx.update(grads, state, PARAMS)
    jax.effects_barrier()
    assert len(seen) == 2


def test_what_a_skipped_step_returns_may_be_donated():
    tx = ols.with_loss_scale(INNER, LS)
    state = tx.init(PARAMS)
    overflow = jax.tree.map(lambda p: p * jnp.nan + jnp.inf, PARAMS)
    updates, skipped = tx.update(overflow, state, PARAMS)
    consume = jax.jit(
        lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0
    )
    chex.assert_trees_all_equal(consume(updates), jax.tree.map(jnp.ones_like, PARAMS))
    consume(skipped.inner_state)
    tx.update(overflow, state, PARAMS)


def test_a_step_is_differentiable():
    """Through the learning rate, say, where gradients are traced and the decision is not."""

    def after(rate):
        tx = ols.with_loss_scale(optax.sgd(rate), LS)
        grads = jax.tree.map(lambda p: 1024 * p, PARAMS)
        params, _ = tx.apply_gradients(grads, tx.init(PARAMS), PARAMS)
        return params["w"].sum()

    np.testing.assert_allclose(jax.grad(after)(0.5), -PARAMS["w"].sum(), rtol=1e-6)
