"""`python -m optax_lossscale.demo`, as it is called."""

import contextlib
import functools
import os
import pathlib
import pty
import re
import signal
import subprocess
import sys
import termios

import jax
import matplotlib.pyplot as plt
import numpy as np
import pytest

import optax_lossscale as ols
from optax_lossscale.demo import _model, _report, _text, _training
from optax_lossscale.demo.__main__ import main

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
    return {row[0].strip(): [cell.strip() for cell in row[1:]] for row in cells[1:]}


@pytest.mark.slow
def test_the_default_run_shows_what_the_readme_claims(tmp_path):
    """The claim of the README, on the default setting."""
    done = subprocess.run(
        [*DEMO, "--out", str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert "mean over a global batch of 1024 micro-batches" in done.stdout
    table = rows(done.stdout)
    loss = {
        name: float(row[0]) for name, row in table.items() if name in _training.RUNS
    }
    assert list(loss) == list(_training.RUNS)
    float32 = loss["float32"]
    assert abs(loss["float16, dynamic scale"] / float32 - 1) < 0.005
    assert loss["float16, no loss scaling"] / float32 > 1.1
    assert float(table["float16, no loss scaling"][2].rstrip("%")) > 50
    assert int(table["float16, dynamic scale"][3]) > 0
    picture = re.search(r"^Picture: (.*)$", done.stdout, re.M)[1]
    assert png_size(picture) > (800, 600)
    assert os.listdir(tmp_path) == [os.path.basename(picture)]


@pytest.mark.slow
def test_undivided_the_model_needs_no_loss_scale(monkeypatch):
    """Another claim of the README."""
    monkeypatch.setattr(_training, "MICRO_BATCHES", 1)
    text = _text.read(None)
    names = ("float32", "float16, no loss scaling")
    losses = [np.mean(_training.train(n, text, 400, 0)["loss"][-20:]) for n in names]
    assert abs(losses[1] / losses[0] - 1) < 0.005


@pytest.mark.slow
def test_options_choose_text_steps_and_folder(tmp_path, capsys, small_model):
    data = tmp_path / "text"
    data.write_bytes(b"To be, or not to be, that is the question. " * 9)
    out = tmp_path / "made" / "on the way"
    assert (
        main(["--steps", "1", "--data", str(data), "--out", str(out), "--seed", "3"])
        == 0
    )
    captured = capsys.readouterr()
    assert set(rows(captured.out)) >= set(_training.RUNS)
    cause = "The loss is divided by 1024, so that gradients underflow in float16."
    assert cause in captured.out
    assert plt.gcf().axes[0].get_title() == cause
    plt.close("all")
    assert [p.name for p in out.iterdir()] == ["loss_scaling.png"]
    assert not captured.err  # the progress bar is for terminals


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--data", "no/such/file"], "no/such/file"),
        (["--data", "{short}"], "holds 5 bytes; the demo needs at least 65"),
        (["--data", "{folder}"], "{folder}"),
        (["--out", "{short}"], "--out {short} is not a folder to write to"),
        (["--out", "/proc/nowhere"], "/proc/nowhere"),
        (["--steps", "0"], "needs an integer from 1 to 2147483647, got '0'"),
        (["--steps", "many"], "needs an integer from 1 to 2147483647, got 'many'"),
        (["--steps", "1e3"], "got '1e3'"),
        (["--seed", "-1"], "needs an integer from 0 to 2147483647, got '-1'"),
        (["--seed", "99999999999"], "from 0 to 2147483647"),
        (["--stepz", "3"], "--stepz"),
    ],
)
def test_bad_arguments_are_one_line_and_exit_code_2(arguments, said, tmp_path, capsys):
    short = tmp_path / "short"
    short.write_bytes(b"12345")
    fill = lambda text: text.format(short=short, folder=tmp_path)
    with pytest.raises(SystemExit) as exit_:
        main([fill(a) for a in arguments])
    captured = capsys.readouterr()
    assert exit_.value.code == 2
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert fill(said) in captured.err
    assert sorted(tmp_path.iterdir()) == [short]


@pytest.mark.slow
def test_interrupt_keeps_what_was_finished(tmp_path):
    # A suite that runs in the background ignores the signal, and so would its children.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    terminal, end = pty.openpty()  # where progress is shown
    termios.tcsetwinsize(end, (24, 80))
    command = [*DEMO, "--steps", "40", "--out", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=end, text=True)
    os.close(end)
    shown = b""
    while b"float16, no loss scaling:   2" not in shown:  # the second run is under way
        shown += os.read(terminal, 100)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    with contextlib.suppress(OSError):  # which Linux raises where a terminal ends
        while more := os.read(terminal, 1000):
            shown += more
    os.close(terminal)
    assert b"Traceback" not in shown
    assert "Interrupted: 1 of 4 runs were finished." in out
    assert set(rows(out)) & set(_training.RUNS) == {"float32"}
    assert [p.name for p in tmp_path.iterdir()] == ["loss_scaling.png"]


def test_its_step_depends_on_the_loss_scale_in_nothing(small_model):
    tx, step = _training.make_train_step("float16, dynamic scale", 60)
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


def test_the_plotted_loss_is_a_running_mean():
    np.testing.assert_allclose(
        _report._smoothed(np.array([1.0, 3.0, 5.0]), 2), [1, 2, 4]
    )
