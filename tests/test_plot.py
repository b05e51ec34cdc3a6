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
        "ols.get('dynamic')\n"
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


def test_the_module_exports_its_functions_and_the_colors_of_what_is_scaled():
    axes = ols.plot.loss_scale([{"loss_scale": 8.0, "should_apply": True}])
    assert axes.get_lines()[0].get_color() == ols.plot.AFTER
    assert ols.plot.BEFORE != ols.plot.AFTER
    assert plot.__all__ == ["AFTER", "BEFORE", "exponents", "loss_scale"]


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
    assert plot.exponents([jnp.ones(3)], axes=second) is second


def test_exponents_draws_shares_before_and_after_scaling():
    grads = {"a": jnp.array([0.0, 1.0, 1.5, -3.0]), "b": None, "c": jnp.float16(4.0)}
    axes = plot.exponents(grads, jnp.float32(2.0))
    before, after = (patch.get_path().vertices for patch in axes.patches[:2])
    share = lambda vertices, power: vertices[vertices[:, 0] == power][:, 1].max()
    assert share(after, 0) == share(after, 1) == 40  # percent: 1 and 1.5 of five
    assert share(before, -1) == 40
    assert after[:, 1].max() == 40
    texts = [text.get_text() for text in axes.texts]
    assert texts == ["20.0% are 0", "subnormal", "float16", "inf"]


def test_exponents_counts_what_becomes_zero_in_the_dtype():
    grads = jnp.array([1e-9, 2.0**-25, 2.0**-24, 1.0])
    texts = [
        plot.exponents(grads, dtype=d).texts[0] for d in (jnp.float16, jnp.float32)
    ]
    assert [text.get_text() for text in texts] == ["50.0% are 0", "0.0% are 0"]


def test_exponents_unscales_by_any_number():
    axes = plot.exponents([jnp.full(3, 1010.0)], loss_scale=1000.0)
    before = axes.patches[0].get_path().vertices
    assert set(before[before[:, 1] > 0][:, 0]) == {0, 1}


@pytest.mark.parametrize(
    ("tree", "zeros"),
    [({}, 0), ([None, 3], 0), ([jnp.zeros((0, 3))], 0), ([jnp.zeros(3)], 100)],
)
def test_exponents_of_a_tree_without_nonzero_numbers_says_how_many_are_zero(
    tree, zeros
):
    texts = plot.exponents(tree, dtype=jnp.bfloat16).texts
    assert texts[0].get_text() == f"{zeros:.1f}% are 0"


def test_exponents_counts_both_parts_of_complex_numbers():
    texts = plot.exponents([jnp.array([1j, 1 + 1j])], ols.get(2)).texts
    assert texts[0].get_text() == "25.0% are 0"
