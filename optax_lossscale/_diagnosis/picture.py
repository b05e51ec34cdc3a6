"""`Diagnosis.plot`: the magnitude of each result, beside the range of float16."""

import numpy as np

from optax_lossscale._diagnosis.axes import GREY, TEAL, Axes, axes_for
from optax_lossscale._diagnosis.figures import TOLERANCE
from optax_lossscale._diagnosis.notes import least_infinite
from optax_lossscale._diagnosis.table import Table

_RED = "#d1495b"

# Float16 rounds this magnitude and smaller ones to 0. It is half of the smallest
# positive float16.
_ROUNDED_TO_ZERO = 2.0**-25

# Float16 rounds this magnitude and larger ones to infinity.
_ROUNDED_TO_INFINITY = least_infinite(np.float16)


def magnitudes(table: Table, axes: Axes | None = None) -> Axes:
    """Draws the largest magnitude of each result as a dot, in the program's order.

    A thin line connects the dot to the root mean square of the result. A dotted line
    marks where the backward pass begins. The magnitudes that float16 cannot hold are
    shaded. Results that are all 0 are left out, because the axis is logarithmic.
    """
    axes = axes_for(axes, height=3.2)
    rows = [row for row in table.rows if row.largest]
    order = np.arange(len(rows))
    largest = np.array([row.largest for row in rows])
    typical = [row.rms or np.nan for row in rows]  # no line is drawn to NaN
    axes.vlines(order, typical, largest, color=GREY, lw=0.8)
    is_narrow = np.array([row.dtype.itemsize < 4 for row in rows], bool)
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
        start = backward[0] - 0.5
        axes.axvline(start, color="black", lw=0.8, ls=":")
    axes.set_yscale("log", base=2)
    _shade(axes)
    axes.set(xlabel="equation of the gradient", ylabel="magnitude")
    axes.legend(frameon=False, fontsize=8)
    return axes


def _shade(axes: Axes) -> None:
    """Shades the magnitudes that float16 rounds to zero or to infinity."""
    bottom, top = axes.get_ylim()
    # Both shaded ranges are visible even if no dot lies in them.
    bottom = min(bottom, _ROUNDED_TO_ZERO / 16)
    top = max(top, _ROUNDED_TO_INFINITY * 16)
    axes.axhspan(bottom, _ROUNDED_TO_ZERO, color="black", alpha=0.14, lw=0)
    axes.axhspan(_ROUNDED_TO_INFINITY, top, color="black", alpha=0.14, lw=0)
    axes.set_ylim(bottom, top)
