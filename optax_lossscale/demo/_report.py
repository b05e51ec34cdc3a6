"""What the demo shows of its runs: a table and a picture."""

import os
import pathlib

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import LogLocator

from optax_lossscale import plot
from optax_lossscale.demo._training import Run

COLORS = ["#222222", "#d1495b", "#edae49", "#00798c"]


def table(runs: list[Run]) -> str:
    """A Markdown table, a row a run; losses relative to the first run."""
    lines = [
        "| run | final loss | against float32 | gradients that are 0 | skipped | last scale "
        "| ms a step |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for run in runs:
        relative = run.final_loss / runs[0].final_loss - 1
        lines.append(
            f"| {run.name} | {run.final_loss:.4f} | {relative:+.2%} | {run.zeros.mean():.1%} "
            f"| {np.sum(~run.applied)} | 2^{np.log2(run.loss_scale[-1]):g} "
            f"| {run.milliseconds:.0f} |"
        )
    return "\n".join(lines)


def picture(runs: list[Run], folder: pathlib.Path) -> pathlib.Path:
    """Losses and loss scales over the steps, as a PNG; returns its path."""
    matplotlib.use("agg")
    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(7, 5.5), sharex=True, height_ratios=(2, 1), layout="constrained"
    )
    for run, color in zip(runs, COLORS, strict=False):
        steps = np.arange(1, len(run.loss) + 1)
        # float32 goes beneath, wide and pale: two of the others lie on top of it.
        reference = run.name == "float32"
        style = {"lw": 5, "alpha": 0.25} if reference else {"lw": 1.3}
        top.plot(steps, _smoothed(run.loss), color=color, label=run.name, **style)
        if not reference:
            history = {"loss_scale": run.loss_scale, "should_apply": run.applied}
            plot.loss_scale(history, bottom, color=color, lw=1.3)
    top.set_ylabel("loss (nats a byte, running mean)")
    top.legend(frameon=False)
    bottom.set_yscale("log", base=2)  # of float32 alone there is nothing to draw
    bottom.yaxis.set_major_locator(LogLocator(base=2**8))
    top.spines[["top", "right"]].set_visible(False)
    top.grid(alpha=0.2)
    path = folder / "loss_scaling.png"
    unfinished = path.with_suffix(".part")
    figure.savefig(unfinished, format="png", dpi=160)
    plt.close(figure)
    os.replace(unfinished, path)
    return path


def _smoothed(loss: np.ndarray, window: int = 10) -> np.ndarray:
    """The mean of the last `window` values, or of as many as there are."""
    sums = np.concatenate([[0.0], np.cumsum(loss, dtype=np.float64)])
    ends = np.arange(1, len(sums))
    starts = np.maximum(0, ends - window)
    return (sums[ends] - sums[starts]) / (ends - starts)
