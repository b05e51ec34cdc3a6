"""`metrics`: flat scalars to log."""

import chex
import jax
import jax.numpy as jnp
import optax
import pytest

import optax_lossscale as ols

PARAMS = jnp.ones(2)


def test_tell_of_an_overflow_in_scalars_of_fixed_dtype():
    tx = ols.with_loss_scale(optax.sgd(0.1), ols.DynamicLossScale(initial_scale=8.0))

    @jax.jit
    def step(grads, state):
        _, state = tx.update(grads, state, PARAMS)
        return state, ols.metrics(state)

    state, metrics = step(PARAMS, tx.init(PARAMS))
    assert metrics["growth_counter"] == 1
    state, metrics = step(PARAMS * jnp.nan, state)
    expected = {
        "loss_scale": jnp.float32(4),
        "log2_loss_scale": jnp.float32(2),
        "should_apply": jnp.array(False),
        "skipped_steps": jnp.int32(1),
        "consecutive_skipped_steps": jnp.int32(1),
        "gradient_norm": jnp.float32(jnp.inf),
        "growth_counter": jnp.int32(0),
        "hysteresis_left": jnp.int32(1),
        "exhausted": jnp.array(False),
    }
    chex.assert_trees_all_equal(metrics, expected)
    chex.assert_trees_all_equal_shapes_and_dtypes(metrics, expected)


@pytest.mark.parametrize("loss_scale", [None, 128, "dynamic", "headroom"])
@pytest.mark.parametrize("skip", [None, ols.skips.threshold(1.0)])
def test_are_found_deep_in_a_state_and_send_nothing_to_the_device(loss_scale, skip):
    tx = ols.with_loss_scale(optax.adam(0.1), loss_scale, skip=skip)
    state = optax.chain(tx, optax.scale(0.5)).init(PARAMS)
    with jax.transfer_guard("disallow"):
        metrics = ols.metrics(state)
    chex.assert_shape(list(metrics.values()), ())
    assert metrics["loss_scale"] == ols.get_loss_scale(state)()
    assert ("gradient_norm" in metrics) == (skip is not None)


@pytest.mark.parametrize("power", [-60, -3, 0, 15, 60])
def test_the_logarithm_of_a_power_of_two_is_an_integer(power):
    ls = ols.DynamicLossScale(2.0**power, min_scale=None)
    assert jax.jit(ols.metrics)(ls)["log2_loss_scale"] == power


def test_hold_the_state_of_ones_own_classes_and_no_name_hides_another():
    class Own(ols.LossScale):
        steps: jax.Array = ols.state_field(1)
        skipped_steps: jax.Array = ols.state_field(2)

        def adjust(self, grads_finite):
            return self

    class Rule(ols.skips.SkipRule):
        steps: jax.Array = ols.state_field(4)
        loss_scale: jax.Array = ols.state_field(6)
        _hidden: jax.Array = ols.state_field(8)

        def decide(self, norm, value):
            return self, True

    state = ols.with_loss_scale(optax.sgd(0.1), Own(64.0), skip=Rule()).init(PARAMS)
    assert {name: float(x) for name, x in ols.metrics(state).items()} == {
        "loss_scale": 64,
        "log2_loss_scale": 6,
        "exhausted": 0,
        "should_apply": 1,
        "skipped_steps": 0,
        "consecutive_skipped_steps": 0,
        "gradient_norm": 0,
        "steps": 1,
        "loss_scale/skipped_steps": 2,
        "skipped_by_rule": 0,
        "skip_debt": 0,
        "skip_rule/steps": 4,
        "skip_rule/loss_scale": 6,
    }
