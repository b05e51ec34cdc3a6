"""A program with a switch at each equation: float32, or rounded as it was written."""

import enum
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from optax_lossscale._arrays.precision import is_inexact
from optax_lossscale._diagnosis.program import Evidence, Program
from optax_lossscale._diagnosis.widened import rounded, widely
from optax_lossscale._programs.operations import Is, is_exact, traits_of
from optax_lossscale._programs.values import HALVES, dtype_in

WIDE, DIGITS, ROUNDED = range(3)
"""How a result is rounded: not at all, to as many digits but with any exponent, or as written."""


class Made(enum.IntEnum):
    """What an equation makes that is not finite, of finite numbers or of infinities."""

    NOTHING = 0  # ever more is known, as of the rounds of a loop the maximum is kept
    NAN_OF_INFINITY = 1
    INFINITY = 2
    NAN = 3
    INFINITY_AND_NAN = 4


class Inspection:
    """A program of which each run is told how to round each result."""

    def __init__(self, program: Program):
        self.equations = program.equations
        # Of each: whether there is anything to round, and whether it may add up many terms.
        self.rounds = np.array([_rounds(e.eqn) for e in self.equations], bool)
        is_sum = [_adds_many(e.eqn) or e.summed > 1 for e in self.equations]
        self.sums = self.rounds & np.array(is_sum, bool)
        self._rounding = program.inspected(
            lambda modes: lambda n, eqn, ins: (_rounded(eqn, ins, modes[n]), None)
        )
        self._watching = {
            mode: program.inspected(functools.partial(_watching, compute))
            for mode, compute in ((WIDE, widely), (ROUNDED, rounded))
        }

    def run(self, exponent: int, modes: np.ndarray) -> Evidence:
        """What comes out at a loss scale of a power of two, each result rounded as `modes` say."""
        return self._rounding(exponent, modes)[0]

    def watched(
        self, exponent: int, mode: int, healed: Collection[int] = ()
    ) -> tuple[Evidence, dict[int, Made]]:
        """What comes out, and what equations make, with zeros for that in those `healed`."""
        is_healed = np.isin(np.arange(len(self.equations)), list(healed))
        evidence, records = self._watching[mode](exponent, is_healed)
        return evidence, {n: Made(int(made)) for n, made in records.items() if made}


def _rounded(eqn: Any, ins: Sequence[Any], mode: Any) -> list[Any]:
    """The results of an equation, rounded as one of the modes says."""
    if not _rounds(eqn):
        return widely(eqn, ins)
    if _adds_many(eqn):  # which rounds inside
        of_digits = lambda eqn, ins: _to_digits(eqn, widely(eqn, ins))
        ways = [functools.partial(way, eqn) for way in (widely, of_digits, rounded)]
        return lax.switch(mode, ways, ins)

    def chosen(v, x, digits):
        if v.aval.dtype not in HALVES:
            return x
        exact = x.astype(v.aval.dtype).astype(x.dtype)
        return lax.select_n(jnp.broadcast_to(mode.astype(jnp.int32), x.shape), x, digits, exact)

    outs = widely(eqn, ins)
    return list(map(chosen, eqn.outvars, outs, _to_digits(eqn, outs)))


def _to_digits(eqn: Any, outs: Sequence[Any]) -> list[Any]:
    """Results with as many digits as they were written with, and any exponent."""
    return [
        lax.reduce_precision(x, 8, jnp.finfo(v.aval.dtype).nmant) if _is_half(v) else x
        for v, x in zip(eqn.outvars, outs, strict=True)
    ]


def _watching(compute: Callable, is_healed: Any) -> Callable:
    """The rule that notes what equations make, and heals some."""

    def watched(n, eqn, ins):
        outs, name = compute(eqn, ins), eqn.primitive.name
        # Of an index out of bounds, NaN.
        if (is_exact(name) and name != "gather") or not any(map(is_inexact, outs)):
            return outs, None
        healed = [_healed(x, is_healed[n]) if is_inexact(x) else x for x in outs]
        return healed, _made(_kinds(ins), _kinds(outs))

    return watched


def _kinds(xs: Sequence[Any]) -> Any:
    return functools.reduce(jnp.bitwise_or, map(_kind, filter(is_inexact, xs)), np.uint8(0))


# Each is traced once for all equations of a shape, and reads it once.
@jax.jit
def _kind(x: jax.Array) -> jax.Array:
    """Whether there are infinities, 1, or NaNs, 2, or both, 3."""
    if jnp.iscomplexobj(x):
        x = jnp.stack([x.real, x.imag])
    kinds = jnp.where(jnp.isnan(x), 2, jnp.where(jnp.isinf(x), 1, 0)).astype(jnp.uint8)
    return lax.reduce_or(kinds, tuple(range(x.ndim)))


@jax.jit
def _healed(x: jax.Array, is_healed: jax.Array) -> jax.Array:
    return jnp.where(is_healed & ~jnp.isfinite(x), 0, x)


@jax.jit
def _made(given: jax.Array, made: jax.Array) -> jax.Array:
    """The `Made` of what is given and made, each with infinities, 1, or NaNs, 2, or both, 3."""
    of_finite = jnp.where(made > 0, made + 1, Made.NOTHING)
    of_infinity = jnp.where((given == 1) & (made >= 2), Made.NAN_OF_INFINITY, Made.NOTHING)
    return jnp.where(given == 0, of_finite, of_infinity).astype(jnp.uint8)


def _rounds(eqn: Any) -> bool:
    return not is_exact(eqn.primitive.name) and any(map(_is_half, eqn.outvars))


def _adds_many(eqn: Any) -> bool:
    return Is.ADDS_MANY in traits_of(eqn.primitive.name)


def _is_half(v: Any) -> bool:
    return dtype_in(v) in HALVES
