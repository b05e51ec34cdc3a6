"""Which states a step takes, and what the errors about others say."""

import jax
import jax.numpy as jnp
import optax
import pytest

import optax_lossscale as ols

PARAMS = {"w": jnp.ones(3)}
TX = ols.with_loss_scale(optax.adam(1e-3))


def test_a_stack_of_states_is_taken_under_vmap_alone():
    params = jax.tree.map(lambda x: jnp.stack([x, x]), PARAMS)
    states = jax.vmap(TX.init)(params)
    with pytest.raises(ValueError, match=r"stack of shape \(2,\)"):
        TX.update(params, states, params)
    _, states = jax.vmap(TX.update)(params, states, params)
    assert states.should_apply.all()


def test_a_state_that_was_computed_with_is_refused():
    state = TX.init(PARAMS)
    state = state._replace(should_apply=state.should_apply + 0.5)
    with pytest.raises(TypeError, match="should_apply came back as float32"):
        TX.update(PARAMS, state, PARAMS)


def test_a_state_of_another_configuration_is_refused_with_both():
    other = ols.with_loss_scale(
        optax.adam(1e-3), ols.DynamicLossScale(growth_interval=7)
    )
    with pytest.raises(
        ValueError, match="scale in the state is configured diff"
    ) as error:
        TX.update(PARAMS, other.init(PARAMS), PARAMS)
    assert all(str(interval) in str(error.value) for interval in (7, 2000))


def test_a_state_of_another_skip_rule_is_refused_with_both():
    taken, given = (
        ols.with_loss_scale(optax.adam(1e-3), skip=ols.skips.spikes(max_skips=n))
        for n in (12, 34)
    )
    with pytest.raises(
        ValueError, match="rule in the state is configured diff"
    ) as error:
        taken.update(PARAMS, given.init(PARAMS), PARAMS)
    assert all(f"SpikeSkipRule(max_skips={n})" in str(error.value) for n in (12, 34))
