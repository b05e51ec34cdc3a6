"""The pictures hold the numbers; how they look, people look at."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
import pytest

import optax_lossscale as ols

matplotlib.use("agg")
from matplotlib import pyplot as plt

from optax_lossscale import plot


@pytest.fixture(autouse=True)
def _close():
    yield
    plt.close("all")


def test_plot_needs_no_import_of_its_own(monkeypatch):
    monkeypatch.delitem(sys.modules, "optax_lossscale.plot")
    monkeypatch.delattr(ols, "plot")
    assert (
        ols.plot.loss_scale([{"loss_scale": 8.0, "should_apply": True}]).get_xlabel()
        == "step"
    )
    with pytest.raises(
        AttributeError, match="'optax_lossscale' has no attribute 'plto'"
    ):
        ols.plto  # noqa: B018


def test_without_matplotlib_all_else_works_and_plot_names_the_extra(tmp_path):
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "import optax_lossscale as ols\n"
        "ols.with_loss_scale\n"
        "ols.plot\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path
    )
    last = run.stderr.splitlines()[-1]
    assert (
        last
        == "ImportError: plot needs matplotlib: pip install 'optax_lossscale[plot]'"
    )
    assert "line 4, in <module>" in run.stderr


@pytest.mark.parametrize("flag", [bool, int, float])
def test_loss_scale_takes_flags_as_loggers_keep_them(flag):
    history = [
        {"loss_scale": 8.0, "should_apply": flag(step != 1), "step": step}
        for step in range(3)
    ]
    np.testing.assert_array_equal(plot.loss_scale(history).lines[1].get_xdata(), [2])


@pytest.mark.parametrize("stacked", [False, True])
def test_loss_scale_draws_the_scale_and_marks_skipped_steps(stacked):
    tx = ols.with_loss_scale(optax.sgd(0.1), ols.DynamicLossScale(initial_scale=8.0))
    state, history = tx.init(jnp.ones(2)), []
    for bad in (0, jnp.inf, 0, jnp.nan):
        _, state = tx.update(jnp.ones(2) + bad, state)
        history.append(ols.metrics(state))
    if stacked:
        history = jax.tree.map(lambda *x: jnp.stack(x), *history)
    axes = plot.loss_scale(history, color="red", label="mine")
    line, marks = axes.lines
    np.testing.assert_array_equal(line.get_ydata(), [8, 4, 4, 2])
    np.testing.assert_array_equal(marks.get_xdata(), [2, 4])
    np.testing.assert_array_equal(marks.get_ydata(), [4, 2])
    assert line.get_color() == marks.get_color() == "red"
    assert line.get_label() == "mine"


def test_crosses_have_the_color_that_matplotlib_chooses_for_the_line():
    history = {"loss_scale": np.ones(3), "should_apply": np.zeros(3, bool)}
    line, marks = plot.loss_scale(history, color=None).lines
    assert line.get_color() == marks.get_color()


@pytest.mark.parametrize(
    "history",
    [
        [],
        [{"loss_scale": 8.0}],
        [8.0],
        {"loss_scale": np.ones(3), "should_apply": np.ones(2, bool)},
    ],
)
def test_what_is_no_history_is_refused(history):
    with pytest.raises(ValueError, match="history must be a sequence of what metrics"):
        plot.loss_scale(history)


def test_draws_into_given_axes():
    _, (first, second) = plt.subplots(2)
    history = {"loss_scale": np.ones(3), "should_apply": np.ones(3, bool)}
    assert plot.loss_scale(history, first, c="red") is first
    assert first.lines[0].get_color() == "red"
    assert not second.lines
