"""Run a program with every value in a pair, and make a note of each result.

`Shadow(jaxpr, arguments)(seed, widths)` returns the results as pairs with notes, and
all notes of the run. Pieces without loops are compiled; the figures of their results
are computed on the host. Python runs loops and branches around such pieces, and so
knows the round in which it is.
"""

import functools
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal, Var

from optax_lossscale._diagnosis import loops, pairs
from optax_lossscale._diagnosis.devices import Devices
from optax_lossscale._diagnosis.figures import Figures
from optax_lossscale._diagnosis.loops import Value, noted_alone
from optax_lossscale._diagnosis.notes import Kind, Note, Origin, Place, note_of
from optax_lossscale._diagnosis.pairs import Compared, Pair, Widths, exact
from optax_lossscale._diagnosis.program import Piece, Program, Step, program_of
from optax_lossscale._programs.operations import Is, traits
from optax_lossscale._programs.values import Atom, dtype_in, variables

_PATIENCE = 10.0  # seconds between two lines of progress

Env = dict[Var, Value]
"""The values of the variables that a program has so far."""


class Argument(NamedTuple):
    """An argument of the whole program, other than the seed."""

    name: str  # its path among the parameters and arguments of the loss function
    array: Any
    is_parameter: bool  # whether the loss is differentiated by it

    @property
    def origin(self) -> Origin:
        """Itself, if it is a parameter."""
        nearest = frozenset([self.name] if self.is_parameter else [])
        return Origin(nearest=nearest, steps=1)


class Around(NamedTuple):
    """What is around a program that runs."""

    widths: Widths  # the floats of each pair
    notes: list[Note]  # all notes of the run so far, to which those of the program come
    rounds: tuple[int, ...] = ()  # the rounds of the loops around it, outermost first
    devices: Devices | None = None  # those of a `shard_map` around it

    def constant(self, x: Any) -> Value:
        """A constant of the program as a value, on each device if there are several."""
        value = Value(exact(x, self.widths))
        return self.devices.entered(value, jax.P()) if self.devices else value

    def constants(self, program: Program) -> Env:
        """The constants of a program, by their variables."""
        constants = program.constants.items()
        return {v: self.constant(jax.device_get(x)) for v, x in constants}

    def argument(self, name: str, x: Any, origin: Origin) -> Value:
        """An argument of the whole program."""
        pair = exact(x, self.widths)
        figures = Figures() if pair.true is None else pair.compared().figures
        place = Place(Kind.ARGUMENT, name=name)
        note = Note(**vars(figures), place=place, origin=origin, dtype=x.dtype)
        return Value(pair, note)

    def read(self, v: Atom, env: Mapping[Var, Value]) -> Value:
        """The value of a variable or literal."""
        if isinstance(v, Literal):
            return self.constant(np.asarray(v.val, dtype_in(v)))
        return env[v]


class _Kept(NamedTuple):
    """What the pieces before the first that reads the seed have left."""

    widths: Widths
    env: Env
    notes: list[Note]


class Shadow:
    """A program to be run in pairs, for its last argument any number of times.

    That argument is the seed of a backward pass. The pieces before the first that reads
    it are run once for runs of the same widths that follow each other.
    """

    def __init__(self, jaxpr: ClosedJaxpr, arguments: Sequence[Argument]):
        self._program = program_of(jaxpr, Place())
        self._arguments = arguments
        self._kept: _Kept | None = None
        self._compiled: dict[Any, Callable[..., tuple[list[Pair], list[Compared]]]] = {}
        self._said = time.monotonic()

    def __call__(
        self, seed: np.float32, widths: Widths
    ) -> tuple[list[Value], list[Note]]:
        """The results of the program, and all notes in the order of running.

        The results have notes about them alone.
        """
        if self._kept is None or self._kept.widths != widths:
            self._kept = self._run_before_the_seed(widths)
        around = Around(widths, list(self._kept.notes))
        given = around.argument("the loss scale", seed, Origin(is_backward=True))
        env = {**self._kept.env, self._seed: given}
        self._run_pieces(self._program.pieces[self._first :], env, around)
        results = []
        for v in self._program.gives:
            value = around.read(v, env).each(np.asarray)
            results.append(noted_alone(value.pair, [value.note]))
        return results, around.notes

    @property
    def _seed(self) -> Var:
        """The variable of the seed."""
        return self._program.takes[-1]

    @functools.cached_property
    def _first(self) -> int:
        """The number of the first piece that reads the seed."""
        reads_seed = [self._seed in piece.reads for piece in self._program.pieces]
        return [*reads_seed, True].index(True)

    def _run_before_the_seed(self, widths: Widths) -> _Kept:
        """Runs the pieces before the first that reads the seed."""
        around = Around(widths, [])
        env = around.constants(self._program)
        for v, one in zip(self._program.takes[:-1], self._arguments, strict=True):
            env[v] = around.argument(one.name, one.array, one.origin)
        self._run_pieces(self._program.pieces[: self._first], env, around)
        return _Kept(widths, env, around.notes)

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
        devices = Devices.of(step.eqn)
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
            line = piece.steps[-1].place.source
            print(
                f"diagnose: {len(around.notes)} results, at {line}",
                file=sys.stderr,
                flush=True,
            )


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
