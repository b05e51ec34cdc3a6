"""Which states a step takes, and what the errors about others say."""

import chex
import jax
import jax.numpy as jnp
import optax
import pytest

import optax_lossscale as ols

PARAMS = {"w": jnp.ones(3)}
GRADS = {"w": jnp.ones(3)}
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


OTHERS = {
    "another class": ("loss_scale", (64, "dynamic"), ("Fixed", "Dynamic")),
    "another option": (
        "loss_scale",
        (ols.DynamicLossScale(growth_interval=7), "dynamic"),
        ("growth_interval=7", "growth_interval=2000"),
    ),
    "another rule": (
        "skip",
        (ols.skips.threshold(1.0), "nonfinite"),
        ("Threshold", "None"),
    ),
    "another option of a rule": (
        "skip",
        (ols.skips.spikes(max_skips=12), ols.skips.spikes(max_skips=34)),
        ("max_skips=12", "max_skips=34"),
    ),
    "no skip": ("skip", (None, "nonfinite"), ("gradient_norm",)),
}


@pytest.mark.parametrize(("option", "values", "named"), OTHERS.values(), ids=OTHERS)
def test_a_state_of_another_configuration_is_refused_and_the_remedy_works(
    option, values, named
):
    old, tx = (
        ols.with_loss_scale(optax.adam(0.1), **{option: value}) for value in values
    )
    params, state = old.apply_gradients(GRADS, old.init(PARAMS), PARAMS)
    with pytest.raises(ValueError, match=r"configured differently|another skip") as e:
        tx.update(GRADS, state, params)
    assert all(name in str(e.value) for name in named)
    remedy = str(e.value).split(": ")[-1]
    migrated = eval(remedy, {"tx": tx, "params": params, "state": state})
    chex.assert_trees_all_equal(migrated.inner_state, state.inner_state)
    _, after = tx.update(GRADS, migrated, params)
    assert after.should_apply
