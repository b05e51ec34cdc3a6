"""A loss that is not finite skips the step, and is never the loss scale's fault."""

import itertools

import chex
import jax
import jax.numpy as jnp
import optax
import pytest
from pairs import product

import optax_lossscale as ols

PARAMS = {"w": jnp.array([1.0, -2.0])}
EACH_SCALE = {
    "dynamic": ols.DynamicLossScale(growth_interval=2),
    "fixed": ols.FixedLossScale(64),
    "none": ols.FixedLossScale(1),
    "headroom": ols.HeadroomLossScale(),
    "without a floor": ols.DynamicLossScale(2.0**16, min_scale=None),
}
each_scale = pytest.mark.parametrize("loss_scale", EACH_SCALE.values(), ids=EACH_SCALE)


@product(branch={"None": None, "select": "select"}, loss_scale=EACH_SCALE)
def test_a_loss_that_is_not_finite_skips_the_step_and_leaves_the_loss_scale(
    loss_scale, branch
):
    tx = ols.with_loss_scale(optax.adam(0.1), loss_scale, branch=branch)
    before = tx.init(PARAMS)
    step = jax.jit(tx.apply_gradients)
    bad = jax.tree.map(lambda p: p * jnp.nan, PARAMS)
    for grads, loss in itertools.product([PARAMS, bad], [jnp.nan, jnp.inf, -jnp.inf]):
        params, state = step(grads, before, PARAMS, value=loss)
        chex.assert_trees_all_equal(params, PARAMS)
        chex.assert_trees_all_equal(state.inner_state, before.inner_state)
        chex.assert_trees_all_equal(state.loss_scale, before.loss_scale)
        assert not state.should_apply
        assert state.skipped_steps == state.consecutive_skipped_steps == 1


@product(compiled={"compiled": True, "eager": False}, loss_scale=EACH_SCALE)
def test_unless_asked_nothing_looks_at_the_loss(loss_scale, compiled):
    """As in the originals: the loss scale alone decides, and goes by the gradients."""
    tx = ols.with_loss_scale(optax.adam(0.1), loss_scale, skip=None)
    step = jax.jit(tx.apply_gradients) if compiled else tx.apply_gradients
    state = tx.init(PARAMS)
    bad = jax.tree.map(lambda p: p * jnp.inf, PARAMS)
    for grads in (PARAMS, bad):
        with_value = step(grads, state, PARAMS, value=jnp.nan)
        chex.assert_trees_all_close(with_value, step(grads, state, PARAMS), rtol=1e-6)
    assert with_value[1].should_apply == isinstance(loss_scale, ols.FixedLossScale)


@each_scale
def test_a_finite_loss_changes_nothing(loss_scale):
    tx = ols.with_loss_scale(optax.adam(0.1), loss_scale)
    state = tx.init(PARAMS)
    for grads in (PARAMS, jax.tree.map(lambda p: p * jnp.inf, PARAMS)):
        with_value = tx.apply_gradients(grads, state, PARAMS, value=3.0)
        without = tx.apply_gradients(grads, state, PARAMS)
        chex.assert_trees_all_close(with_value, without, rtol=1e-6)  # another program


def test_check_raises_when_the_loss_stays_nan():
    tx = ols.with_loss_scale(optax.sgd(0.1))
    state = tx.init(PARAMS)
    for _ in range(4):
        _, state = tx.update(PARAMS, state, PARAMS, value=jnp.nan)
    with pytest.raises(ols.LossScaleError, match="4"):
        ols.raise_if_stuck(state, max_consecutive_skips=3)


def test_minimize_passes_the_loss_on():
    tx = ols.with_loss_scale(optax.sgd(0.1), 64)
    loss_fn = lambda params, x: jnp.sum(params["w"] * x)
    state = tx.init(PARAMS)
    _, params, state = jax.jit(tx.minimize, static_argnums=0)(
        loss_fn, state, PARAMS, jnp.nan
    )
    chex.assert_trees_all_equal(params, PARAMS)
    assert state.skipped_steps == 1


def test_inner_is_given_the_value_as_an_extra_argument():
    inner = optax.GradientTransformationExtraArgs(
        lambda params: jnp.float32(0),
        lambda updates, state, params=None, *, value, **extra: (
            updates,
            value + extra["more"],
        ),
    )
    tx = ols.with_loss_scale(inner)
    _, state = tx.update(PARAMS, tx.init(PARAMS), PARAMS, value=jnp.float32(2), more=1)
    assert state.inner_state == 3
    minimized = tx.minimize(
        lambda params: jnp.sum(params["w"] ** 2), state, PARAMS, extra_args={"more": 1}
    )
    assert minimized[2].inner_state == 6


def test_all_replicas_agree_on_a_loss_that_is_nan_on_one():
    tx = ols.with_loss_scale(optax.sgd(0.1), 64, axis_name="data")
    state = jax.tree.map(lambda x: jnp.stack([x] * 4), tx.init(PARAMS))
    losses = jnp.array([1.0, 1.0, jnp.nan, 1.0])
    params = jax.tree.map(lambda x: jnp.stack([x] * 4), PARAMS)
    step = jax.pmap(
        lambda g, s, p, loss: tx.apply_gradients(g, s, p, value=loss), "data"
    )
    after, state = step(params, state, params, losses)
    chex.assert_trees_all_equal(after, params)
    assert not state.should_apply.any()


def test_a_value_that_is_no_scalar_is_refused():
    tx = ols.with_loss_scale(optax.sgd(0.1))
    with pytest.raises(
        TypeError, match=r"true loss, must be a scalar, got shape \(2,\)"
    ):
        tx.update(PARAMS, tx.init(PARAMS), PARAMS, value=jnp.ones(2))


def test_inner_is_given_the_value_by_its_name_or_among_any_others_or_not_at_all():
    seen = []

    def by_name(updates, state, params=None, *, value=None):
        seen.append(value)
        return updates, state

    def among_others(updates, state, params=None, **extra):
        seen.append(extra.get("value"))
        return updates, state

    def neither(updates, state, params=None, *, more=None):
        seen.append(more)
        return updates, state

    for update in (by_name, among_others, neither):
        inner = optax.GradientTransformationExtraArgs(
            lambda params: optax.EmptyState(), update
        )
        tx = ols.with_loss_scale(inner, None)
        tx.update(PARAMS, tx.init(PARAMS), PARAMS, value=2.0)
    assert seen == [2, 2, None]


def test_minimize_takes_no_value_beside_its_own():
    tx = ols.with_loss_scale(optax.sgd(0.1))
    with pytest.raises(TypeError, match=r"minimize got multiple values .* 'value'"):
        tx.minimize(
            lambda params: jnp.sum(params["w"] ** 2),
            tx.init(PARAMS),
            PARAMS,
            extra_args={"value": jnp.nan},
        )
