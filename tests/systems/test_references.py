"""What the other systems did, run for run, as recorded by running them: see `traces/README.md`."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from pairs import quick

import optax_lossscale as ols

TRACES = sorted((pathlib.Path(__file__).parents[1] / "traces").glob("*.jsonl"))


def recorded(*references):
    """All runs; of each system, the first three are quick."""
    return [
        pytest.param(
            path.stem,
            json.loads(line),
            id=f"{path.stem}-{i}",
            marks=() if i < 3 else pytest.mark.slow,
        )
        for path in TRACES
        for i, line in enumerate(path.read_text().splitlines())
        if not references or path.stem in references
    ]


def bits(text):
    return np.array([c == "1" for c in text])


def test_all_169_recorded_runs_are_found():
    assert len(recorded()) == 169


@pytest.mark.parametrize(("reference", "run"), recorded())
def test_scales_and_decisions_are_the_recorded_ones(reference, run):
    ls = ols.get({"preset": reference, **run["config"]})
    finite = bits(run["finite"])
    largest = np.array(
        [1.0 if a is None else a for a in run.get("amax", finite)], np.float32
    )

    def step(ls, gradient):
        ls, should_apply = ls.update({"w": gradient, "none": None})
        return ls, (ls(), should_apply, ls.exhausted())

    gradients = np.where(finite, largest, np.inf)[:, None] * np.array(
        [0.5, -1.0], np.float32
    )
    scan = jax.jit(lambda ls, gradients: jax.lax.scan(step, ls, gradients))
    _, (scale, applied, exhausted) = jax.device_get(scan(ls, gradients))
    n = len(run["scale"])
    rtol = 1e-2 if reference == "openseq2seq_logmax" else 0
    np.testing.assert_allclose(
        scale[:n], np.array(run["scale"], np.float32), rtol=rtol, atol=0
    )
    np.testing.assert_array_equal(applied[:n], bits(run["apply"]))
    if "raises_at_end" in run:
        assert not exhausted[:n].any()
        assert exhausted[-1] == run["raises_at_end"]


@pytest.mark.parametrize(("reference", "run"), recorded("keras", "tf_keras"))
@quick("way", {way: way for way in ("update", "apply_gradients")}, "apply_gradients")
def test_parameters_are_the_recorded_ones(reference, run, way):
    """Each gradient is 0.125 times the scale; the inner optimizer is SGD(1.0)."""
    tx = ols.with_loss_scale(
        optax.sgd(1.0), ols.get({"preset": reference, **run["config"]})
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
    scan = jax.jit(lambda start, finite: jax.lax.scan(step, start, finite))
    _, (scale, applied, param) = scan(start, bits(run["finite"]))
    np.testing.assert_array_equal(scale, np.array(run["scale"], np.float32))
    np.testing.assert_array_equal(applied, bits(run["apply"]))
    np.testing.assert_array_equal(param, np.array(run["param"], np.float32))
