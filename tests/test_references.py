"""What the other systems did, run for run, as recorded by running them."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols

TRACES = pathlib.Path(__file__).parent / "traces"


def recorded(reference):
    lines = (TRACES / f"{reference}.jsonl").read_text().splitlines()
    runs = [json.loads(line) for line in lines]
    return [pytest.param(run, id=f"{reference}-{i}") for i, run in enumerate(runs)]


def bits(text):
    return np.array([c == "1" for c in text])


def tensorflow(initial_scale, interval, multiplier=2.0):
    return ols.DynamicLossScale(
        initial_scale=initial_scale,
        growth_interval=interval,
        growth_factor=multiplier,
        backoff_factor=1 / multiplier,
    )


def loss_scales(ls, finite):
    """`(scale, applied)` after each step, as one compiled scan over gradients."""

    def step(ls, finite):
        ls, should_apply = ls.update([jnp.where(finite, 1.0, jnp.inf), None])
        return ls, (ls(), should_apply)

    _, (scale, applied) = jax.jit(lambda ls: jax.lax.scan(step, ls, finite))(ls)
    return np.asarray(scale), np.asarray(applied)


def check_scales(ls, run):
    scale, applied = loss_scales(ls, bits(run["finite"]))
    np.testing.assert_array_equal(scale, np.array(run["scale"], np.float32))
    np.testing.assert_array_equal(applied, bits(run["apply"]))


@pytest.mark.parametrize("run", recorded("tensorflow_dynamic"))
def test_tensorflow_dynamic(run):
    c = run["config"]
    check_scales(tensorflow(c["initial_loss_scale"], c["increment_period"], c["multiplier"]), run)


@pytest.mark.parametrize("run", recorded("tensorflow_fixed"))
def test_tensorflow_fixed(run):
    check_scales(ols.get(run["config"]["loss_scale_value"]), run)


@pytest.mark.parametrize("run", recorded("tf_keras"))
@pytest.mark.parametrize("way", ["update", "apply_gradients"])
def test_tf_keras(run, way):
    c = run["config"]
    assert c["dynamic"]
    tx = ols.with_loss_scale(
        optax.sgd(1.0), tensorflow(c["initial_scale"], c["dynamic_growth_steps"])
    )

    def step(carry, finite):
        param, state = carry
        grad = jnp.where(finite, 0.125 * state.loss_scale(), jnp.nan)
        if way == "apply_gradients":
            param, state = tx.apply_gradients(grad, state, param)
        else:
            update, state = tx.update(grad, state, param)
            param = optax.apply_updates(param, update)
        return (param, state), (state.loss_scale(), state.should_apply, param)

    start = (jnp.zeros(()), tx.init(jnp.zeros(())))
    _, (scale, applied, param) = jax.jit(
        lambda start: jax.lax.scan(step, start, bits(run["finite"]))
    )(start)
    np.testing.assert_array_equal(scale, np.array(run["scale"], np.float32))
    np.testing.assert_array_equal(applied, bits(run["apply"]))
    np.testing.assert_array_equal(param, np.array(run["param"], np.float32))
