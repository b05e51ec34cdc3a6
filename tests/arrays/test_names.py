"""Names of leaves and layers in errors and reports."""

import inspect

import jax
import jax.numpy as jnp
import optax
import pytest

import optax_lossscale as ols


def test_an_error_names_a_leaf_as_its_user_knows_it():
    tx = ols.with_loss_scale(optax.adam(1e-3))
    params = {"decoder": {"layer_3": {"kernel": jnp.ones(2)}}}
    state = tx.init(params)
    adam, *others = state.inner_state
    half = adam._replace(mu=jax.tree.map(lambda x: x.astype(jnp.float16), adam.mu))
    with pytest.raises(ValueError, match="0/mu/decoder/layer_3/kernel"):
        tx.update(params, state._replace(inner_state=(half, *others)), params)


@pytest.mark.parametrize("cls", [ols.DynamicLossScale, ols.skips.SkipRule])
def test_the_source_of_a_public_class_is_not_found_rather_than_another(cls):
    with pytest.raises((OSError, TypeError)):
        inspect.getsource(cls)
    assert inspect.getsource(cls.update).lstrip().startswith("def update(")


@pytest.mark.parametrize("module", [ols, ols.skips, ols.testing])
def test_what_is_public_is_at_home_in_a_public_module(module):
    things = [getattr(module, name) for name in module.__all__]
    homes = {x.__module__ for x in things if callable(x)}
    assert homes
    assert not [home for home in homes if "._" in home]
