"""What a step costs on accelerators, as compiled for them; nothing is run."""

import argparse
import functools
import multiprocessing
import pathlib
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib import metadata
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from tqdm import tqdm

import optax_lossscale as ols
from benchmarks import _measure, _tables, _targets, _transformer, _ways
from benchmarks._tables import Table

Row = dict[str, Any]
TARGETS = {target.name: target for target in _targets.TARGETS}
PLAIN_STEP = "optimizer step"
CLIPPED_STEP = "clipped optimizer step"
WHOLE_STEP = "whole step"
FLOAT16_STEP = "whole step from float32 to float16"
STEPS = (PLAIN_STEP, CLIPPED_STEP, WHOLE_STEP, FLOAT16_STEP)
# Of the transformer, whose parameters are float32.
WHOLE_STEPS = (WHOLE_STEP, FLOAT16_STEP)
# A clip's norm shares its pass with the check on the H100. On older GPUs only whole
# steps count.
_H100, *_OLDER = (t.name for t in _targets.TARGETS if t.platform == "cuda")
_ON = {CLIPPED_STEP: [_H100], PLAIN_STEP: [t for t in TARGETS if t not in _OLDER]}
DTYPES = ("float32", "float16")
ADAMW = optax.adamw(1e-3)
CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), ADAMW)


class Case(NamedTuple):
    """A program to compile, by the names of its parts."""

    step: str
    target: str
    way: str
    dtype: str


def main(options: argparse.Namespace) -> None:
    """Writes the tables and the page; or the page alone, from the tables that are there."""
    csv = pathlib.Path(options.out) / "accelerators.csv"
    csv.parent.mkdir(parents=True, exist_ok=True)
    if not options.report:
        before = _tables.read(csv) if options.only else {}
        _tables.write(
            csv, before | tables(measure(options.quick, options.only or STEPS))
        )
    _tables.write_page(csv, page)


def measure(quick: bool, steps: Sequence[str] = STEPS) -> list[Row]:
    """Compiles every way of these steps for every target.

    Raises:
      SystemExit: if a compiler is not installed.
    """
    refuse_missing_compilers()
    cases = [
        Case(step, target, way, dtype)
        for target in TARGETS
        for step in steps
        if target in _ON.get(step, TARGETS)
        for dtype in DTYPES
        if step not in WHOLE_STEPS or dtype == "float16"
        for way in _steps(step)
    ]
    # Each in a process of its own, as compilers remember what they have compiled.
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, mp_context=spawn, max_tasks_per_child=1) as pool:
        rows = pool.map(functools.partial(_costs, quick), cases)
        return list(tqdm(rows, desc="programs", total=len(cases)))


def refuse_missing_compilers() -> None:
    """Ends the program if a compiler is not installed."""
    missing = [name for name, target in TARGETS.items() if not target.is_installed]
    if missing:
        raise SystemExit(
            f"no compiler for {', '.join(missing)}: install the extra `compilers`, which is "
            "available for Linux"
        )


def versions() -> Table:
    """Those of the compilers, as a table."""
    compilers = ("jax", "jaxlib", "jax-cuda12-plugin", "libtpu", "optax")
    found = {name: metadata.version(name) for name in compilers}
    return {"run": {"optax_lossscale": ols.__version__} | found}


def _steps(step: str) -> dict[str, tuple[_ways.Way, _ways.Step]]:
    """The ways, and with each the function that is compiled."""
    if step == FLOAT16_STEP:
        ways = _ways.in_float16(ADAMW)
        return {name: (way, way.train(loss)) for name, (way, loss) in ways.items()}
    if step == WHOLE_STEP:
        ways = _ways.branches(ADAMW)
        return {name: (way, way.train(_transformer.loss)) for name, way in ways.items()}
    ways = _ways.branches(CLIPPED if step == CLIPPED_STEP else ADAMW)
    return {name: (way, way.step) for name, way in ways.items()}


def _arguments(case: Case, quick: bool) -> tuple[Any, Any]:
    """Parameters, and a batch or gradients."""
    if case.step in WHOLE_STEPS:
        params = jax.eval_shape(lambda: _transformer.init(256 if quick else 1024))
        batch = 512 if case.step == FLOAT16_STEP and not quick else 32
        return params, jax.eval_shape(lambda: _transformer.tokens(batch))
    # Four million each, together more than a TPU keeps on the chip.
    params = [jax.ShapeDtypeStruct((2048, 2048), jnp.float32)] * (8 if quick else 100)
    return params, [jax.ShapeDtypeStruct(p.shape, case.dtype) for p in params]


def _costs(quick: bool, case: Case) -> Row:
    way, function = _steps(case.step)[case.way]
    params, batch = _arguments(case, quick)
    device = TARGETS[case.target].device()
    placed = _targets.place((params, jax.eval_shape(way.init, params), batch), device)
    scalar = jax.ShapeDtypeStruct((), jnp.float32)
    # which starts the compiler
    _measure.compile_(jnp.tanh, _targets.place(scalar, device))
    with TARGETS[case.target].as_default():
        _, costs = _measure.compile_(function, *placed, donate=(0, 1))
    parameter_bytes = sum(4 * x.size for x in jax.tree.leaves(params))
    return case._asdict() | {
        "memory": costs["temp_bytes"] / parameter_bytes,
        "moved": costs["bytes_moved"] / parameter_bytes,
        "copies": costs["copies"],
        "kernels": costs["kernels"],
        "compile_cpu_s": costs["compile_cpu_s"],
    }


def _table(rows: list[Row]) -> Table:
    """A row for each way, with a number for each dtype, or one if they agree."""
    plain = [r for r in rows if r["way"] == _ways.PLAIN]
    table = {}
    for way in dict.fromkeys(r["way"] for r in rows):
        found = [r for r in rows if r["way"] == way]
        compile_ratio = _total(found, "compile_cpu_s") / _total(plain, "compile_cpu_s")
        table[way] = {
            "memory": _each(f"{100 * r['memory']:.0f}%" for r in found),
            "moved": _each(f"{r['moved']:.2f}" for r in found),
            "copies": _each(str(r["copies"]) for r in found),
            "kernels": _each(str(r["kernels"]) for r in found),
            "to compile": f"{compile_ratio:.1f}",
        }
    return table


def _each(values: Iterable[str]) -> str:
    return " / ".join(dict.fromkeys(values))


def _total(rows: list[Row], key: str) -> float:
    return sum(r[key] for r in rows)


def tables(rows: list[Row]) -> dict[str, Table]:
    """All tables, and the versions of the compilers."""
    found = {"versions": versions()}
    for step, target in dict.fromkeys((r["step"], r["target"]) for r in rows):
        of_both = [r for r in rows if (r["step"], r["target"]) == (step, target)]
        found[f"{step}, {target}"] = _table(of_both)
    return found


# What the page shows: of each step these ways, and the numbers of those columns on each
# target.
_COLUMNS = ("memory", "moved")
_EVERY_WAY = (
    _ways.PLAIN,
    "apply_gradients",
    "update",
    "Flax DynamicScale",
    "JMP",
    "optax.apply_if_finite",
    "jnp.where by hand",
)
_STEPS = {
    WHOLE_STEP: (
        _EVERY_WAY,
        "A transformer in four blocks of width 1024, 51M float32 parameters and 2048 "
        "tokens, cast to float16 in the model: forward, backward and AdamW. On a TPU much depends "
        "on the batch, as the step without loss scaling can apply each gradient as it comes, "
        "while the check needs all of them first: on the v5e, with jax 0.10.2, 1024 tokens took "
        "54% of memory without loss scaling and 73% with it, and 4096 tokens 173% and 202%. A "
        "select written by hand took the same.",
    ),
    PLAIN_STEP: (
        _EVERY_WAY,
        "From given gradients to new parameters: AdamW, 420M float32 parameters in 100 leaves. Of "
        "two numbers, the first is with float32 gradients, the second with float16 ones.",
    ),
    CLIPPED_STEP: (
        _EVERY_WAY,
        "The same with `optax.clip_by_global_norm` before AdamW, inside the wrapper. The norm and "
        "the check take one pass together, so the check is free.",
    ),
    FLOAT16_STEP: (
        (_ways.PLAIN, "by hand", "autocast"),
        "The same transformer on 32,768 tokens, where most of the memory is what is kept for "
        "the backward pass: in float32 without loss scaling, cast to float16 in the model by "
        "hand, and the float32 model under `autocast`.",
    ),
}


def page(found: dict[str, Table]) -> str:
    """The page, with a few rows and columns of each table."""
    made_with = ", ".join(
        f"{name} {it}" for name, it in found["versions"]["run"].items()
    )
    parts = [
        "# What it costs on GPUs and TPUs, as compiled",
        _answer(found),
        "**These programs were compiled for an H100, a V100, a T4, a TPU v5e and a TPU v6e, and "
        "never run**, as no such device was at hand. They say what the compiler allocates and "
        "schedules, and nothing about time. Kernels were not tuned, as that takes the device. The "
        "V100 and the T4 were described to the compiler from their data sheets.",
        "*Memory* is what the program allocates besides its arguments and results, and *moved* "
        "the bytes that it reads and writes, both per parameter byte. On a TPU, what "
        "stays on the chip is not counted. Parameters and state are donated. Copies, kernels, "
        "times to compile and other variants, among them `branch`, are in "
        "[accelerators.csv](accelerators.csv).",
        "Made by `python -m benchmarks accelerators`, with the extras `benchmarks` and "
        f"`compilers` installed; {made_with}. With `--report` it redraws this page from that "
        "file.",
    ]
    for step, (ways, text) in _STEPS.items():
        targets = [
            target for target in TARGETS.values() if f"{step}, {target.name}" in found
        ]
        if not targets:
            continue
        parts += [f"## {step.capitalize()}", text]
        for platform in dict.fromkeys(target.platform for target in targets):
            of_platform = [
                target.name for target in targets if target.platform == platform
            ]
            side_by_side = {
                way: {
                    f"{target}: {column}": found[f"{step}, {target}"][way][column]
                    for target in of_platform
                    for column in _COLUMNS
                }
                for way in ways
            }
            parts.append(_tables.show(step, side_by_side))
    return "\n\n".join(parts) + "\n"


def _answer(found: dict[str, Table]) -> str:
    """What the whole step says, in a paragraph."""
    tables = {name: found.get(f"{WHOLE_STEP}, {name}") for name in TARGETS}
    if not all(tables.values()):
        what = "What loss scaling adds to a step"
        return f"{what}, by what the compilers for GPU and TPU make of it."

    def more(platform: str, ways: Sequence[str]) -> str:
        """From the least to the most that they add to the bytes of the plain step."""
        percent = [
            100 * (float(table[way]["moved"]) / float(table[_ways.PLAIN]["moved"]) - 1)
            for name, table in tables.items()
            if TARGETS[name].platform == platform
            for way in ways
        ]
        return f"{min(percent):.0f}% to {max(percent):.0f}%"

    return (
        f"**Loss scaling adds {more('cuda', [*_METHODS, _EXCEPTION])} to the bytes that a whole "
        f"training step moves on GPUs, by any method, and {more('tpu', _METHODS)} on TPUs, where "
        f"`{_EXCEPTION}` adds {more('tpu', [_EXCEPTION])}.**"
    )


_METHODS = [
    "apply_gradients",
    "update",
    "Flax DynamicScale",
    "JMP",
    "jnp.where by hand",
]
_EXCEPTION = "optax.apply_if_finite"
