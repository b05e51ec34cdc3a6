"""Plots, drawn on the host. They need matplotlib, which the extra `plot` installs."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

try:
    import matplotlib.pyplot as plt
    from matplotlib.axes import Axes
    from matplotlib.ticker import MaxNLocator
except ImportError as error:
    raise ImportError(
        "plot needs matplotlib: pip install 'optax_lossscale[plot]'"
    ) from error

from optax_lossscale._arrays import validation
from optax_lossscale._arrays.precision import is_inexact
from optax_lossscale._step.get import resolve

BEFORE = "#8a8f98"
AFTER = "#00798c"
# Of zero, the subnormal numbers, the normal ones and infinity
_SHADES = (0.14, 0.06, 0.0, 0.14)


def loss_scale(
    history: Sequence[Mapping[str, Any]] | Mapping[str, Any],
    axes: Axes | None = None,
    **style: Any,
) -> Axes:
    """The loss scale over the steps, with a cross at each skipped step.

    Args:
      history: a sequence of the `metrics` after each step; or one dict of them stacked,
        shape (steps,), as `lax.scan` returns them. The scale drawn is the one after the
        step.
      axes: the axes to draw into and to return; by default those of a new figure.
      **style: matplotlib properties of the line, such as `color` and `label`.

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
    validation.at_hand("plot.loss_scale", history)
    scale = _column(history, "loss_scale")
    applied = _column(history, "should_apply")
    steps = np.arange(1, len(scale) + 1)
    skipped = ~applied.astype(bool)
    axes = _axes(axes, 2.6)
    look: dict[str, Any] = {"color": AFTER, "lw": 1.5} | style
    axes.step(steps, scale, where="mid", **look)
    cross: dict[str, Any] = {"ms": 6, "mew": 1.5, "zorder": 3, "color": look["color"]}
    axes.plot(steps[skipped], scale[skipped], "x", **cross)
    axes.set_yscale("log", base=2)
    axes.set(xlabel="step", ylabel="loss scale\n(×: step skipped)")
    return _plain(axes)


def _column(history: Any, name: str) -> np.ndarray:
    """One of the metrics after each step."""
    try:
        if isinstance(history, Mapping):
            column = history[name]
        else:
            column = [step[name] for step in history]
    except (KeyError, TypeError, IndexError):
        column = ()
    numbers = np.array(jax.device_get(column))
    if numbers.ndim != 1 or not numbers.size:
        validation.refuse(
            "history",
            history,
            "a sequence of what metrics returned after each step, or one dict of them all",
        )
    return numbers


def exponents(
    scaled_grads: Any,
    loss_scale: Any = 1.0,
    dtype: Any = jnp.float16,
    axes: Axes | None = None,
) -> Axes:
    """A histogram of gradients before and after scaling, against a dtype's range.

    The bins are powers of two; the ranges in which the dtype has subnormal numbers,
    zero and infinity are shaded. Infinities and NaNs are not drawn, but count in the
    percentages.

    Args:
      scaled_grads: gradients of the scaled loss; any pytree. If computed in float32,
        they show what a narrower dtype would lose.
      loss_scale: the scale of these: anything that `get` accepts, or a state that holds
        one.
      dtype: the floating-point dtype whose ranges are shown.
      axes: the axes to draw into and to return; by default those of a new figure.

    Example:
      >>> import jax.numpy as jnp
      >>> from optax_lossscale import plot
      >>> plot.exponents({"w": jnp.array([1e-3, 0.5, 2.0])}, loss_scale=1024.0).get_xlabel()
      'gradient'
    """
    validation.at_hand("plot.exponents", (scaled_grads, loss_scale))
    dtype = validation.floating_dtype("dtype", dtype)
    scale = validation.scale("loss_scale", resolve(loss_scale)())
    shift = float(np.log2(scale))
    sizes = _sizes(scaled_grads)
    percent = 100 / max(1, sizes.size)
    drawn = sizes[(sizes > 0) & (sizes < np.inf)]
    powers = np.floor(np.log2(drawn))
    histograms = [(powers, AFTER, "gradients")]
    if shift:
        scaled = f"scaled by $2^{{{shift:g}}}$"
        histograms = [(powers - shift, BEFORE, "unscaled"), (powers, AFTER, scaled)]

    info = jnp.finfo(dtype)
    flushed = info.minexp - info.nmant - 1
    low = flushed - 6
    largest = max(np.max(x, initial=info.maxexp + 2) for x, *_ in histograms)
    high = np.ceil(largest + 1)
    bins = list(np.arange(low, high + 1))
    axes = _axes(axes, 3.2)
    for exponents, color, label in histograms:
        axes.hist(
            np.maximum(exponents, low),  # anything smaller is in the first bin
            bins,
            weights=np.full(exponents.shape, percent),
            histtype="stepfilled",
            facecolor=(color, 0.35),
            edgecolor=color,
            lw=1.5,
            label=label,
        )
    names = ("zero", "subnormal", dtype.name, "inf")
    edges = [low, flushed, info.minexp, info.maxexp, high]
    place: dict[str, Any] = {"transform": axes.get_xaxis_transform(), "ha": "center"}
    for name, start, end, shade in zip(names, edges, edges[1:], _SHADES, strict=False):
        axes.axvspan(start, end, alpha=shade, color="black", lw=0, zorder=0)
        axes.text((start + end) / 2, 1.02, name, fontsize=9, **place)
    zeros = f"{percent * np.sum(sizes == 0):.1f}% are 0"
    axes.text((low + flushed) / 2, 0.92, zeros, fontsize=8, **place)
    axes.set(xlim=(low, high), xlabel="gradient", ylabel="share of all (%)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.xaxis.set_major_formatter(lambda power, _: f"$2^{{{power:g}}}$")
    axes.legend(frameon=False)
    return _plain(axes)


def _sizes(tree: Any) -> np.ndarray:
    """The absolute values of all numbers; a complex number is viewed as two."""
    parts = [np.zeros(0)]
    for leaf in jax.tree.leaves(jax.device_get(tree)):
        if is_inexact(leaf):
            real = np.ravel(leaf).view(leaf.real.dtype)
            parts.append(real.astype(np.float64))
    return np.abs(np.concatenate(parts))


def _axes(axes: Axes | None, height: float) -> Axes:
    """The axes to draw into: those that are given, or new ones."""
    if axes is None:
        _, axes = plt.subplots(figsize=(7, height), layout="constrained")
    if not isinstance(axes, Axes):
        got = validation.shown(axes)
        raise TypeError(f"axes must be one matplotlib Axes, got {got}")
    return axes


def _plain(axes: Axes) -> Axes:
    """Without a frame, and with a pale grid."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.2)
    return axes
