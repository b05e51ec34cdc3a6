"""What operations make infinities and NaNs out of in float32, and what to do about it."""

import math
from collections.abc import Iterator

from optax_lossscale._diagnosis.page import Diagnosis, Wrong
from optax_lossscale._programs.operations import Is, traits_of

_ROOT = "root"
_LOGARITHM = "logarithm"
_OF = {
    "sqrt": _ROOT,
    "rsqrt": _ROOT,
    "cbrt": _ROOT,
    "log": _LOGARITHM,
    "log1p": _LOGARITHM,
    "log2": _LOGARITHM,
    "div": "division",
    "rem": "division",
    "atan2": "division",
    "pow": "power",
    "integer_pow": "power",
}
_MADE = {  # what makes a number that is not finite, and what to keep in range
    _ROOT: ("a root of 0 or less", "the argument of the root above 0"),
    _LOGARITHM: ("the logarithm of 0 or less", "the argument of the logarithm above 0"),
    "division": ("a division by 0", "the divisor away from 0"),
    "power": ("a power of 0 or less", "the base of the power above 0"),
}


def words_in_float32(page: Diagnosis, one: Wrong) -> tuple[str, str]:
    """What makes numbers that are not finite, with its line; and what to do about it."""
    place = one.place
    if not place.source:
        what = f"there are NaNs or infinities in {place.primitive}"
        return what, "Find out where they come from."
    what, remedy = _made(page, one)
    layer = f" [{place.layer}]" if place.layer else ""
    return f"{what}, at {place.source}{layer}", remedy


def _made(page: Diagnosis, one: Wrong) -> tuple[str, str]:
    name = one.place.primitive
    kind = _OF.get(name, "")
    if kind == "division" and math.isfinite(page.loss_in_float32):
        # It may be in the derivative of what else is on its line.
        for other in _on_line(page, one):
            if other in (_ROOT, _LOGARITHM):
                kind = other
    if kind:
        what, kept = _MADE[kind]
        return what, (
            f"Keep {kept}: add a number that the dtype can hold, or replace it with "
            f"jnp.where before the {kind}; replacing the result does not help, as 0 "
            "times infinity is NaN."
        )
    if name == "gather":
        remedy = "Keep indices in bounds: jnp.take gives NaN elsewhere."
        return "an index out of bounds", remedy
    if one.how == "overflows":
        return f"numbers that are too large, in {name}", "Compute with smaller numbers."
    if traits_of(name) & (Is.PRODUCT | Is.ADDS_TWO | Is.ADDS_MANY) or name == "mul":
        return f"infinities, in {name}", (
            "If the infinities come from a mask, or are a constant that is too large "
            "for its dtype, use a finite number, such as -3e4 instead of -inf: the "
            "softmax of nothing but -inf is NaN."
        )
    what = f"numbers for which {name} is not defined"
    return what, "Keep its argument where it is defined."


def _on_line(page: Diagnosis, one: Wrong) -> Iterator[str]:
    """The kinds of the operations on the line of what is not finite."""
    for row in page.table.rows:
        if row.source == one.place.source:
            yield _OF.get(row.primitive, "")
