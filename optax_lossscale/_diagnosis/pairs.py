"""Pairs of a value and its reference in wider floats, and equations applied to pairs.

For `y = x.astype(float16) * 3` with `x` float32, `x` is a pair of equal arrays; the cast
gives a float16 array beside the float32 one, and the multiplication is applied to each
of the two. `compute` does so for the instructions of a piece, inside `jit`.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Var
from jax.sharding import AxisType, reshard

from optax_lossscale._diagnosis.figures import Figures, figures_of, figures_of_choices
from optax_lossscale._diagnosis.program import Piece
from optax_lossscale._diagnosis.wide import in_wide, wide_dtype, widened
from optax_lossscale._programs.operations import Trait, traits
from optax_lossscale._programs.values import (
    FLOAT32,
    FLOAT64,
    Array,
    astype,
    is_inexact,
)

# Without its optimizations, XLA compiles for CPUs three times as fast. Most pieces run so
# few times that compiling them takes longer than running.
_QUICKLY = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_parallel_codegen_split_count": 1,
}


class Widths(NamedTuple):
    """The floats that the two arrays of a pair are computed in.

    Where the program's own are wider, they are kept.
    """

    actual: np.dtype | None  # None for the program's own
    reference: np.dtype


AS_WRITTEN = Widths(None, FLOAT32)
"""The program as it is. The reference is float32, which follows the program's choices."""

IN_FLOAT32 = Widths(FLOAT32, FLOAT64)
"""The program in float32, which makes its own choices. The reference is float64.

Run it with `jax.enable_x64`.
"""


class Pair(NamedTuple):
    """A value as it is computed, and its reference: the same in wider floats."""

    actual: Array
    reference: Array

    @property
    def settled(self) -> "Pair":
        """The pair as later equations read it: of integers or booleans, the actual ones."""
        return self if is_inexact(self.actual) else Pair(self.actual, self.actual)

    @property
    def figures(self) -> Figures:
        """How far the two are apart, and how large; of choices, how many differ."""
        if not is_inexact(self.actual):
            return figures_of_choices(self.actual, self.reference)
        dtype = wide_dtype(self.actual.dtype, FLOAT32)
        actual = np.asarray(self.actual, dtype)
        # A number of float64 that float32 does not hold becomes infinite.
        with np.errstate(over="ignore"):
            reference = np.asarray(self.reference, dtype)
        return figures_of(actual, reference)


def exact(x: Array, widths: Widths) -> Pair:
    """The pair of an argument or constant, which is the same in both, but for its dtype."""
    if not is_inexact(x):
        return Pair(x, x)
    actual = np.asarray(x, wide_dtype(x.dtype, widths.actual))
    reference = np.asarray(x, wide_dtype(x.dtype, widths.reference))
    return Pair(actual, reference)


def compute(piece: Piece, widths: Widths, ins: Sequence[Pair]) -> list[list[Pair]]:
    """The results of each instruction of a piece.

    Of a choice, the reference is what it decides by itself.
    """
    env = dict(zip(piece.reads, map(_resharded, piece.reads, ins), strict=True))
    results = []
    for instruction in piece.instructions:
        eqn = instruction.eqn
        operands = [env[v].settled for v in instruction.ins]
        with eqn.ctx.manager:  # the mesh may be another one, as inside of `auto_axes`
            pairs = _results(eqn, operands, widths)
        env.update(zip(eqn.outvars, pairs, strict=True))
        results.append(pairs)
    return results


def _resharded(v: Var, pair: Pair) -> Pair:
    """A pair whose arrays lie along the axes of a mesh as they did when traced.

    The host may have had them in the meantime. JAX refuses operands that lie
    differently, if an axis is explicit.
    """
    sharding = getattr(v.aval, "sharding", None)
    if sharding is None or sharding.mesh.empty:
        return pair

    def resharded(x):
        types = (*sharding.mesh.axis_types, *jax.typeof(x).sharding.mesh.axis_types)
        if AxisType.Explicit not in types:
            return x
        with jax.sharding.use_abstract_mesh(sharding.mesh):
            return reshard(x, sharding)

    return jax.tree.map(resharded, pair)


def _results(eqn: JaxprEqn, ins: Sequence[Pair], widths: Widths) -> list[Pair]:
    """The results of an equation."""
    actual = in_wide(eqn, [x.actual for x in ins], widths.actual)
    if not any(map(is_inexact, [*eqn.invars, *eqn.outvars])):
        return list(map(Pair, actual, actual))
    if Trait.EFFECTFUL in traits(eqn):
        return [Pair(x, widened(x, widths.reference)) for x in actual]
    reference = in_wide(eqn, [x.reference for x in ins], widths.reference)
    pairs = list(map(Pair, actual, reference))
    # What is sorted can be compared even if the two orders differ.
    if Trait.CHOOSES in traits(eqn):
        return pairs
    return _by_its_choices(pairs)


def _by_its_choices(pairs: list[Pair]) -> list[Pair]:
    """The results of an equation that returns floats and choices that belong together.

    The factors of an LU decomposition mean nothing without its pivots. So if the
    reference has other pivots, in any matrix of a batch, its factors are replaced by the
    actual ones in the whole batch. The first choice decides, as the pivots do, and any
    other follows from it.
    """
    choices = [pair for pair in pairs if not is_inexact(pair.actual)]
    if not choices or len(choices) == len(pairs):
        return pairs
    are_same = jnp.all(choices[0].actual == choices[0].reference)

    def joined(pair):
        if not is_inexact(pair.actual):
            return pair
        actual = astype(pair.actual, pair.reference.dtype)
        return Pair(pair.actual, jnp.where(are_same, pair.reference, actual))

    return list(map(joined, pairs))


@functools.cache
def compiler_options() -> dict[str, bool | int]:
    """Compiler options that keep every rounding, and, on CPUs, compile in little time."""
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
