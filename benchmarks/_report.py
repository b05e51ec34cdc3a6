"""The results page and its charts, from results.json alone."""

import itertools
import pathlib
from collections.abc import Iterable
from typing import Any

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt

from benchmarks import _tables, _ways

Row = dict[str, Any]
OURS, PEERS, GREY = "#1f6f8b", "#c9704c", "#999999"


def _where(rows: Iterable[Row], **case: Any) -> list[Row]:
    return [r for r in rows if all(r[k] == v for k, v in case.items())]


def _values(rows: Iterable[Row], key: str) -> list[Any]:
    """The distinct values of a column, in order."""
    return list(dict.fromkeys(r[key] for r in rows))


def _ratio(row: Row) -> str:
    low, high = row["quartiles"]
    return f"{row['ratio']:.2f} ({low:.2f} to {high:.2f})"


def _step(rows: list[Row]) -> str:
    """AdamW alone: the other optimizers are in results.json."""
    rows = _where(rows, optimizer="AdamW")
    dtypes = _values(rows, "dtype")
    body = []
    for way in _values(rows, "way"):
        by_dtype = [_where(rows, way=way, dtype=d)[0] for d in dtypes]
        plain = [_where(rows, way=_ways.PLAIN, dtype=d)[0] for d in dtypes]
        extra = [
            100 * (r["temp_share"] - p["temp_share"])
            for r, p in zip(by_dtype, plain, strict=True)
        ]
        times = [_ratio(by_dtype[0]), *(f"{r['ratio']:.2f}" for r in by_dtype[1:])]
        body.append([way, *times, " / ".join(f"{abs(x):.0f}%" for x in extra)])
    return _tables.markdown(["AdamW", *dtypes, "extra memory"], body)


def _leaves(rows: list[Row]) -> str:
    counts = _values(rows, "leaves")
    body = []
    for way in _values(rows, "way"):
        cells = []
        for n in counts:
            found = _where(rows, way=way, leaves=n)
            plain = _where(rows, way=_ways.PLAIN, leaves=n)[0]
            cells.append(_compile_cell(found[0], plain) if found else "")
        body.append([way, *cells])
    return _tables.markdown(["seconds to compile (ratio)", *map(str, counts)], body)


def _compile_cell(row: Row, plain: Row) -> str:
    return f"{row['compile_s']:.2f} ({row['compile_s'] / plain['compile_s']:.1f})"


def _compiling(rows: list[Row]) -> str:
    tables = []
    for program in _values(rows, "program"):
        body = []
        for r in _where(rows, program=program):
            ratios = (f"{r[key]:.2f}" for key in ("trace_ratio", "compile_ratio"))
            body.append([r["way"], *ratios, f"{r['compile_cpu_s']:.1f} s"])
        header = [program, "trace", "trace, lower and compile", "processor time"]
        tables.append(_tables.markdown(header, body))
    return "\n\n".join(tables)


def _check(rows: list[Row]) -> str:
    dtypes = _values(rows, "dtype")
    body = []
    for name in _values(rows, "check"):
        found = [_where(rows, check=name, dtype=d)[0] for d in dtypes]
        body.append(
            [
                f"`{name}`",
                *(f"{r['ms']:.1f} ms, {r['gb_per_s']:.0f} GB/s" for r in found),
            ]
        )
    return _tables.markdown(["32M numbers", *dtypes], body)


def _train_step(rows: list[Row]) -> str:
    dtypes = _values(rows, "dtype")
    body = [
        [way, *(_ratio(_where(rows, way=way, dtype=d)[0]) for d in dtypes)]
        for way in _values(rows, "way")
    ]
    return _tables.markdown(["train step", *dtypes], body)


def _whole_step(rows: list[Row]) -> str:
    body = [
        [
            r["way"],
            _ratio(r),
            f"{r['ms']:.0f} ms",
            f"{100 * r['temp_share']:.0f}%",
        ]
        for r in rows
    ]
    return _tables.markdown(
        ["whole step", "time, relative", "time", "temporary memory"], body
    )


def _models(rows: list[Row]) -> str:
    body = [
        [
            f"{r['model']}, {r['way']}",
            _ratio(r),
            f"{r['ms']:.1f} ms",
            f"{r['temp_bytes'] >> 20} MB",
        ]
        for r in rows
    ]
    return _tables.markdown(
        ["gradient", "time, relative", "time", "temporary memory"], body
    )


def _devices(rows: list[Row]) -> str:
    body = [
        [f"{r['placement']}, {r['way']}", _ratio(r), str(len(r["collectives"]))]
        for r in rows
    ]
    return _tables.markdown(
        [f"{rows[0]['devices']} devices", "time", "collective operations"], body
    )


_SECTIONS = (
    (
        "whole_step",
        "A whole float16 step, every method",
        _whole_step,
        "A transformer in four blocks of width 512, from a batch to new parameters: "
        "float32 parameters, AdamW, and so few tokens that the optimizer takes a visible share. "
        "The casts to float16 are in the model, or made by `autocast`. Temporary "
        "memory is all that the compiler allocates, as a percentage of the parameters' bytes.",
    ),
    (
        "train_step",
        "A whole train step",
        _train_step,
        "The same transformer in two blocks of width 128, in two dtypes.",
    ),
    (
        "step",
        "The optimizer step alone",
        _step,
        "From given gradients to new parameters: 32M float32 parameters in 100 leaves, with "
        "parameters and state donated. Flax's `TrainState` and `nnx.Optimizer` call `update`; "
        "`apply_gradients` is faster, as it never writes the updates to memory. Extra memory is "
        "what the compiler allocates beyond the step without loss scaling, as a percentage of the "
        "parameters' bytes, for float32, bfloat16 and float16 gradients.",
    ),
    (
        "compiling",
        "The time to compile",
        _compiling,
        "The processor's time to trace a program, and to trace, lower and compile it, from cold "
        "caches: medians of five, relative to the first row. The whole step is the one above, and "
        "the gradient is of its model.",
    ),
    (
        "leaves",
        "The time to compile many leaves",
        _leaves,
        "AdamW alone, 8M parameters in 1 to 4000 leaves. Beyond 400 leaves the other libraries "
        "are left out, for their time to compile.",
    ),
    ("check", "The check alone", _check, "32M numbers in 100 leaves."),
    (
        "models",
        "Models in 16 bits",
        _models,
        "The value and the gradient of the models of [autocast.md](autocast.md), relative to the "
        "cast by hand.",
    ),
    (
        "devices",
        "Several devices",
        _devices,
        "AdamW; replicated parameters under `shard_map`, whose gradients are reduced by one "
        "collective operation in the plain step too, and sharded ones under `jit`. The devices "
        "are simulated and share the cores, so only the counts are meaningful.",
    ),
)


def page(found: dict[str, Any]) -> str:
    """The results page."""
    machine = found["machine"]
    kind = machine["processor"] if machine["platform"] == "cpu" else machine["device"]
    parts = [
        "# What it costs on a CPU",
        _answer(found),
        "Times are ratios to the same step without loss scaling, with quartiles. Each method was "
        "compiled once, and all were run interleaved in random order. A ratio is the median of "
        "the rounds' ratios, so it differs from the ratio of two medians in ms. Made by "
        "`python -m benchmarks` (with the extra `benchmarks` installed); all numbers, with SGD, "
        "Lion and other sizes, are in [results.json](results.json). With `--report` it redraws "
        "this page from that file.",
        f"optax_lossscale {machine['optax_lossscale']}, jax {machine['jax']}, optax "
        f"{machine['optax']}, Python {machine['python']}; {kind}, {machine['cores']} cores; "
        f"{machine['platform']}.",
    ]
    for name, title, section, text in _SECTIONS:
        if not found.get(name):
            continue
        parts += [f"## {title}", text, section(found[name])]
        if name in ("step", "leaves"):
            parts.append(f"![{title}]({name}.png)")
    return "\n\n".join(parts) + "\n"


def _answer(found: dict[str, Any]) -> str:
    """What the tables say, in a paragraph."""
    if not {"whole_step", "step"} <= found.keys():
        return (
            "What loss scaling adds to an optimizer step and to a training step on CPU."
        )
    of_step = {r["way"]: r["ratio"] for r in found["whole_step"]}
    of_adamw = {
        r["way"]: r["ratio"]
        for r in _where(found["step"], optimizer="AdamW", dtype="float32")
    }
    ours = of_step[_OURS]
    others = [of_step[way] for way in _OTHERS]
    return (
        f"**With this library, a whole training step takes {ours:.2f} times as long as without "
        f"loss scaling; with other methods, {min(others):.2f} to {max(others):.2f} times.** In "
        f"the optimizer step alone, methods differ more: {of_adamw[_OURS]:.2f} times with "
        f"`apply_gradients`, {of_adamw[_UPDATE]:.2f} with `update`, and up to "
        f"{max(of_adamw.values()):.2f} with others."
    )


_OURS = "apply_gradients, dynamic"
_UPDATE = "update, dynamic"
# `optax.apply_if_finite` has no loss scale.
_OTHERS = ("Flax DynamicScale", "JMP", "jnp.where by hand")


def draw(found: dict[str, Any], out: pathlib.Path) -> None:
    """The charts, as PNG files in `out`."""
    plt.rcParams.update(
        {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
    )
    if "step" in found:
        _draw_step(_where(found["step"], optimizer="AdamW"), out / "step.png")
    if "leaves" in found:
        _draw_leaves(found["leaves"], out / "leaves.png")


def _color(way: str) -> str:
    if way == _ways.PLAIN:
        return GREY
    return OURS if way.startswith(("apply_gradients", "update")) else PEERS


def _draw_step(rows: list[Row], path: pathlib.Path) -> None:
    dtypes, ways = _values(rows, "dtype"), _values(rows, "way")
    figure, axes = plt.subplots(1, 3, figsize=(9, 3), sharey=True, layout="constrained")
    for axis, dtype in zip(axes, dtypes, strict=True):
        found = [_where(rows, way=way, dtype=dtype)[0] for way in ways]
        ratios = [r["ratio"] for r in found]
        quartiles = [r["quartiles"] for r in found]
        spread = [
            [max(0, r - low) for r, (low, _) in zip(ratios, quartiles, strict=True)],
            [max(0, high - r) for r, (_, high) in zip(ratios, quartiles, strict=True)],
        ]
        axis.barh(
            ways,
            ratios,
            xerr=spread,
            color=[_color(w) for w in ways],
            error_kw={"lw": 0.8},
        )
        for i, (ratio, (_, high)) in enumerate(zip(ratios, quartiles, strict=True)):
            axis.text(
                max(ratio, high) + 0.1, i, f"{ratio:.2f}", va="center", fontsize=8
            )
        axis.axvline(1, color="black", lw=0.6)
        axis.set_xlim(0, max(r["quartiles"][1] for r in rows) * 1.15)
        axis.set_title(f"{dtype} gradients")
        axis.set_xlabel("time over the plain step's")
    axes[0].invert_yaxis()
    figure.suptitle("AdamW, 32M parameters in 100 leaves")
    figure.savefig(path, dpi=160)
    plt.close(figure)


def _draw_leaves(rows: list[Row], path: pathlib.Path) -> None:
    figure, axis = plt.subplots(figsize=(6, 3.6), layout="constrained")
    for way, mark in zip(
        _values(rows, "way"), itertools.cycle("osv^DPX*h"), strict=False
    ):
        found = _where(rows, way=way)
        axis.plot(
            [r["leaves"] for r in found],
            [r["compile_s"] for r in found],
            marker=mark,
            markersize=4,
            lw=1.2,
            color=_color(way),
            label=way,
        )
    axis.set(xscale="log", yscale="log", xlabel="leaves", ylabel="seconds to compile")
    axis.legend(frameon=False, fontsize=7)
    figure.savefig(path, dpi=160)
    plt.close(figure)
