"""The picture of a table: magnitudes along the program, and the range of float16."""

import math
from typing import Any

import numpy as np

from optax_lossscale._diagnosis.notes import TOLERANCE, limits
from optax_lossscale._diagnosis.table import Table

_GREY = "#8a8f98"
_LEAST = 2.0**-24  # of float16, subnormal numbers included
_MOST, _ = limits(np.float16)
_ROOM = 16  # times beyond the range of float16 that are shown at least


def magnitudes(table: Table, axes: Any = None) -> Any:
    """Draws the largest and the typical size of each result, in the program's order."""
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError(
            "plot needs matplotlib: pip install 'optax_lossscale[plot]'"
        ) from error
    if axes is None:
        _, axes = plt.subplots(figsize=(7, 3.2), layout="constrained")
    rows = [row for row in table.rows if row.largest and row.dtype.itemsize < 8]
    places = np.arange(len(rows))
    largest = np.array([row.largest for row in rows])
    typical = np.array([row.typical or math.nan for row in rows])
    narrow = np.array([row.dtype.itemsize < 4 for row in rows], bool)
    off = np.array([row.error > TOLERANCE for row in rows], bool)

    def mark(which: np.ndarray, marker: str, **look: Any) -> None:
        if which.any():  # or the legend would name what is not there
            axes.plot(places[which], largest[which], marker, **look)

    axes.vlines(places, typical, largest, color=_GREY, lw=0.8)
    mark(narrow, ".", color="#00798c", ms=4, label="16 bits")
    mark(~narrow, ".", color=_GREY, ms=3, label="wider")
    mark(off, "x", color="#d1495b", ms=5, label="off by more than 5%")
    axes.set_yscale("log", base=2)
    bottom, top = axes.get_ylim()
    bottom = min(bottom, _LEAST / _ROOM)
    top = max(top, _MOST * _ROOM)
    for low, high in ((bottom, _LEAST), (_MOST, top)):
        axes.axhspan(low, high, color="black", alpha=0.14, lw=0)
    backward = [place for place in places if rows[place].is_backward]
    if backward:
        axes.axvline(backward[0] - 0.5, color="black", lw=0.8, ls=":")
    axes.set(
        ylim=(bottom, top), xlabel="equation of the gradient", ylabel="size in float32"
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    return axes
