"""The results page and its charts, from results.json alone."""

import pathlib
from collections.abc import Iterable
from typing import Any

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt

from benchmarks import _ways

Row = dict[str, Any]
OURS, PEERS, GREY = "#1f6f8b", "#c9704c", "#999999"


def _where(rows: Iterable[Row], **case: Any) -> list[Row]:
    return [r for r in rows if all(r[k] == v for k, v in case.items())]


def _values(rows: Iterable[Row], key: str) -> list[Any]:
    """The distinct values of a column, in order."""
    return list(dict.fromkeys(r[key] for r in rows))


def table(header: list[str], body: Iterable[list[str]]) -> str:
    """A Markdown table, whose first column has names and the others numbers."""
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [header, rule, *body])


def _ratio(row: Row) -> str:
    low, high = row["quartiles"]
    return f"{row['ratio']:.2f} ({low:.2f} to {high:.2f})"


def _step(rows: list[Row]) -> str:
    dtypes = _values(rows, "dtype")
    parts = []
    for optimizer in _values(rows, "optimizer"):
        of_optimizer = _where(rows, optimizer=optimizer)
        body = []
        for way in _values(of_optimizer, "way"):
            by_dtype = [_where(of_optimizer, way=way, dtype=d)[0] for d in dtypes]
            plain = [_where(of_optimizer, way=_ways.PLAIN, dtype=d)[0] for d in dtypes]
            extra = [
                100 * (r["temp_share"] - p["temp_share"])
                for r, p in zip(by_dtype, plain, strict=True)
            ]
            moved = [
                r["bytes_accessed"] / p["bytes_accessed"]
                for r, p in zip(by_dtype, plain, strict=True)
            ]
            body.append(
                [
                    way,
                    *(_ratio(r) for r in by_dtype),
                    " / ".join(f"{abs(x):.0f}%" for x in extra),
                    " / ".join(f"{x:.2f}" for x in moved),
                    f"{by_dtype[0]['compile_s']:.1f} s",
                ]
            )
        header = [optimizer, *dtypes, "extra memory", "bytes accessed", "to compile"]
        parts.append(table(header, body))
    return "\n\n".join(parts)


def _sizes(rows: list[Row]) -> str:
    sizes = _values(rows, "size")
    body = [
        [way, *(_ratio(_where(rows, way=way, size=n)[0]) for n in sizes)]
        for way in _values(rows, "way")
    ]
    return table(["parameters", *(f"{n // 10**6}M" for n in sizes)], body)


def _leaves(rows: list[Row]) -> str:
    counts = _values(rows, "leaves")
    parts = []
    for title, cell in (
        ("time to compile, seconds (ratio)", _compile_cell),
        ("time of a step (ratio)", lambda row, plain: _ratio(row)),
    ):
        body = []
        for way in _values(rows, "way"):
            cells = []
            for n in counts:
                found = _where(rows, way=way, leaves=n)
                plain = _where(rows, way=_ways.PLAIN, leaves=n)[0]
                cells.append(cell(found[0], plain) if found else "")
            body.append([way, *cells])
        parts.append(table([title, *map(str, counts)], body))
    return "\n\n".join(parts)


def _compile_cell(row: Row, plain: Row) -> str:
    return f"{row['compile_s']:.2f} ({row['compile_s'] / plain['compile_s']:.1f})"


def _check(rows: list[Row]) -> str:
    dtypes = _values(rows, "dtype")
    body = []
    for name in _values(rows, "check"):
        found = [_where(rows, check=name, dtype=d)[0] for d in dtypes]
        body.append([f"`{name}`", *(f"{r['ms']:.1f} ms, {r['gb_per_s']:.0f} GB/s" for r in found)])
    return table(["32M numbers", *dtypes], body)


def _train_step(rows: list[Row]) -> str:
    dtypes = _values(rows, "dtype")
    body = [
        [way, *(_ratio(_where(rows, way=way, dtype=d)[0]) for d in dtypes)]
        for way in _values(rows, "way")
    ]
    return table(["train step", *dtypes], body)


def _whole_step(rows: list[Row]) -> str:
    plain = _where(rows, way=_ways.PLAIN)[0]
    body = [
        [
            r["way"],
            _ratio(r),
            f"{r['ms']:.0f} ms",
            f"{100 * r['temp_share']:.0f}%",
            f"{r['compile_cpu_s']:.1f} s ({r['compile_cpu_s'] / plain['compile_cpu_s']:.2f})",
        ]
        for r in rows
    ]
    return table(["whole step", "time", "", "temporary memory", "to compile"], body)


def _devices(rows: list[Row]) -> str:
    body = [[f"{r['placement']}, {r['way']}", _ratio(r), str(len(r["collectives"]))] for r in rows]
    return table([f"{rows[0]['devices']} devices", "time", "collective operations"], body)


def _limit(found: dict[str, Any]) -> str:
    """AdamW: bytes that must move, against those that do, at the bandwidth of the machine."""
    copy = _where(found["bandwidth"], what="copy")[0]["gb_per_s"]
    read = _where(found["bandwidth"], what="read")[0]["gb_per_s"]
    body = []
    for dtype in _values(found["step"], "dtype"):
        rows = _where(found["step"], optimizer="AdamW", dtype=dtype)
        plain, ours = (_where(rows, way=way)[0] for way in (_ways.PLAIN, _ways.DYNAMIC))
        itemsize = 4 if dtype == "float32" else 2
        # Read parameters, two moments and gradients; write parameters and moments.
        least = plain["size"] * (6 * 4 + itemsize)
        checked = least + plain["size"] * itemsize
        body.append(
            [
                dtype,
                f"{checked / least:.3f}",
                f"{ours['bytes_accessed'] / plain['bytes_accessed']:.3f}",
                f"{ours['ratio']:.3f}",
                f"{least / plain['ms'] / 1e6:.0f} GB/s",
                f"{checked / ours['ms'] / 1e6:.0f} GB/s",
            ]
        )
    header = [
        "AdamW, dynamic",
        "least, by bytes",
        "by the compiler's bytes",
        "measured",
        "plain step moves",
        "ours moves",
    ]
    note = f"The machine copies {copy:.0f} GB/s and reads {read:.0f} GB/s."
    return f"{table(header, body)}\n\n{note}"


_SECTIONS = (
    (
        "step",
        "The optimizer step",
        _step,
        "From given gradients to new parameters: 32M float32 parameters in 100 leaves, with "
        "parameters and state donated. The time is that of the way over that of the optimizer "
        "without loss scaling, with the quartiles; extra memory is what the compiler allocates "
        "beyond the plain step's, in percent of the parameters' bytes; triples are float32, "
        "bfloat16 and float16.",
    ),
    (
        "sizes",
        "From 1M to 128M parameters",
        _sizes,
        "AdamW, float32 gradients, 100 leaves.",
    ),
    (
        "leaves",
        "From 1 to 4000 leaves",
        _leaves,
        "AdamW, 8M parameters. Beyond 400 leaves the peers are left out, for their time to "
        "compile.",
    ),
    ("check", "The check alone", _check, "32M numbers in 100 leaves."),
    (
        "train_step",
        "A whole train step",
        _train_step,
        "The demo's transformer, from a batch to new parameters, computing in this dtype. Tapped, "
        "the step also returns a summary of each block's values and gradients.",
    ),
    (
        "whole_step",
        "A whole float16 step, every way",
        _whole_step,
        "The same transformer in four blocks and wider, with float32 parameters, AdamW and few "
        "tokens, so that the optimizer weighs; its parameters are cast to float16 in the model, "
        "or by `grad_dtype`. Temporary memory is all that the compiler allocates, in percent "
        "of the parameters' bytes; to compile is the processors' time to trace, lower and "
        "compile.",
    ),
    (
        "devices",
        "Several devices",
        _devices,
        "AdamW; replicated parameters under `shard_map`, whose gradients are reduced by one "
        "collective operation in the plain step too, and sharded ones under `jit`. On simulated "
        "devices, which share the cores, only the counts mean something.",
    ),
)


def page(found: dict[str, Any]) -> str:
    """The results page."""
    machine = found["machine"]
    kind = machine["processor"] if machine["platform"] == "cpu" else machine["device"]
    parts = [
        "# What it costs",
        "What loss scaling adds to an optimizer step and to a training step on CPU, in time, "
        "memory and compilation, next to Flax, JMP and Optax.",
        "Made by `python -m benchmarks` (with the extra `benchmarks` installed), every table in "
        "one run: each way compiled once, then run interleaved in random order. Numbers in "
        "[results.json](results.json), remarks in [findings.md](findings.md).",
        f"optax_lossscale {machine['optax_lossscale']}, jax {machine['jax']}, optax "
        f"{machine['optax']}, Python {machine['python']}; {kind}, {machine['cores']} cores; "
        f"{machine['platform']}.",
    ]
    for name, title, section, text in _SECTIONS:
        if name not in found:
            continue
        parts += [f"## {title}", text, section(found[name])]
        if name in ("step", "leaves"):
            parts.append(f"![{title}]({name}.png)")
        if name == "step" and "bandwidth" in found:
            parts += [
                "How far that is from the limit: bytes that must move, against those that do.",
                _limit(found),
            ]
    return "\n\n".join(parts) + "\n"


def draw(found: dict[str, Any], out: pathlib.Path) -> None:
    """The charts, as PNG files in `out`."""
    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
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
        axis.barh(ways, ratios, xerr=spread, color=[_color(w) for w in ways], error_kw={"lw": 0.8})
        for i, (ratio, (_, high)) in enumerate(zip(ratios, quartiles, strict=True)):
            axis.text(max(ratio, high) + 0.1, i, f"{ratio:.2f}", va="center", fontsize=8)
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
    marks = iter("osv^DPX*h")
    for way in _values(rows, "way"):
        found = _where(rows, way=way)
        axis.plot(
            [r["leaves"] for r in found],
            [r["compile_s"] for r in found],
            marker=next(marks),
            markersize=4,
            lw=1.2,
            color=_color(way),
            label=way,
        )
    axis.set(xscale="log", yscale="log", xlabel="leaves", ylabel="seconds to compile")
    axis.legend(frameon=False, fontsize=7)
    figure.savefig(path, dpi=160)
    plt.close(figure)
