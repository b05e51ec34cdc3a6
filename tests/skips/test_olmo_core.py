"""The rule of one's own in docs/bfloat16.md, against recorded decisions of OLMo-core."""

import json
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols

ROOT = pathlib.Path(__file__).parents[2]
TRACES = ROOT / "tests" / "traces" / "skips"
PAGE = (ROOT / "docs" / "bfloat16.md").read_text()


def rule():
    """The rule that the last block of the page defines."""
    [code] = re.findall(r"```python\n(import numpy.*?)```", PAGE, re.S)
    names = {"ols": ols, "jax": jax, "jnp": jnp, "optax": optax}
    exec(code, names)
    return names["OLMoCore"]()


def lines(name):
    return [json.loads(line) for line in (TRACES / name).read_text().splitlines()]


def numbers(values):
    """Floats, of which JSON has no NaN and no infinity."""
    return np.array([np.nan if x is None else float(x) for x in values], np.float32)


SERIES = {
    x["series"]: (numbers(x["norm"]), numbers(x["loss"])) for x in lines("series.jsonl")
}
RUNS = {run["series"]: run for run in lines("olmo_core.jsonl")}


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_the_page_has_a_rule_that_decides_as_olmo_core_did(run):
    """About finite steps; what is not finite never reaches the rule."""
    norms, losses = SERIES[run["series"]]
    tx = ols.skip_nonfinite(optax.sgd(1.0), skip=rule())

    def step(state, measured):
        norm, loss = measured
        _, state = tx.apply_gradients(norm, state, jnp.zeros(()), value=loss)
        return state, state.should_apply

    state = tx.init(jnp.zeros(()))
    _, applied = jax.jit(lambda s: jax.lax.scan(step, s, (norms, losses)))(state)
    usable = np.isfinite(norms) & np.isfinite(losses)
    expected = run["apply"] if usable.all() else run["apply_of_finite"]
    assert "".join("01"[int(x)] for x in applied[usable]) == expected
    assert not applied[~usable].any()
