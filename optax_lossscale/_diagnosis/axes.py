"""What `Diagnosis.plot` draws, and the style that it shares with `ols.plot`.

Importing this file imports matplotlib, which is optional, so `Diagnosis.plot` imports
this file only when it is called. Without matplotlib, an `ImportError` says how to
install it.
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from optax_lossscale._arrays import checks
from optax_lossscale._diagnosis.figures import TOLERANCE
from optax_lossscale._diagnosis.table import Row

try:
    import matplotlib.pyplot as plt
    from matplotlib.axes import Axes
except ImportError as error:
    raise ImportError(
        "plot needs matplotlib: pip install 'optax_lossscale[plot]'"
    ) from error

GREY = "#8a8f98"
TEAL = "#00798c"
_RED = "#d1495b"

# Float16 rounds this magnitude and smaller ones to 0: half of its smallest number.
_ROUNDED_TO_ZERO = 2.0**-25

# Float16 rounds this magnitude and larger ones to infinity: halfway to 2**16.
_ROUNDED_TO_INFINITY = 65520.0


def axes_for(axes: Axes | None, height: float) -> Axes:
    """Returns the given or new axes, with a pale grid and a frame on two sides only.

    Args:
      axes: one matplotlib `Axes`, or None to make a new figure.
      height: the height of a new figure, in inches.

    Raises:
      TypeError: if `axes` is something else, such as an array of `Axes`.
    """
    if axes is None:
        _, axes = plt.subplots(figsize=(7, height), layout="constrained")
    if not isinstance(axes, Axes):
        got = checks.shown(axes)
        raise TypeError(f"axes must be one matplotlib Axes, got {got}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.2)
    return axes


def draw_magnitudes(rows: Sequence[Row], axes: Axes | None) -> Axes:
    """Draws the magnitudes of rows; those that are all 0 have none."""
    axes = axes_for(axes, height=3.2)
    rows = [row for row in rows if row.largest]
    order = np.arange(len(rows))
    largest = np.array([row.largest for row in rows])
    axes.vlines(order, [row.typical for row in rows], largest, color=GREY, lw=0.8)
    is_narrow = np.array([jnp.finfo(row.dtype).bits < 32 for row in rows], bool)
    is_off = np.array([row.error > TOLERANCE for row in rows], bool)
    series = [
        ("16 bits", TEAL, is_narrow),
        ("wider", GREY, ~is_narrow),
        (f"off by more than {TOLERANCE:.0%}", _RED, is_off),
    ]
    for label, color, mask in series:
        axes.plot(order[mask], largest[mask], ".", color=color, label=label)
    backward = [n for n, row in enumerate(rows) if row.is_backward]
    if backward:
        axes.axvline(backward[0] - 0.5, color="black", lw=0.8, ls=":")
    axes.set_yscale("log", base=2)
    # Both shaded ranges are visible even if no dot lies in them.
    bottom, top = axes.get_ylim()
    bottom = min(bottom, _ROUNDED_TO_ZERO / 16)
    top = max(top, _ROUNDED_TO_INFINITY * 16)
    for start, end in ((bottom, _ROUNDED_TO_ZERO), (_ROUNDED_TO_INFINITY, top)):
        axes.axhspan(start, end, color="black", alpha=0.14, lw=0)
    axes.set_ylim(bottom, top)
    axes.set(xlabel="equation of the gradient", ylabel="magnitude")
    axes.legend(frameon=False, fontsize=8)
    return axes
