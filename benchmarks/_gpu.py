"""What this library does on the GPU that is there: `python -m benchmarks gpu` prints a report.

Ten minutes at most. What fails, or does not fit into memory or time, is a row that says so.
"""

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks import _alone, _gpu_report, _gpu_steps, _machine

LIMIT_S = 590.0
CASE_LIMIT_S = 150.0
NO_GPU = (
    "JAX finds no GPU, so this measures the CPU, with small models. "
    "If there is a GPU, install `jax[cuda12]`."
)


def main(options: argparse.Namespace) -> None:
    """Measures everything, with progress on stderr, and prints the report."""
    start = time.monotonic()
    try:
        # This process leaves the device alone, which would keep most of its memory from
        # others.
        machine = _alone.call(_machine.for_report, seconds=CASE_LIMIT_S)
    except _alone.CallError as failure:
        raise SystemExit(f"JAX does not start: {failure}") from None
    if machine["platform"] == "cpu":
        _say(NO_GPU)
    size = (
        "tiny" if options.quick else "small" if machine["platform"] == "cpu" else "full"
    )
    found = measure(size, start + LIMIT_S)
    minutes, seconds = divmod(round(time.monotonic() - start), 60)
    machine["took"] = f"{minutes}:{seconds:02d} minutes, models of size `{size}`"
    print(_gpu_report.page(machine, found))


def measure(size: str, deadline: float) -> _gpu_report.Found:
    """The costs of each model's step, and the losses of one model, each in its own process."""
    cases: dict[_gpu_report.Case, tuple[Callable[..., Any], ...]] = {
        (_gpu_report.LEARNING, way): (_gpu_steps.losses, size, way)
        for way in _gpu_steps.WAYS
    }
    for model in _gpu_steps.FULL:
        for way in _gpu_steps.WAYS:
            cases[model, way] = (_gpu_steps.costs, size, model, way)
    found = {}
    for number, (case, call) in enumerate(cases.items(), start=1):
        start = time.monotonic()
        found[case] = _result(call, min(CASE_LIMIT_S, deadline - start))
        is_failure = isinstance(found[case], _alone.CallError)
        said = found[case] if is_failure else f"{time.monotonic() - start:.0f} s"
        _say(f"[{number}/{len(cases)}] {', '.join(case)}: {said}")
    return found


def _result(call: tuple[Callable[..., Any], ...], seconds: float) -> Any:
    if seconds <= 0:
        return _alone.CallError("not run, as the ten minutes were over")
    try:
        return _alone.call(*call, seconds=seconds)
    except _alone.CallError as failure:
        return failure


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
