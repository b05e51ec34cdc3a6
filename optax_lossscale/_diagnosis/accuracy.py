"""How far gradients in 16 bits are from those in float32, and what takes them there."""

import bisect
import functools
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from optax_lossscale._diagnosis.program import Evidence, Program
from optax_lossscale._diagnosis.widened import DIGITS, ROUNDED, WIDE, adds_many, rounds
from optax_lossscale._programs.operations import Is, traits_of

_NOTABLE = 0.03  # how far a gradient may be off before a word is said
_ROUGH = 0.1  # and how far by rounding that is neither a sum's nor a range's
_FAR = 0.5  # and how far that nothing excuses it
_UNKNOWN = 0.1  # how far it may move with the last digits of float32, to be known at all
_NUDGES = 4


class GradientError(NamedTuple):
    """How far a parameter's gradient is from that in float32.

    Attributes:
      off: the norm of the difference, relative to the gradient's norm in float32.
      cause: what takes it there: "stagnates", "vanishes", "overflows", "saturates" or "rounding".
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
        norm = np.linalg.norm(true)
        if not np.isfinite(g).all():
            off[name] = float("inf")
        else:
            distance = np.linalg.norm(g.astype(wide) * 2.0**-exponent - true)
            off[name] = float(distance / norm) if norm else 0.0
    return off


def known(program: Program) -> set[str]:
    """The parameters whose gradient float32 knows: not that of a bias before a normalization."""
    # Which is zero, and what is computed is how it was rounded: other digits change all of it.
    grads, moved = program.truth.grads, _moved(program, 2.0**-20, seed=0)
    return {name for name, off in moved.items() if off <= _UNKNOWN and grads[name].any()}


def find_errors(
    program: Program, exponent: int, off: dict[str, float]
) -> dict[str, GradientError]:
    """Those gradients that are wrong in 16 bits, the worst first, each with its cause.

    Rounding that is spread evenly is no cause. It moves gradients no further than a change of the
    parameters' last digit does, by which a rectified unit, a maximum or a router may decide
    otherwise. What goes further has a cause that can be removed. It is found by leaving out what
    it may be: the program is run without rounding its sums, and with any exponents.
    """
    equations = program.equations
    is_rounded = np.array([rounds(e.eqn) for e in equations], bool)
    is_sum = is_rounded & np.array([adds_many(e.eqn) or e.summed > 1 for e in equations], bool)
    ways = {
        "stagnates": (WIDE, is_sum),
        "vanishes": (DIGITS, is_rounded),
        "rounding": (WIDE, is_rounded),
    }

    @functools.cache
    def after(cause: str, count: int) -> dict[str, float]:
        """How far gradients are off without a cause after so many of its equations."""
        mode, where = ways[cause]
        modes = np.where(where & (np.cumsum(where) > count), mode, ROUNDED)
        return off_by(program.inspected(exponent, modes)[0], exponent, program.truth)

    def error(name: str) -> GradientError | None:
        half = after("rounding", len(equations))[name] / 2
        cause = next((cause for cause in ways if after(cause, 0)[name] <= half), "")
        if cause in ("rounding", "") and off[name] <= _ROUGH:
            return None
        if not cause:  # not in what was rounded
            return GradientError(off[name], "rounding")
        numbers = np.flatnonzero(ways[cause][1])
        # Ever more equations are rounded as they were written, until half of the error is there.
        is_half_there = lambda count: after(cause, count)[name] >= half
        last = numbers[bisect.bisect_left(range(1, len(numbers)), True, key=is_half_there)]
        primitive = equations[last].eqn.primitive.name
        if cause == "rounding" and Is.SATURATES in traits_of(primitive):
            cause = "saturates"
        elif cause == "vanishes" and last in program.inspected(exponent, ROUNDED)[1]:
            cause = "overflows"
        return GradientError(off[name], cause, primitive, equations[last].source)

    errors = {name: error(name) for name in sorted(_suspects(program, off), key=lambda n: -off[n])}
    return {name: found for name, found in errors.items() if found}


def _suspects(program: Program, off: dict[str, float]) -> list[str]:
    """The gradients that are further off than a change of the last digit moves them."""
    far = [name for name, o in off.items() if o > _NOTABLE]
    if not far:
        return []
    nudge = max(float(jnp.finfo(dtype).eps) for dtype in program.narrow) / 2
    nudged = [_moved(program, nudge, seed) for seed in range(_NUDGES)]
    moved = {name: [of[name] for of in nudged] for name in far}
    is_excused = lambda m, o: o <= min(2 * max(m), _FAR) and min(m) <= _FAR
    return [name for name in far if not is_excused(moved[name], off[name])]


def _moved(program: Program, part: float, seed: int) -> dict[str, float]:
    """How far the true gradients move with the parameters."""
    return off_by(program.moved(part, seed), 0, program.truth)
