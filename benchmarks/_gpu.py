"""A report of the GPU that is there, in ten minutes at most.

What fails, or does not fit into memory or time, is a row that says so.
"""

import argparse
import itertools
import json
import subprocess
import sys
import time
from typing import Any

from benchmarks import _environment, _gpu_steps, _table
from benchmarks._gpu_steps import FLOAT32, MODELS, WAYS

LIMIT_S, CASE_LIMIT_S = 590.0, 150.0
COLUMNS = (
    "training step",
    "ms",
    "quartiles",
    "peak, MiB",
    "planned, MiB",
    "s to compile",
    "loss",
    "skipped",
)
EXPLAINED = """\
In parentheses: over float32. **Peak** is the most memory that was in use, by the device's own
count (`memory_stats`); after ≤ it was so high while compiling already. **Planned** is what the
compiler allocates for arguments, results and all between (`memory_analysis`). **Loss**: that of
the first step, and the mean of the later half before steps were timed. By JAX's default, float32
products run in TF32 on NVIDIA GPUs from the A100's generation on."""
NO_GPU = """\
**This was a CPU, with tiny models, and says nothing about GPUs.** If there is a GPU, install
`jax[cuda12]`."""
Row = dict[str, Any]


def main(options: argparse.Namespace) -> None:
    """Measures everything, with progress on stderr, and prints the report."""
    end = time.monotonic() + LIMIT_S
    # This process leaves the device alone: it would keep most of the memory.
    machine = call(seconds=CASE_LIMIT_S)
    if "failed" in machine:
        raise SystemExit(f"JAX does not start: {machine['failed']}")
    is_cpu = machine["platform"] == "cpu"
    size = "tiny" if is_cpu or options.quick else "full"
    found = {}
    for model, way in itertools.product(options.only or MODELS, WAYS):
        left = min(CASE_LIMIT_S, end - time.monotonic())
        found[model, way] = row = call(size, model, way, seconds=left)
        said = row.get("failed", "done")
        print(f"{model}, {way}: {said}", file=sys.stderr, flush=True)
    print(report(machine | {"size of the models": size}, found))


def call(*arguments: str, seconds: float) -> Row:
    """What a process of its own measures, or why it does not."""
    if seconds <= 0:
        return {"failed": "not run, as the ten minutes were over"}
    command = [sys.executable, "-m", _gpu_steps.__name__, *arguments]
    try:
        result = subprocess.run(
            command, timeout=seconds, stdout=subprocess.PIPE, text=True
        )
        return json.loads(result.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return {"failed": f"took longer than {seconds:.3g} s"}
    except (IndexError, ValueError):
        return {"failed": f"its process ended with exit code {result.returncode}"}


def report(machine: dict[str, str], found: dict[tuple[str, str], Row]) -> str:
    """One block of Markdown, to paste into an issue."""
    is_cpu = machine["platform"] == "cpu"
    where = _environment.processor() if is_cpu else machine["device"]
    about = [f"- {name}: {value}" for name, value in machine.items() if value]
    rows = {
        f"{model}, {way}": cells(row, found[model, FLOAT32])
        for (model, way), row in found.items()
    }
    parts = [
        f"## optax_lossscale on {where}",
        *([NO_GPU] if is_cpu else []),
        "Made by `python -m benchmarks gpu`:",
        "\n".join(about),
        _table.markdown(COLUMNS, rows),
        EXPLAINED,
    ]
    return "\n\n".join(parts)


def cells(row: Row, base: Row) -> list[str]:
    """A row's, or why there is none."""
    if "failed" in row:
        return [row["failed"], *[""] * (len(COLUMNS) - 2)]
    low, ms, high = row["ms"]
    over = lambda of: (
        "" if row is base or "failed" in base else f" ({of(row) / of(base):.2f})"
    )
    peak = "not counted"
    if row["peak"]:
        at_most = "≤ " * (row["peak"] == row["peak_of_compiling"])
        peak = f"{at_most}{_mebi(row['peak'])}{over(lambda r: r['peak'])}"
    return [
        f"{ms:.2f}{over(lambda r: r['ms'][1])}",
        f"{low:.2f} to {high:.2f}",
        peak,
        f"{_mebi(row['planned'])}{over(lambda r: r['planned'])}",
        f"{row['compile_s']:.1f}",
        f"{row['loss'][0]:.4f}, {row['loss'][1]:.4f}",
        f"{row['skipped']} of {row['steps']}",
    ]


def _mebi(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.1f}"
