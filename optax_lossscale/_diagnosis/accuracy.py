"""How far gradients in 16 bits are from those in float32, and why."""

import bisect
import functools
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from optax_lossscale._diagnosis.program import Evidence, Program
from optax_lossscale._diagnosis.widened import DIGITS, ROUNDED, WIDE, adds_many, rounds
from optax_lossscale._programs.operations import Is, traits_of

_NOTABLE = 0.03  # how far a gradient may be off without being looked at
_ROUGH = 0.05  # how far it may be off by the rounding of one line
_WRONG = 0.1  # how far it may be off by the rounding of many
_FAR = 0.5  # how far it may be off at most, whatever the excuse
_UNKNOWN = 0.1  # how far it may move with the last digits of float32, and still count as known
_NUDGES = 4


class GradientError(NamedTuple):
    """How far a parameter's gradient is from that in float32.

    Attributes:
      off: the norm of the difference, relative to the gradient's norm in float32.
      cause: one of "stagnates", "vanishes", "overflows", "saturates" or "rounding".
      primitive: the operation at fault, as JAX calls it, such as `scatter-add`; "" if unknown.
      source: the line that made it, such as `model.py:12 (embed)`; "" if unknown.
    """

    off: float
    cause: str
    primitive: str = ""
    source: str = ""


def off_by(evidence: Evidence, exponent: int, truth: Evidence) -> dict[str, float]:
    """How far each gradient is from the true one, relative to it."""
    off = {}
    for name, g in evidence.grads.items():
        wide = np.complex128 if np.iscomplexobj(g) else np.float64
        true = truth.grads[name].astype(wide)
        norm, distance = np.linalg.norm(true), np.inf
        if np.isfinite(g).all():
            distance = np.linalg.norm(g.astype(wide) * 2.0**-exponent - true)
        off[name] = float(distance / norm) if norm else 0.0
    return off


def known(program: Program) -> set[str]:
    """Parameters whose gradient float32 determines: not that of a bias before a normalization."""
    # That is zero, and what is computed is nothing but rounding: other digits change all of it.
    truth = program.truth
    moved = off_by(program.moved(2.0**-20, seed=0), 0, truth)
    return {name for name, off in moved.items() if off <= _UNKNOWN and truth.grads[name].any()}


def errors_of(program: Program, exponent: int, off: dict[str, float]) -> dict[str, GradientError]:
    """The gradients that are wrong in 16 bits, the worst first, each with its cause.

    Rounding that is spread evenly does not count as a cause: it moves gradients no further than a
    change in the parameters' last digit, by which a rectified unit, a maximum or a router may
    decide differently. A larger error has a cause that can be removed. It is found by leaving out
    candidates: the program is run without rounding its sums, and with unlimited exponents.
    """
    equations = program.equations
    is_rounded = np.array([rounds(e.eqn) for e in equations], bool)
    is_sum = is_rounded & np.array([adds_many(e.eqn) or e.summed > 1 for e in equations], bool)
    ways = {
        "stagnates": (WIDE, is_sum),
        "vanishes": (DIGITS, is_rounded),
        "rounding": (WIDE, is_rounded),
    }

    def without(mode: int, where: np.ndarray) -> dict[str, float]:
        """How far gradients are off with another mode in some places."""
        evidence = program.switched(exponent, np.where(where, mode, ROUNDED).astype(np.int32))
        return off_by(evidence, exponent, program.truth)

    @functools.cache
    def after(cause: str, count: int) -> dict[str, float]:
        """How far they are off with a cause in only the first `count` of its equations."""
        mode, where = ways[cause]
        return without(mode, where & (np.cumsum(where) > count))

    def error(name: str) -> GradientError | None:
        half = after("rounding", len(equations))[name] / 2
        is_reproduced = half > off[name] / 8  # else it is inside an unknown operation
        causes = [cause for cause, (_, where) in ways.items() if is_reproduced and where.any()]
        cause = next((cause for cause in causes if after(cause, 0)[name] <= half), "")
        if not cause:
            return GradientError(off[name], "rounding") if off[name] > _WRONG else None
        numbers = np.flatnonzero(ways[cause][1])
        # Ever more equations are rounded as they were written, until half of the error is there.
        is_half_there = lambda count: after(cause, count)[name] >= half
        last = numbers[bisect.bisect_left(range(1, len(numbers)), True, key=is_half_there)]
        primitive, source = equations[last].eqn.primitive.name, equations[last].source
        if cause == "vanishes" and last in program.watched(exponent, ROUNDED)[1]:
            cause = "overflows"
        elif cause == "rounding":
            on_line = is_rounded & np.array([e.source == source for e in equations])
            is_alone = without(WIDE, on_line)[name] <= half
            if off[name] <= (_ROUGH if is_alone else _WRONG):
                return None
            cause = "saturates" if Is.SATURATES in traits_of(primitive) else cause
        return GradientError(off[name], cause, primitive, source)

    errors = {name: error(name) for name in sorted(_suspects(program, off), key=lambda n: -off[n])}
    return {name: found for name, found in errors.items() if found}


def _suspects(program: Program, off: dict[str, float]) -> list[str]:
    """The gradients that are further off than a change in the last digit moves them."""
    far = [name for name, o in off.items() if o > _NOTABLE]
    if not far:
        return []
    nudge = max(float(jnp.finfo(dtype).eps) for dtype in program.narrow) / 2
    nudged = [off_by(program.moved(nudge, i), 0, program.truth) for i in range(_NUDGES)]
    moved = {name: [of[name] for of in nudged] for name in far}
    is_excused = lambda m, o: o <= min(2 * max(m), _FAR) and min(m) <= _FAR
    return [name for name in far if not is_excused(moved[name], off[name])]
