"""`python -m optax_lossscale.demo`, as it is called."""

import functools
import importlib
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

import optax_lossscale as ols
from optax_lossscale.demo import __main__ as demo
from optax_lossscale.demo import _model, _text

DEMO = [sys.executable, "-m", "optax_lossscale.demo"]


@pytest.fixture
def small_model(monkeypatch):
    """Compiles sooner."""
    monkeypatch.setattr(
        _model, "init", functools.partial(_model.init, width=16, blocks=1)
    )


def png_size(path):
    """Width and height, from the PNG's header."""
    header = pathlib.Path(path).read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(header[16:20]), int.from_bytes(header[20:24])


def rows(output):
    cells = [
        line.strip("|").split("|")
        for line in output.splitlines()
        if line.startswith("| ")
    ]
    return {row[0].strip(): [cell.strip() for cell in row[1:]] for row in cells[2:]}


@pytest.mark.slow
def test_the_default_run_shows_what_the_readme_claims(tmp_path):
    """The claim of the README, on the default setting."""
    done = subprocess.run(
        DEMO, capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert "mean over a global batch of 1024 micro-batches" in done.stdout
    table = rows(done.stdout)
    assert list(table) == list(demo.RUNS)
    loss = {name: float(row[0]) for name, row in table.items()}
    float32 = loss["float32"]
    assert abs(loss["float16, dynamic scale"] / float32 - 1) < 0.005
    assert loss["float16, no loss scaling"] / float32 > 1.1
    assert int(table["float16, dynamic scale"][1]) > 0
    assert os.listdir(tmp_path) == ["loss_scaling.png"]
    assert png_size(tmp_path / "loss_scaling.png") > (800, 600)


@pytest.mark.slow
def test_undivided_the_model_needs_no_loss_scale(monkeypatch):
    """Another claim of the README."""
    monkeypatch.setattr(demo, "MICRO_BATCHES", 1)
    losses = []
    for name in ("float32", "float16, no loss scaling"):
        history = demo.train(*demo.RUNS[name], 400)
        losses.append(history["loss"][-20:].mean())
    assert abs(losses[1] / losses[0] - 1) < 0.005


@pytest.mark.slow
def test_steps_is_an_option(tmp_path, capsys, small_model, monkeypatch):
    monkeypatch.chdir(tmp_path)
    demo.main(["--steps", "1"])
    captured = capsys.readouterr()
    assert list(rows(captured.out)) == list(demo.RUNS)
    assert not captured.err
    assert png_size(tmp_path / "loss_scaling.png") > (800, 600)


@pytest.mark.parametrize(
    "arguments", [["--steps", "many"], ["--steps", "0"], ["--stepz", "3"]]
)
def test_bad_arguments_are_named(arguments, capsys):
    with pytest.raises(SystemExit, match="2"):
        demo.main(arguments)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert arguments[0] in captured.err


def test_without_matplotlib_it_can_be_imported_and_names_the_extra_when_it_runs(
    monkeypatch,
):
    drawing = ("matplotlib", "optax_lossscale.plot", "optax_lossscale._diagnosis.axes")
    for name in [name for name in sys.modules if name.startswith(drawing)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(ols, "plot", raising=False)  # that of an earlier import
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    imported = importlib.reload(demo)
    with pytest.raises(SystemExit, match=r"pip install 'optax_lossscale\[demo\]'"):
        imported.main(["--steps", "1"])


@pytest.mark.slow
def test_its_step_depends_on_the_loss_scale_in_nothing(small_model):
    tx, step = demo.make_train_step(*demo.RUNS["float16, dynamic scale"], 60)
    text = np.frombuffer(b"To be, or not to be, that is the question. " * 9, np.uint8)
    first, second = _text.batches(text, 2, seed=0)
    params = _model.init(jax.random.key(0))
    # the first of a warmup moves nothing
    params, state, _ = step(params, tx.init(params), first)
    ols.testing.assert_scale_invariant(step, params, state, second)


def test_the_same_seed_gives_the_same_batches():
    text = np.arange(200, dtype=np.uint8)
    first, again = (np.stack(list(_text.batches(text, 3, seed=7))) for _ in range(2))
    np.testing.assert_array_equal(first, again)
    assert first.shape == (3, _text.BATCH, _model.CONTEXT + 1)
    assert (np.diff(first) == 1).all()
    assert first.dtype == np.int32
