"""A program with a switch at each equation: float32, or rounded as it was written."""

import functools
from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from optax_lossscale._diagnosis.program import Evidence, Program
from optax_lossscale._diagnosis.widened import rounded, widely
from optax_lossscale._programs.operations import Is, is_exact, traits_of
from optax_lossscale._programs.run import numbered
from optax_lossscale._programs.values import HALVES, dtype_in
from optax_lossscale._programs.walk import Equation, equations

WIDE, DIGITS, ROUNDED = range(3)
"""How a result is rounded: not at all, to as many digits but with any exponent, or as written."""


class Made(NamedTuple):
    """What an equation makes that is not finite, of finite numbers, or of infinities."""

    infinity: bool
    nan: bool
    nan_of_infinity: bool


# In increasing order of what is known, as the maximum over the rounds of a loop is kept.
_MADE = (
    Made(infinity=False, nan=False, nan_of_infinity=False),
    Made(infinity=False, nan=False, nan_of_infinity=True),
    Made(infinity=True, nan=False, nan_of_infinity=False),
    Made(infinity=False, nan=True, nan_of_infinity=False),
    Made(infinity=True, nan=True, nan_of_infinity=False),
)
Watched = tuple[Evidence, dict[int, Made]]
"""What comes out, and what those equations that make something make, under their numbers."""


class Inspection:
    """A program of which each run is told how to round each result.

    Attributes:
      equations: those that hold no others, in order.
      rounds: of each, whether there is anything to round.
      sums: of each, whether it adds up what may be many terms.
    """

    def __init__(self, program: Program):
        places = {id(e.eqn): e for e in equations(program.jaxpr.jaxpr)}
        self.equations: list[Equation] = [places[id(eqn)] for eqn in numbered(program.jaxpr)]
        self.rounds = np.array([_rounds(e.eqn) for e in self.equations], bool)
        is_sum = lambda e: _adds_many(e.eqn) or e.summed > 1
        self.sums = self.rounds & np.array(list(map(is_sum, self.equations)), bool)
        self._program = program
        self._watches: dict[int, Callable] = {}

    def run(self, exponent: int, modes: np.ndarray) -> Evidence:
        """What comes out at a loss scale of a power of two, each result rounded as `modes` say."""
        return self._rounding(exponent, modes)[0]

    def watched(self, exponent: int, mode: int, healed: Collection[int] = ()) -> Watched:
        """What makes infinities and NaNs, in a program that is wide, or rounded, throughout.

        Args:
          exponent: of the loss scale.
          mode: `WIDE` or `ROUNDED`.
          healed: the numbers of equations whose infinities and NaNs are replaced by zeros.
        """
        if mode not in self._watches:
            compute = widely if mode == WIDE else rounded

            def rule(is_healed):
                def computed(n, eqn, ins):
                    outs = compute(eqn, ins)
                    can_make = _can_make(eqn) and any(map(_is_inexact, outs))
                    return _watched(outs, ins, is_healed[n]) if can_make else (outs, None)

                return computed

            self._watches[mode] = self._program.inspected(rule)
        is_healed = np.zeros(len(self.equations), bool)
        is_healed[list(healed)] = True
        evidence, records = self._watches[mode](exponent, is_healed)
        return evidence, {n: _MADE[made] for n, made in records.items() if made}

    @cached_property
    def _rounding(self) -> Callable[[int, np.ndarray], tuple[Evidence, Any]]:
        return self._program.inspected(
            lambda modes: lambda n, eqn, ins: (_rounded(eqn, ins, modes[n]), None)
        )


def _rounded(eqn: Any, ins: Sequence[Any], mode: Any) -> list[Any]:
    """The results of an equation, rounded as one of the modes says."""
    if not _rounds(eqn):
        return widely(eqn, ins)
    if _adds_many(eqn):  # which rounds inside
        of_digits = lambda *ins: _to_digits(eqn, widely(eqn, ins))
        return lax.switch(mode, [_of(widely, eqn), of_digits, _of(rounded, eqn)], *ins)

    def chosen(v, x, digits):
        if v.aval.dtype not in HALVES:
            return x
        exact = x.astype(v.aval.dtype).astype(x.dtype)
        return lax.select_n(jnp.broadcast_to(mode.astype(jnp.int32), x.shape), x, digits, exact)

    outs = widely(eqn, ins)
    return list(map(chosen, eqn.outvars, outs, _to_digits(eqn, outs)))


def _of(compute: Callable, eqn: Any) -> Callable:
    return lambda *ins: compute(eqn, ins)


def _to_digits(eqn: Any, outs: Sequence[Any]) -> list[Any]:
    """Results with as many digits as they were written with, and any exponent."""
    return [
        lax.reduce_precision(x, 8, jnp.finfo(v.aval.dtype).nmant) if _is_half(v) else x
        for v, x in zip(eqn.outvars, outs, strict=True)
    ]


def _watched(outs: list[Any], ins: Sequence[Any], is_healed: Any) -> tuple[list[Any], jax.Array]:
    """The results of an equation, healed if so wished, and an index of `_MADE`."""
    given, made = (_joined([_kinds(x) for x in xs if _is_inexact(x)]) for xs in (ins, outs))
    healed = [_healed(x, is_healed) if _is_inexact(x) else x for x in outs]
    return healed, _made(given, made)


def _joined(kinds: list[jax.Array]) -> Any:
    return functools.reduce(jnp.bitwise_or, kinds, np.uint8(0))


# Each is traced once for all equations of a shape, and reads it once.
@jax.jit
def _kinds(x: jax.Array) -> jax.Array:
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
    of_finite = jnp.where(made > 0, made + 1, 0)
    of_infinity = jnp.where((given == 1) & (made >= 2), 1, 0)
    return jnp.where(given == 0, of_finite, of_infinity).astype(jnp.uint8)


def _is_inexact(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _can_make(eqn: Any) -> bool:
    """Whether an equation may make infinities or NaNs: of an index out of bounds, too."""
    return not is_exact(eqn.primitive.name) or eqn.primitive.name == "gather"


def _rounds(eqn: Any) -> bool:
    return not is_exact(eqn.primitive.name) and any(map(_is_half, eqn.outvars))


def _adds_many(eqn: Any) -> bool:
    return Is.ADDS_MANY in traits_of(eqn.primitive.name)


def _is_half(v: Any) -> bool:
    return dtype_in(v) in HALVES
