"""Pairs of a value and what float32 gives for it, and equations applied to pairs.

For `y = x.astype(float16) * 3` with `x` float32, `x` is a pair with one array for both;
the cast gives a float16 array beside the float32 one, and the multiplication is applied
to each of these. `beside_float32` does so for the equations of a piece, inside `jit`.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Literal

from optax_lossscale._diagnosis.pieces import Piece
from optax_lossscale._diagnosis.wide import (
    NotWidenedError,
    as_written,
    in_float32,
    is_narrow,
    narrows,
    widened,
)
from optax_lossscale._programs.values import dtype_in
from optax_lossscale._programs.versions import bind

# Without optimizing kernels, XLA's CPU compiler takes a third of the time, which pays
# for a program that runs once or twice.
_QUICKLY = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_parallel_codegen_split_count": 1,
}

# Operations by which `shard_map` with `check_vma` tracks the mesh axes along which an
# array differs. Here arrays may differ along all axes, so that two of them do nothing,
# and the third is an ordinary `psum`.
_OF_DEVICES = {
    "pvary": lambda x, params: x,
    "pcast": lambda x, params: x,
    "psum_invariant": lambda x, params: lax.psum(x, params["axes"]),
}


class Pair(NamedTuple):
    """A value as the program computes it (`low`), and as it is in float32 (`true`)."""

    low: Any
    # None if both are the same, as nothing before has rounded to 16 bits
    true: Any = None

    @property
    def in_float32(self) -> Any:
        """The value in float32, which is `low` if both are the same."""
        return self.low if self.true is None else self.true

    @property
    def both(self) -> "Pair":
        """The same pair, never with None."""
        return Pair(self.low, self.in_float32)

    @property
    def followed(self) -> "Pair":
        """The pair that others read if float32 follows the choices of the program.

        Of integers and booleans, both are then the program's.
        """
        return self if holds_floats(self.low.dtype) else Pair(self.low)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["pairs"], meta_fields=["is_passed"]
)
@dataclasses.dataclass
class Results:
    """The results of an equation."""

    pairs: list[Pair]
    is_passed: bool = False  # whether float32's were computed in 16 bits as well


@functools.cache
def holds_floats(dtype: Any) -> bool:
    """Whether arrays of a dtype are floating-point or complex."""
    return bool(jnp.issubdtype(dtype, jnp.inexact))


def exact(x: np.ndarray) -> Pair:
    """A pair whose two numbers are equal, such as that of a constant."""
    return Pair(x, x.astype(np.float32) if is_narrow(x.dtype) else None)


def beside_float32(piece: Piece, follows: bool, ins: Sequence[Pair]) -> list[Results]:
    """The results of each equation of a piece, in pairs.

    Args:
      piece: the equations.
      follows: whether float32 follows the choices of the program.
      ins: the values that the piece reads.
    """
    env = dict(zip(piece.reads, ins, strict=True))
    every = []
    for eqn in piece.eqns:
        operands = [
            exact(np.asarray(v.val, dtype_in(v))) if isinstance(v, Literal) else env[v]
            for v in eqn.invars
        ]
        results = _of_one(eqn, operands)
        if follows:
            results.pairs = _by_its_choices(results.pairs)
        every.append(results)
        for v, pair in zip(eqn.outvars, results.pairs, strict=True):
            env[v] = pair.followed if follows else pair
    return every


def _of_one(eqn: Any, ins: Sequence[Pair]) -> Results:
    """The results of an equation, from operands in pairs."""
    if eqn.primitive.name in _OF_DEVICES:
        of_one = _OF_DEVICES[eqn.primitive.name]
        return Results(jax.tree.map(lambda x: of_one(x, eqn.params), list(ins)))
    lows = bind(eqn, [x.low for x in ins])
    if all(x.true is None for x in ins) and not narrows(eqn):
        return Results(list(map(Pair, lows)))
    trues = [x.in_float32 for x in ins]
    try:
        return Results(list(map(Pair, lows, in_float32(eqn, trues))))
    except NotWidenedError:
        is_once = eqn.primitive.name == "io_callback"
        results = list(map(widened, lows)) if is_once else as_written(eqn, trues)
        return Results(list(map(Pair, lows, results)), is_passed=True)


def _by_its_choices(pairs: list[Pair]) -> list[Pair]:
    """The results of an equation that returns floats and choices that belong together.

    The factors of an LU decomposition mean nothing without its pivots. So where float32
    chooses other pivots, its factors are replaced by the program's. If the equation
    returns only floats or only choices, its results stay as they are.
    """
    choices = [pair for pair in pairs if not holds_floats(pair.low.dtype)]
    is_one_choice = len(choices) < len(pairs) and all(
        pair.true is not None for pair in pairs
    )
    if not choices or not is_one_choice:
        return pairs
    are_same = jnp.all(jnp.stack([jnp.all(x.low == x.true) for x in choices]))
    followed = []
    for pair in pairs:
        if holds_floats(pair.low.dtype):
            true = jnp.where(are_same, pair.true, widened(pair.low))
            pair = Pair(pair.low, true)
        followed.append(pair)
    return followed


@functools.cache
def compiler_options() -> dict[str, Any]:
    """The compiler's options for pieces, which run once or twice."""
    # By default XLA may drop a cast to 16 bits and back, but its rounding counts here.
    options: dict[str, Any] = {"xla_allow_excess_precision": False}
    if jax.default_backend() != "cpu":
        return options
    quickly = options | _QUICKLY
    try:
        jax.jit(lambda: 0.0, compiler_options=quickly).lower().compile()
    except jax.errors.JaxRuntimeError:
        return options
    return quickly
