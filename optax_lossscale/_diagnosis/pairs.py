"""Pairs of a value and the same in wider floats, and equations applied to pairs.

For `y = x.astype(float16) * 3` with `x` float32, `x` is a pair of equal arrays; the cast
gives a float16 array beside the float32 one, and the multiplication is applied to each
of these. `compute` does so for the instructions of a piece, inside `jit`.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Literal, Var
from jax.sharding import AxisType, reshard

from optax_lossscale._diagnosis.figures import Figures, figures_of
from optax_lossscale._diagnosis.program import Piece
from optax_lossscale._diagnosis.wide import in_wide, wide_dtype, widened
from optax_lossscale._programs.operations import Trait, traits
from optax_lossscale._programs.values import (
    FLOAT32,
    FLOAT64,
    Array,
    Atom,
    dtype_in,
    is_inexact,
)

# Without optimizing kernels, XLA's CPU compiler takes a third of the time. Most pieces
# run so few times that compiling them takes longer than running.
_QUICKLY = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_parallel_codegen_split_count": 1,
}


class Widths(NamedTuple):
    """The floats that the two arrays of a pair are computed in.

    Where the program's own are wider, they are kept.
    """

    low: np.dtype | None  # None for the program's own
    true: np.dtype


AS_WRITTEN = Widths(None, FLOAT32)
"""The program as it is. Beside it float32 follows its choices, such as indices."""

IN_FLOAT32 = Widths(FLOAT32, FLOAT64)
"""The program in float32, which makes its own choices. Beside it float64 follows these.

Run it with `jax.enable_x64`.
"""


class Pair(NamedTuple):
    """A value as it is computed (`low`), and as it is in wider floats (`true`)."""

    low: Array
    true: Any = None  # an array; None for integers and booleans, which follow `low`

    @property
    def followed(self) -> Array:
        """The value in wider floats, or the one that these follow."""
        return self.low if self.true is None else self.true

    def compared(self) -> "Compared":
        """The pair in one dtype of 32 bits or more."""
        if not is_inexact(self.low):
            return Compared(jnp.not_equal(self.low, self.true))
        dtype = wide_dtype(self.low.dtype, FLOAT32)
        return Compared(self.low.astype(dtype), self.true.astype(dtype))


class Compared(NamedTuple):
    """A pair as the host compares it.

    Of a choice, `low` is whether the wider floats decide otherwise, and `true` is None.
    """

    low: Array
    true: Array | None = None

    @property
    def figures(self) -> Figures:
        """How far the two arrays are apart, and how large."""
        return figures_of(self.low, self.true)


def exact(x: Array, widths: Widths) -> Pair:
    """A pair whose two numbers are equal, such as that of a constant."""
    if not is_inexact(x):
        return Pair(x)
    return Pair(widened(x, widths.low), widened(x, widths.true))


def compute(
    piece: Piece, widths: Widths, ins: Sequence[Pair]
) -> tuple[list[Pair], list[Compared]]:
    """What a piece leaves to others, and what the host compares for its notes."""
    env = dict(zip(piece.reads, map(_placed, piece.reads, ins), strict=True))
    to_compare = []
    for instruction in piece.instructions:
        eqn = instruction.eqn
        operands = [_read(v, env, widths) for v in eqn.invars]
        with eqn.ctx.manager:  # the mesh may be another one, as inside of `auto_axes`
            pairs = _of_one(eqn, operands, widths)
            results = dict(zip(eqn.outvars, pairs, strict=True))
            to_compare += [results[v].compared() for v in instruction.noted.values()]
        for v, pair in results.items():
            # From here on, wider floats follow a choice.
            env[v] = pair if is_inexact(pair.low) else Pair(pair.low)
    return [env[v] for v in piece.leaves], to_compare


def _placed(v: Var, pair: Pair) -> Pair:
    """A pair whose arrays lie along explicit axes of a mesh as they did when traced.

    The host may have had them since, and JAX refuses operands that lie differently.
    """
    sharding = getattr(v.aval, "sharding", None)
    if sharding is None or AxisType.Explicit not in sharding.mesh.axis_types:
        return pair
    return jax.tree.map(lambda x: reshard(x, sharding), pair)


def _read(v: Atom, env: Mapping[Var, Pair], widths: Widths) -> Pair:
    """The pair of a variable or literal."""
    if isinstance(v, Literal):
        return exact(np.asarray(v.val, dtype_in(v)), widths)
    return env[v]


def _of_one(eqn: JaxprEqn, ins: Sequence[Pair], widths: Widths) -> list[Pair]:
    """The results of an equation."""
    lows = in_wide(eqn, [x.low for x in ins], widths.low)
    if not any(map(is_inexact, [*eqn.invars, *eqn.outvars])):
        return list(map(Pair, lows))
    if Trait.EFFECTFUL in traits(eqn):
        return [Pair(x, widened(x, widths.true)) for x in lows]
    trues = in_wide(eqn, [x.followed for x in ins], widths.true)
    pairs = list(map(Pair, lows, trues))
    if Trait.CHOOSES in traits(eqn):  # what is sorted is right in any order
        return pairs
    return _by_its_choices(pairs)


def _by_its_choices(pairs: list[Pair]) -> list[Pair]:
    """The results of an equation that returns floats and choices that belong together.

    The factors of an LU decomposition mean nothing without its pivots. So where wider
    floats choose other pivots, their factors are replaced by those beside them.
    """
    choices = [pair for pair in pairs if not is_inexact(pair.low)]
    if not choices or len(choices) == len(pairs):
        return pairs
    are_same = jnp.all(choices[0].low == choices[0].true)
    joined = []
    for pair in pairs:
        if is_inexact(pair.low):
            beside = widened(pair.low, pair.true.dtype)
            pair = Pair(pair.low, jnp.where(are_same, pair.true, beside))
        joined.append(pair)
    return joined


@functools.cache
def compiler_options() -> dict[str, bool | int]:
    """The options with which the compiler takes the least time for a piece."""
    # By default XLA may drop a cast to 16 bits and back, but its rounding counts here.
    options: dict[str, bool | int] = {"xla_allow_excess_precision": False}
    if jax.default_backend() != "cpu":
        return options
    quickly = options | _QUICKLY
    # XLA does not say which options it has: a release may drop one of them.
    try:
        jax.jit(lambda: 0.0, compiler_options=quickly).lower().compile()
    except jax.errors.JaxRuntimeError:
        return options
    return quickly
