"""What the five originals decided, step for step, as recorded: see `traces/README.md`."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from optax_lossscale import skips

TRACES = pathlib.Path(__file__).parents[1] / "traces" / "skips"


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def numbers(values):
    """Floats, of which JSON has no NaN and no infinity."""
    return np.array([np.nan if x is None else float(x) for x in values], np.float32)


SERIES = {
    x["series"]: (numbers(x["norm"]), numbers(x["loss"]))
    for x in lines(TRACES / "series.jsonl")
}
RUNS = [
    pytest.param(
        path.stem,
        run,
        id=f"{path.stem}-{i}",
        marks=() if i % 4 == 0 else pytest.mark.slow,
    )
    for path in sorted(TRACES.glob("*.jsonl"))
    if path.stem != "series"
    for i, run in enumerate(lines(path))
]


def made(original, config):
    """The rule of an original's arguments, of which a function is a dict of its name."""
    config = dict(config)
    if isinstance(config.get("drop_norm"), dict):
        [(name, arguments)] = config["drop_norm"].items()
        config["drop_norm"] = getattr(skips, name)(**arguments)
    return getattr(skips, original)(**config)


@jax.jit
def decided(rule, norms, losses):
    """Step by step as the optimizer's, of gradients of this norm."""
    tx = ols.with_loss_scale(optax.sgd(1.0), None, skip=rule)

    def step(carry, measured):
        norm, loss = measured
        param, state = tx.apply_gradients(norm, carry[1], carry[0], value=loss)
        return (param, state), (state.should_apply, jnp.isfinite(param))

    start = jnp.zeros(())
    (_, state), (applied, finite) = jax.lax.scan(
        step, (start, tx.init(start)), (norms, losses)
    )
    return applied, finite, state.skip_rule.skipped_by_rule


def text(decisions):
    return "".join("01"[int(x)] for x in decisions)


def test_all_97_recorded_runs_are_found():
    assert len(RUNS) == 97


@pytest.mark.parametrize(("original", "run"), RUNS)
def test_decisions_are_the_recorded_ones(original, run):
    """About finite steps; what is not finite is skipped, and changes no decision after it."""
    norms, losses = SERIES[run["series"]]
    applied, finite, skipped = decided(made(original, run["config"]), norms, losses)
    usable = np.isfinite(norms) & np.isfinite(losses)
    expected = run["apply"] if usable.all() else run["apply_of_finite"]
    assert text(np.array(applied)[usable]) == expected
    assert not np.array(applied)[~usable].any()
    assert finite.all()
    assert skipped == expected.count("0")


@pytest.mark.parametrize("original", ["olmo_core", "maxtext", "levanter"])
def test_a_nan_costs_the_originals_as_many_steps_as_their_window_is_long(original):
    """The deliberate difference: here it costs the one step."""
    runs = [run for name, run in (p.values for p in RUNS) if name == original]
    default = runs[0]["config"]
    [run] = [
        run
        for run in runs
        if run["config"] == default and run["series"] == "not finite"
    ]
    applied, _, skipped = decided(made(original, run["config"]), *SERIES["not finite"])
    assert run["apply"].count("0") > 128
    assert text(applied).count("0") == 2 + skipped == 3
