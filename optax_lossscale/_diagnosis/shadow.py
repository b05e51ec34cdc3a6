"""Run a program with every value in a pair, and make a note of each result.

`Shadow(jaxpr)(arrays, places, widths)` returns the results as pairs with notes, and
leaves all notes of the run in `notes`. Pieces without loops are compiled; the figures
of their results are computed on the host. Python runs loops and branches around such
pieces, and so knows the round in which it is.
"""

import functools
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import Literal

from optax_lossscale._diagnosis import loops, pairs
from optax_lossscale._diagnosis.devices import Devices
from optax_lossscale._diagnosis.figures import figures_of, rows_of
from optax_lossscale._diagnosis.loops import Value, noted_alone
from optax_lossscale._diagnosis.notes import Note, Notes, Place
from optax_lossscale._diagnosis.pairs import AS_WRITTEN, Pair, Widths, exact
from optax_lossscale._diagnosis.program import Piece, Program, Step, program_of
from optax_lossscale._programs.operations import Is, traits
from optax_lossscale._programs.values import dtype_in
from optax_lossscale._programs.walk import keeps_numbers, line_of

_PATIENCE = 10.0  # seconds between two lines of progress


class Around(NamedTuple):
    """What is around a program that runs."""

    widths: Widths = AS_WRITTEN  # the floats of each pair
    rounds: tuple[int, ...] = ()  # the rounds of the loops around it, outermost first
    devices: Devices | None = None  # those of a `shard_map` around it

    def constant(self, x: Any) -> Value:
        """A constant of the program as a value, on each device if there are several."""
        value = Value(exact(x, self.widths))
        return self.devices.entered(value, jax.P()) if self.devices else value


class Result(NamedTuple):
    """A result of the program, with a note about it alone; None of a constant."""

    pair: Pair
    row: int | None = None
    note: Note | None = None


class Shadow:
    """A program to be run in pairs, any number of times.

    Attributes:
      notes: the notes of the last run.
    """

    def __init__(self, jaxpr: Any):
        self.program = program_of(jaxpr)
        self.notes = Notes()
        self._compiled: dict[Any, Callable[..., tuple[list[Pair], list[Pair]]]] = {}
        self._said = time.monotonic()

    def __call__(
        self, arrays: Sequence[Any], places: Sequence[Place], widths: Widths
    ) -> list[Result]:
        """Runs the program for these arguments, and replaces the notes."""
        self.notes = Notes()
        values = []
        for x, place in zip(arrays, places, strict=True):
            pair = exact(x, widths)
            is_float = pair.true is not None
            figures = figures_of([pair.compared]) if is_float else rows_of([x.size])
            self.notes.add_figures(figures)
            values.append(Value(pair, self.notes.add(place, (), [])))
        results = self._run(self.program, values, Around(widths))
        on_host = [value.each(np.asarray) for value in results]
        alone = [noted_alone(self.notes, [x.pair], [x.row])[0] for x in on_host]
        return [
            Result(x.pair)
            if x.row is None
            else Result(x.pair, x.row, self.notes[x.row])
            for x in alone
        ]

    def _run(
        self, program: Program, values: Sequence[Value], around: Around
    ) -> list[Value]:
        """The results of a program, piece by piece."""
        env = dict(zip(program.takes, values, strict=True))
        for n, x in program.constants.items():
            env[n] = around.constant(jax.device_get(x))

        def read(n):
            if isinstance(n, Literal):
                return around.constant(np.asarray(n.val, dtype_in(n)))
            return env[n]

        for piece in program.pieces:
            (step, *_) = piece.steps
            if step.programs:
                results = self._run_inside(step, list(map(read, step.reads)), around)
                env.update(zip(step.makes, results, strict=True))
            else:
                self._compute(piece, env, around)
            for n in piece.frees:
                env.pop(n, None)
        return list(map(read, program.gives))

    def _run_inside(
        self, step: Step, ins: Sequence[Value], around: Around
    ) -> list[Value]:
        """The results of a loop or branch, whose programs are run piece by piece."""

        def run(program, values, *turn):
            rounds = (*around.rounds, *turn)
            return self._run(program, values, around._replace(rounds=rounds))

        kind = traits(step.eqn)
        if Is.SCANS in kind:
            axis = 1 if around.devices else 0
            return loops.scan(step, ins, run, self.notes, axis)
        if Is.WAITS in kind:
            return loops.while_loop(step, ins, run, self.notes)
        if Is.BRANCHES in kind:
            return loops.cond(step, ins, run, self.notes)
        devices = Devices.of(step.eqn)
        entered = list(map(devices.entered, ins, step.eqn.params["in_specs"]))
        (program,) = step.programs
        results = self._run(program, entered, around._replace(devices=devices))
        return list(map(devices.left, results, step.eqn.params["out_specs"]))

    def _compute(self, piece: Piece, env: dict[int, Value], around: Around) -> None:
        """Computes a piece by compiled code, and adds its results to `env`."""
        key = (piece.key, around.widths, around.devices)
        if key not in self._compiled:
            function = functools.partial(pairs.run, piece, around.widths)
            self._compiled[key] = jax.jit(
                around.devices.over(function) if around.devices else function,
                compiler_options=pairs.compiler_options(),
            )
        left, noted = self._compiled[key]([env[n].pair for n in piece.reads])
        rows = self._note(piece, noted, env, around.rounds)
        for n, pair in zip(piece.leaves, left, strict=True):
            env[n] = Value(pair, rows[n])
        self._say(piece)

    def _note(
        self,
        piece: Piece,
        noted: Sequence[Pair],
        env: dict[int, Value],
        rounds: tuple[int, ...],
    ) -> dict[int, int | None]:
        """Makes notes of the results of a piece, and returns the row of each value."""
        self.notes.add_figures(figures_of(noted))
        pairs_left = iter(noted)
        rows = {n: env[n].row for n in piece.reads}
        for step in piece.steps:
            reads = [rows[n] for n in step.values if rows[n] is not None]
            for n, place in zip(step.makes, step.places, strict=True):
                if place is not None:
                    place.is_passed = next(pairs_left).is_passed
                    rows[n] = self.notes.add(place, rounds, reads)
                else:
                    rows[n] = reads[0] if reads and keeps_numbers(step.eqn) else None
        return rows

    def _say(self, piece: Piece) -> None:
        """Prints a line of progress, if none has been printed for a while."""
        if time.monotonic() - self._said > _PATIENCE:
            self._said = time.monotonic()
            line = line_of(piece.steps[-1].eqn)
            print(
                f"diagnose: {len(self.notes)} results, at {line}",
                file=sys.stderr,
                flush=True,
            )
