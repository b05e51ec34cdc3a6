"""The page and the pictures of `python -m benchmarks rescaling`, from its numbers alone."""

import pathlib
from typing import Any

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import MaxNLocator

from benchmarks._report import GREY, OURS, PEERS, table

FLOAT32, FIXED, DYNAMIC, HEADROOM, BLOCKS, WHOLE = (
    "float32",
    "best fixed",
    "dynamic",
    "headroom",
    "rescaled blocks",
    "rescaled whole",
)
_GLOBAL = (FIXED, DYNAMIC, HEADROOM)
_PAGE = pathlib.Path(__file__).with_name("_rescaling_page.txt")


def _mean_and_error(values: np.ndarray) -> str:
    error = values.std(ddof=1) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return f"{values.mean():+.4f} ± {error:.4f}"


def _final(case: dict[str, Any], way: str) -> np.ndarray:
    return np.array(case["ways"][way]["loss"])


def _losses(cases: list[dict[str, Any]]) -> str:
    body = []
    for case in cases:
        wide = _final(case, FLOAT32)
        cells = [f"{wide.mean():.4f} (from {wide.min():.4f} to {wide.max():.4f})"]
        for way in (*_GLOBAL, BLOCKS, WHOLE):
            if way not in case["ways"]:
                cells.append("")
                continue
            scale = f" (2^{np.log2(case['ways'][way]['scale']):.0f})" if way == FIXED else ""
            cells.append(_mean_and_error(_final(case, way) - wide) + scale)
        body.append([case["name"], *cells])
    return table(["final loss", FLOAT32, *_GLOBAL, BLOCKS, WHOLE], body)


def _gains(cases: list[dict[str, Any]]) -> str:
    """Rescaled blocks against each of the others, seed by seed."""
    body = []
    for case in cases:
        ours = _final(case, BLOCKS)
        body.append([case["name"], *(_mean_and_error(ours - _final(case, w)) for w in _GLOBAL)])
    return table(["rescaled blocks less …", *_GLOBAL], body)


def _percent(share: float) -> str:
    return f"{100 * share:.2f}" if share else "0"


def _shares(cases: list[dict[str, Any]]) -> str:
    body = []
    for case in cases:
        cells = []
        for way in (*_GLOBAL, BLOCKS, WHOLE):
            of_way = case["ways"].get(way)
            skipped = of_way and np.mean(of_way["skipped"])
            cells.append(f"{_percent(skipped)} / {_percent(of_way['flushed'])}" if of_way else "")
        body.append([case["name"], *cells])
    return table(["steps skipped / gradients flushed, %", *_GLOBAL, BLOCKS, WHOLE], body)


def _scales(cases: list[dict[str, Any]], scales: list[float]) -> str:
    body = [[case["name"], *(f"{np.mean(x):.4f}" for x in case["fixed"])] for case in cases]
    return table(["fixed scale", *(f"2^{np.log2(s):.0f}" for s in scales)], body)


def _margins(rows: list[dict[str, Any]], margins: list[int]) -> str:
    body = []
    for row in rows:
        cells = [
            f"{_percent(overflows)} / " + ("–" if flushed is None else f"{100 * flushed:.3f}")
            for overflows, flushed in zip(row["overflows"], row["flushed"], strict=True)
        ]
        body.append([f"{row['model']}, {row['what']}", *cells])
    return table(["steps overflowing / gradients flushed, %", *map(str, margins)], body)


def _trained(rows: list[dict[str, Any]]) -> str:
    body = [
        [
            str(row["margin"]),
            ", ".join(_percent(share) for share in row["skipped"]),
            ", ".join(f"{loss:.2f}" for loss in row["loss"]),
        ]
        for row in rows
    ]
    return table(["margin", "steps skipped, % of each seed", "final loss of each seed"], body)


def page(found: dict[str, Any]) -> str:
    """The page with all tables, in Markdown."""
    machine, cases = found["machine"], found["cases"]
    return _PAGE.read_text().format(
        minutes=f"{found['minutes']:.0f}",
        platform=machine["platform"],
        jax=machine["jax"],
        optax=machine["optax"],
        scales=len(found["scales"]),
        interval=found["interval"],
        margin=found["margin"],
        seeds=len(found["seeds"]),
        steps="; ".join(f"{case['name']}: {case['steps']}" for case in cases),
        losses=_losses(cases),
        gains=_gains(cases),
        fixed=_scales(cases, found["scales"]),
        shares=_shares(cases),
        margins=_margins(found["margins"], found["margin_bits"]),
        trained=_trained(found["trained"]),
    )


_COLORS = {FLOAT32: GREY, FIXED: "#d8a31a", DYNAMIC: PEERS, HEADROOM: "#8d6a9f", BLOCKS: OURS}


def _draw_losses(cases: list[dict[str, Any]], path: pathlib.Path) -> None:
    rows = -(-len(cases) // 3)
    figure, axes = plt.subplots(
        rows, 3, figsize=(9.5, 2.6 * rows), layout="constrained", squeeze=False
    )
    for axis, case in zip(axes.flat, cases, strict=False):
        for way, color in _COLORS.items():
            curve = np.array(case["ways"][way]["curve"])
            steps = np.linspace(0, case["steps"], len(curve), endpoint=False)
            style = {"lw": 4, "alpha": 0.4} if way == FLOAT32 else {"lw": 1.2}
            axis.plot(steps, curve, color=color, label=way, **style)
        axis.set_yscale("log")
        axis.set_title(case["name"].replace(", float8", ",\nfloat8"), loc="left", fontsize=8)
        axis.tick_params(labelsize=7, which="both")
    for axis in axes.flat[len(cases) :]:
        axis.set_visible(False)
    axes[0, 0].legend(frameon=False, fontsize=7)
    figure.supxlabel("step", fontsize=9)
    figure.supylabel("loss, mean over seeds", fontsize=9)
    figure.savefig(path, dpi=140)
    plt.close(figure)


def _draw_exponents(found: list[dict[str, Any]], path: pathlib.Path) -> None:
    figure, axes = plt.subplots(
        1, len(found), figsize=(9.5, 3), sharey=True, layout="constrained", squeeze=False
    )
    for axis, model in zip(axes.flat, found, strict=True):
        axis.axhspan(16, 20, color="black", alpha=0.14, lw=0)
        axis.axhspan(-24, -14, color="black", alpha=0.06, lw=0)
        axis.axhspan(-32, -24, color="black", alpha=0.14, lw=0)
        for label, color in (("before", PEERS), ("after", OURS)):
            largest = np.array(model[label], float)
            largest[largest == 0] = np.nan
            axis.plot(np.log2(largest), color=color, marker=".", ms=3, lw=1, label=label)
            zeros = np.flatnonzero(np.isnan(largest))
            axis.plot(zeros, np.full(len(zeros), -28), "x", color=color, ms=4)
        axis.set_title(
            model["model"].replace("work without", "work\nwithout"), loc="left", fontsize=8
        )
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.set_ylim(-32, 20)
        axis.tick_params(labelsize=7)
    axes[0, 0].legend(frameon=False, fontsize=7)
    for text, y in (("inf", 17), ("subnormal", -20), ("all zero", -31)):
        axes[0, 0].text(0.3, y, text, fontsize=7)
    figure.supxlabel("block, from the input to the output", fontsize=9)
    figure.supylabel("log2 of the largest cotangent", fontsize=9)
    figure.savefig(path, dpi=140)
    plt.close(figure)


def draw(found: dict[str, Any], out: pathlib.Path) -> None:
    """The pictures, as PNG files in `out`."""
    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    _draw_losses(found["cases"], out / "rescaling_losses.png")
    _draw_exponents(found["exponents"], out / "rescaling_exponents.png")
