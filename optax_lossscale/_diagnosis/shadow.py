"""Run a program with every value in a pair, and make a note of each result.

`Shadow(program, arguments, widths)(seed)` returns the results as pairs with notes, and
all notes of the run. Pieces without loops are compiled; the figures of their results
are computed on the host. Python runs loops and branches around such pieces, and so
knows the round in which it is.
"""

import functools
import sys
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.extend.core import Literal, Var

from optax_lossscale._diagnosis import loops, pairs
from optax_lossscale._diagnosis.devices import Devices
from optax_lossscale._diagnosis.figures import Figures
from optax_lossscale._diagnosis.loops import Value, noted_alone
from optax_lossscale._diagnosis.notes import Kind, Note, Place, note_of
from optax_lossscale._diagnosis.pairs import Compared, Widths, exact
from optax_lossscale._diagnosis.program import Piece, Program, Step
from optax_lossscale._programs.operations import Is, traits
from optax_lossscale._programs.values import Array, Atom, dtype_in, variables
from optax_lossscale._programs.versions import mapped_axes

_PATIENCE = 10.0  # seconds between two lines of progress

Env = dict[Var, Value]
"""The values of the variables that a program has so far."""


class Argument(NamedTuple):
    """An argument of the whole program."""

    name: str  # its path among the parameters and arguments of the loss function
    array: Array
    is_parameter: bool  # whether the loss is differentiated by it


class Around(NamedTuple):
    """What is around a program that runs."""

    widths: Widths  # the floats of each pair
    notes: list[Note]  # all notes of the run so far, to which those of the program come
    rounds: tuple[int, ...] = ()  # the rounds of the loops around it, outermost first
    devices: Devices | None = None  # those of a `shard_map` around it

    def constant(self, x: np.ndarray) -> Value:
        """A constant of the program as a value, on each device if there are several."""
        value = Value(exact(x, self.widths))
        return self.devices.entered(value, jax.P()) if self.devices else value

    def constants(self, program: Program) -> Env:
        """The constants of a program, by their variables."""
        return {v: self.constant(x) for v, x in program.constants.items()}

    def argument(self, one: Argument, is_seed: bool = False) -> Value:
        """An argument of the whole program."""
        pair = exact(one.array, self.widths)
        figures = Figures() if pair.true is None else pair.compared().figures
        note = Note(
            **vars(figures),
            place=Place(Kind.ARGUMENT, name=one.name, is_parameter=one.is_parameter),
            dtype=dtype_in(one.array),
            is_backward=is_seed,
        )
        return Value(pair, note)

    def read(self, v: Atom, env: Mapping[Var, Value]) -> Value:
        """The value of a variable or literal."""
        if isinstance(v, Literal):
            return self.constant(np.asarray(v.val, dtype_in(v)))
        return env[v]


class Shadow:
    """A program to be run in pairs for any seed, its last argument.

    The pieces before the first that reads the seed are run once, when this is made.
    """

    def __init__(self, program: Program, arguments: Sequence[Argument], widths: Widths):
        self._compiled: dict[Hashable, Callable] = {}
        self._said = time.monotonic()
        self._gives = program.gives
        *takes, self._seed = program.takes
        reads_seed = [self._seed in piece.reads for piece in program.pieces]
        first = [*reads_seed, True].index(True)
        self._pieces = program.pieces[first:]
        self._around = Around(widths, notes=[])
        self._env = self._around.constants(program)
        for v, one in zip(takes, arguments, strict=True):
            self._env[v] = self._around.argument(one)
        self._run_pieces(program.pieces[:first], self._env, self._around)

    def __call__(self, seed: np.ndarray) -> tuple[list[Value], list[Note]]:
        """The results of the program, and all notes in the order of running.

        The results have notes about them alone.
        """
        around = self._around._replace(notes=list(self._around.notes))
        given = Argument("the loss scale", seed, is_parameter=False)
        env = {**self._env, self._seed: around.argument(given, is_seed=True)}
        self._run_pieces(self._pieces, env, around)
        results = []
        for v in self._gives:
            value = around.read(v, env).each(np.asarray)
            results.append(noted_alone(value.pair, [value]))
        return results, around.notes

    def _run(
        self, program: Program, values: Sequence[Value], around: Around
    ) -> list[Value]:
        """The results of a program."""
        env = dict(zip(program.takes, values, strict=True))
        env.update(around.constants(program))
        self._run_pieces(program.pieces, env, around)
        return [around.read(v, env) for v in program.gives]

    def _run_pieces(self, pieces: Sequence[Piece], env: Env, around: Around) -> None:
        """Runs one piece after the other, in place.

        `env` gets what they leave, and loses what no later piece reads.
        """
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
        devices = Devices(step.eqn.params["mesh"], tuple(mapped_axes(step.eqn)))
        entered = list(map(devices.entered, ins, step.eqn.params["in_specs"]))
        (program,) = step.programs
        results = self._run(program, entered, around._replace(devices=devices))
        return list(map(devices.left, results, step.eqn.params["out_specs"]))

    def _compute(self, piece: Piece, env: Env, around: Around) -> None:
        """Computes a piece by compiled code, and adds its results to `env`."""
        key = (piece.key, around.widths, around.devices)
        if key not in self._compiled:
            function = functools.partial(pairs.compute, piece, around.widths)
            self._compiled[key] = jax.jit(
                around.devices.over(function) if around.devices else function,
                compiler_options=pairs.compiler_options(),
            )
        left, noted = self._compiled[key]([env[v].pair for v in piece.reads])
        notes = _notes_of(piece, noted, env, around)
        for v, pair in zip(piece.leaves, left, strict=True):
            env[v] = Value(pair, notes[v])
        self._say(piece, around)

    def _say(self, piece: Piece, around: Around) -> None:
        """Prints a line of progress, if none has been printed for a while."""
        if time.monotonic() - self._said > _PATIENCE:
            self._said = time.monotonic()
            line = f"{len(around.notes)} results, at {piece.steps[-1].place.source}"
            print(f"diagnose: {line}", file=sys.stderr, flush=True)


def _notes_of(
    piece: Piece, noted: Sequence[Compared], env: Env, around: Around
) -> dict[Var, Note | None]:
    """Makes notes of the results of a piece; returns those of all of its values."""
    left = iter(noted)
    notes = {v: env[v].note for v in piece.reads}
    for step in piece.steps:
        known = [notes.get(v) for v in variables(step.eqn.invars)]
        reads = [note for note in known if note is not None]
        notes.update(dict.fromkeys(step.eqn.outvars, next(iter(reads), None)))
        for position, v in step.noted.items():
            compared = next(left)
            note = note_of(
                compared.figures,
                step.place,
                dtype_in(v),
                reads,
                around.rounds,
                position,
                compared.is_passed,
            )
            around.notes.append(note)
            notes[v] = note
    return notes
