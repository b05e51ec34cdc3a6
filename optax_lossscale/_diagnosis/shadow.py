"""Runs a program on pairs of values and references; makes a note of each result.

Running a program beside a copy of itself in wider floats is known as shadow execution.
The forward pass runs once, and the backward pass once for each loss scale, the *seed*
from which it starts:

    shadow = run_to_seed(program, arguments, widths)    # the forward pass
    results, notes = shadow(seed)                       # the rest, for one seed
    results, notes = shadow(another_seed)

Python runs loops and branches, one iteration after the other, so each note in a loop
has the number of its iteration. Every other piece is compiled. The host makes notes of
its results.
"""

import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import takewhile
from typing import NamedTuple

import jax
from jax.extend.core import Var

from optax_lossscale._diagnosis import loops, pairs
from optax_lossscale._diagnosis.devices import Devices
from optax_lossscale._diagnosis.figures import Figures
from optax_lossscale._diagnosis.notes import Note, Origin, note_of
from optax_lossscale._diagnosis.old_operations import Trait, traits
from optax_lossscale._diagnosis.pairs import Pair, Widths, pair_of
from optax_lossscale._diagnosis.program import Instruction, Piece, Program
from optax_lossscale._diagnosis.value import Value, notes_of
from optax_lossscale._programs.values import Array, dtype_in, is_inexact

# The least time between two lines of progress, in seconds.
_PROGRESS_INTERVAL = 10.0

Env = Mapping[Var, Value]
"""The values of a program's variables that are computed and still needed."""


class Argument(NamedTuple):
    """An argument of the whole program.

    Attributes:
      name: its path in the inputs of the loss function, such as `args/0`.
      array: its value.
      is_parameter: whether the gradient is with respect to it.
      is_seed: whether it is the seed of the backward pass.
    """

    name: str
    array: Array
    is_parameter: bool = False
    is_seed: bool = False


def run_to_seed(
    program: Program, arguments: Sequence[Argument], widths: Widths
) -> "Shadow":
    """Runs a program on pairs, up to the first piece that reads its seed.

    Args:
      program: a program whose last argument is the seed.
      arguments: all arguments except the seed.
      widths: the dtypes of each pair.

    Returns:
      The rest of the program. Call it with a seed to run it.
    """
    runner = _Runner(widths)
    values = [_value_of(argument, widths) for argument in arguments]
    *invars, seed = program.invars
    env = runner.constants_of(program)
    env.update(zip(invars, values, strict=True))

    def is_without_seed(piece):
        return seed not in piece.reads

    before_seed = list(takewhile(is_without_seed, program.pieces))
    env = runner.run_pieces(before_seed, env)
    remaining = program._replace(pieces=program.pieces[len(before_seed) :])
    return Shadow(remaining, env, runner)


class Shadow(NamedTuple):
    """A program that has run up to its seed; a call runs the rest for one seed.

    Attributes:
      remaining: the program without the pieces that have run.
      env: the values that the remaining pieces may read.
      runner: runs the remaining pieces and holds the notes of those that have run.
    """

    remaining: Program
    env: Env
    runner: "_Runner"

    def __call__(self, seed: Argument) -> tuple[list[Value], list[Note]]:
        """Returns the program's results, and all notes in the order of execution."""
        # Each call appends to a copy of the notes of the forward pass.
        runner = dataclasses.replace(self.runner, notes=list(self.runner.notes))
        seed_var = self.remaining.invars[-1]
        env = {**self.env, seed_var: _value_of(seed, runner.widths)}
        env = runner.run_pieces(self.remaining.pieces, env)
        return [env[v] for v in self.remaining.outvars], runner.notes


def _value_of(argument: Argument, widths: Widths) -> Value:
    """Pairs an argument with itself and makes its note, which has no operands."""
    array = argument.array
    pair = pair_of(array, widths)
    figures = pair.figures if is_inexact(array) else Figures(array.size)
    origin = Origin(name=argument.name, is_parameter=argument.is_parameter)
    note = note_of(figures, origin, dtype_in(array), is_seed=argument.is_seed)
    return Value(pair, note)


class _Progress:
    """Prints a run's progress to stderr, at most every `_PROGRESS_INTERVAL` seconds."""

    def __init__(self):
        self._printed = time.monotonic()

    def report(self, source: str, n_results: int) -> None:
        """Prints how many results have notes, and which line of the user is running."""
        if time.monotonic() - self._printed > _PROGRESS_INTERVAL:
            self._printed = time.monotonic()
            progress = f"diagnose: {n_results} results compared, now at {source}"
            print(progress, file=sys.stderr, flush=True)


@dataclasses.dataclass(frozen=True)
class _Runner:
    """Runs programs on pairs and appends the note of each result to `notes`.

    The programs in a loop or `shard_map` run in a copy of the runner with other
    `iterations` or `devices`. The copy shares its other fields with the original, so
    all notes are in one list, in the order of execution.

    Attributes:
      widths: the dtypes of each pair.
      notes: the notes of all results so far.
      iterations: the current iteration of each loop around the program, the outermost
        first.
      devices: the devices that the program runs on.
      compiled: the compiled functions: of each piece, by its key and the devices, and
        of each conversion to or from stacks, by its arguments.
      progress: prints the progress of the run.
    """

    widths: Widths
    notes: list[Note] = dataclasses.field(default_factory=list)
    iterations: tuple[int, ...] = ()
    devices: Devices = Devices()
    compiled: dict[Hashable, Callable] = dataclasses.field(default_factory=dict)
    progress: _Progress = dataclasses.field(default_factory=_Progress)

    def run(self, program: Program, values: Iterable[Value]) -> list[Value]:
        """Runs a program, given the values of its arguments; returns its results."""
        env = self.constants_of(program)
        env.update(zip(program.invars, values, strict=True))
        env = self.run_pieces(program.pieces, env)
        return [env[v] for v in program.outvars]

    def constants_of(self, program: Program) -> dict[Var, Value]:
        """Returns the values of a program's constants, the same on each device."""
        env = {}
        for v, x in program.constants.items():
            value = Value(pair_of(x, self.widths))
            env[v] = value.map(self.devices.replicate)
        return env

    def run_pieces(self, pieces: Iterable[Piece], env: Env) -> Env:
        """Runs pieces; returns the values that are still needed after them."""
        env = dict(env)
        for piece in pieces:
            has_programs = bool(piece.instructions[0].programs)
            run_piece = self._run_in_python if has_programs else self._run_compiled
            env.update(run_piece(piece, env))
            for instruction in piece.instructions:
                for v in instruction.frees:
                    del env[v]
        return env

    def _run_in_python(self, piece: Piece, env: Env) -> Env:
        """Runs a loop, branch or `shard_map`."""
        (instruction,) = piece.instructions
        eqn = instruction.eqn
        operands = [env[v] for v in instruction.operands]
        if Trait.SCANS in traits(eqn):
            axis = len(self.devices.maps)
            results = loops.scan(instruction, operands, self._run_inside, axis)
        elif Trait.WHILE in traits(eqn):
            results = loops.while_loop(instruction, operands, self._run_inside)
        elif Trait.BRANCHES in traits(eqn):
            results = loops.cond(instruction, operands, self._run_inside)
        else:
            results = self._run_on_devices(instruction, operands)
        return dict(zip(eqn.outvars, results, strict=True))

    def _run_inside(
        self,
        program: Program,
        values: Iterable[Value],
        iterations: tuple[int, ...] = (),
    ) -> list[Value]:
        """Runs a branch, or the iteration of a loop whose number is in `iterations`."""
        inside = dataclasses.replace(self, iterations=self.iterations + iterations)
        return inside.run(program, values)

    def _run_on_devices(
        self, instruction: Instruction, operands: Sequence[Value]
    ) -> list[Value]:
        """Runs a `shard_map`."""
        (program,) = instruction.programs
        params = instruction.eqn.params
        devices = self.devices.inside(instruction.eqn)
        inside = dataclasses.replace(self, devices=devices)
        to_stack = functools.partial(self._converted, Devices.to_stack, devices)
        from_stack = functools.partial(self._converted, Devices.from_stack, devices)
        stacks = map(to_stack, operands, params["in_specs"])
        results = inside.run(program, stacks)
        return list(map(from_stack, results, params["out_specs"]))

    def _converted(
        self, conversion: Callable, devices: Devices, value: Value, spec: jax.P
    ) -> Value:
        """Applies `Devices.to_stack` or `from_stack`, compiled once for its arguments.

        Otherwise, each iteration of a loop around the `shard_map` would compile anew.
        """
        key = (conversion, devices, spec)
        if key not in self.compiled:
            self.compiled[key] = jax.jit(conversion(devices, spec))
        return value.map(self.compiled[key])

    def _run_compiled(self, piece: Piece, env: Env) -> Env:
        """Compiles and runs a piece; returns its operands and results."""
        values = {v: env[v] for v in piece.reads}
        inputs = [value.pair for value in values.values()]
        all_results = self._compiled_for(piece)(inputs)
        for instruction, results in zip(piece.instructions, all_results, strict=True):
            for position, v in enumerate(instruction.eqn.outvars):
                pair = results[position]
                operands = instruction.operands_of(position)
                reads = notes_of(values[operand] for operand in operands)
                note = self._note(instruction, position, pair, reads)
                values[v] = Value(pair.as_operand, note)
        last = piece.instructions[-1]
        self.progress.report(last.origin.source, len(self.notes))
        return values

    def _note(
        self, instruction: Instruction, position: int, pair: Pair, reads: list[Note]
    ) -> Note | None:
        """Returns the note of a result: a new note, or the note of its operand.

        A new note is appended to `notes`.
        """
        if position not in instruction.noted:
            return reads[0] if reads else None
        note = note_of(
            pair.figures,
            instruction.origin,
            dtype_in(instruction.eqn.outvars[position]),
            reads,
            self.iterations,
            position,
        )
        self.notes.append(note)
        return note

    def _compiled_for(self, piece: Piece) -> Callable:
        """Compiles `pairs.compute` for a piece, once for its key and the devices."""
        key = (piece.key, self.devices)
        if key not in self.compiled:
            compute = functools.partial(pairs.compute, piece, self.widths)
            self.compiled[key] = jax.jit(
                self.devices.over_stacks(compute),
                compiler_options=pairs.compiler_options(piece),
            )
        return self.compiled[key]
