"""A program run with every value beside what float32 gives for it, and noted.

Stretches without loops are compiled. Loops and branches are Python's, around bodies that are
compiled once; a scan over a body without loops is compiled for as many rounds as memory allows.
Choices, of branches and of indices, are those of the program.
"""

import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from optax_lossscale._diagnosis import stretch as compiling
from optax_lossscale._diagnosis.flat import Flat, Step, Stretch
from optax_lossscale._diagnosis.notes import Note, Place, measured
from optax_lossscale._diagnosis.stretch import Pair
from optax_lossscale._programs.values import is_float
from optax_lossscale._programs.versions import mapped_axes, scan_sizes

_BYTES = 2**27  # of results of a scan in float32 that are kept at once
_PATIENCE = 10.0  # seconds between two lines of progress


@dataclasses.dataclass(slots=True)
class Value:
    """A value of the program, and what was noted of it."""

    pair: Pair
    note: Note | None = None
    parts: Sequence[Note | None] | None = None  # of a stack of results of a loop


@dataclasses.dataclass(frozen=True)
class Devices:
    """The devices that a `shard_map` maps over: inside, the first axis of a value is theirs."""

    mesh: Any
    axes: tuple[Any, ...]

    @property
    def spec(self) -> Any:
        """One for each."""
        return jax.P(self.axes)

    def over(self, function: Callable, in_specs: Any = None, out_specs: Any = None) -> Callable:
        """A function of what one device has, for all of them."""
        one = lambda x: x[0]
        each = lambda x: jnp.expand_dims(x, 0)

        def of_one(*args):
            args = jax.tree.map(one, args) if in_specs is None else args
            results = function(*args)
            return jax.tree.map(each, results) if out_specs is None else results

        return jax.shard_map(
            of_one,
            mesh=self.mesh,
            axis_names=set(self.axes),
            in_specs=self.spec if in_specs is None else in_specs,
            out_specs=self.spec if out_specs is None else out_specs,
            check_vma=False,
        )


class Shadow:
    """A run of a program with float32 beside it.

    Attributes:
      notes: what was noted of each result, in the order of running.
      passed: the numbers of the steps that compute in 16 bits only.
    """

    def __init__(self, program: Flat):
        self.program = program
        self.notes: list[Note] = []
        self.passed: set[int] = set()
        self._compiled: dict[Any, Callable] = {}
        self._said = time.monotonic()

    def __call__(self, values: Sequence[Value]) -> list[Value]:
        """The results for these arguments; the notes are those of this run."""
        self.notes = []
        return self._run(self.program, values, (), None)

    def _run(
        self, flat: Flat, values: Sequence[Value], rounds: tuple[int, ...], devices: Devices | None
    ) -> list[Value]:
        env = dict(zip(flat.ins, values, strict=True))
        for number, x in flat.consts.items():
            env[number] = self._constant(x, devices)

        def read(number):
            known = number in env
            return env[number] if known else self._constant(flat.literals[number], devices)

        for part in flat.stretches:
            self._say(part)
            step = part.steps[0]
            if step.programs:
                loop = _LOOPS[step.eqn.primitive.name]
                ins = list(map(read, step.ins))
                env.update(zip(step.outs, loop(self, step, ins, rounds, devices), strict=True))
            else:
                self._run_stretch(flat, part, env, rounds, devices)
            for number in part.frees:
                env.pop(number, None)
        return list(map(read, flat.outs))

    def _constant(self, x: Any, devices: Devices | None) -> Value:
        x = jnp.asarray(x)
        if devices:
            x = devices.over(lambda x: x, in_specs=(jax.P(),))(x)
        return Value(compiling.pair(x))

    def _run_stretch(self, flat, part: Stretch, env: dict[int, Value], rounds, devices) -> None:
        key = (id(part), devices)
        if key not in self._compiled:
            call = compiling.called(flat, part, self.passed)
            self._compiled[key] = compiling.compiled(devices.over(call) if devices else call)
        reads = [env[i].pair.packed() for i in part.reads]
        kept, records = self._compiled[key](reads)
        measures = _measures(jax.tree.map(lambda x: x[None], jax.device_get(records)))
        notes = {i: env[i].note for i in part.reads}
        self._note(part, measures, 0, notes, rounds)
        for number, packed in zip(part.keeps, kept, strict=True):
            env[number] = Value(compiling.unpacked(packed), notes.get(number))

    def _note(self, part: Stretch, measures, n: int, notes: dict, rounds) -> None:
        """Adds the notes of a stretch's results, in round `n` of those measured, to `notes`."""
        for step, outs in zip(part.steps, measures, strict=True):
            reads = tuple(filter(None, map(notes.get, step.ins)))
            seeded = any(note.seeded for note in reads)
            for v, number, measure in zip(step.eqn.outvars, step.outs, outs, strict=True):
                if measure is None:
                    is_alias = step.aliases is not None
                    notes[number] = notes.get(step.ins[0]) if is_alias else None
                    continue
                place = step.place._replace(is_passed=step.number in self.passed)
                noted = {"dtype": v.aval.dtype, "seeded": seeded, **measure[n]}
                notes[number] = Note(place, step.number, rounds, reads, **noted)
                self.notes.append(notes[number])

    def _say(self, part: Stretch) -> None:
        """A line of progress, where it takes long."""
        if time.monotonic() - self._said > _PATIENCE:
            self._said = time.monotonic()
            source = part.steps[0].place.source
            print(f"diagnose: {len(self.notes)} results, at {source}", file=sys.stderr, flush=True)

    # --- loops and branches ---

    def _cond(self, step: Step, ins: Sequence[Value], rounds, devices) -> list[Value]:
        index, *operands = ins
        chosen = int(np.ravel(jax.device_get(index.pair.low))[0])
        branch = step.programs[min(max(chosen, 0), len(step.programs) - 1)]
        return self._run(branch, operands, rounds, devices)

    def _while(self, step: Step, ins: Sequence[Value], rounds, devices) -> list[Value]:
        condition, body = step.programs
        n_cond = step.eqn.params["cond_nconsts"]
        n_body = step.eqn.params["body_nconsts"]
        of_cond, of_body = ins[:n_cond], ins[n_cond:][:n_body]
        carry = list(ins[n_cond + n_body :])
        n = 0
        while True:
            (condition_of_all,) = self._run(condition, [*of_cond, *carry], (*rounds, n), devices)
            goes_on = jax.device_get(condition_of_all.pair.low)
            if not goes_on.any():
                return carry
            results = self._run(body, [*of_body, *carry], (*rounds, n), devices)
            if not goes_on.all():  # elements of a batch, or devices, that have ended stay
                pairs = zip(results, carry, strict=True)
                results = [_where(goes_on, result, old) for result, old in pairs]
            carry = results
            n += 1

    def _scan(self, step: Step, ins: Sequence[Value], rounds, devices) -> list[Value]:
        (body,) = step.programs
        length = step.eqn.params["length"]
        n_consts, n_carry = scan_sizes(step.eqn)
        consts, carry, xs = ins[:n_consts], ins[n_consts:][:n_carry], ins[n_consts + n_carry :]
        if body.is_one_stretch and not devices:
            return self._scan_at_once(step, consts, carry, xs, rounds)
        turns = range(length)[:: -1 if step.eqn.params["reverse"] else 1]
        axis = 1 if devices else 0
        results: list[Any] = [None] * length
        carry = list(carry)
        for n in turns:
            outs = self._run(body, [*consts, *carry, *_taken(xs, n, axis)], (*rounds, n), devices)
            carry, results[n] = outs[:n_carry], outs[n_carry:]
        return [*carry, *(_stacked(column, axis) for column in zip(*results, strict=True))]

    def _scan_at_once(self, step: Step, consts, carry, xs, rounds) -> list[Value]:
        """A scan over a body without loops, in as few parts as memory allows."""
        (body,) = step.programs
        (part,) = body.stretches
        reverse = step.eqn.params["reverse"]
        length = step.eqn.params["length"]
        outs = [v for inner in part.steps for v in inner.eqn.outvars]
        size = sum(8 * v.aval.size for v in outs if hasattr(v.aval, "size"))
        rows = max(1, _BYTES // max(size, 1))
        if id(part) not in self._compiled:
            call = compiling.scanned(body, reverse, self.passed)
            self._compiled[id(part)] = compiling.compiled(call)
        carried = [compiling.apart(x.pair).packed() for x in carry]
        carry_notes = [x.note for x in carry]
        constants = [x.pair.packed() for x in consts]
        stacks: list[Any] = []
        notes_of: list[Any] = [None] * length
        starts = range(0, length, rows)[:: -1 if reverse else 1]
        for start in starts:
            turns = range(start, min(start + rows, length))
            some = [_some(x, start, turns.stop) for x in xs]
            carried, ys, records = self._compiled[id(part)](
                constants, carried, some, np.arange(turns.start, turns.stop)
            )
            stacks.append(ys)
            measures = _measures(jax.device_get(records))
            for n in turns[:: -1 if reverse else 1]:
                given = [x.note for x in consts] + carry_notes + [_part(x, n) for x in xs]
                notes = dict(zip(body.ins, given, strict=True))
                self._note(part, measures, n - start, notes, (*rounds, n))
                results = [notes.get(i) for i in body.outs]
                carry_notes, notes_of[n] = results[: len(carry)], results[len(carry) :]
            self._say(part)
        stacks = stacks[:: -1 if reverse else 1]
        whole = stacks[0] if len(stacks) == 1 else jax.tree.map(_joined, *stacks)
        carries = [
            Value(compiling.unpacked(x), note)
            for x, note in zip(carried, carry_notes, strict=True)
        ]
        columns = zip(whole, zip(*notes_of, strict=True), strict=True)
        return carries + [_stack(compiling.unpacked(x), parts) for x, parts in columns]

    def _shard_map(self, step: Step, ins: Sequence[Value], rounds, devices) -> list[Value]:
        params = step.eqn.params
        inside = Devices(params["mesh"], tuple(mapped_axes(step.eqn)))
        enter = lambda x, spec: inside.over(lambda x: x, in_specs=(spec,))(x)
        leave = lambda x, spec: inside.over(lambda x: x, out_specs=spec)(x)
        values = [_moved(x, enter, spec) for x, spec in zip(ins, params["in_specs"], strict=True)]
        outs = self._run(step.programs[0], values, rounds, inside)
        return [_moved(x, leave, spec) for x, spec in zip(outs, params["out_specs"], strict=True)]


_LOOPS = {
    "cond": Shadow._cond,
    "while": Shadow._while,
    "scan": Shadow._scan,
    "shard_map": Shadow._shard_map,
}


def _measures(records: Sequence[Any]) -> list[list[Any]]:
    """What is to be noted of each result of a stretch, in each round."""
    of_one = lambda record: None if record is None else measured(*record)
    return [list(map(of_one, outs)) for outs in records]


def _moved(value: Value, move: Callable, spec: Any) -> Value:
    """A value on other devices."""
    packed = jax.tree.map(lambda x: move(x, spec), value.pair.packed())
    return Value(compiling.unpacked(packed), value.note)


def _where(goes_on: np.ndarray, new: Value, old: Value) -> Value:
    """The new value of the elements of a batch that go on with a loop, the old one of others."""

    def choose(x, y):
        axes = range(goes_on.ndim, x.ndim)
        return jnp.where(jnp.expand_dims(goes_on, tuple(axes)), x, y)

    low = choose(new.pair.low, old.pair.low)
    if new.pair.is_same and old.pair.is_same:
        return dataclasses.replace(new, pair=Pair(low, low))
    return dataclasses.replace(new, pair=Pair(low, choose(new.pair.true, old.pair.true)))


def _some(stack: Value, start: int, stop: int) -> Any:
    """Some of the rounds of a stack."""
    return jax.tree.map(lambda x: x[start:stop], stack.pair.packed())


def _taken(stacks: Sequence[Value], n: int, axis: int) -> list[Value]:
    """The values of one round in stacks of them."""
    packed = _slices([x.pair.packed() for x in stacks], np.int32(n), axis)
    pairs = zip(stacks, map(compiling.unpacked, packed), strict=True)
    return [Value(pair, _part(stack, n)) for stack, pair in pairs]


def _slices_of(tree: Any, n: Any, axis: int) -> Any:
    of_leaf = lambda x: lax.dynamic_index_in_dim(x, n, axis, keepdims=False)
    return jax.tree.map(of_leaf, tree)


_slices = jax.jit(_slices_of, static_argnums=2)


def _part(stack: Value, n: int) -> Note | None:
    """What was noted of one round's value in a stack."""
    return stack.note if stack.parts is None else stack.parts[n]


def _stacked(values: Sequence[Value], axis: int) -> Value:
    """A stack of the values of all rounds."""
    is_same = all(x.pair.is_same for x in values)
    low = jnp.stack([x.pair.low for x in values], axis)
    true = low if is_same else jnp.stack([x.pair.true for x in values], axis)
    return _stack(Pair(low, true), [x.note for x in values])


def _stack(pair: Pair, parts: Sequence[Note | None]) -> Value:
    """A stack, noted as the worst of its parts."""
    worst = max(filter(None, parts), key=lambda note: note.off, default=None)
    return Value(pair, worst, parts)


def _joined(*parts: Any) -> Any:
    return jnp.concatenate(parts)


def argument(x: Any, name: str, is_parameter: bool = False, seeded: bool = False) -> Value:
    """A value that the program is given."""
    place = Place("", "", "", name, is_parameter)
    pair = compiling.pair(x)
    numbers = measured(np.asarray(pair.true)[None], None)[0] if is_float(x) else {}
    return Value(pair, Note(place, -1, (), (), x.dtype, seeded, **numbers))
