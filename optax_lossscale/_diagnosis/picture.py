"""The picture of a table: magnitudes along the program, with float16's range."""

import numpy as np

from optax_lossscale._arrays.axes import GREY, TEAL, Axes, axes_for
from optax_lossscale._diagnosis.figures import TOLERANCE
from optax_lossscale._diagnosis.notes import limits
from optax_lossscale._diagnosis.table import Table

_RED = "#d1495b"
_SMALLEST = 2.0**-24  # of float16, subnormal numbers included
_LARGEST, _ = limits(np.float16)


def magnitudes(table: Table, axes: Axes | None = None) -> Axes:
    """Draws the largest and the typical size of each result, in the program's order."""
    axes = axes_for(axes, 3.2)
    rows = [row for row in table.rows if row.largest]
    places = np.arange(len(rows))
    largest = np.array([row.largest for row in rows])
    typical = [row.typical or np.nan for row in rows]
    narrow = np.array([row.dtype.itemsize < 4 for row in rows], bool)
    off = np.array([row.error > TOLERANCE for row in rows], bool)
    marked = {
        "16 bits": (narrow, TEAL),
        "wider": (~narrow, GREY),
        "off by more than 5%": (off, _RED),
    }
    axes.vlines(places, typical, largest, color=GREY, lw=0.8)
    for label, (which, color) in marked.items():
        axes.plot(places[which], largest[which], ".", color=color, label=label)
    axes.set_yscale("log", base=2)
    bottom, top = axes.get_ylim()
    bottom = min(bottom, _SMALLEST / 16)
    top = max(top, _LARGEST * 16)
    for low, high in ((bottom, _SMALLEST), (_LARGEST, top)):
        axes.axhspan(low, high, color="black", alpha=0.14, lw=0)
    backward = [n for n in places if rows[n].is_backward]
    if backward:
        axes.axvline(backward[0] - 0.5, color="black", lw=0.8, ls=":")
    axes.set(ylim=(bottom, top), xlabel="equation of the gradient", ylabel="size")
    axes.legend(frameon=False, fontsize=8)
    return axes
