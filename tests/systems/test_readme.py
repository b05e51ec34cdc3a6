"""The README's code runs."""

import pathlib
import re

import jax
import optax
import pytest

import optax_lossscale as ols

README = (pathlib.Path(__file__).parents[2] / "README.md").read_text()


def test_the_readmes_program_trains(capsys):
    names = {}
    [block] = re.findall(r"```python\n(.*?)```", README, re.S)
    exec(block, names)
    [printed] = re.findall(r"^print.*  # (.*)", block, re.M)
    assert capsys.readouterr().out == f"{printed}\n"
    assert isinstance(names["state"], ols.LossScaleState)
    assert names["loss"] == pytest.approx(0.09, rel=1e-2)
    assert (names["params"]["w"] < 0.1).all()
    assert names["state"].should_apply
    assert jax.tree.leaves(names["params"])[0].shape == (3, 2)


def test_the_readmes_program_goes_2000_steps_without_a_skip_as_its_scale_rises():
    """A loss in float16 would hold the scale at 2**15, and skip 19 of these steps."""
    names = {}
    [block] = re.findall(r"```python\n(.*?)```", README, re.S)
    exec(block, names)
    loss_scale = ols.DynamicLossScale(growth_interval=100)
    names["tx"] = tx = ols.with_loss_scale(optax.adamw(1e-3), loss_scale)
    params, x = names["params"], names["x"]

    def body(carry, _):
        return names["train_step"](*carry, x)[:2], None

    _, state = jax.lax.scan(body, (params, tx.init(params)), length=2000)[0]
    assert state.skipped_steps == 0
    assert state.loss_scale() == 2.0**35


def test_the_version_is_three_numbers():
    assert re.fullmatch(r"\d+\.\d+\.\d+", ols.__version__)
