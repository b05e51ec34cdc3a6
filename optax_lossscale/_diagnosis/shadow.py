"""Run a program with every value in a pair, and make a note of each result.

`Shadow(jaxpr, arrays, places)(seed, widths)` returns the results as pairs with notes,
and leaves all notes of the run in `notes`. Pieces without loops are compiled; the figures
of their results are computed on the host. Python runs loops and branches around such
pieces, and so knows the round in which it is.
"""

import functools
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import Literal

from optax_lossscale._diagnosis import loops, pairs
from optax_lossscale._diagnosis.devices import Devices
from optax_lossscale._diagnosis.figures import Figures
from optax_lossscale._diagnosis.loops import Value, noted_alone
from optax_lossscale._diagnosis.notes import Note, Place, note_of
from optax_lossscale._diagnosis.pairs import AS_WRITTEN, Pair, Widths, exact
from optax_lossscale._diagnosis.program import Piece, Program, Step, program_of
from optax_lossscale._programs.operations import Is, traits
from optax_lossscale._programs.values import dtype_in

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

    def constants(self, program: Program) -> dict[Any, Value]:
        """The constants of a program, by their variables."""
        constants = program.constants.items()
        return {v: self.constant(jax.device_get(x)) for v, x in constants}

    def argument(self, x: Any, place: Place) -> Value:
        """An argument of the whole program."""
        pair = exact(x, self.widths)
        figures = Figures() if pair.true is None else pair.compared.figures
        return Value(pair, note_of(figures, place, x.dtype))

    def read(self, v: Any, env: Mapping[Any, Value]) -> Value:
        """The value of a variable or literal."""
        if isinstance(v, Literal):
            return self.constant(np.asarray(v.val, dtype_in(v)))
        return env[v]


class Shadow:
    """A program to be run in pairs, for its last argument any number of times.

    What does not depend on that argument, the seed of a backward pass, is run once.

    Attributes:
      notes: the notes of the last run, in the order of running.
    """

    def __init__(self, jaxpr: Any, arrays: Sequence[Any], places: Sequence[Place]):
        self.notes: list[Note] = []
        self._program = program_of(jaxpr, Place())
        self._arrays = arrays
        self._places = places
        # Before the first piece that reads the seed: the widths, values, and notes
        self._kept: tuple[Widths | None, dict[Any, Value], list[Note]] = (None, {}, [])
        self._compiled: dict[Any, Callable[..., tuple[list[Pair], list[Pair]]]] = {}
        self._said = time.monotonic()

    def __call__(self, seed: Any, widths: Widths) -> list[Value]:
        """Runs the program, and replaces the notes.

        The results have notes about them alone.
        """
        around = Around(widths)
        program = self._program
        *takes, last = program.takes
        reads_seed = [last in piece.reads for piece in program.pieces]
        first = [*reads_seed, True].index(True)
        if widths != self._kept[0]:
            self.notes = []
            arguments = map(around.argument, self._arrays, self._places)
            env = dict(zip(takes, arguments, strict=True))
            env.update(around.constants(program))
            self._run_pieces(program.pieces[:first], env, around)
            self._kept = (widths, env, self.notes)
        _, env, notes = self._kept
        self.notes = list(notes)
        env = {**env, last: around.argument(seed, self._places[-1])}
        self._run_pieces(program.pieces[first:], env, around)
        results = [around.read(v, env).each(np.asarray) for v in program.gives]
        return [noted_alone(value.pair, [value.note]) for value in results]

    def _run(
        self, program: Program, values: Sequence[Value], around: Around
    ) -> list[Value]:
        """The results of a program."""
        env = dict(zip(program.takes, values, strict=True))
        env.update(around.constants(program))
        self._run_pieces(program.pieces, env, around)
        return [around.read(v, env) for v in program.gives]

    def _run_pieces(
        self, pieces: Sequence[Piece], env: dict[Any, Value], around: Around
    ) -> None:
        """Runs one piece after the other, and adds what they leave to `env`."""
        for piece in pieces:
            (step, *_) = piece.steps
            if step.programs:
                ins = [around.read(v, env) for v in step.eqn.invars]
                results = self._run_inside(step, ins, around)
                env.update(zip(step.eqn.outvars, results, strict=True))
            else:
                self._compute(piece, env, around)
            for v in piece.frees:
                del env[v]

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
            return loops.scan(step, ins, run, axis)
        if Is.WAITS in kind:
            return loops.while_loop(step, ins, run)
        if Is.BRANCHES in kind:
            return loops.cond(step, ins, run)
        devices = Devices.of(step.eqn)
        entered = list(map(devices.entered, ins, step.eqn.params["in_specs"]))
        (program,) = step.programs
        results = self._run(program, entered, around._replace(devices=devices))
        return list(map(devices.left, results, step.eqn.params["out_specs"]))

    def _compute(self, piece: Piece, env: dict[Any, Value], around: Around) -> None:
        """Computes a piece by compiled code, and adds its results to `env`."""
        key = (piece.key, around.widths, around.devices)
        if key not in self._compiled:
            function = functools.partial(pairs.run, piece, around.widths)
            self._compiled[key] = jax.jit(
                around.devices.over(function) if around.devices else function,
                compiler_options=pairs.compiler_options(),
            )
        left, noted = self._compiled[key]([env[v].pair for v in piece.reads])
        notes = self._notes_of(piece, noted, env, around.rounds)
        for v, pair in zip(piece.leaves, left, strict=True):
            env[v] = Value(pair, notes[v])
        self._say(piece)

    def _notes_of(
        self,
        piece: Piece,
        noted: Sequence[Pair],
        env: dict[Any, Value],
        rounds: tuple[int, ...],
    ) -> dict[Any, Note | None]:
        """Makes notes of the results of a piece; returns those of all of its values."""
        left = iter(noted)
        notes = {v: env[v].note for v in piece.reads}
        for step in piece.steps:
            known = (
                notes.get(v) for v in step.eqn.invars if not isinstance(v, Literal)
            )
            reads = [note for note in known if note is not None]
            notes.update(dict.fromkeys(step.eqn.outvars, next(iter(reads), None)))
            for v in step.noted:
                pair = next(left)
                note = note_of(
                    pair.figures,
                    step.place,
                    dtype_in(v),
                    reads,
                    rounds,
                    pair.is_passed,
                )
                self.notes.append(note)
                notes[v] = note
        return notes

    def _say(self, piece: Piece) -> None:
        """Prints a line of progress, if none has been printed for a while."""
        if time.monotonic() - self._said > _PATIENCE:
            self._said = time.monotonic()
            line = piece.steps[-1].place.source
            print(
                f"diagnose: {len(self.notes)} results, at {line}",
                file=sys.stderr,
                flush=True,
            )
