"""What the demo shows of its runs: a table and a picture."""

import pathlib
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import numpy as np

from optax_lossscale import plot
from optax_lossscale.demo._training import CAUSE

COLORS = ["#222222", "#d1495b", "#edae49", "#00798c"]
HEAD = """\
| run | final loss | against float32 | last gradients that are 0 | skipped | last scale |
| --- | ---: | ---: | ---: | ---: | ---: |"""


def table(runs: dict[str, dict[str, Any]]) -> str:
    """A Markdown table with a row for each run; losses relative to float32's, the first run."""
    rows = [HEAD]
    reference = _final_loss(runs["float32"])
    for name, history in runs.items():
        loss = _final_loss(history)
        against = loss / reference - 1
        zeros = history["zeros"]
        skipped = history["skipped_steps"][-1]
        exponent = history["log2_loss_scale"][-1]
        rows.append(
            f"| {name} | {loss:.4f} | {against:+.2%} | {zeros:.1%} | {skipped} | "
            f"2^{exponent:g} |"
        )
    return "\n".join(rows)


def picture(runs: dict[str, dict[str, Any]], folder: pathlib.Path) -> pathlib.Path:
    """Losses and loss scales over the steps, as a PNG; returns its path."""
    matplotlib.use("agg")
    figure = plt.figure(figsize=(7, 5.5), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    for (name, history), color in zip(runs.items(), COLORS, strict=False):
        # float32 goes beneath, wide and pale: two of the others lie on top of it.
        style = {"lw": 5, "alpha": 0.25} if name == "float32" else {"lw": 1.3}
        loss = _smoothed(history["loss"])
        top.plot(np.arange(1, len(loss) + 1), loss, color=color, label=name, **style)
        plot.loss_scale(history, bottom, color=color, **style)
    top.set_title(CAUSE, fontsize=9)
    top.set_ylabel("loss (nats per byte, running mean)")
    top.legend(frameon=False)
    top.spines[["top", "right"]].set_visible(False)
    top.grid(alpha=0.2)
    path = folder / "loss_scaling.png"
    figure.savefig(path, dpi=160)
    return path


def _final_loss(history: dict[str, Any]) -> float:
    """The mean of the last tenth of the steps."""
    loss = history["loss"]
    tenth = max(1, len(loss) // 10)
    return loss[-tenth:].mean()


def _smoothed(loss: np.ndarray, window: int = 10) -> np.ndarray:
    """The mean of the last `window` values, or of as many as there are."""
    sums = np.convolve(loss, np.ones(window))[: len(loss)]
    counts = np.minimum(np.arange(len(loss)) + 1, window)
    return sums / counts
