"""What autocast costs on GPUs and TPUs, beside float32 and a cast by hand, as compiled."""

import argparse
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import optax_lossscale as ols
from benchmarks import (
    _between_devices,
    _compiled,
    _models,
    _table,
    _targets,
    _transformer,
    _ways,
)
from benchmarks._compiled import Case, Costs, Found

ADAMW = optax.adamw(1e-3)
FLOAT32, BY_HAND, AUTOCAST = WAYS = ("float32", "cast by hand", "autocast")
WHOLE_STEP = "whole step"
GATHERED = "a whole transformer, its weights gathered"
BETWEEN_DEVICES = (*_between_devices.LOSSES, GATHERED)
ROWS = 8192  # of the batch between devices, and columns


def main(options: argparse.Namespace) -> None:
    """Compiles all, and prints three tables."""
    cases = [Case(WHOLE_STEP, way, t) for way in WAYS for t in _targets.TARGETS]
    of_gradients = [
        *itertools.product(_models.MODELS, ("H100", "v5e")),
        *itertools.product(BETWEEN_DEVICES, ("H100",)),
    ]
    cases += [Case(p, w, t) for p, t in of_gradients for w in (BY_HAND, AUTOCAST)]
    of = functools.partial(costs, options.quick)
    found = _compiled.measure(cases, of, options)
    for table in (whole_step_table, models_table, between_devices_table):
        print("\n" + table(found))


def costs(quick: bool, case: Case) -> Costs:
    """Compiles a program."""
    if case.program == WHOLE_STEP:
        return _whole_step(quick, case)
    cast = _models.by_hand if case.way == BY_HAND else _models.left
    if case.program in _models.MODELS:
        model = _models.MODELS[case.program](cast)
        place = _targets.TARGETS[case.target].device()
        return _gradient(model.loss, (model.params, *model.batch), place, case)
    mesh = _targets.TARGETS[case.target].mesh()
    by_rows = _targets.by_rows(mesh)
    if case.program != GATHERED:
        square = jax.ShapeDtypeStruct((ROWS, ROWS), jnp.float32)
        loss = _between_devices.LOSSES[case.program](cast, mesh)
        return _gradient(loss, (square, square), by_rows, case)
    model = _models.transformer(cast)
    whole = lambda x: jax.ShapeDtypeStruct((8 * x.shape[0], *x.shape[1:]), x.dtype)
    loss = _between_devices.gathered_model(model, cast, mesh)
    return _gradient(loss, (model.params, *map(whole, model.batch)), by_rows, case)


def _whole_step(quick: bool, case: Case) -> Costs:
    """Of a transformer on 32,768 tokens: most of the memory is for the backward pass."""
    way = (_ways.plain if case.way == FLOAT32 else _ways.apply_gradients)(ADAMW)
    loss = {
        FLOAT32: _transformer.float32_loss,
        BY_HAND: _transformer.loss,
        AUTOCAST: ols.autocast(_transformer.float32_loss),
    }[case.way]
    params = jax.eval_shape(lambda: _transformer.init(128 if quick else 1024))
    tokens = jax.eval_shape(lambda: _transformer.tokens(32 if quick else 512))
    args = params, jax.eval_shape(way.init, params), tokens
    placed = _targets.place(args, _targets.TARGETS[case.target].device())
    return _compiled.costs(way.train(loss), placed, case.target, donate=(0, 1))


def _gradient(
    loss: Callable[..., jax.Array], args: tuple[Any, ...], place: Any, case: Case
) -> Costs:
    """Of a loss and its gradient."""
    of = ols.autocast(loss) if case.way == AUTOCAST else loss
    placed = _targets.place(args, place)
    return _compiled.costs(jax.value_and_grad(of), placed, case.target)


def whole_step_table(found: Found) -> str:
    """Memory / bytes moved, over float32 without loss scaling."""
    targets = [t for t in _targets.TARGETS if (WHOLE_STEP, FLOAT32, t) in found]
    base = {t: found[WHOLE_STEP, FLOAT32, t] for t in targets}
    of = lambda way: [_over(found[WHOLE_STEP, way, t], base[t]) for t in targets]
    return _table.markdown(
        [f"{WHOLE_STEP}, over float32", *targets],
        {way: of(way) for way in (BY_HAND, AUTOCAST)} if targets else {},
    )


def models_table(found: Found) -> str:
    """Memory / bytes moved of a loss and its gradient, over a cast by hand."""
    of = lambda model, target: _of_both(found, model, target, _over)
    return _table.markdown(
        ["loss and gradient, over a cast by hand", "H100", "v5e"],
        {m: [of(m, "H100"), of(m, "v5e")] for m in _models.MODELS},
    )


def between_devices_table(found: Found) -> str:
    """Bytes that each of eight devices sends, over a cast by hand."""
    sent = lambda x, y: f"{x.sent / y.sent:.2f}"
    summed = lambda x, y: f"{(x.sent + x.summed) / (y.sent + y.summed):.2f}"
    of = lambda loss, ratio: _of_both(found, loss, "H100", ratio)
    return _table.markdown(
        ["eight H100s, over a cast by hand", "sent", "with sums of gradients"],
        {loss: [of(loss, sent), of(loss, summed)] for loss in BETWEEN_DEVICES},
    )


def _of_both(found: Found, program: str, target: str, ratio: Any) -> str:
    both = [found.get(Case(program, way, target)) for way in (AUTOCAST, BY_HAND)]
    return ratio(*both) if all(both) else ""


def _over(x: Costs, y: Costs) -> str:
    return f"{x.memory / y.memory:.2f} / {x.moved / y.moved:.2f}"
