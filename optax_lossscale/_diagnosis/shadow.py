"""Run a program with every value in a pair, and make a note of each result.

`run_to_seed(program, arguments, widths)` runs the pieces before the first that reads the
seed, and returns a `Shadow`. Called with a seed, a shadow runs the other pieces, and
returns the results as pairs with notes, and all notes of the run. Pieces without loops
are compiled, and the figures of their results are computed on the host. Loops and
branches are run in Python, which knows the number of each iteration. To run a program
with wider numbers beside its own is called shadow execution.
"""

import dataclasses
import functools
import itertools
import sys
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

import jax
from jax.extend.core import Var

from optax_lossscale._diagnosis import loops, pairs
from optax_lossscale._diagnosis.devices import Devices
from optax_lossscale._diagnosis.figures import Figures
from optax_lossscale._diagnosis.notes import Note, Origin, note_of
from optax_lossscale._diagnosis.pairs import Pair, Widths, exact
from optax_lossscale._diagnosis.program import Instruction, Piece, Program
from optax_lossscale._diagnosis.value import Value, notes_of
from optax_lossscale._programs.operations import Trait, traits
from optax_lossscale._programs.values import Array, dtype_in, is_inexact

_PATIENCE = 10.0  # seconds between two lines of progress


Env = Mapping[Var, Value]
"""The values of variables of a program, as far as it has run."""


class Argument(NamedTuple):
    """An argument of the whole program."""

    name: str  # its path among the parameters and arguments of the loss function
    array: Array
    is_parameter: bool = False  # whether the loss is differentiated by it
    is_seed: bool = False  # whether it is the seed of the backward pass


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
    runner = _Runner(widths)
    values = [_value_of(argument, widths) for argument in arguments]
    env = {**runner.constants_of(program), **dict(zip(others, values, strict=True))}
    before_seed = list(
        itertools.takewhile(lambda piece: seed not in piece.reads, program.pieces)
    )
    env = runner.after(before_seed, env)
    rest = program._replace(pieces=program.pieces[len(before_seed) :])
    return Shadow(rest, env, runner)


class Shadow(NamedTuple):
    """A program that has run in pairs up to its seed. A call runs the rest of it."""

    rest: Program  # the program without the pieces that have run
    env: Env  # the values that the pieces before it have made
    runner: "_Runner"  # which has noted those values

    def __call__(self, seed: Argument) -> tuple[list[Value], list[Note]]:
        """The results of the program, and all notes in the order of running."""
        runner = dataclasses.replace(self.runner, notes=[*self.runner.notes])
        env = {**self.env, self.rest.takes[-1]: _value_of(seed, runner.widths)}
        env = runner.after(self.rest.pieces, env)
        return [env[v] for v in self.rest.gives], runner.notes


def _value_of(argument: Argument, widths: Widths) -> Value:
    """The value of an argument of the whole program."""
    pair = exact(argument.array, widths)
    figures = (
        pair.figures if is_inexact(argument.array) else Figures(argument.array.size)
    )
    note = Note(
        **vars(figures),
        origin=Origin(name=argument.name, is_parameter=argument.is_parameter),
        dtype=dtype_in(argument.array),
        is_backward=argument.is_seed,
    )
    return Value(pair, note)


class _Progress:
    """Prints a line to stderr where none has been printed for `_PATIENCE` seconds."""

    def __init__(self):
        self._printed = time.monotonic()

    def at(self, source: str, n_results: int) -> None:
        """Says how many results there are, and at which of the user's lines the run is."""
        if time.monotonic() - self._printed > _PATIENCE:
            self._printed = time.monotonic()
            progress = f"diagnose: {n_results} results, at {source}"
            print(progress, file=sys.stderr, flush=True)


@dataclasses.dataclass(frozen=True)
class _Runner:
    """Runs programs in pairs, and adds the note of each result to `notes`.

    The runner of what is inside of a loop or a `shard_map` differs in `rounds` or
    `devices`, and adds to the same notes.
    """

    widths: Widths
    notes: list[Note] = dataclasses.field(default_factory=list)
    rounds: tuple[int, ...] = ()  # of the loops around, the outermost first
    devices: Devices = Devices()
    # By the key of a piece and its devices
    compiled: dict[Hashable, Callable] = dataclasses.field(default_factory=dict)
    progress: _Progress = dataclasses.field(default_factory=_Progress)

    def run(self, program: Program, values: Iterable[Value]) -> list[Value]:
        """The results of a program."""
        arguments = dict(zip(program.takes, values, strict=True))
        env = self.after(program.pieces, {**self.constants_of(program), **arguments})
        return [env[v] for v in program.gives]

    def constants_of(self, program: Program) -> Env:
        """The constants of a program as values."""
        return {v: self._constant(x) for v, x in program.constants.items()}

    def after(self, pieces: Iterable[Piece], env: Env) -> Env:
        """The values after pieces have run, without those that no later one reads."""
        values = dict(env)
        for piece in pieces:
            has_programs = bool(piece.instructions[0].programs)
            apply = self._run_inside if has_programs else self._compute
            values.update(apply(piece, values))
            for instruction in piece.instructions:
                for v in instruction.frees:
                    del values[v]
        return values

    def _constant(self, x: Array) -> Value:
        """A constant of a program as a value, which is the same on each device."""
        return Value(exact(x, self.widths)).each(self.devices.everywhere)

    def _run_inside(self, piece: Piece, env: Env) -> Env:
        """The results of a loop, a branch or a `shard_map`, from its programs."""

        def run_program(program, values, rounds=()):
            inside = dataclasses.replace(self, rounds=self.rounds + rounds)
            return inside.run(program, values)

        (instruction,) = piece.instructions
        eqn = instruction.eqn
        ins = [env[v] for v in instruction.ins]
        if Trait.SCANS in traits(eqn):
            results = loops.scan(instruction, ins, run_program, len(self.devices.maps))
        elif Trait.WHILE in traits(eqn):
            results = loops.while_loop(instruction, ins, run_program)
        elif Trait.BRANCHES in traits(eqn):
            results = loops.cond(instruction, ins, run_program)
        else:
            results = self._run_on_devices(instruction, ins)
        return dict(zip(eqn.outvars, results, strict=True))

    def _run_on_devices(
        self, instruction: Instruction, ins: Sequence[Value]
    ) -> list[Value]:
        """The results of a `shard_map`."""
        params = instruction.eqn.params
        devices = self.devices.inside(instruction.eqn)
        (program,) = instruction.programs
        entered = map(devices.entered, ins, params["in_specs"])
        results = dataclasses.replace(self, devices=devices).run(program, entered)
        return list(map(devices.exited, results, params["out_specs"]))

    def _compute(self, piece: Piece, env: Env) -> Env:
        """What a piece without loops reads and gives, by compiled code, with notes."""
        values = {v: env[v] for v in piece.reads}
        ins = [value.pair for value in values.values()]
        pairs_of_each = self._compiled_for(piece)(ins)
        for instruction, results in zip(piece.instructions, pairs_of_each, strict=True):
            eqn = instruction.eqn
            for position, v in enumerate(eqn.outvars):
                pair = results[position]
                operands = instruction.operands_of(position)
                reads = notes_of(values[operand] for operand in operands)
                note = self._note(instruction, position, pair, reads)
                values[v] = Value(pair.settled, note)
        self.progress.at(piece.instructions[-1].origin.source, len(self.notes))
        return values

    def _note(
        self,
        instruction: Instruction,
        position: int,
        pair: Pair,
        reads: Sequence[Note],
    ) -> Note | None:
        """Makes a result's note and adds it to `notes`; or gives the first operand's.

        The note of the first operand is that of a result which has none of its own.
        """
        if position not in instruction.noted:
            return reads[0] if reads else None
        note = note_of(
            pair.figures,
            instruction.origin,
            dtype_in(instruction.eqn.outvars[position]),
            reads,
            self.rounds,
            position,
        )
        self.notes.append(note)
        return note

    def _compiled_for(self, piece: Piece) -> Callable:
        """`pairs.compute` of a piece on its devices, shared by those alike."""
        key = (piece.key, self.devices)
        if key not in self.compiled:
            function = functools.partial(pairs.compute, piece, self.widths)
            self.compiled[key] = jax.jit(
                self.devices.over(function), compiler_options=pairs.compiler_options()
            )
        return self.compiled[key]
