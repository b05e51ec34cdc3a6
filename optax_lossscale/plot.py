"""A plot of the loss scale and of skipped steps, drawn with matplotlib.

The extra `plot` installs matplotlib: `pip install "optax_lossscale[plot]"`.
"""

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

import jax
import numpy as np

from optax_lossscale._arrays import checks
from optax_lossscale._diagnosis.axes import TEAL, Axes, axes_for

__all__ = ["loss_scale"]


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
    checks.check_concrete("plot.loss_scale", history)
    scale, applied = _table(history).T
    steps = np.arange(1, len(scale) + 1)
    skipped = applied == 0
    axes = axes_for(axes, 2.6)
    if "c" not in style:  # matplotlib accepts `c` for `color`, but not both
        style.setdefault("color", TEAL)
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
        checks.refuse("history", history, allowed)
    if table.ndim != 2 or not table.size:
        checks.refuse("history", history, allowed)
    return table
