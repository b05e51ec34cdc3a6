"""`skip_nonfinite`: the wrapper without a loss scale, for bfloat16."""

import inspect

import chex
import jax
import jax.numpy as jnp
import optax
import pytest

import optax_lossscale as ols

PARAMS = {"w": jnp.array([1.0, -2.0])}
BAD = {"w": jnp.array([1.0, jnp.nan])}


def test_it_is_the_wrapper_without_a_loss_scale():
    tx = ols.skip_nonfinite(optax.adam(0.1))
    same = ols.with_loss_scale(optax.adam(0.1), None)
    assert isinstance(tx, ols.LossScaledTransformation)
    state = tx.init(PARAMS)
    chex.assert_trees_all_equal(state, same.init(PARAMS))
    for grads in (PARAMS, BAD):
        chex.assert_trees_all_equal(
            jax.jit(tx.apply_gradients)(grads, state, PARAMS),
            jax.jit(same.apply_gradients)(grads, state, PARAMS),
        )


def test_it_hands_every_option_on():
    options = {*inspect.signature(ols.with_loss_scale).parameters} - {"loss_scale"}
    assert {*inspect.signature(ols.skip_nonfinite).parameters} == options
    rule = ols.skips.threshold(1.0)
    tx = ols.skip_nonfinite(
        optax.sgd(0.1), axis_name="i", mask={"w": True}, branch="select", skip=rule
    )
    step = lambda grads: tx.apply_gradients(grads, tx.init(PARAMS), PARAMS)[1]
    stacked = jax.tree.map(lambda x: jnp.stack([x, 0.1 * x]), PARAMS)
    state = jax.vmap(step, axis_name="i")(stacked)
    assert not state.should_apply.any()
    assert state.skip_rule.skipped_by_rule.tolist() == [1, 1]
    with pytest.raises(ValueError, match="branch must be"):
        ols.skip_nonfinite(optax.sgd(0.1), branch="switch")


def test_it_trains_bfloat16():
    tx = ols.skip_nonfinite(optax.sgd(0.1))
    loss_fn = ols.autocast(lambda p, x: jnp.sum((x @ p["w"]) ** 2), jnp.bfloat16)
    step = jax.jit(lambda s, p, x: tx.minimize(loss_fn, s, p, x))
    _, params, state = step(tx.init(PARAMS), PARAMS, jnp.ones((3, 2)))
    assert state.should_apply
    assert (params["w"] != PARAMS["w"]).all()
    _, after, state = step(state, params, jnp.full((3, 2), jnp.nan))
    chex.assert_trees_all_equal(after, params)
    assert state.skipped_steps == 1
