"""Which line makes what is not finite, and of what."""

from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import Literal

from optax_lossscale._diagnosis.inspection import WIDE, Inspection, Made
from optax_lossscale._programs.operations import Is, is_exact, traits_of

_LINES = 32  # at most, to try


class Maker(NamedTuple):
    """A line that makes infinities or NaNs of finite numbers.

    Attributes:
      what: what it makes them of: "the derivative of a square root at 0".
      kind: what it is about: "root", "logarithm", "divisor", "power", "index", "domain", or "mask"
        for what takes infinities; "" where numbers are too large.
      source: the line.
    """

    what: str
    kind: str
    source: str

    def __str__(self) -> str:
        return f"{self.what}, at {self.source}"


def maker(inspection: Inspection, exponent: int, mode: int) -> Maker | None:
    """The line at fault for a loss or gradients that are not finite, in one of the modes.

    It is the first without whose infinities and NaNs they are finite: what a mask makes
    infinite, or a `where` leaves out, is not at fault.
    """
    made = inspection.watched(exponent, mode)[1]
    lines: dict[str, list[int]] = {}
    for n in sorted(made):
        lines.setdefault(inspection.equations[n].source, []).append(n)

    def is_at_fault(numbers):
        evidence, _ = inspection.watched(exponent, mode, healed=numbers)
        return bool(np.isfinite(evidence.loss)) and evidence.is_finite

    at_fault = next(filter(is_at_fault, list(lines.values())[:_LINES]), sorted(made))
    if not at_fault:
        return None
    at = inspection.equations[at_fault[0]]
    return Maker(*_words(inspection, at.eqn, made[at_fault[0]], mode), at.source)


def _words(inspection: Inspection, eqn: Any, made: Made, mode: int) -> tuple[str, str]:
    """What an equation makes infinities or NaNs of, and of which kind that is."""
    name = eqn.primitive.name
    if made.nan_of_infinity and not (made.infinity or made.nan):
        if name in ("mul", "dot_general", "conv_general_dilated"):
            return "0 times infinity", "mask"
        return ("infinity over infinity" if name == "div" else "infinity minus infinity"), "mask"
    if name in ("log", "log1p", "log2"):
        return f"the logarithm of {'0' if made.infinity else 'a negative number'}", "logarithm"
    if name == "sqrt":
        return "the root of a negative number", "root"
    if name == "rsqrt":
        return f"the inverse root of {'a negative number' if made.nan else '0'}", "root"
    if name in ("pow", "integer_pow") and (made.nan or _is_negative(eqn, mode)):
        return ("a power of a negative number" if made.nan else "a negative power of 0"), "power"
    if name in ("div", "rem", "atan2"):
        if isinstance(eqn.invars[0], Literal) and _is_root(inspection, eqn.invars[1]):
            return "the derivative of a root at 0", "root"
        if _has_logarithm(inspection, eqn.invars[1]):
            return "the derivative of a logarithm at 0", "logarithm"
        return ("0/0" if made.nan else "a division by 0"), "divisor"
    if name in ("exp", "exp2", "expm1"):
        return "the exponential of too large a number", ""
    if name == "convert_element_type":
        return "a cast of too large a number", ""
    if name == "gather":
        return "an index out of bounds", "index"
    if made.nan and not traits_of(name) & (Is.PRODUCT | Is.ADDS_TWO | Is.ADDS_MANY):
        return f"numbers for which {name} is not defined", "domain"
    return f"numbers that are too large, in {name}", ""


def _is_negative(eqn: Any, mode: int) -> bool:
    """Whether the exponent of a power is, as far as one can tell."""
    if eqn.primitive.name == "integer_pow":
        return eqn.params["y"] < 0
    exponent = eqn.invars[1]
    return float(exponent.val) < 0 if isinstance(exponent, Literal) else mode == WIDE


def _is_root(inspection: Inspection, v: Any) -> bool:
    """Whether a variable is what a root gave."""
    origin = _origin(inspection, v)
    return any(
        origin is out
        for e in inspection.equations
        if e.eqn.primitive.name in ("sqrt", "rsqrt", "cbrt")
        for out in e.eqn.outvars
    )


def _has_logarithm(inspection: Inspection, v: Any) -> bool:
    """Whether a variable is what a logarithm is taken of."""
    origin = _origin(inspection, v)
    return origin is not None and any(
        origin is _origin(inspection, e.eqn.invars[0])
        for e in inspection.equations
        if e.eqn.primitive.name == "log"
    )


def _origin(inspection: Inspection, v: Any) -> Any:
    """What a variable was, before it was cast, broadcast or multiplied by a number."""
    made_by = {v: e.eqn for e in inspection.equations for v in e.eqn.outvars}
    while not isinstance(v, Literal) and v in made_by:
        eqn = made_by[v]
        variables = [x for x in eqn.invars if not isinstance(x, Literal)]
        name = eqn.primitive.name
        is_form = is_exact(name) or name in ("convert_element_type", "mul")
        if not is_form or len(variables) != 1:
            break
        (v,) = variables
    return None if isinstance(v, Literal) else v
