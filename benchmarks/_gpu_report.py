"""The report of a GPU, as one block of Markdown to paste into an issue."""

import math
import statistics
from typing import TypeAlias

from benchmarks import _alone, _tables
from benchmarks._gpu_steps import FLOAT32, FULL, LOSS_STEPS, WAYS, Costs, Losses

LEARNING = "losses"
WINDOW = 50  # steps whose losses are averaged
Case: TypeAlias = tuple[str, str]  # a model and a way, or `LEARNING` and a way
Found: TypeAlias = dict[Case, Costs | Losses | _alone.CallError]

_COSTS = [
    "training step",
    "ms",
    "quartiles",
    "peak, MiB",
    "planned, MiB",
    "s to compile",
    "loss, step 5",
    "skipped",
]
_EXPLAINED = (
    "In parentheses: relative to float32. **Peak** is the most memory that was in use, by the "
    "device's own count (`memory_stats`), with a process for each row; after ≤, that was while "
    "compiling, and steps needed less. **Planned** is what the compiler allocates for arguments, "
    "results and all between (`memory_analysis`). **Skipped** counts steps that the loss scale "
    "skipped, out of all that were taken."
)
_TF32 = (
    "By JAX's default, float32 products run in TF32 on NVIDIA GPUs from the A100's "
    "generation on."
)


def page(machine: dict[str, str], found: Found) -> str:
    """The block, from what `_machine.for_report` says and what was measured."""
    is_cpu = machine["platform"] == "cpu"
    where = f"a CPU, {machine['processor']}" if is_cpu else machine["device"]
    about = [f"- {name}: {value}" for name, value in machine.items() if value]
    parts = [
        f"## optax_lossscale on {where}",
        "\n".join(["Made by `python -m benchmarks gpu`:", "", *about]),
        _costs_table(found),
        _EXPLAINED if is_cpu else f"{_EXPLAINED} {_TF32}",
        _losses_table(found),
    ]
    if is_cpu:
        parts.insert(
            1, "**This was a CPU, with small models, and says nothing about GPUs.**"
        )
    return "\n\n".join(parts)


def _costs_table(found: Found) -> str:
    body = []
    for model in FULL:
        base = found[model, FLOAT32]
        for way in WAYS:
            costs = found[model, way]
            is_measured = isinstance(costs, Costs)
            cells = _cost_cells(costs, base) if is_measured else _failed(costs, _COSTS)
            body.append([f"{model}, {way}", *cells])
    return _tables.markdown(_COSTS, body)


def _cost_cells(costs: Costs, base: Costs | _alone.CallError) -> list[str]:
    relative_to = base if isinstance(base, Costs) and base is not costs else None
    low, high = costs.quartiles
    return [
        f"{costs.ms:.2f}{_ratio(costs.ms, relative_to and relative_to.ms)}",
        f"{low:.2f} to {high:.2f}",
        _peak(costs, relative_to),
        f"{_mebi(costs.planned)}{_ratio(costs.planned, relative_to and relative_to.planned)}",
        f"{costs.compile_s:.1f}",
        f"{costs.loss:.4f}",
        f"{costs.skipped} of {costs.steps}",
    ]


def _peak(costs: Costs, base: Costs | None) -> str:
    if costs.peak is None:
        return "not counted"
    at_most = "≤ " if costs.peak_of_compiling else ""
    return f"{at_most}{_mebi(costs.peak)}{_ratio(costs.peak, base and base.peak)}"


def _losses_table(found: Found) -> str:
    starts = range(0, LOSS_STEPS, WINDOW)
    windows = [f"{start + 1} to {start + WINDOW}" for start in starts]
    header = [
        "mean loss of steps",
        *windows,
        "farthest from float32",
        "skipped",
        "loss scale",
    ]
    base = found[LEARNING, FLOAT32]
    body = []
    for way in WAYS:
        learned = found[LEARNING, way]
        is_measured = isinstance(learned, Losses)
        cells = _loss_cells(learned, base) if is_measured else _failed(learned, header)
        body.append([way, *cells])
    return _tables.markdown(header, body)


def _loss_cells(learned: Losses, base: Losses | _alone.CallError) -> list[str]:
    losses = learned.losses
    means = [
        statistics.fmean(losses[i : i + WINDOW]) for i in range(0, len(losses), WINDOW)
    ]
    farthest = ""
    if isinstance(base, Losses) and base is not learned:
        farthest = f"{max(map(_distance, losses, base.losses)):.4f}"
    scale = "" if learned.loss_scale is None else f"{learned.loss_scale:g}"
    return [*(f"{mean:.4f}" for mean in means), farthest, str(learned.skipped), scale]


def _failed(failure: _alone.CallError, header: list[str]) -> list[str]:
    """The reason, and cells that are empty."""
    return [str(failure), *[""] * (len(header) - 2)]


def _ratio(value: float, base: float | None) -> str:
    return f" ({value / base:.2f})" if base else ""


def _mebi(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.1f}"


def _distance(x: float, y: float) -> float:
    """Which is infinite beside a NaN."""
    return abs(x - y) if math.isfinite(x) and math.isfinite(y) else math.inf
