"""The picture of a table: magnitudes along the program, and the range of float16."""

import math
from typing import Any

import numpy as np

from optax_lossscale._diagnosis.notes import TOLERANCE, limits
from optax_lossscale._diagnosis.table import Table

_RANGE = (2.0**-24, limits(np.float16)[0])  # of float16, subnormal numbers included


def magnitudes(table: Table, axes: Any = None) -> Any:
    """Draws the largest and the typical size of each 16-bit result, in the program's order."""
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError("plot needs matplotlib: pip install 'optax_lossscale[plot]'") from error
    if axes is None:
        _, axes = plt.subplots(figsize=(7, 3.2), layout="constrained")
    rows = [row for row in table.rows if row.largest and row.dtype.itemsize < 8]
    places = np.arange(len(rows))
    largest = np.array([row.largest for row in rows])
    typical = np.array([row.typical or math.nan for row in rows])
    narrow = np.array([row.dtype.itemsize < 4 for row in rows], bool)
    off = np.array([row.error > TOLERANCE for row in rows], bool)
    axes.vlines(places, typical, largest, color="#8a8f98", lw=0.8)
    axes.plot(places[narrow], largest[narrow], ".", color="#00798c", ms=4, label="16 bits")
    axes.plot(places[~narrow], largest[~narrow], ".", color="#8a8f98", ms=3, label="wider")
    axes.plot(places[off], largest[off], "x", color="#d1495b", ms=5, label="off by more than 5%")
    axes.set_yscale("log", base=2)
    low, high = axes.get_ylim()
    least, most = _RANGE
    low, high = min(low, least / 16), max(high, most * 16)
    axes.axhspan(low, least, color="black", alpha=0.14, lw=0)
    axes.axhspan(most, high, color="black", alpha=0.14, lw=0)
    backward = next((n for n, row in enumerate(rows) if row.is_backward), None)
    if backward is not None:
        axes.axvline(backward - 0.5, color="black", lw=0.8, ls=":")
    axes.set(ylim=(low, high), xlabel="equation of the gradient", ylabel="size in float32")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    return axes
