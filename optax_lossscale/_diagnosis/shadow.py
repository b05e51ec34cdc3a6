"""Run a program with every value in a pair, and make a note of each result.

`Shadow(program)(values, widths)` returns the results as values, which are pairs with notes, and
leaves all notes of the run in `notes`. Pieces without loops are compiled and give the
pairs of all of their results; the notes are made of these on the host. Python runs
loops and branches around such pieces, and so knows the round in which it is.
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
from optax_lossscale._diagnosis.equations import keeps_numbers
from optax_lossscale._diagnosis.loops import Value
from optax_lossscale._diagnosis.notes import Note, Place, measured, note_of
from optax_lossscale._diagnosis.pairs import AS_WRITTEN, Pair, Widths, exact
from optax_lossscale._diagnosis.pieces import Piece, pieces_of
from optax_lossscale._diagnosis.places import place_of
from optax_lossscale._programs.operations import Is, traits
from optax_lossscale._programs.values import dtype_in, is_float
from optax_lossscale._programs.versions import constants, open_jaxpr
from optax_lossscale._programs.walk import line_of, programs_in

_PATIENCE = 10.0  # seconds between two lines of progress


class Around(NamedTuple):
    """What is around a program that runs."""

    place: Place = Place()  # the place of the equation that holds it
    rounds: tuple[int, ...] = ()  # the rounds of the loops around it, outermost first
    widths: Widths = AS_WRITTEN  # the floats of each pair
    devices: Devices | None = None  # those of a `shard_map` around it

    def constant(self, x: np.ndarray) -> Value:
        """A constant of the program as a value, on each device if there are several."""
        value = Value(exact(x, self.widths))
        return self.devices.entered(value, jax.P()) if self.devices else value


class Shadow:
    """A program to be run in pairs, any number of times.

    Attributes:
      notes: the notes of the last run, in the order of running.
    """

    def __init__(self, program: Any):
        self.program = program
        self.notes: list[Note] = []
        # The place of each equation, by the number of the place around and its `id`
        self._places: dict[tuple[int, int], Place] = {}
        self._compiled: dict[Any, Callable[..., list[list[Pair]]]] = {}
        self._said = time.monotonic()

    def __call__(self, values: Sequence[Value], widths: Widths) -> list[Value]:
        """Runs the program for these arguments, and replaces the notes."""
        self.notes = []
        return self._run(self.program, values, Around(widths=widths))

    def _run(
        self, program: Any, values: Sequence[Value], around: Around
    ) -> list[Value]:
        """The results of a program, piece by piece."""
        jaxpr = open_jaxpr(program)
        env = dict(zip(jaxpr.invars, values, strict=True))
        for v, x in zip(jaxpr.constvars, constants(program), strict=True):
            env[v] = around.constant(jax.device_get(x))

        def read(v):
            if isinstance(v, Literal):
                return around.constant(np.asarray(v.val, dtype_in(v)))
            return env[v]

        for piece in pieces_of(jaxpr):
            if piece.programs:
                (eqn,) = piece.eqns
                results = self._run_inside(eqn, list(map(read, eqn.invars)), around)
                env.update(zip(eqn.outvars, results, strict=True))
            else:
                self._compute(piece, env, around)
            for v in piece.frees:
                del env[v]
        return list(map(read, jaxpr.outvars))

    def _run_inside(
        self, eqn: Any, ins: Sequence[Value], around: Around
    ) -> list[Value]:
        """The results of an equation whose programs are run piece by piece."""
        inside = around._replace(place=self._place(eqn, around))

        def run(program, values, *turn):
            rounds = (*around.rounds, *turn)
            return self._run(program, values, inside._replace(rounds=rounds))

        kind = traits(eqn)
        if Is.SCANS in kind:
            return loops.scan(eqn, ins, run, axis=1 if inside.devices else 0)
        if Is.WAITS in kind:
            return loops.while_loop(eqn, ins, run)
        if Is.BRANCHES in kind:
            return loops.cond(eqn, ins, run)
        (program,) = programs_in(eqn)
        if Is.MAPS not in kind:
            return self._run(program, ins, inside)
        devices = Devices.of(eqn)
        inside = inside._replace(devices=devices)
        entered = list(map(devices.entered, ins, eqn.params["in_specs"]))
        results = self._run(program, entered, inside)
        return list(map(devices.left, results, eqn.params["out_specs"]))

    def _place(self, eqn: Any, around: Around) -> Place:
        """The place of an equation, which is found once for each place around it."""
        key = (around.place.number, id(eqn))
        if key not in self._places:
            self._places[key] = place_of(eqn, len(self._places), around.place)
        return self._places[key]

    def _compute(self, piece: Piece, env: dict[Any, Value], around: Around) -> None:
        """Computes a piece by compiled code, and adds its results to `env`."""
        key = (piece.key, around.widths, around.devices)
        if key not in self._compiled:
            function = functools.partial(pairs.run, piece, around.widths)
            self._compiled[key] = jax.jit(
                around.devices.over(function) if around.devices else function,
                compiler_options=pairs.compiler_options(),
            )
        every = self._compiled[key]([env[v].pair for v in piece.reads])
        for eqn, results in zip(piece.eqns, every, strict=True):
            read = [env[v].note for v in eqn.invars if not isinstance(v, Literal)]
            notes = tuple(note for note in read if note is not None)
            for v, pair in zip(eqn.outvars, results, strict=True):
                note = self._note(eqn, pair.compared, notes, around)
                env[v] = Value(pair.followed, note)
        self._say(piece)

    def _note(
        self, eqn: Any, pair: Pair, reads: tuple[Note, ...], around: Around
    ) -> Note | None:
        """Makes a note of a result, if it holds floats or is a choice.

        A result that has all numbers of the operand has its note.
        """
        if keeps_numbers(eqn) and Is.SELECTS not in traits(eqn):
            return next(iter(reads), None)
        is_choice = pair.true is not None
        if not (is_float(pair.low) or is_choice):
            return None
        note = note_of(
            measured(pair.low, pair.true),
            place=self._place(eqn, around),
            dtype=pair.low.dtype,
            reads=reads,
            rounds=around.rounds,
            is_passed=pair.is_passed,
        )
        self.notes.append(note)
        return note

    def _say(self, piece: Piece) -> None:
        """Prints a line of progress, if none has been printed for a while."""
        if time.monotonic() - self._said > _PATIENCE:
            self._said = time.monotonic()
            print(
                f"diagnose: {len(self.notes)} results, at {line_of(piece.eqns[-1])}",
                file=sys.stderr,
                flush=True,
            )
