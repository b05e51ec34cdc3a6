"""Pairs of a value and the same in wider floats, and equations applied to pairs.

For `y = x.astype(float16) * 3` with `x` float32, `x` is a pair with one array for both;
the cast gives a float16 array beside the float32 one, and the multiplication is applied
to each of these. `run` does so for the equations of a piece, inside `jit`.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from optax_lossscale._diagnosis.pieces import Piece
from optax_lossscale._diagnosis.wide import (
    in_wide,
    narrows,
    widened,
)
from optax_lossscale._programs.operations import Is, traits
from optax_lossscale._programs.values import FLOAT32, FLOAT64, dtype_in, is_float

# Without optimizing kernels, XLA's CPU compiler takes a third of the time, which pays
# for a program that runs once or twice.
_QUICKLY = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_parallel_codegen_split_count": 1,
}


class Widths(NamedTuple):
    """In which floats the two arrays of a pair are computed, unless theirs are wider."""

    low: Any  # None for those of the program
    true: Any


AS_WRITTEN = Widths(None, FLOAT32)
"""The program beside float32, which follows its choices, such as indices."""

IN_FLOAT32 = Widths(FLOAT32, FLOAT64)
"""The program in float32, by choices of its own, beside float64, which follows them.

These pairs are computed with `jax.enable_x64`.
"""


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["low", "true"],
    meta_fields=["is_passed"],
)
@dataclasses.dataclass
class Pair:
    """A value as it is computed (`low`), and as it is in wider floats (`true`)."""

    low: Any
    # None if both are the same, as nothing before has rounded to narrower floats
    true: Any = None
    is_passed: bool = (
        False  # whether `true` was computed in the program's narrow dtypes, too
    )

    @property
    def wide(self) -> Any:
        """The value in wider floats, which is `low` if both are the same."""
        return self.low if self.true is None else self.true

    @property
    def both(self) -> "Pair":
        """The same pair, never with None."""
        return Pair(self.low, self.wide)

    @property
    def followed(self) -> "Pair":
        """The pair that others read: of integers and booleans, both are `low`."""
        return Pair(self.low, self.true if is_float(self.low) else None)

    @property
    def compared(self) -> "Pair":
        """The pair with float64 rounded to the dtype beside it, as that is as telling.

        On the host, arrays of one dtype are compared in a fraction of the time.
        """
        if self.true is None or self.true.dtype != FLOAT64:
            return self
        with np.errstate(over="ignore"):
            return Pair(self.low, np.asarray(self.true, self.low.dtype), self.is_passed)


def exact(x: np.ndarray, widths: Widths) -> Pair:
    """A pair whose two numbers are equal, such as that of a constant."""
    low, true = (widened(x, wide) for wide in widths)
    return Pair(low, None if low.dtype == true.dtype else true)


def run(piece: Piece, widths: Widths, ins: Sequence[Pair]) -> list[list[Pair]]:
    """The results of each equation of a piece.

    Args:
      piece: the equations.
      widths: the floats of the two arrays of each pair.
      ins: the values that the piece reads.
    """
    env = dict(zip(piece.reads, ins, strict=True))
    every = []
    for eqn in piece.eqns:
        operands = [
            exact(np.asarray(v.val, dtype_in(v)), widths)
            if isinstance(v, Literal)
            else env[v]
            for v in eqn.invars
        ]
        results = _of_one(eqn, operands, widths)
        every.append(results)
        for v, pair in zip(eqn.outvars, results, strict=True):
            env[v] = pair.followed
    return every


def _of_one(eqn: Any, ins: Sequence[Pair], widths: Widths) -> list[Pair]:
    """The results of an equation, from operands in pairs."""
    lows, _ = in_wide(eqn, [x.low for x in ins], widths.low)
    if all(x.true is None for x in ins) and not narrows(eqn, widths.true):
        return list(map(Pair, lows))
    if Is.ONCE in traits(eqn):
        return [Pair(x, widened(x, widths.true), is_passed=True) for x in lows]
    trues, is_passed = in_wide(eqn, [x.wide for x in ins], widths.true)
    pairs = [Pair(low, true, is_passed) for low, true in zip(lows, trues, strict=True)]
    return _by_its_choices(pairs)


def _by_its_choices(pairs: list[Pair]) -> list[Pair]:
    """The results of an equation that returns floats and choices that belong together.

    The factors of an LU decomposition mean nothing without its pivots. So where wider
    floats choose other pivots, their factors are replaced by those beside them.
    """
    choices = [pair for pair in pairs if not is_float(pair.low)]
    if not choices:
        return pairs
    are_same = jnp.stack([jnp.all(x.low == x.true) for x in choices]).all()
    joined = []
    for pair in pairs:
        if is_float(pair.low):
            low = pair.low.astype(pair.true.dtype)
            true = jnp.where(are_same, pair.true, low)
            pair = dataclasses.replace(pair, true=true)
        joined.append(pair)
    return joined


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
