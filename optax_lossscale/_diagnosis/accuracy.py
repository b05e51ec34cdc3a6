"""How far gradients in 16 bits are from those in float32, and what takes them there."""

import bisect
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from optax_lossscale._diagnosis.inspection import DIGITS, ROUNDED, WIDE, Inspection
from optax_lossscale._diagnosis.program import Evidence, Program

NOTABLE = 0.03  # how far a gradient may be off before a word is said
_ROUGH = 0.05  # and how far by the rounding of one line
_WRONG = 0.1  # and by that of many
_FAR = 0.5  # and how far that nothing excuses it
_UNKNOWN = 0.1  # how far it may move with the last digits of float32, to be known at all
_NUDGES = 4
_SATURATING = {"erf", "erfc", "exp", "logistic", "tanh"}


class GradientError(NamedTuple):
    """How far a parameter's gradient is from that in float32.

    Attributes:
      off: the norm of the difference, relative to the gradient's norm in float32.
      cause: what takes it there: "stagnates", "vanishes", "overflows", "saturates" or "rounding".
      primitive: the operation at fault, as JAX calls it, such as `scatter-add`; "" if unknown.
      source: the line that made it, such as `model.py:12 (embed)`; "" if unknown.

    Example:
      The gradient of a row that is looked up 8192 times is a sum of as many terms:

      >>> import jax.numpy as jnp
      >>> import optax_lossscale as ols
      >>> rows = jnp.zeros(8192, int)
      >>> half = lambda p: p["w"].astype(jnp.float16)
      >>> loss_fn = lambda p: jnp.mean(half(p)[rows].astype(jnp.float32))
      >>> error = ols.diagnose(loss_fn, {"w": jnp.ones((2, 1))}).errors["w"]
      >>> error.cause, error.primitive
      ('stagnates', 'scatter-add')
    """

    off: float
    cause: str
    primitive: str = ""
    source: str = ""


def off_by(evidence: Evidence, exponent: int, truth: Evidence) -> dict[str, float]:
    """How far each gradient is from the true one, relative to it."""
    return {
        name: _distance(_wide(g) * 2.0**-exponent, _wide(truth.grads[name]))
        for name, g in evidence.grads.items()
    }


def known(program: Program, truth: Evidence) -> set[str]:
    """The parameters of which float32 knows the gradient.

    That of a bias before a normalization is zero, say, and what is computed is how its terms
    were rounded: another number once the parameters have changed in float32's last digits.
    """
    moved = off_by(program.truth(moved=2.0**-20), 0, truth)
    return {name for name, off in moved.items() if off <= _UNKNOWN and truth.grads[name].any()}


def find_errors(
    program: Program, inspection: Inspection, exponent: int, truth: Evidence, off: dict[str, float]
) -> dict[str, GradientError]:
    """Those gradients that are wrong in 16 bits, the worst first, each with its cause.

    Rounding in all places alike is none. It moves gradients no further than a change of the
    parameters' last digit does, by which a rectified unit, a maximum or a router may decide
    otherwise. What goes further has a cause that can be removed.

    Args:
      program: the loss function's.
      inspection: of the program.
      exponent: of the loss scale that fits.
      truth: the gradients in float32.
      off: how far from them each is that is to be looked at.
    """
    suspects = {name: o for name, o in off.items() if o > NOTABLE}
    if not suspects:
        return {}
    nudge = max(float(jnp.finfo(dtype).eps) for dtype in program.narrow) / 2
    nudged = [off_by(program.truth(moved=nudge, seed=i), 0, truth) for i in range(_NUDGES)]
    moved = {name: [of[name] for of in nudged] for name in suspects}
    suspects = {
        name: o
        for name, o in suspects.items()
        if o > min(2 * max(moved[name]), _FAR) or min(moved[name]) > _FAR
    }
    if not suspects:
        return {}
    causes = _causes(inspection, exponent, truth, suspects)
    return {
        name: GradientError(o, *causes[name])
        for name, o in sorted(suspects.items(), key=lambda item: -item[1])
        if name in causes
    }


def _causes(
    inspection: Inspection, exponent: int, truth: Evidence, off: dict[str, float]
) -> dict[str, tuple[str, str, str]]:
    """Of each gradient: the cause, the operation and its line.

    Found by leaving out what it may be. The program is run without rounding its sums, and with
    any exponents; and then with ever more of its equations rounded as they were written, until
    half of the error is there. Where it comes of rounding, that line alone has to make half of
    it, unless it is large.
    """

    def errors(modes):
        return off_by(inspection.run(exponent, modes), exponent, truth)

    as_written = np.full(len(inspection.equations), ROUNDED, np.int8)
    whole = errors(as_written)
    without = {
        "stagnates": (WIDE, inspection.sums),
        "vanishes": (DIGITS, inspection.rounds),
        "rounding": (WIDE, inspection.rounds),
    }
    repaired = {
        kind: errors(np.where(candidates, mode, as_written).astype(np.int8))
        for kind, (mode, candidates) in without.items()
    }
    causes: dict[str, tuple[str, str, str]] = {}
    for name in sorted(off, key=lambda name: -whole[name]):
        if name in causes:
            continue
        is_it = lambda kind, name=name: repaired[kind][name] <= whole[name] / 2
        kind = next(filter(is_it, without), "")
        if not kind:  # not in what was rounded
            if off[name] > _WRONG:
                causes[name] = "rounding", "", ""
            continue
        mode, candidates = without[kind]
        numbers = np.flatnonzero(candidates)

        def is_half_there(count, numbers=numbers, mode=mode, name=name):
            modes = as_written.copy()
            modes[numbers[count:]] = mode
            return errors(modes)[name] >= whole[name] / 2

        last = bisect.bisect_left(range(1, len(numbers)), True, key=is_half_there)
        at = inspection.equations[numbers[last]]
        on_line = candidates & np.array([e.source == at.source for e in inspection.equations])
        repaired_there = errors(np.where(on_line, mode, as_written).astype(np.int8))
        alike = {n for n in off if repaired_there[n] <= whole[n] / 2 and is_it(kind, n)}
        if kind == "rounding" and off[name] <= (_ROUGH if name in alike else _WRONG):
            continue
        primitive = at.eqn.primitive.name
        if kind == "vanishes" and numbers[last] in inspection.watched(exponent, ROUNDED)[1]:
            kind = "overflows"
        elif kind == "rounding" and primitive in _SATURATING:
            kind = "saturates"
        causes |= {n: (kind, primitive, at.source) for n in alike | {name} if n not in causes}
    return causes


def _distance(g: np.ndarray, truth: np.ndarray) -> float:
    if not np.isfinite(g).all():
        return float("inf")
    norm = np.linalg.norm(truth)
    return float(np.linalg.norm(g - truth) / norm) if norm else 0.0


def _wide(x: np.ndarray) -> np.ndarray:
    return x.astype(np.complex128 if np.iscomplexobj(x) else np.float64)
