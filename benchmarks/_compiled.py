"""Programs that are compiled for accelerators and not run: what each costs, in a CSV file."""

import argparse
import csv
import multiprocessing
import pathlib
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import jax

from benchmarks import _environment, _hlo, _targets

_SUMS = ("all-reduce", "reduce-scatter")


class Case(NamedTuple):
    """A program to compile."""

    program: str
    way: str
    target: str


class Costs(NamedTuple):
    """Bytes, of one device where there are several.

    Attributes:
      memory: allocated besides arguments and results.
      moved: read and written.
      sent: results of collective operations, but for sums.
      summed: results of sums over devices.
    """

    memory: int
    moved: int
    sent: int
    summed: int


Found = dict[Case, Costs]


def costs(
    step: Callable[..., Any], args: Iterable[Any], target: str, donate: Any = ()
) -> Costs:
    """Compiles a function for arguments that are placed on devices of a target."""
    with _targets.TARGETS[target].as_default():
        lowered = jax.jit(step, donate_argnums=donate).lower(*args)
    program = _hlo.of(lowered.compile())
    sums = sum(o.nbytes for o in program.collectives if o.opcode in _SUMS)
    sent = sum(o.nbytes for o in program.collectives) - sums
    return Costs(program.temp_bytes, program.bytes_moved, sent, sums)


def measure(
    cases: Iterable[Case], of: Callable[[Case], Costs], options: argparse.Namespace
) -> Found:
    """Compiles what the options select, and returns this and what the file had before.

    The file is written after each program. `of` must be something to pickle.
    """
    path = pathlib.Path(options.out) / f"{options.section}.csv"
    if options.report:
        return read(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    is_part = options.only or options.on
    found = read(path) if is_part and path.exists() else {}
    cases = [
        case
        for case in cases
        if case.program in (options.only or [case.program])
        and case.target in (options.on or [case.target])
    ]
    if not cases:
        raise SystemExit("nothing has these names")
    _refuse_missing_compilers({case.target for case in cases})
    # A process for each, as compilers remember what they have compiled.
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, mp_context=spawn, max_tasks_per_child=1) as pool:
        for case, it in zip(cases, pool.map(of, cases), strict=True):
            found[case] = it
            write(path, found)
            print(*case, *it, sep=", ", file=sys.stderr, flush=True)
    print(_environment.here())
    return found


def _refuse_missing_compilers(targets: Iterable[str]) -> None:
    missing = [t for t in targets if not _targets.TARGETS[t].is_installed]
    if missing:
        raise SystemExit(
            f"no compiler for {', '.join(sorted(missing))}: install the extra "
            "`compilers`, which is available for Linux"
        )


def write(path: pathlib.Path, found: Found) -> None:
    """Writes a line for each program."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*Case._fields, *Costs._fields])
        writer.writerows([*case, *it] for case, it in found.items())


def read(path: pathlib.Path) -> Found:
    """What `write` wrote."""
    with path.open(newline="") as file:
        _, *lines = csv.reader(file)
    width = len(Case._fields)
    return {Case(*x[:width]): Costs(*map(int, x[width:])) for x in lines}
