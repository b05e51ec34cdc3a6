"""A program run with every value beside what float32 gives for it, and noted.

Stretches without loops are compiled; loops and branches are Python's, around these.
"""

import dataclasses
import math
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from optax_lossscale._diagnosis import loops
from optax_lossscale._diagnosis.loops import Value
from optax_lossscale._diagnosis.notes import Note, Place, measured
from optax_lossscale._diagnosis.steps import Step, last_reads
from optax_lossscale._diagnosis.stretch import (
    Pair,
    Stretch,
    Wired,
    exact,
    followed,
    holds_floats,
)
from optax_lossscale._programs.operations import Is, traits
from optax_lossscale._programs.values import dtype_in
from optax_lossscale._programs.versions import constants, mapped_axes, open_jaxpr

_STEPS = 300  # equations that are compiled together, at most
_BYTES = 2**28  # of results in float32 that may be there at once
_PATIENCE = 10.0  # seconds between two lines of progress


class Devices(NamedTuple):
    """The devices that a `shard_map` maps over: inside, the first axis of a value is theirs."""

    mesh: Any
    axes: tuple[Any, ...]

    def over(
        self, function: Callable, in_specs: Any = None, out_specs: Any = None
    ) -> Callable:
        """A function of what one device has, for all of them."""

        def of_one(*args):
            if in_specs is None:
                args = jax.tree.map(lambda x: x[0], args)
            results = function(*args)
            if out_specs is None:
                results = jax.tree.map(lambda x: jnp.expand_dims(x, 0), results)
            return results

        each = jax.P(self.axes)
        return jax.shard_map(
            of_one,
            mesh=self.mesh,
            axis_names=set(self.axes),
            in_specs=each if in_specs is None else in_specs,
            out_specs=each if out_specs is None else out_specs,
            check_vma=False,
        )

    def repeated(self, x: np.ndarray) -> np.ndarray:
        """What is the same for each of them."""
        count = math.prod(self.mesh.shape[axis] for axis in self.axes)
        return np.broadcast_to(x, (count, *x.shape))

    def moved(
        self, values: Sequence[Value], move: Callable, specs: Sequence[Any]
    ) -> list[Value]:
        """Values, each as its spec says."""
        pairs = zip(values, specs, strict=True)
        return [value.each(lambda x, spec=spec: move(x, spec)) for value, spec in pairs]

    def enter(self, x: Any, spec: Any) -> Any:
        """What each of them has of an array."""
        return jax.device_get(self.over(lambda x: x, in_specs=(spec,))(x))

    def leave(self, x: Any, spec: Any) -> Any:
        """The array of which each of them has a part."""
        return jax.device_get(self.over(lambda x: x, out_specs=spec)(x))


class Around(NamedTuple):
    """Where a program is run."""

    place: Place = Place("", "", "")  # of the equation that holds it
    path: tuple[int, ...] = ()  # the `id` of each equation around it
    rounds: tuple[int, ...] = ()  # of the loops around it
    devices: Devices | None = None

    def constant(self, x: np.ndarray) -> Value:
        """A value that is the same on all devices."""
        value = Value(exact(x))
        return value.each(self.devices.repeated) if self.devices else value


class PutOff(NamedTuple):
    """An equation that is yet to be computed."""

    step: Step
    ins: Sequence[Value]
    outs: Sequence[Value]


class Shadow:
    """A run of a program with float32 beside it.

    Equations are put off, and compiled together where a loop or a branch needs their
    results, and after products: so the layers of a model, which are alike, share what
    is compiled for one.

    Attributes:
      notes: what was noted of each result, in the order of running.
    """

    def __init__(self, program: Any):
        self.program = program
        self.notes: list[Note] = []
        self._steps: dict[tuple[int, ...], Step] = {}  # by the path to it
        self._put_off: list[PutOff] = []
        self._stretches: dict[Any, Stretch] = {}
        # Of each result, the rounds that are yet to be measured, which takes less time
        # at once.
        self._unmeasured: dict[Any, list[tuple[Note, Pair]]] = defaultdict(list)
        self._room = _BYTES
        self._said = time.monotonic()

    def __call__(self, values: Sequence[Value]) -> list[Value]:
        """The results for these arguments; the notes are those of this run."""
        self.notes = []
        results = self._run(self.program, values, Around())
        self._measure()
        return results

    def _run(
        self, program: Any, values: Sequence[Value], around: Around
    ) -> list[Value]:
        """The results of a program."""
        results = self._call(program, values, around)
        self._compute(around)
        return results

    def _call(
        self, program: Any, values: Sequence[Value], around: Around
    ) -> list[Value]:
        """The results of a program, some of which are put off."""
        jaxpr = open_jaxpr(program)
        env = dict(zip(jaxpr.invars, values, strict=True))
        for v, x in zip(jaxpr.constvars, constants(program), strict=True):
            env[v] = around.constant(jax.device_get(x))

        def read(v):
            if isinstance(v, Literal):
                return around.constant(np.asarray(v.val, dtype_in(v)))
            return env[v]

        for eqn, frees in zip(jaxpr.eqns, last_reads(jaxpr), strict=True):
            results = self._results(eqn, list(map(read, eqn.invars)), around)
            env.update(zip(eqn.outvars, results, strict=True))
            for v in frees:
                del env[v]
        return list(map(read, jaxpr.outvars))

    def _results(
        self, eqn: Any, ins: Sequence[Value], around: Around
    ) -> Sequence[Value]:
        """The results of an equation."""
        path = (*around.path, id(eqn))
        if path not in self._steps:
            self._steps[path] = Step.at(eqn, len(self._steps), around.place)
        step = self._steps[path]
        if step.programs:
            inside = around._replace(place=step.place, path=path)
            if step.is_call:
                return self._call(step.programs[0], ins, inside)
            self._compute(around)
            return self._run_loop(step, ins, inside)
        outs = [Value() for _ in eqn.outvars]
        self._put_off.append(PutOff(step, ins, outs))
        self._room -= step.size
        if self._is_enough(is_in_loop=bool(around.rounds)):
            self._compute(around)
        return outs

    def _run_loop(
        self, step: Step, ins: Sequence[Value], inside: Around
    ) -> list[Value]:
        def run(program, values, *turn):
            return self._run(
                program, values, inside._replace(rounds=(*inside.rounds, *turn))
            )

        kind = traits(step.eqn)
        if Is.SCANS in kind:
            axis = 1 if inside.devices else 0
            return loops.scan(step, ins, run, self._worst, inside.constant, axis)
        if Is.WAITS in kind:
            return loops.while_loop(step, ins, run)
        if Is.BRANCHES in kind:
            return loops.cond(step, ins, run, self._worst)
        params = step.eqn.params
        devices = Devices(params["mesh"], tuple(mapped_axes(step.eqn)))
        values = devices.moved(ins, devices.enter, params["in_specs"])
        results = self._run(step.programs[0], values, inside._replace(devices=devices))
        return devices.moved(results, devices.leave, params["out_specs"])

    def _is_enough(self, is_in_loop: bool) -> bool:
        """Whether to compute what was put off."""
        if len(self._put_off) >= _STEPS or self._room < 0:
            return True
        if is_in_loop:  # all of whose rounds share what is compiled
            return False
        return Is.PRODUCT in traits(self._put_off[-1].step.eqn)

    def _compute(self, around: Around) -> None:
        """Computes what was put off."""
        put_off = self._put_off
        if not put_off:
            return
        self._put_off = []
        numbers: dict[int, int] = {}  # by the `id` of a value
        reads: dict[int, Pair] = {}

        def number(value):
            number = numbers.setdefault(id(value), len(numbers))
            if value.pair is not None:
                reads[number] = value.pair
            return number

        wired = [
            Wired(step.eqn, tuple(map(number, ins)), tuple(map(number, outs)))
            for step, ins, outs in put_off
        ]
        keys = (one.step.key for one in put_off)
        key = (
            around.devices,
            *((key, *wires[1:]) for key, wires in zip(keys, wired, strict=True)),
        )
        if key not in self._stretches:
            transform = (
                around.devices.over if around.devices else lambda function: function
            )
            self._stretches[key] = Stretch(wired, transform)
        stretch = self._stretches[key]
        for n, (one, pairs) in enumerate(zip(put_off, stretch(reads), strict=True)):
            self._note(one, pairs, n in stretch.passed, around.rounds)
        if self._room < 0:
            self._measure()
        self._say(put_off)

    def _note(
        self, one: PutOff, results: Sequence[Pair], is_passed: bool, rounds
    ) -> None:
        """Notes the results of an equation, which are its values from now on."""
        step, ins, outs = one
        for v, value, result in zip(step.eqn.outvars, outs, results, strict=True):
            value.pair = followed(result)
            if step.keeps_numbers:
                value.note = ins[0].note
            elif holds_floats(result.low.dtype) or _is_choice(result):
                place = step.place._replace(is_passed=True) if is_passed else step.place
                reads = tuple(x.note for x in ins if x.note is not None)
                seeded = any(note.seeded for note in reads)
                value.note = Note(
                    place, step.number, rounds, reads, v.aval.dtype, seeded
                )
                self.notes.append(value.note)
                kind = (step.number, v, result.true is None)
                self._unmeasured[kind].append((value.note, result))

    def _measure(self) -> None:
        """Adds to notes how far results are off, and how large they are."""
        for of_one in self._unmeasured.values():
            pairs = [pair for _, pair in of_one]
            stacked = jax.tree.map(_stacked, *pairs)
            for (note, _), numbers in zip(of_one, measured(*stacked), strict=True):
                note.add(numbers)
        self._unmeasured.clear()
        self._room = _BYTES

    def _worst(self, notes: Sequence[Note | None]) -> Note | None:
        """What is noted of several values in one: the worst."""
        self._measure()
        noted = [note for note in notes if note is not None]
        worst = max(noted, key=lambda note: note.off, default=None)
        in_float32 = next((note for note in noted if note.bad_true), None)
        if worst is None or in_float32 is None or worst.bad_true:
            return worst
        reads = (worst, in_float32)
        nan = any(note.nan_true for note in noted)
        return dataclasses.replace(worst, reads=reads, bad_true=True, nan_true=nan)

    def _say(self, put_off: Sequence[PutOff]) -> None:
        """A line of progress, where it takes long."""
        if time.monotonic() - self._said > _PATIENCE:
            self._said = time.monotonic()
            source = put_off[-1].step.place.source
            print(
                f"diagnose: {len(self.notes)} results, at {source}",
                file=sys.stderr,
                flush=True,
            )


def _stacked(*rounds: np.ndarray) -> np.ndarray:
    """The results of several rounds in one array; that of one round is not copied."""
    return np.stack(rounds) if len(rounds) > 1 else rounds[0][None]


def _is_choice(result: Pair) -> bool:
    """Whether a result is of indices or conditions that float32 may choose otherwise."""
    dtype = result.low.dtype
    return result.true is not None and (
        dtype == np.bool_ or jnp.issubdtype(dtype, jnp.integer)
    )
