"""Run a program with every value in a pair, and make a note of each result.

`run_to_seed(program, arguments, widths)` runs the pieces before the first that reads the
seed, and returns a `Shadow`. Called with a seed, a shadow runs the other pieces, and
returns the results as pairs with notes, and all notes of the run. Pieces without loops
are compiled, and the figures of their results are computed on the host. Loops and
branches are run in Python, which knows the number of each round.
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


class Context(NamedTuple):
    """Where a program runs: in which rounds of loops, and on which devices."""

    rounds: tuple[int, ...] = ()  # the outermost loop first
    devices: Devices = Devices()


def run_to_seed(
    program: Program, arguments: Sequence[Argument], widths: Widths
) -> "Shadow":
    """Runs a program in pairs up to the first piece that reads its seed.

    Args:
      program: a program whose last argument is the seed.
      arguments: all arguments but the seed.
      widths: the floats of each pair.
    """
    *others, seed = program.takes
    without_seed = program._replace(takes=others)
    before_seed = list(
        itertools.takewhile(lambda piece: seed not in piece.reads, program.pieces)
    )
    compiler = _Compiler(widths)
    runner = _Runner(compiler, notes=())
    values = [_value_of(argument, widths) for argument in arguments]
    env = runner.env_of(without_seed, values, Context())
    return Shadow(
        compiler,
        seed,
        env=runner.after(before_seed, env, Context()),
        notes=runner.notes,
        pieces=program.pieces[len(before_seed) :],
        gives=program.gives,
    )


class Shadow(NamedTuple):
    """A program that has run in pairs up to its seed. A call runs the rest of it."""

    compiler: "_Compiler"
    seed: Var
    env: Env  # the values that do not depend on the seed
    notes: Sequence[Note]  # those of the pieces that have run
    pieces: Sequence[Piece]  # those that have not run
    gives: Sequence[Atom]  # the results of the program

    def __call__(self, seed: Argument) -> tuple[list[Value], list[Note]]:
        """The results of the program, and all notes in the order of running.

        The note of a result is about its own numbers, also where these were only moved.
        """
        runner = _Runner(self.compiler, self.notes)
        env = {**self.env, self.seed: _value_of(seed, self.compiler.widths)}
        env = runner.after(self.pieces, env, Context())
        results = []
        for value in runner.read(self.gives, env, Context()):
            on_host = value.each(np.asarray)
            results.append(noted_alone(on_host.pair, [on_host]))
        return results, runner.notes


def _value_of(argument: Argument, widths: Widths) -> Value:
    """The value of an argument of the whole program."""
    pair = exact(argument.array, widths)
    figures = Figures() if pair.reference is None else pair.compared().figures
    note = Note(
        **vars(figures),
        place=Place(name=argument.name, is_parameter=argument.is_parameter),
        dtype=dtype_in(argument.array),
        is_backward=argument.is_seed,
    )
    return Value(pair, note)


class _Compiler:
    """Compiles pieces. Those that compute the same share what is compiled for one."""

    def __init__(self, widths: Widths):
        self.widths = widths
        self._compiled: dict[Hashable, Callable] = {}

    def compiled(self, piece: Piece, devices: Devices) -> Callable:
        """`pairs.compute` of a piece on these devices, as a function of its operands."""
        key = (piece.key, devices)
        if key not in self._compiled:
            function = functools.partial(pairs.compute, piece, self.widths)
            self._compiled[key] = jax.jit(
                devices.over(function), compiler_options=pairs.compiler_options()
            )
        return self._compiled[key]


class _Runner:
    """One run in pairs, which adds the note of each result to `notes`."""

    def __init__(self, compiler: _Compiler, notes: Sequence[Note]):
        self.notes = list(notes)
        self._compiler = compiler
        self._reported = time.monotonic()  # when progress was last reported

    # --- values ---

    def env_of(
        self, program: Program, values: Iterable[Value], context: Context
    ) -> Env:
        """The values that a program begins with: its constants and arguments."""
        constants = {
            v: self._constant(x, context) for v, x in program.constants.items()
        }
        return {**constants, **dict(zip(program.takes, values, strict=True))}

    def read(self, atoms: Iterable[Atom], env: Env, context: Context) -> list[Value]:
        """The values of variables and literals."""
        values = []
        for v in atoms:
            if isinstance(v, Literal):
                number = np.asarray(v.val, dtype_in(v))
                values.append(self._constant(number, context))
            else:
                values.append(env[v])
        return values

    def _constant(self, x: np.ndarray, context: Context) -> Value:
        """A constant of a program as a value, which is the same on each device."""
        return context.devices.everywhere(Value(exact(x, self._compiler.widths)))

    # --- running ---

    def _run(
        self, program: Program, values: Sequence[Value], context: Context
    ) -> list[Value]:
        """The results of a program."""
        env = self.env_of(program, values, context)
        env = self.after(program.pieces, env, context)
        return self.read(program.gives, env, context)

    def after(self, pieces: Sequence[Piece], env: Env, context: Context) -> Env:
        """The values after pieces have run, without those that no later piece reads."""
        for piece in pieces:
            if piece.instructions[0].programs:
                results = self._run_inside(piece.instructions[0], env, context)
            else:
                results = self._compute(piece, env, context)
            kept = {v: value for v, value in env.items() if v not in piece.frees}
            env = {**kept, **results}
        return env

    def _run_inside(self, instruction: Instruction, env: Env, context: Context) -> Env:
        """The results of a loop or branch, whose programs are run piece by piece."""

        def run(program, values, *turn):  # `turn`: the number of the round, in a loop
            rounds = (*context.rounds, *turn)
            return self._run(program, values, context._replace(rounds=rounds))

        eqn = instruction.eqn
        kind = traits(eqn)
        ins = self.read(eqn.invars, env, context)
        if Trait.SCANS in kind:
            results = loops.scan(instruction, ins, run, len(context.devices.maps))
        elif Trait.WHILE in kind:
            results = loops.while_loop(instruction, ins, run)
        elif Trait.BRANCHES in kind:
            results = loops.cond(instruction, ins, run)
        else:
            results = self._run_on_devices(instruction, ins, context)
        return dict(zip(eqn.outvars, results, strict=True))

    def _run_on_devices(
        self, instruction: Instruction, ins: Sequence[Value], context: Context
    ) -> list[Value]:
        """The results of a `shard_map`."""
        eqn = instruction.eqn
        devices = context.devices.inside(eqn)
        (program,) = instruction.programs
        entered = list(map(devices.entered, ins, eqn.params["in_specs"]))
        results = self._run(program, entered, context._replace(devices=devices))
        return list(map(devices.exited, results, eqn.params["out_specs"]))

    def _compute(self, piece: Piece, env: Env, context: Context) -> Env:
        """What a piece without loops leaves to others, by compiled code."""
        operands = [env[v].pair for v in piece.reads]
        compute = self._compiler.compiled(piece, context.devices)
        pairs_left, compared = compute(operands)
        notes = self._note_results(piece, compared, env, context)
        self._report_progress(piece)
        results = zip(piece.leaves, pairs_left, strict=True)
        return {v: Value(pair, notes[v]) for v, pair in results}

    def _note_results(
        self, piece: Piece, compared: Sequence[Compared], env: Env, context: Context
    ) -> dict[Var, Note | None]:
        """Notes the results of a piece; returns the notes of all that it reads or makes.

        A result without a note of its own has that of the first operand that has one.
        """
        compared_in_order = iter(compared)
        notes = {v: env[v].note for v in piece.reads}
        for instruction in piece.instructions:
            eqn = instruction.eqn
            known = [notes[v] for v in variables(eqn.invars)]
            reads = [note for note in known if note is not None]
            notes.update(dict.fromkeys(eqn.outvars, reads[0] if reads else None))
            for position, v in instruction.noted.items():
                note = note_of(
                    next(compared_in_order).figures,
                    instruction.place,
                    dtype_in(v),
                    reads,
                    context.rounds,
                    position,
                    stays_narrow=instruction.stays_narrow and is_inexact(v),
                )
                notes[v] = note
                self.notes.append(note)
        return notes

    def _report_progress(self, piece: Piece) -> None:
        """Prints a line to stderr, if none has been printed for `_PATIENCE` seconds."""
        if time.monotonic() - self._reported > _PATIENCE:
            self._reported = time.monotonic()
            line = piece.instructions[-1].place.source
            progress = f"diagnose: {len(self.notes)} results, at {line}"
            print(progress, file=sys.stderr, flush=True)
