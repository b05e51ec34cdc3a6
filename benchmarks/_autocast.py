"""What models cost under `autocast`, over a cast by hand, as compiled for accelerators."""

import argparse
import multiprocessing
import pathlib
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from tqdm import tqdm

import optax_lossscale as ols
from benchmarks import _accelerators, _between_devices, _hlo, _models, _tables, _targets
from benchmarks._tables import Table

ROWS = 8192  # of the batch between devices, and columns
WHOLE = "a whole transformer, its weights gathered"
ONE_DEVICE, EIGHT_DEVICES = "one device", "eight devices"
_MOVEMENTS = ("all-gather", "all-to-all", "collective-permute")


def main(options: argparse.Namespace) -> None:
    """Writes the table and the page; or the page alone, from the table that is there."""
    csv = pathlib.Path(options.out) / "autocast.csv"
    _tables.publish(csv, page, None if options.report else measure)


def measure() -> dict[str, Table]:
    """Compiles every model for an H100 and a v5e, and what is sent for eight H100s."""
    _accelerators.refuse_missing_compilers()
    h100, v5e = _targets.H100.name, _targets.V5E.name
    cases = [
        (ONE_DEVICE, model, target)
        for model in _models.MODELS
        for target in (h100, v5e)
    ]
    cases += [(EIGHT_DEVICES, loss, h100) for loss in (*_between_devices.LOSSES, WHOLE)]
    found: dict[str, Table] = {"versions": _accelerators.versions()}
    # Each in a process of its own, as compilers remember what they have compiled.
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, mp_context=spawn, max_tasks_per_child=1) as pool:
        rows = tqdm(pool.map(_cells, cases), desc="programs", total=len(cases))
        for (where, name, _), cells in zip(cases, rows, strict=True):
            found.setdefault(where, {}).setdefault(name, {}).update(cells)
    return found


def _cells(case: tuple[str, str, str]) -> dict[str, str]:
    where, name, target = case
    of = ratios if where == ONE_DEVICE else sent_ratios
    found = of(name, _accelerators.TARGETS[target])
    return {f"{target}: {column}": f"{ratio:.2f}" for column, ratio in found.items()}


def page(found: dict[str, Table]) -> str:
    """The page, with all numbers but those of kernels."""
    made_with = ", ".join(
        f"{name} {it}" for name, it in found["versions"]["run"].items()
    )
    columns = next(iter(found[ONE_DEVICE].values()))
    tables = [
        _tables.show(
            "one device", found[ONE_DEVICE], columns=filter(_is_shown, columns)
        ),
        _tables.show("eight devices", found[EIGHT_DEVICES]),
    ]
    text = pathlib.Path(__file__).with_name("_autocast_page.txt").read_text()
    return text.format(*tables, made_with=made_with)


def _is_shown(column: str) -> bool:
    return "kernels" not in column


def ratios(model: str, target: _targets.Target) -> dict[str, float]:
    """Memory, bytes moved and kernels of a model's value and gradient, over those by hand."""
    of_model = _models.MODELS[model]
    of_both = [
        compiled(of_model(cast), cast, target)
        for cast in (_models.left, _models.by_hand)
    ]
    numbers = [(p.temp_bytes, p.bytes_moved, len(p.kernels)) for p in of_both]
    names = ("memory", "moved", "kernels")
    return {name: x / y for name, x, y in zip(names, *numbers, strict=True)}


def sent_ratios(loss: str, target: _targets.Target) -> dict[str, float]:
    """What eight devices send each other, without sums and with them, over that by hand."""
    of_both = [
        _eight_devices(loss, cast, target) for cast in (_models.left, _models.by_hand)
    ]
    of = lambda program, names: sum(
        o.nbytes for o in program.collectives if o.opcode.startswith(names)
    )
    ours, theirs = ([of(program, _MOVEMENTS), of(program, "")] for program in of_both)
    names = ("weights and activations", "with sums of gradients")
    return {name: x / y for name, x, y in zip(names, ours, theirs, strict=True)}


def compiled(
    model: _models.Model, cast: _models.Cast, target: _targets.Target
) -> _hlo.Program:
    """A model's value and gradient on one device, cast by hand or under `autocast`."""
    placed = _targets.place((model.params, *model.batch), target.device())
    return _compiled(model.loss, cast, target, *placed)


def _eight_devices(
    loss: str, cast: _models.Cast, target: _targets.Target
) -> _hlo.Program:
    mesh = target.mesh("data", axis_types=(AxisType.Auto,))
    placed = lambda *args: _targets.place(args, _targets.by_rows(mesh))
    if loss != WHOLE:
        square = jax.ShapeDtypeStruct((ROWS, ROWS), jnp.float32)
        of_loss = _between_devices.LOSSES[loss](cast, mesh)
        return _compiled(of_loss, cast, target, *placed(square, square))
    model = _models.transformer(cast)
    whole = [
        jax.ShapeDtypeStruct((8 * x.shape[0], *x.shape[1:]), x.dtype)
        for x in model.batch
    ]
    of_each = _between_devices.gathered_model(model, cast, mesh)
    return _compiled(of_each, cast, target, *placed(model.params, *whole))


def _compiled(
    loss: Any, cast: _models.Cast, target: _targets.Target, *args: Any
) -> _hlo.Program:
    """A loss and its gradients, compiled as on the machine itself."""
    of = ols.autocast(loss) if cast is _models.left else loss
    with target.as_default():
        lowered = jax.jit(jax.value_and_grad(of)).lower(*args)
    return _hlo.Program(lowered.compile())
