"""A loss that is not finite skips the step, and is never the loss scale's fault."""

import chex
import jax
import jax.numpy as jnp
import optax
import pytest

import optax_lossscale as ols

PARAMS = {"w": jnp.array([1.0, -2.0])}
NAN = {"w": jnp.array([1.0, jnp.nan])}
SCALES = {
    "dynamic": ols.DynamicLossScale(growth_interval=2),
    "fixed": ols.FixedLossScale(64),
    "headroom": ols.HeadroomLossScale(),
}
each_scale = pytest.mark.parametrize("loss_scale", SCALES.values(), ids=SCALES)


@each_scale
def test_a_loss_that_is_not_finite_skips_the_step_and_leaves_the_loss_scale(loss_scale):
    tx = ols.with_loss_scale(optax.adam(0.1), loss_scale)
    before = tx.init(PARAMS)
    step = jax.jit(tx.apply_gradients)
    for grads in (PARAMS, NAN):
        for loss in (jnp.nan, jnp.inf, -jnp.inf):
            params, state = step(grads, before, PARAMS, value=loss)
            chex.assert_trees_all_equal(params, PARAMS)
            chex.assert_trees_all_equal(state.inner_state, before.inner_state)
            chex.assert_trees_all_equal(state.loss_scale, before.loss_scale)
            assert state.skipped_steps == state.consecutive_skipped_steps == 1


def test_minimize_passes_the_loss_on():
    tx = ols.with_loss_scale(optax.sgd(0.1), 64)
    loss_fn = lambda params, x: jnp.sum(params["w"] * x)
    _, params, state = tx.minimize(loss_fn, tx.init(PARAMS), PARAMS, jnp.nan)
    chex.assert_trees_all_equal(params, PARAMS)
    assert state.skipped_steps == 1


def test_all_replicas_agree_on_a_loss_that_is_nan_on_one():
    tx = ols.with_loss_scale(optax.sgd(0.1), 64, axis_name="data")
    step = lambda loss: tx.apply_gradients(PARAMS, tx.init(PARAMS), PARAMS, value=loss)
    losses = jnp.array([1.0, 1.0, jnp.nan, 1.0])
    after, state = jax.pmap(step, "data")(losses)
    assert not state.should_apply.any()
    chex.assert_trees_all_equal(after["w"], jnp.stack([PARAMS["w"]] * 4))


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
        init = lambda params: optax.EmptyState()
        inner = optax.GradientTransformationExtraArgs(init, update)
        tx = ols.with_loss_scale(inner, None)
        tx.update(PARAMS, tx.init(PARAMS), PARAMS, value=2.0)
    assert seen == [2, 2, None]


def test_extra_arguments_reach_inner_beside_the_value():
    inner = optax.GradientTransformationExtraArgs(
        lambda params: jnp.float32(0),
        lambda updates, state, params=None, *, value, more: (updates, value + more),
    )
    tx = ols.with_loss_scale(inner)
    _, state = tx.update(PARAMS, tx.init(PARAMS), PARAMS, value=2.0, more=1)
    assert state.inner_state == 3
    loss_fn = lambda params: jnp.sum(params["w"] ** 2)
    _, _, state = tx.minimize(loss_fn, state, PARAMS, extra_args={"more": 1})
    assert state.inner_state == 6
    with pytest.raises(TypeError, match=r"minimize got multiple values .* 'value'"):
        tx.minimize(loss_fn, state, PARAMS, extra_args={"value": 1.0})
