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


@pytest.mark.parametrize("identifier", [None, 128, "dynamic", "headroom"])
def test_are_found_for_every_loss_scale_deep_in_a_state(identifier):
    tx = optax.chain(ols.with_loss_scale(optax.adam(0.1), identifier), optax.scale(0.5))
    metrics = ols.metrics(tx.init(PARAMS))
    chex.assert_shape(list(metrics.values()), ())
    assert metrics["loss_scale"] == ols.get_loss_scale(tx.init(PARAMS))()
    assert set(metrics) >= {"log2_loss_scale", "should_apply", "skipped_steps"}


@pytest.mark.parametrize("power", [-60, -3, 0, 15, 31, 60])
def test_the_logarithm_of_a_power_of_two_is_an_integer(power):
    ls = ols.DynamicLossScale(2.0**power, min_scale=None)
    assert jax.jit(ols.metrics)(ls)["log2_loss_scale"] == power


def test_hold_the_counters_of_a_strategy_of_ones_own():
    class Counting(ols.LossScale):
        overflows: jax.Array = ols.state_field(0)

        def adjust(self, grads_finite):
            return self.replace(
                overflows=self.overflows + jnp.logical_not(grads_finite)
            )

    metrics = ols.metrics(Counting(initial_scale=4.0).adjust(False))
    assert {k: float(v) for k, v in metrics.items()} == {
        "loss_scale": 4,
        "log2_loss_scale": 2,
        "exhausted": 0,
        "overflows": 1,
    }


def test_no_name_hides_another():
    class Same(ols.LossScale):
        steps: jax.Array = ols.state_field(1)
        skipped_steps: jax.Array = ols.state_field(2)
        exhausted_at: jax.Array = ols.state_field(3)

        def adjust(self, grads_finite):
            return self

    class Names(ols.skips.SkipRule):
        steps: jax.Array = ols.state_field(4)
        skipped_steps: jax.Array = ols.state_field(5)
        loss_scale: jax.Array = ols.state_field(6)
        exhausted: jax.Array = ols.state_field(7)
        _steps: jax.Array = ols.state_field(8)

        def decide(self, norm, value):
            return self, True

    state = ols.with_loss_scale(optax.sgd(0.1), Same(64.0), skip=Names()).init(PARAMS)
    assert {name: float(x) for name, x in ols.metrics(state).items()} == {
        "loss_scale": 64,
        "log2_loss_scale": 6,
        "exhausted": 0,
        "should_apply": 1,
        "skipped_steps": 0,
        "consecutive_skipped_steps": 0,
        "steps": 1,
        "loss_scale/skipped_steps": 2,
        "exhausted_at": 3,
        "gradient_norm": 0,
        "skipped_by_rule": 0,
        "skip_debt": 0,
        "skip_rule/steps": 4,
        "skip_rule/skipped_steps": 5,
        "skip_rule/loss_scale": 6,
        "skip_rule/exhausted": 7,
    }


@pytest.mark.parametrize("loss_scale", [None, 128, "dynamic", "headroom"])
@pytest.mark.parametrize(
    "skip", [None, ols.skips.threshold(1.0)], ids=["none", "a rule"]
)
def test_sends_nothing_to_the_device(loss_scale, skip):
    tx = ols.with_loss_scale(optax.sgd(0.1), loss_scale, skip=skip)
    _, state = tx.apply_gradients(PARAMS, tx.init(PARAMS), PARAMS)
    with jax.transfer_guard("disallow"):
        metrics = ols.metrics(state)
    chex.assert_shape(list(metrics.values()), ())


def test_a_state_without_a_loss_scale_has_none():
    with pytest.raises(ValueError, match="exactly one loss scale"):
        ols.metrics(optax.sgd(0.1).init(PARAMS))
