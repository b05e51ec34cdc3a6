"""A program run with every value beside what float32 gives for it, and noted.

Stretches without loops are compiled; loops and branches are Python's, around these.
"""

import math
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale._diagnosis import loops, stretch
from optax_lossscale._diagnosis.flat import Flat, Step, Stretch
from optax_lossscale._diagnosis.loops import Value
from optax_lossscale._diagnosis.notes import Note, measured
from optax_lossscale._diagnosis.stretch import Pair
from optax_lossscale._programs.operations import Is, traits
from optax_lossscale._programs.values import is_float
from optax_lossscale._programs.versions import mapped_axes

_PATIENCE = 10.0  # seconds between two lines of progress


class Devices(NamedTuple):
    """The devices that a `shard_map` maps over: inside, the first axis of a value is theirs."""

    mesh: Any
    axes: tuple[Any, ...]

    def over(self, function: Callable, in_specs: Any = None, out_specs: Any = None) -> Callable:
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

    def enter(self, x: Any, spec: Any) -> Any:
        """What each of them has of an array."""
        return jax.device_get(self.over(lambda x: x, in_specs=(spec,))(x))

    def leave(self, x: Any, spec: Any) -> Any:
        """The array of which each of them has a part."""
        return jax.device_get(self.over(lambda x: x, out_specs=spec)(x))


class Shadow:
    """A run of a program with float32 beside it.

    Attributes:
      notes: what was noted of each result, in the order of running.
    """

    def __init__(self, program: Flat):
        self.program = program
        self.notes: list[Note] = []
        self._passed: set[int] = set()  # the steps that compute in 16 bits only
        self._compiled: dict[int, Callable] = {}  # by the `id` of the stretch
        self._said = time.monotonic()

    def __call__(self, values: Sequence[Value]) -> list[Value]:
        """The results for these arguments; the notes are those of this run."""
        self.notes = []
        return self._run(self.program, values, (), None)

    def _run(
        self,
        program: Flat,
        values: Sequence[Value],
        rounds: tuple[int, ...],
        devices: Devices | None,
    ) -> list[Value]:
        env = dict(zip(program.ins, values, strict=True))
        for number, x in program.consts.items():
            constant = Value(stretch.exact(x))
            env[number] = constant.each(devices.repeated) if devices else constant
        for part in program.stretches:
            self._say(part)
            (step, *_) = part.steps
            if step.programs:
                ins = [env[number] for number in step.ins]
                results = self._run_loop(step, ins, rounds, devices)
                env.update(zip(step.outs, results, strict=True))
            else:
                self._run_stretch(part, env, rounds, devices)
            for number in part.frees:
                del env[number]
        return [env[number] for number in program.outs]

    def _run_loop(
        self,
        step: Step,
        ins: Sequence[Value],
        rounds: tuple[int, ...],
        devices: Devices | None,
    ) -> list[Value]:
        def run(program, values, *turn):
            return self._run(program, values, (*rounds, *turn), devices)

        kind = traits(step.eqn)
        if Is.SCANS in kind:
            return loops.scan(step, ins, run, axis=1 if devices else 0)
        if Is.WAITS in kind:
            return loops.while_loop(step, ins, run)
        if Is.BRANCHES in kind:
            return loops.cond(step, ins, run)
        return self._run_on_devices(step, ins, rounds)

    def _run_on_devices(
        self, step: Step, ins: Sequence[Value], rounds: tuple[int, ...]
    ) -> list[Value]:
        """The results of a `shard_map`."""
        params = step.eqn.params
        devices = Devices(params["mesh"], tuple(mapped_axes(step.eqn)))

        def moved(values, move, specs):
            pairs = zip(values, specs, strict=True)
            return [value.each(lambda x, spec=spec: move(x, spec)) for value, spec in pairs]

        values = moved(ins, devices.enter, params["in_specs"])
        results = self._run(step.programs[0], values, rounds, devices)
        return moved(results, devices.leave, params["out_specs"])

    def _run_stretch(
        self,
        part: Stretch,
        env: dict[int, Value],
        rounds: tuple[int, ...],
        devices: Devices | None,
    ) -> None:
        """Adds the results of a stretch to the values that are known."""
        if id(part) not in self._compiled:
            call = stretch.called(part, self._passed)
            self._compiled[id(part)] = stretch.compiled(devices.over(call) if devices else call)
        reads = [env[number].pair for number in part.reads]
        results = jax.device_get(self._compiled[id(part)](reads))
        for step, pairs in zip(part.steps, results, strict=True):
            notes = [env[number].note for number in step.ins]
            for number, v, pair in zip(step.outs, step.eqn.outvars, pairs, strict=True):
                if step.keeps_numbers:
                    note = notes[0]
                else:
                    note = self._noted(step, v.aval.dtype, pair, notes, rounds)
                env[number] = Value(stretch.followed(pair), note)

    def _noted(
        self,
        step: Step,
        dtype: Any,
        result: Pair,
        notes: Sequence[Note | None],
        rounds: tuple[int, ...],
    ) -> Note | None:
        """What is to be noted of a result; None of choices that float32 leaves as they are."""
        is_choice = result.true is not None and jnp.issubdtype(dtype, jnp.integer)
        is_choice = is_choice or (result.true is not None and dtype == bool)
        if not (is_float(result.low) or is_choice):
            return None
        place = step.place._replace(is_passed=step.number in self._passed)
        reads = tuple(note for note in notes if note is not None)
        seeded = any(note.seeded for note in reads)
        note = Note(place, step.number, rounds, reads, dtype, seeded, **measured(*result))
        self.notes.append(note)
        return note

    def _say(self, part: Stretch) -> None:
        """A line of progress, where it takes long."""
        if time.monotonic() - self._said > _PATIENCE:
            self._said = time.monotonic()
            source = part.steps[0].place.source
            print(f"diagnose: {len(self.notes)} results, at {source}", file=sys.stderr, flush=True)
