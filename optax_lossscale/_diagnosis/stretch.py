"""A stretch of a program, compiled to return all results as they are and in float32."""

import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from optax_lossscale._diagnosis.wide import (
    NotWidenedError,
    as_written,
    in_float32,
    is_narrow,
    narrows,
    widened,
)
from optax_lossscale._programs.versions import bind

# A program that runs once or twice is compiled without optimizing its kernels, in a
# fifth of the time. The names are those of XLA's CPU compiler.
_QUICKLY = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_parallel_codegen_split_count": 1,
}

# Numbers of a result that is sent by itself.
_LARGE = 2**12

# What `shard_map` writes where it checks along which axes arrays differ: here, along
# all.
_OF_DEVICES = {
    "pvary": lambda x, params: x,
    "pcast": lambda x, params: x,
    "psum_invariant": lambda x, params: lax.psum(x, params["axes"]),
}


class Pair(NamedTuple):
    """A value as the program computes it, and as it is in float32."""

    low: Any
    true: Any = None  # None for the same, if nothing before it has rounded to 16 bits

    @property
    def in_float32(self) -> Any:
        """The value in float32."""
        return self.low if self.true is None else self.true

    @property
    def both(self) -> "Pair":
        """With an array for each, if these are floats."""
        return Pair(self.low, self.in_float32) if holds_floats(self.low.dtype) else self


@functools.cache
def holds_floats(dtype: Any) -> bool:
    """Whether arrays of a dtype are floating-point or complex."""
    return bool(jnp.issubdtype(dtype, jnp.inexact))


def exact(x: np.ndarray) -> Pair:
    """A number that is exact in both."""
    return Pair(x, x.astype(np.float32) if is_narrow(x.dtype) else None)


def followed(result: Pair) -> Pair:
    """A result as it is read: what float32 would have chosen otherwise follows the program."""
    return result if holds_floats(result.low.dtype) else Pair(result.low)


class Wired(NamedTuple):
    """An equation of a stretch, whose values are numbered in the order in which it has them."""

    eqn: Any
    ins: tuple[int, ...]
    outs: tuple[int, ...]


class Stretch:
    """Equations that are compiled together.

    Attributes:
      passed: the numbers of those that compute in 16 bits only, once it was called.
    """

    def __init__(
        self, steps: Sequence[Wired], transform: Callable[[Callable], Callable]
    ):
        self.steps = steps
        self.passed: set[int] = set()
        self._forms: dict[Any, tuple[Any, list[tuple[str, tuple[int, ...], int]]]] = {}
        self._compiled = jax.jit(transform(self._sent), compiler_options=_options())

    def __call__(self, reads: dict[int, Pair]) -> list[list[Pair]]:
        """The results of each, on the host, given what they read that was there before."""
        large, rows = jax.tree.map(_on_host, self._compiled(reads))
        structure, types = self._forms[jax.tree.structure(reads)]
        left = iter(large)
        ends = dict.fromkeys(rows, 0)
        leaves = []
        for dtype, shape, size in types:
            if size > _LARGE:
                leaves.append(next(left))
                continue
            row = rows[dtype]
            begin = ends[dtype]
            ends[dtype] = begin + size
            numbers = row[..., begin : begin + size].copy()
            leaves.append(numbers.reshape(row.shape[:-1] + shape))
        return jax.tree.unflatten(structure, leaves)

    def _sent(self, reads: dict[int, Pair]) -> tuple[list[Any], dict[str, jax.Array]]:
        """All results: large ones, and small ones in a row for each dtype.

        Sending many small ones takes longer than computing them.
        """
        leaves, structure = jax.tree.flatten(self._computed(reads))
        types = [(str(x.dtype), jnp.shape(x), jnp.size(x)) for x in leaves]
        self._forms[jax.tree.structure(reads)] = structure, types
        large = []
        rows = defaultdict(list)
        for x in leaves:
            if jnp.size(x) > _LARGE:
                large.append(x)
            else:
                rows[str(x.dtype)].append(jnp.ravel(x))
        return large, {dtype: jnp.concatenate(row) for dtype, row in rows.items()}

    def _computed(self, reads: dict[int, Pair]) -> list[list[Pair]]:
        pairs = dict(reads)
        results = []
        for number, step in enumerate(self.steps):
            outs, is_passed = _beside_float32(step.eqn, [pairs[i] for i in step.ins])
            if is_passed:
                self.passed.add(number)
            pairs.update(zip(step.outs, map(followed, outs), strict=True))
            results.append(outs)
        return results


def _on_host(x: jax.Array) -> Any:
    """An array of NumPy's, if it has one for the dtype: not for the keys of random numbers."""
    return np.asarray(x) if isinstance(x.dtype, np.dtype) else x


def _beside_float32(eqn: Any, ins: Sequence[Pair]) -> tuple[list[Pair], bool]:
    """The results of an equation beside float32's, and whether it has none in float32."""
    if eqn.primitive.name in _OF_DEVICES:
        of_one = _OF_DEVICES[eqn.primitive.name]
        return jax.tree.map(lambda x: of_one(x, eqn.params), list(ins)), False
    lows = bind(eqn, [x.low for x in ins])
    if all(x.true is None for x in ins) and not narrows(eqn):
        return list(map(Pair, lows)), False
    trues = [x.in_float32 for x in ins]
    try:
        return list(map(Pair, lows, in_float32(eqn, trues))), False
    except NotWidenedError:
        is_once = eqn.primitive.name == "io_callback"
        results = list(map(widened, lows)) if is_once else as_written(eqn, trues)
        return list(map(Pair, lows, results)), True


@functools.cache
def _options() -> dict[str, Any]:
    """The options that this version of the compiler knows."""
    # The compiler must not drop a rounding to 16 bits and back.
    options: dict[str, Any] = {"xla_allow_excess_precision": False}
    quickly = _QUICKLY if jax.default_backend() == "cpu" else {}
    for name, value in quickly.items():
        try:
            jax.jit(lambda: 0.0, compiler_options={name: value}).lower().compile()
        except jax.errors.JaxRuntimeError:
            continue
        options[name] = value
    return options
