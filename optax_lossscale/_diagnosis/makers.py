"""What operations make infinities and NaNs out of in float32, and what to do about it."""

import math

from optax_lossscale._diagnosis.page import Diagnosis, Wrong
from optax_lossscale._programs.operations import Is, traits_of

_ABOVE_0 = (
    "Keep {}: add a number that the dtype can hold, or replace it with jnp.where "
    "before the {}; replacing the result does not help, as 0 times infinity is NaN."
).format
_ROOT = _ABOVE_0("the argument of the root above 0", "root")
_LOGARITHM = _ABOVE_0("the argument of the logarithm above 0", "logarithm")
_DIVISION = _ABOVE_0("the divisor away from 0", "division")
_POWER = _ABOVE_0("the base of the power above 0", "power")
_MASK = (
    "If the infinities come from a mask, or are a constant that is too large for its "
    "dtype, use a finite number, such as -3e4 instead of -inf: the softmax of nothing "
    "but -inf is NaN."
)
_ARE_MADE = {
    **dict.fromkeys(
        ("log", "log1p", "log2"), ("the logarithm of 0 or less", _LOGARITHM)
    ),
    **dict.fromkeys(("div", "rem", "atan2"), ("a division by 0", _DIVISION)),
    **dict.fromkeys(("pow", "integer_pow"), ("a power of 0 or less", _POWER)),
    **dict.fromkeys(("sqrt", "rsqrt", "cbrt"), ("a root of 0 or less", _ROOT)),
    "gather": (
        "an index out of bounds",
        "Keep indices in bounds: jnp.take gives NaN elsewhere.",
    ),
}


def words_in_float32(page: Diagnosis, one: Wrong) -> str:
    """What makes numbers that are not finite, and where."""
    source = one.place.source
    if not source:
        return f"there are NaNs or infinities in {one.place.primitive}"
    what = _made(page, one)[0]
    layer = f" [{one.place.layer}]" if one.place.layer else ""
    return f"{what}, at {source}{layer}"


def remedy_in_float32(page: Diagnosis, one: Wrong) -> str:
    """What to do about it."""
    if not one.place.source:
        return "Find out where they come from."
    return _made(page, one)[1]


def _made(page: Diagnosis, one: Wrong) -> tuple[str, str]:
    name = one.place.primitive
    if name == "div" and math.isfinite(page.loss_in_float32):
        # It is of the derivative of what else is on its line.
        rows = (
            row.primitive for row in page.table.rows if row.source == one.place.source
        )
        for primitive in rows:
            what, remedy = _ARE_MADE.get(primitive, ("", ""))
            if remedy == _ROOT:
                return "the derivative of a root at 0", remedy
            if remedy == _LOGARITHM:
                return what, remedy
    if name in _ARE_MADE:
        return _ARE_MADE[name]
    if one.how == "overflows":
        return f"numbers that are too large, in {name}", "Compute with smaller numbers."
    if traits_of(name) & (Is.PRODUCT | Is.ADDS_TWO | Is.ADDS_MANY) or name == "mul":
        return f"infinities, in {name}", _MASK
    what = f"numbers for which {name} is not defined"
    return what, "Keep its argument where it is defined."
