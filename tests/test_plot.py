"""`plot.loss_scale`: the picture holds the numbers; how it looks, people look at."""

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


@pytest.mark.parametrize("stacked", [False, True])
def test_draws_the_scale_and_marks_skipped_steps(stacked):
    tx = ols.with_loss_scale(optax.sgd(0.1), ols.DynamicLossScale(initial_scale=8.0))
    state, history = tx.init(jnp.ones(2)), []
    for bad in (0, jnp.inf, 0, jnp.nan):
        _, state = tx.update(jnp.ones(2) + bad, state)
        history.append(ols.metrics(state))
    if stacked:
        history = jax.tree.map(lambda *x: jnp.stack(x), *history)
    axes = plot.loss_scale(history, color="red", label="mine")
    line, marks = axes.lines
    assert axes.get_xlabel() == "step"
    np.testing.assert_array_equal(line.get_ydata(), [8, 4, 4, 2])
    np.testing.assert_array_equal(marks.get_xdata(), [2, 4])
    np.testing.assert_array_equal(marks.get_ydata(), [4, 2])
    assert line.get_color() == marks.get_color() == "red"
    assert line.get_label() == "mine"


@pytest.mark.parametrize("flag", [bool, int, float])
def test_takes_flags_as_loggers_keep_them(flag):
    flags = [flag(step != 1) for step in range(3)]
    history = [{"loss_scale": 8.0, "should_apply": flag} for flag in flags]
    np.testing.assert_array_equal(plot.loss_scale(history).lines[1].get_xdata(), [2])


def test_draws_into_given_axes():
    _, (first, second) = plt.subplots(2)
    history = {"loss_scale": np.ones(3), "should_apply": np.zeros(3, bool)}
    assert plot.loss_scale(history, first, color=None) is first
    line, marks = first.lines
    assert line.get_color() == marks.get_color()
    assert not second.lines
