"""A stretch of a program, computed as it is and in float32; all results are returned."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from optax_lossscale._diagnosis.flat import Flat, Step
from optax_lossscale._diagnosis.wide import (
    NotWidenedError,
    as_written,
    in_float32,
    narrows,
    widened,
)
from optax_lossscale._programs.values import dtype_in, in_dtype, is_float
from optax_lossscale._programs.versions import bind

# A program that runs once or twice is compiled without optimizing its kernels, in a fifth of the
# time. The names are those of XLA's CPU compiler.
_QUICKLY = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_parallel_codegen_split_count": 1,
}

# What `shard_map` writes where it checks along which axes arrays differ: here, along all.
_OF_DEVICES = {
    "pvary": lambda x, params: x,
    "pcast": lambda x, params: x,
    "psum_invariant": lambda x, params: lax.psum(x, params["axes"]),
}


class Pair(NamedTuple):
    """A value as the program computes it, and as it is in float32."""

    low: Any
    true: Any  # the same object, if nothing before it has rounded to 16 bits
    decided: Any = None  # what float32 decides, of booleans and integers that follow the program

    @property
    def is_same(self) -> bool:
        return self.true is self.low

    def packed(self) -> tuple[Any, Any]:
        """As a tree of arrays, in which None stands for the same."""
        return self.low, None if self.is_same else self.true


def pair(x: Any) -> Pair:
    """A number that is exact in both."""
    return Pair(x, widened(x))


def unpacked(packed: tuple[Any, Any]) -> Pair:
    """What `packed` packed."""
    low, true = packed
    return Pair(low, low if true is None else true)


def called(flat: Flat, stretch: Any, passed: set[int]) -> Any:
    """The function from what a stretch reads to what it keeps, and a record of each result."""

    def call(reads: Sequence[Any]):
        pairs = dict(zip(stretch.reads, map(unpacked, reads), strict=True))
        records = _evaluated(stretch.steps, pairs, flat.literals, passed)
        return [pairs[i].packed() for i in stretch.keeps], records

    return call


def scanned(flat: Flat, reverse: bool, passed: set[int]) -> Any:
    """The function of a scan over a body without loops, which stacks the records of its rounds."""
    steps = flat.stretches[0].steps

    def call(consts: Sequence[Any], carry: Sequence[Any], xs: Sequence[Any], turns: Any):
        def body(carry, numbered):
            xs, _ = numbered
            ins = [*consts, *carry, *xs]
            pairs = dict(zip(flat.ins, map(unpacked, ins), strict=True))
            pairs |= {i: pair(x) for i, x in flat.consts.items()}
            records = _evaluated(steps, pairs, flat.literals, passed)
            read = lambda i: pairs[i] if i in pairs else pair(jnp.asarray(flat.literals[i]))
            outs = [apart(read(i)).packed() for i in flat.outs]
            carried = [in_types(old, new) for old, new in zip(carry, outs, strict=False)]
            return carried, (outs[len(carry) :], records)

        carry, (ys, records) = lax.scan(body, carry, (xs, turns), reverse=reverse)
        return carry, ys, records

    return call


def apart(value: Pair) -> Pair:
    """A pair of two arrays, if these are floats: what a loop carries may differ later."""
    return Pair(value.low, value.true + 0) if is_float(value.low) and value.is_same else value


def in_types(old: tuple[Any, Any], new: tuple[Any, Any]) -> Any:
    """A packed pair in the types that a loop carries."""
    return jax.tree.map(lambda x, y: in_dtype(dtype_in(x), y), old, new)


@functools.cache
def _options() -> dict[str, Any]:
    """The options that this version of the compiler knows."""
    # The compiler must not drop a rounding to 16 bits and back.
    options: dict[str, Any] = {"xla_allow_excess_precision": False}
    for name, value in _QUICKLY.items() if jax.default_backend() == "cpu" else ():
        try:
            jax.jit(lambda: 0.0, compiler_options={name: value}).lower().compile()
        except jax.errors.JaxRuntimeError:
            continue
        options[name] = value
    return options


def compiled(function: Any) -> Any:
    """A function, compiled quickly rather than optimized, for arguments of any types."""
    return jax.jit(function, compiler_options=_options())


def _evaluated(
    steps: Sequence[Step],
    pairs: dict[int, Pair],
    literals: Mapping[int, Any],
    passed: set[int],
) -> list[list[Any]]:
    """Adds the results of steps to `pairs`, and returns what is to be noted of each."""
    read = lambda i: pairs[i] if i in pairs else pair(jnp.asarray(literals[i]))
    records = []
    for step in steps:
        outs = _computed(step, list(map(read, step.ins)), passed)
        pairs.update(zip(step.outs, outs, strict=True))
        records.append([None if step.aliases is not None else _record(x) for x in outs])
    return records


def _computed(step: Step, ins: Sequence[Pair], passed: set[int]) -> list[Pair]:
    """The results of an equation in both."""
    eqn = step.eqn
    if eqn.primitive.name in _OF_DEVICES:
        of_one = _OF_DEVICES[eqn.primitive.name]
        return [Pair(*(of_one(x, eqn.params) for x in pair[:2])) for pair in ins]
    lows = bind(eqn, [x.low for x in ins])
    if all(x.is_same for x in ins) and not narrows(eqn):
        return [Pair(x, x) for x in lows]
    trues = [x.true for x in ins]
    try:
        trues = in_float32(eqn, trues)
    except NotWidenedError:
        passed.add(step.number)
        is_once = eqn.primitive.name == "io_callback"
        trues = list(map(widened, lows)) if is_once else as_written(eqn, trues)
    # What decides follows the program.
    both = zip(lows, trues, strict=True)
    return [Pair(x, y) if is_float(x) else Pair(x, x, decided=y) for x, y in both]


def _record(value: Pair) -> Any:
    """The numbers to note of a result, in float32; None if there is nothing to note."""
    if is_float(value.low):
        return widened(value.low), None if value.is_same else value.true
    is_number = value.decided is not None and jnp.issubdtype(value.low.dtype, jnp.integer)
    if is_number or (value.decided is not None and value.low.dtype == bool):
        return value.low, value.decided
    return None
