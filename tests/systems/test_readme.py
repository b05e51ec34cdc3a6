"""The README's code runs."""

import pathlib
import re

import jax
import pytest

import optax_lossscale as ols

README = (pathlib.Path(__file__).parents[2] / "README.md").read_text()


def test_the_readmes_program_trains():
    names = {}
    [block] = re.findall(r"```python\n(.*?)```", README, re.S)
    exec(block, names)
    assert isinstance(names["state"], ols.LossScaleState)
    assert names["loss"] == pytest.approx(0.09, rel=1e-2)
    assert (names["params"]["w"] < 0.1).all()
    assert names["state"].should_apply
    assert jax.tree.leaves(names["params"])[0].shape == (3, 2)


def test_the_version_is_three_numbers():
    assert re.fullmatch(r"\d+\.\d+\.\d+", ols.__version__)
