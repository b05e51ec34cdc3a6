"""The README's code runs, and every public name is explained."""

import pathlib
import re

import jax
import pytest

import optax_lossscale as ols

README = (pathlib.Path(__file__).parents[1] / "README.md").read_text()


def test_the_three_lines_run():
    names = {}
    [block] = re.findall(r"```python\n(.*?)```", README, re.S)
    exec(block, names)
    assert isinstance(names["state"], ols.LossScaleState)
    assert names["loss"] == pytest.approx(0.09, rel=1e-2)
    assert (names["params"]["w"] < 0.1).all()
    assert names["state"].should_apply
    assert jax.tree.leaves(names["params"])[0].shape == (3, 2)


@pytest.mark.parametrize("name", sorted({*ols.__all__} - {"presets"}))
def test_every_public_name_is_documented_with_an_example(name):
    documented = getattr(ols, name).__doc__
    assert documented
    assert (
        name in ("LossScaleState", "LossScaleError")
        or ">>> import optax_lossscale as ols" in documented
    )


def test_version_is_in_one_place():
    assert re.fullmatch(r"\d+\.\d+\.\d+", ols.__version__)
