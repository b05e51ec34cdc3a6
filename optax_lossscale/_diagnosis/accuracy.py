"""How far gradients in 16 bits are from those in float32, and what takes them there."""

import bisect
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from optax_lossscale._diagnosis.inspection import DIGITS, ROUNDED, WIDE, Inspection
from optax_lossscale._diagnosis.program import Evidence, Program
from optax_lossscale._programs.operations import Is, traits_of

NOTABLE = 0.03  # how far a gradient may be off before a word is said
_ROUGH = 0.05  # and how far by the rounding of one line
_WRONG = 0.1  # and by that of many
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


def known(program: Program, truth: Evidence) -> set[str]:
    """The parameters whose gradient float32 knows: not that of a bias before a normalization."""
    # Which is zero, and what is computed is how it was rounded: other digits change all of it.
    moved = off_by(program.truth(moved=2.0**-20), 0, truth)
    return {name for name, off in moved.items() if off <= _UNKNOWN and truth.grads[name].any()}


def find_errors(
    program: Program, exponent: int, truth: Evidence, off: dict[str, float]
) -> dict[str, GradientError]:
    """Those gradients that are wrong in 16 bits, the worst first, each with its cause.

    Rounding that is spread evenly is no cause. It moves gradients no further than a change of the
    parameters' last digit does, by which a rectified unit, a maximum or a router may decide
    otherwise. What goes further has a cause that can be removed. It is found by leaving out what
    it may be: the program is run without rounding its sums, and with any exponents.
    """
    suspects = {name: o for name, o in off.items() if o > NOTABLE}
    if suspects:
        nudge = max(float(jnp.finfo(dtype).eps) for dtype in program.narrow) / 2
        nudged = [off_by(program.truth(moved=nudge, seed=i), 0, truth) for i in range(_NUDGES)]
        moved = {name: [of[name] for of in nudged] for name in suspects}
        is_far = lambda name, o: o > min(2 * max(moved[name]), _FAR) or min(moved[name]) > _FAR
        suspects = {name: o for name, o in suspects.items() if is_far(name, o)}
    if not suspects:
        return {}
    trials = _Trials(Inspection(program), exponent, truth)
    errors: dict[str, GradientError] = {}
    for name in sorted(suspects, key=lambda name: -trials.whole[name]):
        if name in errors:
            continue
        kind = next((kind for kind in trials.repaired if trials.is_it(kind, name)), "")
        if kind:
            errors = trials.on_its_line(kind, name, suspects) | errors
        elif suspects[name] > _WRONG:  # not in what was rounded
            errors[name] = GradientError(suspects[name], "rounding")
    worst_first = sorted(suspects, key=lambda name: -suspects[name])
    return {name: errors[name] for name in worst_first if name in errors}


class _Trials:
    """How far each gradient is off as written, `whole`, and without what may be the cause."""

    def __init__(self, inspection: Inspection, exponent: int, truth: Evidence):
        self._inspection, self._exponent, self._truth = inspection, exponent, truth
        self._without = {
            "stagnates": (WIDE, inspection.sums),
            "vanishes": (DIGITS, inspection.rounds),
            "rounding": (WIDE, inspection.rounds),
        }
        self.whole = self._off(WIDE, np.zeros_like(inspection.sums))
        self.repaired = {kind: self._off(*by) for kind, by in self._without.items()}

    def is_it(self, kind: str, name: str) -> bool:
        """Whether half of an error is of a kind."""
        return self.repaired[kind][name] <= self.whole[name] / 2

    def on_its_line(self, kind: str, name: str, off: dict[str, float]) -> dict[str, GradientError]:
        """An error of a kind, and those alike, at the line that makes it."""
        mode, candidates = self._without[kind]
        numbers = np.flatnonzero(candidates)

        # Ever more equations are rounded as they were written, until half of the error is there.
        def is_half_there(count):
            left_out = np.isin(np.arange(len(candidates)), numbers[count:])
            return self._off(mode, left_out)[name] >= self.whole[name] / 2

        last = numbers[bisect.bisect_left(range(1, len(numbers)), True, key=is_half_there)]
        equations = self._inspection.equations
        primitive, source = equations[last].eqn.primitive.name, equations[last].source
        on_line = candidates & np.array([e.source == source for e in equations])
        without_line = self._off(mode, on_line)
        half = {n for n in off if without_line[n] <= self.whole[n] / 2}
        # Of rounding that line alone has to make half, unless the error is large.
        if kind == "rounding" and off[name] <= (_ROUGH if name in half else _WRONG):
            return {}
        alike = {name, *(n for n in half if self.is_it(kind, n))}
        if kind == "vanishes" and last in self._inspection.watched(self._exponent, ROUNDED)[1]:
            kind = "overflows"
        elif kind == "rounding" and Is.SATURATES in traits_of(primitive):
            kind = "saturates"
        return {n: GradientError(off[n], kind, primitive, source) for n in alike}

    def _off(self, mode: int, where: np.ndarray) -> dict[str, float]:
        """How far each gradient is off with another mode in some places."""
        modes = np.where(where, mode, ROUNDED).astype(np.int8)
        return off_by(self._inspection.run(self._exponent, modes), self._exponent, self._truth)
