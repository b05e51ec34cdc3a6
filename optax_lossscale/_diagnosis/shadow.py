"""Run a program with every value in a pair, and make a note of each result.

`run_to_seed(program, arguments, widths)` runs the instructions before the first that
reads the seed, and returns a `Shadow`. Called with a seed, a shadow runs the others, and
returns the results as pairs with notes, and all notes of the run. Each equation is
compiled, and the figures of its results are computed on the host. Loops and branches
are run in Python, which knows the number of each round.
"""

import copy
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
from optax_lossscale._diagnosis.pairs import Widths, exact
from optax_lossscale._diagnosis.program import Instruction, Program
from optax_lossscale._diagnosis.value import Value, noted_alone, notes_of
from optax_lossscale._programs.operations import Trait, traits
from optax_lossscale._programs.values import (
    Array,
    Atom,
    dtype_in,
    is_inexact,
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
    """Runs a program in pairs up to the first instruction that reads its seed.

    Args:
      program: a program whose last argument is the seed.
      arguments: all arguments but the seed.
      widths: the floats of each pair.
    """
    *others, seed = program.takes
    runner = _Runner(widths)
    values = [_value_of(argument, widths) for argument in arguments]
    env = runner.env_of(program._replace(takes=others), values, Context())
    before_seed = list(
        itertools.takewhile(lambda x: seed not in x.eqn.invars, program.instructions)
    )
    env = runner.after(before_seed, env, Context())
    rest = program._replace(instructions=program.instructions[len(before_seed) :])
    return Shadow(rest, env, runner)


class Shadow(NamedTuple):
    """A program that has run in pairs up to its seed. A call runs the rest of it."""

    rest: Program  # the program without the instructions that have run
    env: Env  # the values that do not depend on the seed
    runner: "_Runner"  # which has noted these

    def __call__(self, seed: Argument) -> tuple[list[Value], list[Note]]:
        """The results of the program, and all notes in the order of running.

        The note of a result is about its own numbers, also where these were only moved.
        """
        runner = self.runner.copy()
        env = {**self.env, self.rest.takes[-1]: _value_of(seed, runner.widths)}
        env = runner.after(self.rest.instructions, env, Context())
        results = []
        for value in runner.read(self.rest.gives, env, Context()):
            on_host = value.each(np.asarray)
            results.append(noted_alone(on_host.pair, [on_host]))
        return results, runner.notes


def _value_of(argument: Argument, widths: Widths) -> Value:
    """The value of an argument of the whole program."""
    pair = exact(argument.array, widths)
    figures = Figures() if pair.reference is None else pair.figures
    note = Note(
        **vars(figures),
        place=Place(name=argument.name, is_parameter=argument.is_parameter),
        dtype=dtype_in(argument.array),
        is_backward=argument.is_seed,
    )
    return Value(pair, note)


class _Runner:
    """One run in pairs, which adds the note of each result to `notes`."""

    def __init__(self, widths: Widths):
        self.widths = widths
        self.notes: list[Note] = []
        self._compiled: dict[Hashable, Callable] = {}
        self._reported = time.monotonic()  # when progress was last reported

    def copy(self) -> "_Runner":
        """A run that goes on from here, and uses what is compiled for this one."""
        copied = copy.copy(self)
        copied.notes = list(self.notes)
        return copied

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
        return Value(exact(x, self.widths)).each(context.devices.everywhere)

    # --- running ---

    def _run(
        self, program: Program, values: Sequence[Value], context: Context
    ) -> list[Value]:
        """The results of a program."""
        env = self.env_of(program, values, context)
        env = self.after(program.instructions, env, context)
        return self.read(program.gives, env, context)

    def after(
        self, instructions: Sequence[Instruction], env: Env, context: Context
    ) -> Env:
        """The values after instructions have run, without those that no one reads."""
        values = dict(env)
        for instruction in instructions:
            ins = self.read(instruction.eqn.invars, values, context)
            run = self._run_inside if instruction.programs else self._compute
            results = run(instruction, ins, context)
            values.update(zip(instruction.eqn.outvars, results, strict=True))
            for v in instruction.frees:
                del values[v]
        return values

    def _run_inside(
        self, instruction: Instruction, ins: Sequence[Value], context: Context
    ) -> list[Value]:
        """The results of a loop or branch, whose programs are run in Python."""

        def run(program, values, *turn):  # `turn`: the number of the round, in a loop
            rounds = (*context.rounds, *turn)
            return self._run(program, values, context._replace(rounds=rounds))

        kind = traits(instruction.eqn)
        if Trait.SCANS in kind:
            return loops.scan(instruction, ins, run, len(context.devices.maps))
        if Trait.WHILE in kind:
            return loops.while_loop(instruction, ins, run)
        if Trait.BRANCHES in kind:
            return loops.cond(instruction, ins, run)
        return self._run_on_devices(instruction, ins, context)

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

    def _compute(
        self, instruction: Instruction, ins: Sequence[Value], context: Context
    ) -> list[Value]:
        """The results of an equation, by compiled code, with their notes.

        One without a note of its own has that of the first operand that has one.
        """
        compute = self._compiled_for(instruction, context.devices)
        results = compute([value.pair for value in ins])
        reads = notes_of(ins)
        values = []
        for position, pair in enumerate(results):
            note = reads[0] if reads else None
            if position in instruction.noted:
                note = note_of(
                    pair.figures,
                    instruction.place,
                    dtype_in(instruction.eqn.outvars[position]),
                    reads,
                    context.rounds,
                    position,
                    stays_narrow=instruction.stays_narrow and is_inexact(pair.actual),
                )
                self.notes.append(note)
            values.append(Value(pair.settled, note))
        self._report_progress(instruction)
        return values

    def _compiled_for(self, instruction: Instruction, devices: Devices) -> Callable:
        """`pairs.compute` of an equation on these devices, shared by those alike."""
        key = (instruction.key, devices)
        if key not in self._compiled:
            function = functools.partial(pairs.compute, instruction.eqn, self.widths)
            self._compiled[key] = jax.jit(
                devices.over(function), compiler_options=pairs.compiler_options()
            )
        return self._compiled[key]

    def _report_progress(self, instruction: Instruction) -> None:
        """Prints a line to stderr, if none has been printed for `_PATIENCE` seconds."""
        if time.monotonic() - self._reported > _PATIENCE:
            self._reported = time.monotonic()
            line = instruction.place.source
            progress = f"diagnose: {len(self.notes)} results, at {line}"
            print(progress, file=sys.stderr, flush=True)
