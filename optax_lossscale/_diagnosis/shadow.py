"""Run a program with every value in a pair, and make a note of each result.

`Shadow(program)(values)` returns the results as values, which are pairs with notes, and
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
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from optax_lossscale._diagnosis import loops
from optax_lossscale._diagnosis.devices import Devices
from optax_lossscale._diagnosis.loops import Value
from optax_lossscale._diagnosis.notes import Note, Place, measured, note_of
from optax_lossscale._diagnosis.pairs import (
    Pair,
    Results,
    beside_float32,
    compiler_options,
    exact,
    holds_floats,
)
from optax_lossscale._diagnosis.pieces import Piece, is_call, pieces_of
from optax_lossscale._diagnosis.places import keeps_numbers, place_of
from optax_lossscale._programs.operations import Is, traits
from optax_lossscale._programs.values import dtype_in
from optax_lossscale._programs.versions import constants, open_jaxpr
from optax_lossscale._programs.walk import line_of

_PATIENCE = 10.0  # seconds between two lines of progress


class Around(NamedTuple):
    """What is around a program that runs."""

    place: Place = Place("", "", "")  # the place of the equation that holds it
    path: tuple[int, ...] = ()  # the `id` of each equation around it, outermost first
    rounds: tuple[int, ...] = ()  # the rounds of the loops around it, outermost first
    devices: Devices | None = None  # those of a `shard_map` around it

    def constant(self, x: np.ndarray) -> Value:
        """A constant of the program as a value, on each device if there are several."""
        value = Value(exact(x))
        return value.each(self.devices.repeated) if self.devices else value


class Shadow:
    """A program to be run in pairs, any number of times.

    Attributes:
      notes: the notes of the last run, in the order of running. There are none if
        float32 does not follow the choices of the program, but makes its own.
    """

    def __init__(self, program: Any, follows: bool = True):
        self.program = program
        self._follows = follows
        self.notes: list[Note] = []
        self._places: dict[tuple[int, ...], Place] = {}  # by the path to an equation
        self._compiled: dict[Any, Callable[[Sequence[Pair]], list[Results]]] = {}
        self._said = time.monotonic()

    def __call__(self, values: Sequence[Value]) -> list[Value]:
        """Runs the program for these arguments, and replaces the notes."""
        self.notes = []
        return self._run(self.program, values, Around())

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
                results = self._run_inside(piece, list(map(read, eqn.invars)), around)
                env.update(zip(eqn.outvars, results, strict=True))
            else:
                self._compute(piece, env, around)
            for v in piece.frees:
                del env[v]
        return list(map(read, jaxpr.outvars))

    def _run_inside(
        self, piece: Piece, ins: Sequence[Value], around: Around
    ) -> list[Value]:
        """The results of an equation whose programs are run piece by piece."""
        (eqn,) = piece.eqns
        path = (*around.path, id(eqn))
        inside = around._replace(place=self._place(eqn, around), path=path)
        if is_call(eqn):
            return self._run(piece.programs[0], ins, inside)

        def run(program, values, *turn):
            rounds = (*around.rounds, *turn)
            return self._run(program, values, inside._replace(rounds=rounds))

        kind = traits(eqn)
        if Is.SCANS in kind:
            axis = 1 if inside.devices else 0
            return loops.scan(piece, ins, run, inside.constant, axis)
        if Is.WAITS in kind:
            return loops.while_loop(piece, ins, run)
        if Is.BRANCHES in kind:
            return loops.cond(piece, ins, run)
        # It is a `shard_map`.
        devices = Devices.of(eqn)
        params = eqn.params
        entered = [
            value.each(functools.partial(devices.enter, spec=spec))
            for value, spec in zip(ins, params["in_specs"], strict=True)
        ]
        results = self._run(
            piece.programs[0], entered, inside._replace(devices=devices)
        )
        return [
            value.each(functools.partial(devices.leave, spec=spec))
            for value, spec in zip(results, params["out_specs"], strict=True)
        ]

    def _place(self, eqn: Any, around: Around) -> Place:
        """The place of an equation, which is found once for each path to it."""
        path = (*around.path, id(eqn))
        if path not in self._places:
            self._places[path] = place_of(eqn, len(self._places), around.place)
        return self._places[path]

    def _compute(self, piece: Piece, env: dict[Any, Value], around: Around) -> None:
        """Computes a piece by compiled code, and adds its results to `env`."""
        key = (piece.key, around.devices)
        if key not in self._compiled:
            function = functools.partial(beside_float32, piece, self._follows)
            self._compiled[key] = jax.jit(
                around.devices.over(function) if around.devices else function,
                compiler_options=compiler_options(),
            )
        every = self._compiled[key]([env[v].pair for v in piece.reads])
        for eqn, results in zip(piece.eqns, every, strict=True):
            read = [env[v].note for v in eqn.invars if not isinstance(v, Literal)]
            notes = tuple(note for note in read if note is not None)
            for v, pair in zip(eqn.outvars, results.pairs, strict=True):
                if keeps_numbers(eqn):
                    (note,) = notes or [None]
                else:
                    note = self._note(eqn, pair, notes, results.is_passed, around)
                env[v] = Value(pair.followed if self._follows else pair, note)
        self._say(piece)

    def _note(
        self,
        eqn: Any,
        pair: Pair,
        reads: tuple[Note, ...],
        is_passed: bool,
        around: Around,
    ) -> Note | None:
        """Makes a note of a result, if it holds floats or is a choice."""
        if not self._follows:
            return None
        dtype = pair.low.dtype
        is_choice = pair.true is not None and (
            dtype == np.bool_ or jnp.issubdtype(dtype, jnp.integer)
        )
        if not (holds_floats(dtype) or is_choice):
            return None
        note = note_of(
            measured(pair.low, pair.true),
            place=self._place(eqn, around),
            dtype=dtype,
            reads=reads,
            rounds=around.rounds,
            is_passed=is_passed,
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
