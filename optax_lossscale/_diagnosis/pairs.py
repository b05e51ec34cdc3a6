"""Pairs of a value and what float32 gives for it, and equations applied to pairs.

For `y = x.astype(float16) * 3` with `x` float32, `x` is a pair with one array for both;
the cast gives a float16 array beside the float32 one, and the multiplication is applied
to each of these. `beside_float32` does so for the equations of a piece, inside `jit`.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from optax_lossscale._diagnosis.pieces import Piece
from optax_lossscale._diagnosis.wide import (
    NotWidenedError,
    applied,
    as_written,
    in_float32,
    narrows,
    widened,
)
from optax_lossscale._programs.operations import Is, traits
from optax_lossscale._programs.values import dtype_in, is_float, is_narrow

# Without optimizing kernels, XLA's CPU compiler takes a third of the time, which pays
# for a program that runs once or twice.
_QUICKLY = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_parallel_codegen_split_count": 1,
}


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["low", "true"],
    meta_fields=["is_passed"],
)
@dataclasses.dataclass
class Pair:
    """A value as the program computes it (`low`), and as it is in float32 (`true`)."""

    low: Any
    # None if both are the same, as nothing before has rounded to 16 bits
    true: Any = None
    is_passed: bool = False  # whether float32's was computed in 16 bits as well

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
        """The pair that others read: of integers and booleans, both are the program's."""
        return Pair(self.low, self.true if is_float(self.low) else None)


def exact(x: np.ndarray) -> Pair:
    """A pair whose two numbers are equal, such as that of a constant."""
    return Pair(x, x.astype(np.float32) if is_narrow(x.dtype) else None)


Rule = Callable[[Any, Sequence[Pair]], list[Pair]]
"""From an equation and its operands to its results."""


def run(piece: Piece, rule: Rule, ins: Sequence[Pair]) -> list[list[Pair]]:
    """The results of each equation of a piece.

    Args:
      piece: the equations.
      rule: how an equation is computed.
      ins: the values that the piece reads.
    """
    env = dict(zip(piece.reads, ins, strict=True))
    every = []
    for eqn in piece.eqns:
        operands = [
            exact(np.asarray(v.val, dtype_in(v))) if isinstance(v, Literal) else env[v]
            for v in eqn.invars
        ]
        results = rule(eqn, operands)
        every.append(results)
        for v, pair in zip(eqn.outvars, results, strict=True):
            env[v] = pair.followed
    return every


def beside_float32(eqn: Any, ins: Sequence[Pair]) -> list[Pair]:
    """The results as the program computes them, beside float32's.

    Float32 follows the choices of the program.
    """
    lows = applied(eqn, [x.low for x in ins])
    if all(x.true is None for x in ins) and not narrows(eqn):
        return list(map(Pair, lows))
    if Is.ONCE in traits(eqn):
        return [Pair(low, widened(low), is_passed=True) for low in lows]
    trues, is_passed = _wide(eqn, ins)
    return _by_its_choices(
        [Pair(low, true, is_passed) for low, true in zip(lows, trues, strict=True)]
    )


def float32_alone(eqn: Any, ins: Sequence[Pair]) -> list[Pair]:
    """The results in float32 only, by its own choices: a pair has it as `low`."""
    trues, _ = _wide(eqn, ins)
    return list(map(Pair, trues))


def _wide(eqn: Any, ins: Sequence[Pair]) -> tuple[list[Any], bool]:
    """The results in float32, and whether they were computed in 16 bits all the same."""
    trues = [x.in_float32 for x in ins]
    try:
        return in_float32(eqn, trues), False
    except NotWidenedError:
        return as_written(eqn, trues), True


def _by_its_choices(pairs: list[Pair]) -> list[Pair]:
    """The results of an equation that returns floats and choices that belong together.

    The factors of an LU decomposition mean nothing without its pivots. So where float32
    chooses other pivots, its factors are replaced by the program's.
    """
    choices = [pair for pair in pairs if not is_float(pair.low)]
    if not choices:
        return pairs
    are_same = jnp.stack([jnp.all(x.low == x.true) for x in choices]).all()
    return [
        Pair(x.low, jnp.where(are_same, x.true, widened(x.low)), x.is_passed)
        if is_float(x.low)
        else x
        for x in pairs
    ]


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
