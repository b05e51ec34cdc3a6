"""The verdict on a model, and the advice for it."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from optax_lossscale._arrays.names import scale_name, without_numbers
from optax_lossscale._diagnosis.dtypes import Operation
from optax_lossscale._diagnosis.makers import words_in_float32
from optax_lossscale._diagnosis.notes import FIFTH
from optax_lossscale._diagnosis.page import Diagnosis, Wrong
from optax_lossscale._diagnosis.scale import InitialScale, Underflow
from optax_lossscale._diagnosis.table import Row
from optax_lossscale._diagnosis.text import lines_of, some
from optax_lossscale._diagnosis.wide import is_narrow
from optax_lossscale._programs.operations import Is, traits_of
from optax_lossscale._programs.values import HALVES
from optax_lossscale._scales.dynamic import DynamicLossScale

_STILL_LOST = 0.05  # a share of gradients for which one scale is not enough
_MANY = 0.05  # a share of choices that should not be made otherwise
_LOWEST = -126
_START = round(math.log2(DynamicLossScale.initial_scale))

Findings = Iterator[tuple[str, list[str]]]
"""Verdicts, the most important first, each with what to do."""


def judged(page: Diagnosis) -> Diagnosis:
    """The page with its verdict and advice."""
    findings = [
        *_about_what_is_wrong(page),
        *_about_choices(page),
        *_about_products(page),
        *(_about_rounding(page) or _about_no_gradients(page)),
        *_about_scale(page),
        *_about_the_loss(page),
    ]
    if not findings:
        return _found_fine(page)
    to_do = [sentence for _, sentences in findings for sentence in sentences]
    return page._replace(verdict=findings[0][0], advice=list(dict.fromkeys(to_do)))


def _found_fine(page: Diagnosis) -> Diagnosis:
    """The page of a model of which nothing is wrong."""
    fits = _scale_that_fits(page)
    advice = "Nothing."
    if not page.computes_in:
        verdict = (
            "Nothing is computed in 16 bits, nor would autocast compute anything in "
            "it: there are no products to narrow."
        )
    elif not fits:
        verdict = f"{page.computes_in[0]} is fine as it is, and needs no loss scale."
    elif page.loss_scale is not None:
        verdict = (
            f"float16 is fine, and so is a loss scale of {scale_name(page.loss_scale)}."
        )
    else:
        spare = f"{math.log2(fits.largest):.0f} bits to spare"
        verdict = f"float16 is fine as it is, without a loss scale, with {spare}."
        if fits.scale < DynamicLossScale.initial_scale:
            advice += f" A dynamic loss scale would start at {scale_name(fits.scale)}."
    return page._replace(verdict=verdict, advice=[advice])


def _scale_that_fits(page: Diagnosis) -> InitialScale | None:
    """The scale that fits a model in float16; of others, None."""
    is_scaled = np.float16 in page.computes_in and page.has_gradients
    return page.initial_scale if is_scaled else None


def _about_what_is_wrong(page: Diagnosis) -> Findings:
    """The loss, gradients and values inside that are off."""
    if not page.wrong:
        return
    worst = page.wrong[0]
    not_finite = [one for one in page.wrong if one.is_in_float32]
    if worst.is_in_float32:
        losses = [one for one in not_finite if one.name == "the loss"]
        (first, *_) = [*losses, worst]
        what = "The loss is" if losses else "The gradients are"
        why, remedy = words_in_float32(page, first)
        verdict = f"{what} not finite in float32 either, so no loss scale helps: {why}."
        yield verdict, [remedy]
    elif page.overflow and all(
        _is_lost_at_the_scale_that_fits(page, one) for one in page.wrong
    ):
        verdict = (
            f"No single loss scale fits: at {scale_name(page.scale)} the gradient of "
            f"{worst.name} is off by {worst.off:.1%}, as {worst.place} is lost to "
            f"underflow, and from {_top(page.initial_scale)} on, {page.overflow} "
            "overflows."
        )
        yield verdict, [_in_range(page.overflow)]
    else:
        advice = [sentence for one in page.wrong for sentence in _remedies(page, one)]
        yield f"{_what_is_wrong(page, worst)}.", advice


def _is_lost_at_the_scale_that_fits(page: Diagnosis, one: Wrong) -> bool:
    """Whether a larger scale would mend it."""
    return (
        page.initial_scale is not None
        and one.how == "vanishes"
        and one.place.is_backward
    )


def _what_is_wrong(page: Diagnosis, worst: Wrong) -> str:
    """What 16 bits spoil, and where."""
    dtypes = " and ".join(map(str, page.computes_in))
    because = "" if worst.how == "adds up" else f": {worst.place} {_HOWS[worst.how][0]}"
    if not np.isfinite(page.loss):
        return (
            f"The loss is {page.loss} at any loss scale, as that only multiplies "
            f"gradients; in float32 it is {page.loss_in_float32:.4g}{because}"
        )
    if page.initial_scale is None:
        return (
            "The loss is finite; its gradients are not at any scale, but are in "
            f"float32{because}"
        )
    if worst.name == "the loss":
        losses = f"{page.loss:.4g} for {page.loss_in_float32:.4g}"
        return f"{dtypes} gives a wrong loss, {losses}{because}"
    if worst.name == "a value inside":
        return (
            f"{dtypes} gives wrong values inside, though loss and gradients happen to "
            f"agree with float32's, or are nothing but rounding there{because}"
        )
    return (
        f"{dtypes} gives wrong gradients: that of {worst.name} is off by "
        f"{worst.off:.1%}, at the scale that fits best{because}"
    )


_DIGITS = "Compute {line}, and what it is made of, in float32: it needs more digits."
_HOWS = {  # what an equation does, in the words of the verdict; and what to do about it
    "overflows": (
        "overflows",
        "Compute {line} in float32, or with smaller numbers: those above {largest} "
        "are infinite.",
    ),
    "vanishes": (
        "is lost to underflow",
        "Compute {line} in float32, or with larger numbers: those below {least} "
        "become 0.",
    ),
    "saturates": (
        "saturates",
        "Compute {line} in float32: 16 bits round it to its limit, where its "
        "derivative is 0.",
    ),
    "stagnates": (
        "stagnates, as small terms are lost beside a large sum",
        "Compute {line} in float32, as small terms are lost beside a large sum: "
        "{summed}",
    ),
    "rounds": ("needs more digits than 16 bits have", _DIGITS),
    "amplifies": ("amplifies the rounding of its operands", _DIGITS),
    "cancels": ("cancels, and leaves little but the rounding of its operands", _DIGITS),
    "is undefined": ("is not defined for numbers a little off", _DIGITS),
    "is not linear": (
        "is not in proportion to the loss, and so a loss scale changes it",
        "Have the optimizer clip or normalize gradients, once they are divided by the "
        "loss scale, instead of the backward pass at {line}.",
    ),
    "is a kernel": (
        "is a kernel, which computes in 16 bits",
        "Give {line} float32, or look into it: nothing shows what it computes.",
    ),
    "adds up": (
        "",
        "Compute more in float32: rounding adds up over many lines; no one line is "
        "at fault.",
    ),
}
_INNER = (
    "The derivative at {source} is taken inside of the loss function, where no loss "
    "scale reaches: scale its own loss by a fixed number, as in "
    "ols.value_and_scaled_grad(inner_loss, 2.0**10)(x), and divide what it returns."
)
_WIDE = (
    "Compute what {line} is made of in float32: it needs more digits than 16 bits have."
)
_SUMMED = {  # how a sum, of the backward pass or not, is to be had in float32
    (
        "scatter-add",
        True,
    ): "index the float32 table and cast the result, not the table.",
    ("add_any", True): "cast a shared weight where it is used, inside the loop.",
    ("reduce_sum", False): "cast to float32 first, or pass the dtype to jnp.sum.",
}


def _remedies(page: Diagnosis, one: Wrong) -> Iterator[str]:
    """What to do about something that is wrong."""
    place = one.place
    is_product = Is.PRODUCT in traits_of(place.primitive)
    is_of_range = one.how in ("vanishes", "overflows")
    template = _HOWS[one.how][1]
    if one.is_inner and is_of_range:
        template = _INNER
    elif one.products:
        yield from _kept(page, one.products)
        return
    elif is_product and one.how not in ("adds up", "is a kernel"):
        is_large = one.how == "overflows"
        otherwise = ", or compute with smaller numbers" if is_large else ""
        yield from _kept(page, [place], otherwise)
        return
    elif template is _DIGITS and not is_narrow(place.dtype):
        template = _WIDE
    range_of = jnp.finfo(place.dtype if is_narrow(place.dtype) else jnp.float16)
    is_cast = place.primitive == "convert_element_type"
    yield template.format(
        line=f"what is cast at {place.source}" if is_cast else place.line,
        source=place.source,
        largest=f"{float(range_of.max):g}",
        least=f"{float(range_of.smallest_subnormal):.0e}".replace("e-0", "e-"),
        summed=_SUMMED.get(
            (place.primitive, place.is_backward), "cast to float32 first."
        ),
    )


def _kept(
    page: Diagnosis, products: Sequence[Row], otherwise: str = ""
) -> Iterator[str]:
    """How to have products in float32: those that autocast narrows, and those that a cast does."""
    autocasts = {
        product.source for product in page.dtypes.products if product.by_autocast
    }
    lines = lines_of(products)
    ways = {
        "precision=jax.lax.Precision.HIGHEST": [
            line for line in lines if line in autocasts
        ],
        "cast the operands to float32": [
            line for line in lines if line not in autocasts
        ],
    }
    for way, some_lines in ways.items():
        if some_lines:
            where = some(some_lines, "more lines")
            what = "product" if len(some_lines) == 1 else "products"
            yield f"Keep the {what} at {where} in float32: {way}{otherwise}."


def _in_range(place: Row) -> str:
    return f"Compute {place} in float32, or with smaller numbers."


def _about_choices(page: Diagnosis) -> Findings:
    """Integers and branches that float32 would have chosen otherwise."""
    for choice in () if page.wrong else page.choices:
        is_cast = choice.primitive == "convert_element_type"
        if choice.decided > (_MANY if is_cast else FIFTH):
            verdict = (
                f"{choice.decided:.1%} of the {choice.count} numbers chosen in "
                f"{choice} are not what float32 chooses."
            )
            yield verdict, [f"Compute what {choice.line} reads in float32."]
            return


def _about_products(page: Diagnosis) -> Findings:
    """Where an operand in 16 bits met one in float32, and most is computed in float32."""
    products = page.dtypes.products
    has_autocast = page.is_autocast or any(p.by_autocast for p in products)
    share = sum(s for dtype, s in page.dtypes.shares.items() if dtype.itemsize > 2)
    # The first product of a line is that of the forward pass.
    firsts: dict[str, Operation] = {}
    for product in products:
        firsts.setdefault(product.source, product)
    widened = [
        p
        for p in firsts.values()
        if p.dtype.itemsize > 2 and not p.by_choice and HALVES.intersection(p.before)
    ]
    # Who widens both operands means it.
    is_meant = all(HALVES.issuperset(p.before) for p in widened)
    if page.wrong or has_autocast or share <= 0.5 or is_meant:
        return
    dtype = next(dtype for p in widened for dtype in p.before if dtype in HALVES)
    in_dtype = "" if dtype == np.float16 else ", jnp.bfloat16"
    lines = some(lines_of(widened), "more lines")
    yield (
        f"Hardly anything is computed in {dtype}: {share:.1%} of the multiplications "
        f"are in {widened[0].dtype}, to which an operand is widened.",
        [
            f"Wrap the loss function: autocast(loss_fn{in_dtype}) computes every "
            f"matrix product in {dtype}. Or cast both operands to {dtype} at {lines}."
        ],
    )


def _about_rounding(page: Diagnosis) -> list[tuple[str, list[str]]]:
    """A loss that float32 does not determine either, of which nothing can be said."""
    if not page.computes_in or page.wrong or "the loss" in page.off:
        return []
    verdict = (
        f"The loss is nothing but rounding, {page.loss:.3g} for {page.loss_in_float32:.3g} "
        "in float32, and so may be its gradients."
    )
    advice = (
        "Diagnose other parameters or another batch. If it compares two things that are "
        "to be equal, compute both in the same dtype, such as a teacher under autocast."
    )
    return [(verdict, [advice])]


def _about_no_gradients(page: Diagnosis) -> Findings:
    """Gradients that tell nothing of 16 bits, nor train anything."""
    if page.computes_in and not page.wrong and not page.has_gradients:
        yield (
            "All gradients are 0, in float32 as well.",
            [
                "Look for what stops them, such as a ReLU that is 0 for every input, or a "
                "constant that 16 bits round to 0 or infinity."
            ],
        )


def _about_scale(page: Diagnosis) -> Findings:
    """What the loss scale has to be, if one is needed."""
    fits = _scale_that_fits(page)
    if not fits:
        return
    mend = [_in_range(page.overflow)] if page.overflow else []
    lost = _lost_for_want_of_a_scale(page)
    name, worst = max(lost.items(), key=lambda item: item[1].left, default=("", None))
    if worst and worst.left > _STILL_LOST:
        verdict = (
            f"No single loss scale fits: at {scale_name(fits.scale)} "
            f"{_share(worst.left, name)} are still lost to underflow, and from "
            f"{_top(fits)} on others overflow."
        )
        yield verdict, [*mend, *_wrap(page, fits)]
    elif page.loss_scale is not None:
        yield from _about_theirs(page, fits, page.loss_scale)
    elif fits.largest < 1:
        verdict = "Gradients overflow without a loss scale: float16 needs one below 1."
        yield verdict, [*_wrap(page, fits), *mend]
    elif not page.is_finite_without:
        verdict = "float16 needs a loss scale: without one, gradients are not finite."
        yield verdict, _wrap(page, fits)
    elif lost:
        name, group = next(iter(lost.items()))  # of all parameters, or else the worst
        (wrap,) = _wrap(page, fits)
        if group.lost < _STILL_LOST and not page.wrong:
            wrap += " With so few lost, many models need none."
        verdict = f"Without a loss scale, float16 loses {_share(group.lost, name)} to underflow."
        yield verdict, [wrap]


def _lost_for_want_of_a_scale(page: Diagnosis) -> dict[str, Underflow]:
    """The groups of gradients that are lost, and are neither wrong nor nothing but rounding."""
    every = page.underflow.get("all")
    if every and every.left > _STILL_LOST and not page.wrong:
        # What is nothing but rounding is no small part of the model.
        return page.underflow
    wrong = {one.name for one in page.wrong}
    groups = {without_numbers(name) for name in page.off if name not in wrong}
    lost = {name: group for name, group in page.underflow.items() if name in groups}
    is_every = page.underflow.keys() <= {"all", *lost}
    return page.underflow if is_every else lost


def _about_theirs(page: Diagnosis, fits: InitialScale, theirs: float) -> Findings:
    """Whether the loss scale in the optimizer's state fits."""
    change = f"Else set it to {scale_name(fits.scale)}."
    if theirs > fits.largest:
        verdict = f"Gradients overflow at your loss scale, {scale_name(theirs)}."
        yield verdict, [f"Nothing, if it is dynamic: it will fall. {change}"]
    elif theirs < 2.0 ** min(_bits_needed(page), math.log2(fits.scale)):
        verdict = (
            f"Your loss scale, {scale_name(theirs)}, is lower than what fits: "
            "gradients are lost."
        )
        yield verdict, [f"Nothing, if it is dynamic: it will grow. {change}"]


def _wrap(page: Diagnosis, fits: InitialScale) -> list[str]:
    """How to begin with the scale that fits; nothing for who has a loss scale."""
    exponent = round(math.log2(fits.scale))
    if page.loss_scale is not None:
        return []
    if _bits_needed(page) <= _START <= exponent and page.is_finite_without:
        initial = f"with_loss_scale(optimizer), whose initial scale of 2**{_START} suffices here"
        return [f"Wrap the optimizer: {initial}."]
    floor = max(exponent - 16, _LOWEST)  # which leaves room to fall
    bound = f", min_scale=2.0**{floor}" if exponent < 0 else ""
    scale = f"DynamicLossScale(initial_scale=2.0**{exponent}{bound})"
    return [f"Wrap the optimizer: with_loss_scale(optimizer, {scale})."]


def _bits_needed(page: Diagnosis) -> int:
    """The bits that gradients need, but for those that are nothing but rounding."""
    groups = {without_numbers(name) for name in page.off}
    lost = [group.bits for name, group in page.underflow.items() if name in groups]
    return max(lost, default=0)


def _top(fits: Any) -> str:
    """The scale from which on something overflows."""
    return scale_name(2 * fits.largest)


def _share(lost: float, group: str) -> str:
    share = f"{lost:.1%} of the gradients"
    return share if group == "all" else f"{share} ({group})"


def _about_the_loss(page: Diagnosis) -> Findings:
    """A loss in float16."""
    if page.loss_dtype == np.float16 and not page.wrong:
        verdict = "float16 is fine except for the loss: its gradient is the scale, at most 2**15."
        yield verdict, ["Compute the loss in float32: cast what it averages or sums."]
