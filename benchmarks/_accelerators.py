"""What a step costs on accelerators, as compiled for them; nothing is run."""

import functools
import multiprocessing
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib import metadata
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from tqdm import tqdm

import optax_lossscale as ols
from benchmarks import _measure, _report, _targets, _transformer, _ways

Row = dict[str, Any]
TARGETS = {target.name: target for target in _targets.TARGETS}
PLAIN_STEP = "optimizer step"
CLIPPED_STEP = "clipped optimizer step"
WHOLE_STEP = "whole step"
FLOAT16_STEP = "whole step from float32 to float16"
STEPS = (PLAIN_STEP, CLIPPED_STEP, WHOLE_STEP, FLOAT16_STEP)
# Of the transformer, whose parameters are float32.
WHOLE_STEPS = (WHOLE_STEP, FLOAT16_STEP)
DTYPES = ("float32", "float16")
ADAMW = optax.adamw(1e-3)
CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), ADAMW)


class Case(NamedTuple):
    """A program to compile, by the names of what it is made of."""

    step: str
    target: str
    way: str
    dtype: str


def measure(quick: bool, steps: Sequence[str] = STEPS) -> list[Row]:
    """Compiles every way of these steps for every target.

    Raises:
      SystemExit: if a compiler is not installed.
    """
    missing = [name for name, target in TARGETS.items() if not target.is_installed]
    if missing:
        raise SystemExit(
            f"no compiler for {', '.join(missing)}: install the extra `accelerators`, which is "
            "to be had for Linux"
        )
    cases = [
        Case(step, target, way, dtype)
        for target in TARGETS
        for step in steps
        if step != CLIPPED_STEP or target == _targets.H100.name
        for dtype in DTYPES
        if step not in WHOLE_STEPS or dtype == "float16"
        for way in _steps(step)
    ]
    # Each in a process of its own, as compilers remember what they have compiled.
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, mp_context=spawn, max_tasks_per_child=1) as pool:
        rows = pool.map(functools.partial(_costs, quick), cases)
        return list(tqdm(rows, desc="programs", total=len(cases)))


def _steps(step: str) -> dict[str, tuple[_ways.Way, _ways.Step]]:
    """The ways, and with each the function that is compiled."""
    if step == FLOAT16_STEP:
        ways = _ways.in_float16(ADAMW)
        return {name: (way, way.train(loss)) for name, (way, loss) in ways.items()}
    if step == WHOLE_STEP:
        ways = _ways.branches(ADAMW, jnp.float16)
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
    _measure.compile_(jnp.tanh, _targets.place(scalar, device))  # which starts the compiler
    _, costs = _measure.compile_(function, *placed, donate=(0, 1))
    parameter_bytes = sum(4 * x.size for x in jax.tree.leaves(params))
    return case._asdict() | {
        "memory": costs["temp_bytes"] / parameter_bytes,
        "moved": costs["bytes_moved"] / parameter_bytes,
        "copies": costs["copies"],
        "kernels": costs["kernels"],
        "compile_cpu_s": costs["compile_cpu_s"],
    }


def _table(rows: list[Row]) -> str:
    """A row for each way, and in it a number for each dtype, or one where they agree."""
    body = []
    for way in dict.fromkeys(r["way"] for r in rows):
        found = [r for r in rows if r["way"] == way]
        plain = [r for r in rows if r["way"] == _ways.PLAIN]
        compile_ratio = _total(found, "compile_cpu_s") / _total(plain, "compile_cpu_s")
        body.append(
            [
                way,
                _each(f"{100 * r['memory']:.0f}%" for r in found),
                _each(f"{r['moved']:.2f}" for r in found),
                _each(str(r["copies"]) for r in found),
                _each(str(r["kernels"]) for r in found),
                f"{compile_ratio:.1f}",
            ]
        )
    target = rows[0]["target"]
    return _report.table([target, "memory", "moved", "copies", "kernels", "to compile"], body)


def _each(values: Iterable[str]) -> str:
    return " / ".join(dict.fromkeys(values))


def _total(rows: list[Row], key: str) -> float:
    return sum(r[key] for r in rows)


_STEPS = {
    PLAIN_STEP: "From given gradients to new parameters: AdamW, 420M float32 parameters in "
    "100 leaves. Of two numbers, the first is with float32 gradients, the second with float16 "
    "ones.",
    CLIPPED_STEP: "The same with `optax.clip_by_global_norm` before AdamW, inside the "
    "wrapper: the norm and the check can take one pass together.",
    WHOLE_STEP: "The demo's transformer in four blocks of width 1024, 51M float32 parameters "
    "and 2048 tokens, computing in float16: forward, backward and AdamW. The parameters are cast "
    "in the model, or before it by `grad_dtype`. On a TPU much depends on the batch, as the "
    "step without loss scaling applies each gradient as it comes, where the check needs all of "
    "them: on the v5e, with jax 0.10.2, 1024 tokens took 54% without and 73% with it, 4096 took "
    "173% and 202%, and a select by hand the same; on the H100 these took as much without as with "
    "it.",
    FLOAT16_STEP: "The same transformer on 32,768 tokens, where most of the memory is what is "
    "kept for the backward pass: in float32 without loss scaling, cast to float16 in the model by "
    "hand, and the float32 model under `autocast`.",
}


def page(rows: list[Row]) -> str:
    """The page of tables."""
    versions = ", ".join(
        f"{name} {metadata.version(name)}"
        for name in ("jax", "jaxlib", "jax-cuda12-plugin", "libtpu", "optax")
    )
    parts = [
        "# What it costs on a GPU and on TPUs, as compiled",
        "What loss scaling adds to the memory, the traffic and the compilation of a training step "
        "on GPU and TPU, by what their compilers make of it.",
        "**These programs were compiled for an H100, a TPU v5e and a TPU v6e, and not run**: no "
        "such device was at hand. They say what the compiler allocates and schedules, and nothing "
        "about time; nor were kernels tuned, as that takes the device. Made by "
        "`python -m benchmarks accelerators`, with the extras `benchmarks` and `accelerators` "
        f"installed; optax_lossscale {ols.__version__}, {versions}.",
        "Parameters and state are donated. *Memory* is what the program allocates besides its "
        "arguments and results, and *moved* is the bytes of the operands and results of all that "
        "it runs, both over the parameters' bytes; on a TPU what stays on the chip is not "
        "counted. Of a conditional, the branch of an applied step counts. *Copies* are those "
        "from main memory to main memory, some of them of scalars; *kernels* are what computes. "
        "*To compile* is the processors' time to trace, lower and compile, over that of the "
        "step without loss scaling. A step of this library's is a select, as it is by default on "
        'these platforms; `branch="cond"` is the conditional that is the default on CPU.',
    ]
    for step, text in _STEPS.items():
        of_step = [r for r in rows if r["step"] == step]
        if not of_step:
            continue
        parts += [f"## {step.capitalize()}", text]
        for target in dict.fromkeys(r["target"] for r in of_step):
            parts.append(_table([r for r in of_step if r["target"] == target]))
    return "\n\n".join(parts) + "\n"
