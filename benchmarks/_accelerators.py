"""What loss scaling adds to a step on GPUs and TPUs, as compiled for them."""

import argparse
import functools

import jax
import jax.numpy as jnp
import optax

from benchmarks import _compiled, _table, _targets, _transformer, _ways
from benchmarks._compiled import Case, Costs, Found

ADAMW = optax.adamw(1e-3)
WHOLE_STEP, OPTIMIZER_STEP = PROGRAMS = ("whole step", "optimizer step")
COND = 'update, branch="cond"'
WAYS = _ways.ways(ADAMW) | {COND: _ways.update(ADAMW, branch="cond")}
PLAIN = next(iter(WAYS))


def main(options: argparse.Namespace) -> None:
    """Compiles every way for every target, and prints a table for each program."""
    cases = [Case(p, w, t) for p in PROGRAMS for w in WAYS for t in _targets.TARGETS]
    of = functools.partial(costs, options.quick)
    found = _compiled.measure(cases, of, options)
    for program in PROGRAMS:
        if any(case.program == program for case in found):
            print("\n" + table(program, found, options.quick))


def costs(quick: bool, case: Case) -> Costs:
    """Compiles a program."""
    way = WAYS[case.way]
    params, batch = arguments(case.program, quick)
    is_whole = case.program == WHOLE_STEP
    step = way.train(_transformer.loss) if is_whole else way.step
    args = params, jax.eval_shape(way.init, params), batch
    placed = _targets.place(args, _targets.TARGETS[case.target].device())
    return _compiled.costs(step, placed, case.target, donate=(0, 1))


def arguments(program: str, quick: bool):
    """Parameters, and the tokens or gradients for a step.

    They are a transformer of width 1024 on 2048 tokens, whose model casts its parameters to
    float16 itself; or 420 million in 100 leaves, more than a TPU keeps on the chip.
    """
    if program == WHOLE_STEP:
        params = jax.eval_shape(lambda: _transformer.init(128 if quick else 1024))
        return params, jax.eval_shape(lambda: _transformer.tokens(32))
    shape, count = ((128, 128), 4) if quick else ((2048, 2048), 100)
    params = [jax.ShapeDtypeStruct(shape, jnp.float32)] * count
    return params, params


def table(program: str, found: Found, quick: bool) -> str:
    """Bytes moved over those without loss scaling, and further memory over the parameters'."""
    params, _ = arguments(program, quick)
    size = sum(4 * x.size for x in jax.tree.leaves(params))
    targets = [t for t in _targets.TARGETS if (program, PLAIN, t) in found]
    rows = {}
    for way in WAYS:
        both = [(found[program, way, t], found[program, PLAIN, t]) for t in targets]
        rows[way] = [
            f"{x.moved / y.moved:.2f} / {round(100 * (x.memory - y.memory) / size)}%"
            for x, y in both
        ]
    return _table.markdown([program, *targets], rows)
