"""Which line makes infinities or NaNs, out of what, and what to do about it."""

from collections.abc import Collection
from typing import Any, NamedTuple

from jax.extend.core import Literal

from optax_lossscale._diagnosis.program import Program
from optax_lossscale._diagnosis.widened import NAN, NAN_OF_INFINITY
from optax_lossscale._programs.operations import Is, traits_of

_LINES = 32  # to try, at most
_ABOVE_0 = (
    "Keep {}: add a number that the dtype can hold, or replace it with jnp.where before the {}; "
    "afterwards it is too late, as 0 times infinity is NaN."
).format
_ROOT = _ABOVE_0("the argument of the root above 0", "root")
_LOGARITHM = _ABOVE_0("the argument of the logarithm above 0", "logarithm")
_DIVISION = _ABOVE_0("the divisor away from 0", "division")
_POWER = _ABOVE_0("the base of the power above 0", "power")
_MASK = (
    "If the infinities come from a mask, use a finite number, such as -3e4, instead of -inf: the "
    "softmax of nothing but -inf is NaN."
)
# What operations make infinities and NaNs out of, and what to do about it.
_OF_NUMBERS = {
    **dict.fromkeys(("log", "log1p", "log2"), ("the logarithm of 0 or less", _LOGARITHM)),
    **dict.fromkeys(("div", "rem", "atan2"), ("a division by 0", _DIVISION)),
    **dict.fromkeys(("pow", "integer_pow"), ("a power of 0 or less", _POWER)),
    **dict.fromkeys(("sqrt", "rsqrt", "cbrt"), ("a root of 0 or less", _ROOT)),
    "gather": ("an index out of bounds", "Keep indices in bounds: jnp.take gives NaN elsewhere."),
}


class Maker(NamedTuple):
    """A line that makes infinities or NaNs out of finite numbers."""

    what: str  # what it makes them out of, and where
    remedy: str  # what to do about it; "" if that is to compute with smaller numbers
    source: str


def maker(program: Program, mode: int) -> Maker | None:
    """The line at fault for a loss or gradients that are not finite, in one of the modes."""
    made = program.watched(0, mode)[1]
    if not made:
        return None
    lines: dict[str, list[int]] = {}
    for n in sorted(made):
        lines.setdefault(program.equations[n].source, []).append(n)
    # Infinities that a mask makes, or that a `where` leaves out, are not at fault.
    is_at_fault = lambda numbers: program.watched(0, mode, numbers)[0].is_finite
    at_fault = next(filter(is_at_fault, list(lines.values())[:_LINES]), None)
    number = at_fault[0] if at_fault else min(made)
    eqn, source = program.equations[number].eqn, program.equations[number].source
    on_line = {e.eqn.primitive.name for e in program.equations if e.source == source}
    what, remedy = _words(eqn, made[number], on_line)
    alone = "" if at_fault else ", but not only there"
    return Maker(f"{what}, at {source}{alone}", remedy, source)


def _words(eqn: Any, made: int, on_line: Collection[str]) -> tuple[str, str]:
    """What an equation makes infinities or NaNs out of, and what to do about it."""
    name = eqn.primitive.name
    if made == NAN_OF_INFINITY:
        return f"infinities, in {name}", _MASK
    is_root = _ROOT in (_OF_NUMBERS.get(other, ("", ""))[1] for other in on_line)
    if name == "div" and isinstance(eqn.invars[0], Literal) and is_root:
        return "the derivative of a root at 0", _ROOT
    is_power = name in ("pow", "integer_pow") and made != NAN
    # An unknown exponent is taken to be negative.
    exponent = eqn.params.get("y", getattr(eqn.invars[-1], "val", -1)) if is_power else -1
    if name in _OF_NUMBERS and exponent < 0:
        return _OF_NUMBERS[name]
    if made == NAN and not traits_of(name) & (Is.PRODUCT | Is.ADDS_TWO | Is.ADDS_MANY):
        return f"numbers for which {name} is not defined", "Keep its argument where it is defined."
    return f"numbers that are too large, in {name}", ""
