"""Which line makes what is not finite, and of what."""

from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import Literal

from optax_lossscale._diagnosis.inspection import WIDE, Inspection, Made
from optax_lossscale._programs.operations import Is, is_exact, traits_of

_LINES = 32  # at most, to try
_OF_INFINITY = dict.fromkeys(("mul", "dot_general", "conv_general_dilated"), "0 times infinity")
_OF_INFINITY["div"] = "infinity over infinity"
_LOGARITHM = ("the logarithm of 0", "the logarithm of a negative number", "logarithm")
_DIVISION = ("a division by 0", "0/0", "divisor")
_POWER = ("a negative power of 0", "a power of a negative number", "power")
# What operations make infinities of; NaNs, if of something else; and of which kind that is.
_OF_NUMBERS = {
    **dict.fromkeys(("log", "log1p", "log2"), _LOGARITHM),
    **dict.fromkeys(("div", "rem", "atan2"), _DIVISION),
    **dict.fromkeys(("pow", "integer_pow"), _POWER),
    **dict.fromkeys(("exp", "exp2", "expm1"), ("the exponential of too large a number", "", "")),
    "sqrt": ("the root of a negative number", "", "root"),
    "rsqrt": ("the inverse root of 0", "the inverse root of a negative number", "root"),
    "convert_element_type": ("a cast of too large a number", "", ""),
    "gather": ("an index out of bounds", "", "index"),
}


class Maker(NamedTuple):
    """A line that makes infinities or NaNs of finite numbers."""

    what: str  # it makes them of: "the derivative of a square root at 0"
    kind: str  # root, logarithm, divisor, power, index, domain; mask for what takes infinities
    source: str  # the line
    is_alone: bool  # whether all is finite without what this line makes

    def __str__(self) -> str:
        return f"{self.what}, at {self.source}" + ", but not there alone" * (not self.is_alone)


def maker(inspection: Inspection, exponent: int, mode: int) -> Maker | None:
    """The line at fault for a loss or gradients that are not finite, in one of the modes."""
    made = inspection.watched(exponent, mode)[1]
    if not made:
        return None
    lines: dict[str, list[int]] = {}
    for n in sorted(made):
        lines.setdefault(inspection.equations[n].source, []).append(n)

    # What a mask makes infinite, or a `where` leaves out, is not at fault.
    def is_at_fault(numbers):
        evidence, _ = inspection.watched(exponent, mode, healed=numbers)
        return bool(np.isfinite(evidence.loss)) and evidence.is_finite

    at_fault = next(filter(is_at_fault, list(lines.values())[:_LINES]), None)
    number = at_fault[0] if at_fault else min(made)
    at = inspection.equations[number]
    made_by = {v: e.eqn for e in inspection.equations for v in e.eqn.outvars}
    words = _words(at.eqn, made[number], mode == WIDE, made_by)
    return Maker(*words, at.source, is_alone=at_fault is not None)


def _words(eqn: Any, made: Made, is_wide: bool, made_by: dict[Any, Any]) -> tuple[str, str]:
    """What an equation makes infinities or NaNs of, and of which kind that is."""
    name, is_nan = eqn.primitive.name, made >= Made.NAN
    if made == Made.NAN_OF_INFINITY:
        return _OF_INFINITY.get(name, "infinity minus infinity"), "mask"
    what, of_nan, kind = _OF_NUMBERS.get(name, ("", "", ""))
    if kind == "divisor":
        divisor = _origin(eqn.invars[1], made_by)
        origin = made_by[divisor].primitive.name if divisor in made_by else ""
        if origin in ("sqrt", "rsqrt", "cbrt") and isinstance(eqn.invars[0], Literal):
            return "the derivative of a root at 0", "root"
        logs = [e for e in made_by.values() if e.primitive.name == "log"]
        if divisor is not None and divisor in [_origin(e.invars[0], made_by) for e in logs]:
            return "the derivative of a logarithm at 0", "logarithm"
    if what and (kind != "power" or is_nan or _is_inverse(eqn, is_wide)):
        return (of_nan if is_nan and of_nan else what), kind
    if is_nan and not traits_of(name) & (Is.PRODUCT | Is.ADDS_TWO | Is.ADDS_MANY):
        return f"numbers for which {name} is not defined", "domain"
    return f"numbers that are too large, in {name}", ""


def _is_inverse(eqn: Any, is_wide: bool) -> bool:
    """Whether the exponent of a power is negative, as far as one can tell."""
    if eqn.primitive.name == "integer_pow":
        return eqn.params["y"] < 0
    exponent = eqn.invars[1]
    return float(exponent.val) < 0 if isinstance(exponent, Literal) else is_wide


def _origin(v: Any, made_by: dict[Any, Any]) -> Any:
    """What a variable was, before it was cast, broadcast or multiplied by a number."""
    while not isinstance(v, Literal) and v in made_by:
        eqn = made_by[v]
        name, variables = eqn.primitive.name, [x for x in eqn.invars if not isinstance(x, Literal)]
        is_form = is_exact(name) or name in ("convert_element_type", "mul")
        if not is_form or len(variables) != 1:
            break
        (v,) = variables
    return None if isinstance(v, Literal) else v
