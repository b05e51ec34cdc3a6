"""Variables of Flax NNX stand for the arrays in them, and count once where they are held twice."""

import sys
import types
import warnings

import jax.numpy as jnp
import optax
import pytest

import optax_lossscale as ols

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # the framework's, not ours
    from flax import nnx

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def optimizer():
    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    tx = ols.with_loss_scale(optax.sgd(0.1), ols.DynamicLossScale(8.0))
    return nnx.Optimizer(model, tx, wrt=nnx.Param)


def test_flax_may_still_be_importing(monkeypatch):
    monkeypatch.setitem(sys.modules, "flax.nnx", types.ModuleType("flax.nnx"))
    state = ols.with_loss_scale(optax.sgd(0.1)).init(jnp.ones(2))
    assert ols.get_loss_scale(state)() == 2**15


def test_what_is_held_twice_is_one():
    one = optimizer()
    assert ols.get_loss_scale([one, one])() == 8
    assert ols.where_applied({"a": one, "b": one}, 1.0, 0.0) == 1
    with pytest.raises(ValueError, match="found 2"):
        ols.get_loss_scale([one, optimizer()])
    with pytest.raises(ValueError, match="one LossScaleState, found 2"):
        ols.where_applied([one, optimizer()], 1.0, 0.0)


def test_a_split_state_is_to_be_merged_first():
    graph, state = nnx.split(optimizer())
    with pytest.raises(ValueError, match=r"call nnx\.merge first"):
        ols.get_loss_scale(state)
    assert ols.get_loss_scale(nnx.merge(graph, state))() == 8


def test_a_module_that_autocast_is_given_is_changed_in_place():
    model = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    mean = model.mean
    ols.autocast(lambda model, x: model(x))(model, jnp.ones((4, 3)))
    assert model.mean is mean
    assert (mean[...] != 0).all()
