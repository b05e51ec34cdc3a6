"""Plots of the loss scale and of gradients, drawn on the host with matplotlib.

`plot.loss_scale(history)` shows how the loss scale changed during training and whether
many steps were skipped. `plot.exponents(grads)` shows which gradients underflow and how
much room a loss scale leaves them below overflow. The extra `plot` installs matplotlib:
`pip install "optax_lossscale[plot]"`.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from operator import itemgetter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale._arrays import messages, validation
from optax_lossscale._arrays.precision import is_inexact_leaf
from optax_lossscale._diagnosis.axes import GREY, TEAL, Axes, axes_for
from optax_lossscale._step.get import resolve

__all__ = ["AFTER", "BEFORE", "exponents", "loss_scale"]

BEFORE = GREY
"""The color of gradients before scaling."""

AFTER = TEAL
"""The color of scaled gradients and of the loss scale."""


def loss_scale(
    history: Sequence[Mapping[str, Any]] | Mapping[str, Any],
    axes: Axes | None = None,
    **style: Any,
) -> Axes:
    """Draws the loss scale over the steps, with a cross at each skipped step.

    If the scale falls to its floor, with a cross at every step, the gradients are not
    finite at any of these scales, so run `diagnose`.

    Args:
      history: a sequence of what `metrics` returned after each step, or one dict of
        stacked metrics, each of shape (steps,), as `lax.scan` returns them. The plot
        shows the scale after each step.
      axes: the axes to draw into. By default, a new figure is created.
      **style: matplotlib properties of the line, such as `color` and `label`.

    Returns:
      The axes.

    Raises:
      ValueError: if `history` is not such a sequence or dict, is empty, or has columns
        of different lengths.
      TypeError: if `history` is traced, or `axes` are not matplotlib's.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> import optax_lossscale as ols
      >>> tx = ols.with_loss_scale(optax.sgd(0.1))
      >>> state, history = tx.init(jnp.zeros(())), []
      >>> for grad in (jnp.inf, 1.0, jnp.inf, 1.0):
      ...     _, state = tx.update(jnp.array(grad), state)
      ...     history.append(ols.metrics(state))
      >>> ols.plot.loss_scale(history).get_xlabel()
      'step'
    """
    validation.check_concrete("plot.loss_scale", history)
    scale, applied = _table(history).T
    steps = np.arange(1, len(scale) + 1)
    skipped = applied == 0
    axes = axes_for(axes, 2.6)
    if "c" not in style:  # matplotlib accepts `c` for `color`, but not both
        style.setdefault("color", AFTER)
    [line] = axes.step(steps, scale, where="mid", **style)
    color = line.get_color()  # for color=None, matplotlib has chosen one
    axes.plot(steps[skipped], scale[skipped], "x", color=color, zorder=3)
    axes.set_yscale("log", base=2)
    axes.set(xlabel="step", ylabel="loss scale\n(×: step skipped)")
    return axes


def _table(history: Any) -> np.ndarray:
    """Tabulates the scale after each step and whether the step was applied.

    The table has shape (steps, 2).
    """
    columns = itemgetter("loss_scale", "should_apply")
    allowed = (
        "a sequence of what metrics returned after each step, or one dict of them all"
    )
    history = jax.device_get(history)
    try:
        if isinstance(history, Mapping):
            table = np.stack(columns(history), axis=-1)
        else:
            table = np.array([columns(step) for step in history])
    except (KeyError, TypeError, IndexError, ValueError):
        messages.refuse("history", history, allowed)
    if table.ndim != 2 or not table.size:
        messages.refuse("history", history, allowed)
    return table


def exponents(
    scaled_grads: Any,
    loss_scale: Any = 1.0,
    dtype: Any = jnp.float16,
    axes: Axes | None = None,
) -> Axes:
    """Draws a histogram of gradients before and after scaling, with a dtype's range.

    A loss scale fits if the scaled gradients lie between the shaded ranges, in which
    the dtype has only subnormal numbers, zero or infinity. The bins are powers of two,
    and a label says which percentage of the scaled gradients' elements are 0 in the
    dtype. Elements that are 0, infinite or NaN are not drawn, but count in the
    percentages.

    Args:
      scaled_grads: a pytree of gradients of the scaled loss. Gradients computed in
        float32 show what a narrower dtype would lose.
      loss_scale: the loss scale of these gradients: anything that `get` accepts, or a
        state that holds a loss scale.
      dtype: the floating-point dtype whose ranges to show.
      axes: the axes to draw into. By default, a new figure is created.

    Returns:
      The axes.

    Raises:
      ValueError: if `loss_scale` is not a loss scale, or `dtype` is not a
        floating-point dtype.
      TypeError: if an argument is traced, or `axes` are not matplotlib's.

    Example:
      >>> import jax.numpy as jnp
      >>> from optax_lossscale import plot
      >>> grads = {"w": jnp.array([1e-3, 0.5, 2.0])}
      >>> plot.exponents(grads, loss_scale=1024.0).get_xlabel()
      'gradient'
    """
    validation.check_concrete("plot.exponents", (scaled_grads, loss_scale))
    dtype = validation.floating_dtype("dtype", dtype)
    edges = _edges(dtype)
    low, largest_zero, *_, high = edges
    resolved = resolve(loss_scale)
    scale = validation.scale("loss_scale", resolved())
    magnitudes = _magnitudes(scaled_grads)
    axes = axes_for(axes, 3.2)
    if scale == 1:
        _draw_histogram(axes, edges, magnitudes, "gradients", AFTER)
    else:
        _draw_histogram(axes, edges, magnitudes / scale, "unscaled", BEFORE)
        label = f"scaled by $2^{{{np.log2(scale):g}}}$"
        _draw_histogram(axes, edges, magnitudes, label, AFTER)
    becomes_zero = magnitudes <= 2.0**largest_zero
    percent_zero = 100 * np.sum(becomes_zero) / max(1, magnitudes.size)
    labels = [f"{percent_zero:.1f}% are 0", "subnormal", dtype.name, "inf"]
    _shade(axes, edges, labels)
    axes.set(xlim=(low, high), xlabel="gradient", ylabel="share of all (%)")
    axes.locator_params("x", integer=True)
    axes.xaxis.set_major_formatter("$2^{{{x:g}}}$")
    axes.legend(frameon=False)
    return axes


def _draw_histogram(
    axes: Axes, edges: Sequence[int], magnitudes: np.ndarray, label: str, color: str
) -> None:
    """Draws a histogram of absolute values, in percent, with powers of two as bins."""
    low, *_, high = edges
    drawn = magnitudes[(magnitudes > 0) & (magnitudes < np.inf)]
    powers = np.log2(drawn)
    axes.hist(
        np.clip(powers, low, high - 1),  # the outermost bins also count all beyond them
        range(low, high + 1),
        weights=np.full(powers.shape, 100 / max(1, magnitudes.size)),
        histtype="stepfilled",
        color=color,
        alpha=0.5,
        label=label,
    )


def _edges(dtype: np.dtype) -> list[int]:
    """Returns the five exponents of 2 that bound the four ranges of a dtype.

    In these ranges, numbers become zero, subnormal, normal and infinite. For float16,
    the exponents are -31, -25, -14, 16 and 20. The ranges of zero and infinity have no
    end, so they are cut off after 6 bins and 4 bins.
    """
    info = jnp.finfo(dtype)
    largest_zero = info.minexp - info.nmant - 1  # half the smallest number rounds to 0
    return [largest_zero - 6, largest_zero, info.minexp, info.maxexp, info.maxexp + 4]


def _shade(axes: Axes, edges: Sequence[int], labels: Sequence[str]) -> None:
    """Shades the ranges between exponents and writes a label above each."""
    shades = (0.14, 0.06, 0.0, 0.14)
    above = axes.get_xaxis_transform()
    for label, shade, (start, end) in zip(labels, shades, pairwise(edges), strict=True):
        axes.axvspan(start, end, alpha=shade, color="black", lw=0)
        axes.text((start + end) / 2, 1.02, label, ha="center", transform=above)


def _magnitudes(tree: Any) -> np.ndarray:
    """Flattens gradients to absolute values in float64, two for a complex element."""
    leaves = jax.tree.leaves(jax.device_get(tree))
    parts = [np.zeros(0)]
    for leaf in filter(is_inexact_leaf, leaves):
        flat = np.ravel(leaf)
        real = flat.view(flat.real.dtype)
        parts.append(real.astype(np.float64))
    return np.abs(np.concatenate(parts))
