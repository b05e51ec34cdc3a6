"""The README's code runs."""

import contextlib
import io
import pathlib
import re

import jax
import jax.numpy as jnp
import optax
import pytest

import optax_lossscale as ols

README = (pathlib.Path(__file__).parents[2] / "README.md").read_text()
[BLOCK] = re.findall(r"```python\n(.*?)```", README, re.S)


@pytest.fixture
def program():
    """What the README's program defines and has at its end."""
    names = {}
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(BLOCK, names)
    names["printed"] = out.getvalue()
    return names


def test_the_readmes_program_trains(program):
    [comment] = re.findall(r"^print.*  # (.*)", BLOCK, re.M)
    assert program["printed"] == f"{comment}\n"
    assert isinstance(program["state"], ols.LossScaleState)
    assert program["state"].should_apply
    assert program["loss_fn"](program["params"], program["batch"]) < program["loss"]


def test_the_readmes_program_has_float32_alone_and_no_cast(program):
    assert not re.search("dtype|astype|float16", re.sub("#.*", "", BLOCK))
    arrays = jax.tree.leaves((program["params"], program["batch"]))
    assert {str(x.dtype) for x in arrays} == {"float32"}


def test_the_readmes_program_computes_in_float16_throughout(program):
    """But for the exponentials of the softmax between its products."""
    arguments = program["params"], program["state"], program["batch"]
    report = ols.dtype_report(program["train_step"], *arguments)
    # Two forward, and backward two of each; of that with the batch one, for the
    # parameter.
    assert sum(product.count for product in report.products) == 2 + 2 * 2 - 1
    assert report.shares == {jnp.dtype(jnp.float16): 1.0}
    assert "exp" in str(jax.make_jaxpr(program["train_step"])(*arguments))


def test_the_readmes_program_goes_1000_steps_without_a_skip_as_its_scale_rises(program):
    """A loss in float16 would hold the scale at 2**15."""
    loss_scale = ols.DynamicLossScale(growth_interval=200)
    program["tx"] = tx = ols.with_loss_scale(optax.adamw(1e-3), loss_scale)
    params, batch = program["params"], program["batch"]

    def body(carry, _):
        return program["train_step"](*carry, batch)[:2], None

    _, state = jax.lax.scan(body, (params, tx.init(params)), length=1000)[0]
    assert state.skipped_steps == 0
    assert state.loss_scale() == 2.0**20


def test_the_version_is_three_numbers():
    assert re.fullmatch(r"\d+\.\d+\.\d+", ols.__version__)
