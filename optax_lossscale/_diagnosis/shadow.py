"""Run a program with every value in a pair, and make a note of each result.

`Shadow(program, arguments, widths)(seed)` returns the results as pairs with notes, and
all notes of the run. Pieces without loops are compiled, and the figures of their
results are computed on the host. Python runs loops and branches around such pieces, and so
knows the round in which it is.
"""

import functools
import itertools
import sys
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.extend.core import Literal, Var

from optax_lossscale._diagnosis import loops, pairs
from optax_lossscale._diagnosis.devices import Devices
from optax_lossscale._diagnosis.figures import Figures
from optax_lossscale._diagnosis.notes import Note, Place, note_of
from optax_lossscale._diagnosis.pairs import Compared, Widths, exact
from optax_lossscale._diagnosis.program import Instruction, Piece, Program
from optax_lossscale._diagnosis.value import Value, noted_alone
from optax_lossscale._programs.operations import Trait, traits
from optax_lossscale._programs.values import (
    Array,
    Atom,
    dtype_in,
    is_inexact,
    variables,
)

_PATIENCE = 10.0  # seconds between two lines of progress

Env = Mapping[Var, Value]
"""The values of variables of a program, as far as it has run."""


class Argument(NamedTuple):
    """An argument of the whole program."""

    name: str  # its path among the parameters and arguments of the loss function
    array: Array
    is_parameter: bool = False  # whether the loss is differentiated by it
    is_seed: bool = False  # whether it is the seed of the backward pass


class Around(NamedTuple):
    """What is around a program that runs."""

    rounds: tuple[int, ...] = ()  # the rounds of the loops, the outermost first
    devices: Devices = Devices()


class Shadow:
    """A program to be run in pairs for any seed, its last argument.

    The pieces before the first that reads the seed are run once, when this is made.
    """

    def __init__(self, program: Program, arguments: Sequence[Argument], widths: Widths):
        self._widths = widths
        self._compiled: dict[Hashable, Callable] = {}
        self._notes: list[Note] = []  # of the run, so far
        self._said = time.monotonic()
        *_, self._seed = program.takes
        self._gives = program.gives
        before_seed = list(
            itertools.takewhile(lambda x: self._seed not in x.reads, program.pieces)
        )
        self._pieces_from_seed = program.pieces[len(before_seed) :]
        env = self._given(program, map(self._argument, arguments), Around())
        self._env_before_seed = self._after(before_seed, env, Around())
        self._notes_before_seed = tuple(self._notes)

    def __call__(self, seed: Argument) -> tuple[list[Value], list[Note]]:
        """The results of the program, and all notes in the order of running.

        The results have notes about them alone.
        """
        self._notes = list(self._notes_before_seed)
        env = {**self._env_before_seed, self._seed: self._argument(seed)}
        env = self._after(self._pieces_from_seed, env, Around())
        results = []
        for value in self._read(self._gives, env, Around()):
            on_host = value.each(np.asarray)
            results.append(noted_alone(on_host.pair, [on_host]))
        return results, self._notes

    # --- values ---

    def _argument(self, one: Argument) -> Value:
        """The value of an argument of the whole program."""
        pair = exact(one.array, self._widths)
        figures = Figures() if pair.true is None else pair.compared().figures
        note = Note(
            **vars(figures),
            place=Place(name=one.name, is_parameter=one.is_parameter),
            dtype=dtype_in(one.array),
            is_backward=one.is_seed,
        )
        return Value(pair, note)

    def _constant(self, x: np.ndarray, around: Around) -> Value:
        """A constant of a program as a value, which is the same on each device."""
        return around.devices.everywhere(Value(exact(x, self._widths)))

    def _given(self, program: Program, values: Iterable[Value], around: Around) -> Env:
        """What a program has before it runs: its constants and arguments."""
        constants = {v: self._constant(x, around) for v, x in program.constants.items()}
        return {**constants, **dict(zip(program.takes, values, strict=False))}

    def _read(self, atoms: Iterable[Atom], env: Env, around: Around) -> list[Value]:
        """The values of variables and literals."""
        values = []
        for v in atoms:
            if isinstance(v, Literal):
                number = np.asarray(v.val, dtype_in(v))
                values.append(self._constant(number, around))
            else:
                values.append(env[v])
        return values

    # --- running ---

    def _run(
        self, program: Program, values: Sequence[Value], around: Around
    ) -> list[Value]:
        """The results of a program."""
        env = self._given(program, values, around)
        env = self._after(program.pieces, env, around)
        return self._read(program.gives, env, around)

    def _after(self, pieces: Sequence[Piece], env: Env, around: Around) -> Env:
        """The values after pieces have run, without those that no later piece reads."""
        for piece in pieces:
            if piece.instructions[0].programs:
                made = self._run_inside(piece.instructions[0], env, around)
            else:
                made = self._compute(piece, env, around)
            left = {v: value for v, value in env.items() if v not in piece.frees}
            env = {**left, **made}
        return env

    def _run_inside(self, instruction: Instruction, env: Env, around: Around) -> Env:
        """The results of a loop or branch, whose programs are run piece by piece."""

        def run(program, values, *turn):
            rounds = (*around.rounds, *turn)
            return self._run(program, values, around._replace(rounds=rounds))

        eqn = instruction.eqn
        kind = traits(eqn)
        ins = self._read(eqn.invars, env, around)
        if Trait.SCANS in kind:
            results = loops.scan(instruction, ins, run, len(around.devices.maps))
        elif Trait.WHILE in kind:
            results = loops.while_loop(instruction, ins, run)
        elif Trait.BRANCHES in kind:
            results = loops.cond(instruction, ins, run)
        else:
            results = self._run_on_devices(instruction, ins, around)
        return dict(zip(eqn.outvars, results, strict=True))

    def _run_on_devices(
        self, instruction: Instruction, ins: Sequence[Value], around: Around
    ) -> list[Value]:
        """The results of a `shard_map`."""
        eqn = instruction.eqn
        devices = around.devices.inside(eqn)
        (program,) = instruction.programs
        entered = list(map(devices.entered, ins, eqn.params["in_specs"]))
        results = self._run(program, entered, around._replace(devices=devices))
        return list(map(devices.left, results, eqn.params["out_specs"]))

    def _compute(self, piece: Piece, env: Env, around: Around) -> Env:
        """What a piece without loops leaves to others, by compiled code."""
        operands = [env[v].pair for v in piece.reads]
        results, compared = self._compiled_for(piece, around.devices)(operands)
        notes = self._notes_after(piece, compared, env, around)
        self._say_at(piece)
        left = zip(piece.leaves, results, strict=True)
        return {v: Value(pair, notes[v]) for v, pair in left}

    def _compiled_for(self, piece: Piece, devices: Devices) -> Callable:
        """The compiled code of a piece, which pieces that compute the same share."""
        key = (piece.key, devices)
        if key not in self._compiled:
            function = functools.partial(pairs.compute, piece, self._widths)
            self._compiled[key] = jax.jit(
                devices.over(function), compiler_options=pairs.compiler_options()
            )
        return self._compiled[key]

    def _notes_after(
        self, piece: Piece, compared: Sequence[Compared], env: Env, around: Around
    ) -> dict[Var, Note | None]:
        """The notes of all values that a piece reads or makes.

        A result without a note of its own has that of the first operand.
        """
        left = iter(compared)
        notes = {v: env[v].note for v in piece.reads}
        for instruction in piece.instructions:
            eqn = instruction.eqn
            known = [notes[v] for v in variables(eqn.invars)]
            reads = [note for note in known if note is not None]
            notes.update(dict.fromkeys(eqn.outvars, reads[0] if reads else None))
            for position, v in instruction.noted.items():
                note = note_of(
                    next(left).figures,
                    instruction.place,
                    dtype_in(v),
                    reads,
                    around.rounds,
                    position,
                    is_passed=instruction.is_passed and is_inexact(v),
                )
                notes[v] = note
                self._notes.append(note)
        return notes

    def _say_at(self, piece: Piece) -> None:
        """Prints a line of progress, if none has been printed for a while."""
        if time.monotonic() - self._said > _PATIENCE:
            self._said = time.monotonic()
            line = piece.instructions[-1].place.source
            progress = f"diagnose: {len(self._notes)} results, at {line}"
            print(progress, file=sys.stderr, flush=True)
