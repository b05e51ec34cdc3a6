"""`skip_nonfinite`: the wrapper without a loss scale, for bfloat16."""

import inspect

import chex
import jax.numpy as jnp
import optax

import optax_lossscale as ols

PARAMS = {"w": jnp.array([1.0, -2.0])}


def test_it_is_the_wrapper_without_a_loss_scale():
    tx = ols.skip_nonfinite(optax.adam(0.1))
    same = ols.with_loss_scale(optax.adam(0.1), None)
    assert isinstance(tx, ols.LossScaledTransformation)
    state = tx.init(PARAMS)
    chex.assert_trees_all_equal(state, same.init(PARAMS))
    for grads in (PARAMS, {"w": jnp.array([1.0, jnp.nan])}):
        steps = [t.apply_gradients(grads, state, PARAMS) for t in (tx, same)]
        chex.assert_trees_all_equal(*steps)


def test_it_hands_every_option_on():
    options = {*inspect.signature(ols.with_loss_scale).parameters} - {"loss_scale"}
    assert {*inspect.signature(ols.skip_nonfinite).parameters} == options
    given = {
        "axis_name": "i",
        "mask": {"w": True},
        "branch": "select",
        "skip": ols.skips.threshold(1.0),
    }
    tx = ols.skip_nonfinite(optax.sgd(0.1), **given)
    assert {name: getattr(tx.update, name) for name in given} == given


def test_it_trains_bfloat16():
    tx = ols.skip_nonfinite(optax.sgd(0.1))
    loss_fn = ols.autocast(lambda p, x: jnp.sum((x @ p["w"]) ** 2), jnp.bfloat16)
    _, params, state = tx.minimize(loss_fn, tx.init(PARAMS), PARAMS, jnp.ones((3, 2)))
    assert (params["w"] != PARAMS["w"]).all()
    bad = jnp.full((3, 2), jnp.nan)
    _, after, state = tx.minimize(loss_fn, state, params, bad)
    chex.assert_trees_all_equal(after, params)
    assert state.skipped_steps == 1
