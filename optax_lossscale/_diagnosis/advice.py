"""The verdict on a model, and the advice for it."""

import math
from collections.abc import Iterator

import numpy as np

from optax_lossscale._arrays.names import scale_name
from optax_lossscale._diagnosis.makers import remedy_in_float32, words_in_float32
from optax_lossscale._diagnosis.page import Diagnosis, Wrong
from optax_lossscale._diagnosis.scale import InitialScale
from optax_lossscale._diagnosis.text import some
from optax_lossscale._programs.operations import Is, traits_of
from optax_lossscale._programs.values import HALVES
from optax_lossscale._scales.dynamic import DynamicLossScale

_STILL_LOST = 0.05  # a share of gradients for which one scale is not enough
_DROWNED = 0.1  # a share that an optimizer should not lose
_MANY = 0.05  # a share of choices that should not be made otherwise
_LOWEST = -126

Findings = Iterator[tuple[str, list[str]]]
"""Verdicts, the most important first, each with what to do, in one sentence each."""


def judged(page: Diagnosis) -> Diagnosis:
    """The page with its verdict and advice."""
    fine = "Nothing is computed in 16 bits"
    advice = "Nothing"
    if page.computes_in:
        fine = f"{page.computes_in[0]} is fine as it is, and needs no loss scale"
    else:
        fine += ", nor would autocast compute anything in it: there are no products to narrow"
    findings = [*_about_what_is_wrong(page), *_about_choices(page), *_about_products(page)]
    if page.initial_scale and np.float16 in page.computes_in:
        findings += _about_scale(page, page.initial_scale)
        room = f"{math.log2(page.initial_scale.largest):.0f} bits to spare"
        fine = f"float16 is fine as it is, without a loss scale, with {room}"
        if page.loss_scale is not None:
            fine = f"float16 is fine, and so is a loss scale of {scale_name(page.loss_scale)}"
        elif page.initial_scale.scale < DynamicLossScale.initial_scale:
            start = scale_name(page.initial_scale.scale)
            advice += f". A dynamic loss scale would start at {start}"
    findings += _about_loss_and_moments(page)
    if not findings:
        return page._replace(verdict=f"{fine}.", advice=[f"{advice}."])
    to_do = [sentence for _, sentences in findings for sentence in sentences]
    return page._replace(verdict=findings[0][0], advice=list(dict.fromkeys(to_do)))


def _about_what_is_wrong(page: Diagnosis) -> Findings:
    if not page.wrong:
        return
    first = page.wrong[0]
    dtypes = " and ".join(map(str, page.computes_in))
    because = f": {first.place} {_HOW.get(first.how, first.how)}" * (first.how != "adds up")
    if first.is_in_float32:
        one = next((w for w in page.wrong if w.name == "the loss" and w.is_in_float32), first)
        what = "The loss is" if one.name == "the loss" else "The gradients are"
        words = words_in_float32(page, one)
        yield (
            f"{what} not finite in float32 either, so no dtype and no loss scale helps: {words}.",
            [remedy_in_float32(page, one)],
        )
        return
    if (
        page.initial_scale
        and page.overflow
        and all(w.is_backward and w.how == "vanishes" for w in page.wrong)
    ):
        verdict = (
            f"No single loss scale fits: at {scale_name(page.scale)} the gradient of {first.name} "
            f"is off by {first.off:.1%}, as {first.place} is lost to underflow, and from "
            f"{scale_name(2 * page.initial_scale.largest)} on, {page.overflow} overflows."
        )
        yield verdict, [f"Compute {page.overflow} in float32, or with smaller numbers."]
        return
    if not np.isfinite(page.loss):
        verdict = (
            f"The loss is {page.loss} at any loss scale, as that only multiplies gradients; in "
            f"float32 it is {page.loss_in_float32:.4g}{because}."
        )
    elif page.initial_scale is None:
        verdict = (
            f"The loss is finite; its gradients are not at any scale, but are in float32{because}."
        )
    elif first.name == "the loss":
        losses = f"{page.loss:.4g} for {page.loss_in_float32:.4g}"
        verdict = f"{dtypes} gives a wrong loss, {losses}{because}."
    elif first.name == "a value inside":
        verdict = (
            f"{dtypes} gives wrong values inside, though loss and gradients happen to agree with "
            f"float32's{because}."
        )
    else:
        verdict = (
            f"{dtypes} gives wrong gradients: that of {first.name} is off by {first.off:.1%}, at "
            f"the scale that fits best{because}."
        )
    yield verdict, list(dict.fromkeys(s for one in page.wrong for s in _corrections(page, one)))


_HOW = {
    "is a kernel": "is a kernel, which computes in 16 bits",
    "amplifies": "amplifies the rounding of its operands",
    "cancels": "cancels, and leaves little but the rounding of its operands",
    "is undefined": "is not defined for numbers a little off",
    "vanishes": "is lost to underflow",
    "stagnates": "stagnates, as small terms are lost beside a large sum",
    "rounds": "needs more digits than 16 bits have",
}


def _corrections(page: Diagnosis, one: Wrong) -> Iterator[str]:
    """What to do about something that is wrong."""
    place = f"{one.place.primitive} at {one.place.source}"
    lines = list(dict.fromkeys(product.source for product in one.products))
    if one.is_inner and one.how in ("vanishes", "overflows"):
        yield (
            f"The derivative at {one.place.source} is taken inside of the loss function, where no "
            "loss scale reaches: scale its own loss by a fixed number, as in "
            "ols.value_and_scaled_grad(inner_loss, 2.0**10)(x), and divide what it returns."
        )
    elif one.how == "adds up":
        yield "Compute more in float32: rounding adds up over many lines, none at fault alone."
    elif lines:
        kept = "precision=jax.lax.Precision.HIGHEST"
        yield f"Keep the product at {some(lines, 'more lines')} in float32: {kept}."
    elif one.how == "is a kernel":
        yield f"Give {place} float32, or look into it: nothing shows what it computes."
    elif Is.PRODUCT in traits_of(one.place.primitive):
        keep = "in float32: precision=jax.lax.Precision.HIGHEST"
        smaller = ", or compute with smaller numbers" * (one.how == "overflows")
        yield f"Keep the product at {one.place.source} {keep}{smaller}."
    elif one.how in _RANGES:
        yield f"Compute {place} in float32{_RANGES[one.how]}."
    elif one.how == "stagnates":
        how = _SUMS.get(one.place.primitive, "cast to float32 first.")
        yield f"Compute {place} in float32, as small terms are lost beside a large sum: {how}"
    else:
        yield f"Compute {place}, and what it is made of, in float32: it needs more digits."


_RANGES = {
    "overflows": ", or with smaller numbers: those above 65504 are infinite",
    "vanishes": ", or with larger numbers: those below 6e-8 become 0",
    "saturates": ": 16 bits round it to its limit, where its derivative is 0",
}
_SUMS = {
    "scatter-add": "index the float32 table and cast the result, not the table.",
    "add_any": "cast a shared weight where it is used, inside the loop.",
    "reduce_sum": "cast to float32 first, or pass the dtype to jnp.sum.",
}


def _about_choices(page: Diagnosis) -> Findings:
    """Integers and branches that float32 would have chosen otherwise."""
    for choice in () if page.wrong else page.choices:
        primitive = choice.place.primitive
        is_cast = primitive == "convert_element_type"
        if choice.share > (_MANY if is_cast else 0.2):
            verdict = (
                f"{choice.share:.1%} of the {choice.count} numbers chosen in {choice.place} are "
                "not what float32 chooses."
            )
            yield verdict, [f"Compute what {primitive} at {choice.place.source} reads in float32."]
            return


def _about_products(page: Diagnosis) -> Findings:
    """Where operands in 16 bits were widened, and most is computed in float32."""
    products = page.dtypes.products
    wide = [p for p in products if p.dtype.itemsize > 2]
    widened = [p for p in wide if HALVES.intersection(p.before)]
    share = sum(share for dtype, share in page.dtypes.shares.items() if dtype.itemsize > 2)
    count, total = (sum(p.count for p in some) for some in (wide, products))
    if not widened or page.is_autocast or share <= 0.5 or count <= total / 2:
        return
    dtype = next(dtype for p in widened for dtype in p.before if dtype in HALVES)
    in_dtype = "" if dtype == np.float16 else ", jnp.bfloat16"
    lines = some(list(dict.fromkeys(p.source for p in widened)), "more lines")
    yield (
        f"Hardly anything is computed in {dtype}: {count} of {total} matrix products are in "
        f"{wide[0].dtype}, to which their operands are widened.",
        [
            f"Wrap the loss function: autocast(loss_fn{in_dtype}) computes every matrix product "
            f"in {dtype}. Or cast both operands to {dtype} at {lines}."
        ],
    )


def _about_scale(page: Diagnosis, fits: InitialScale) -> Findings:
    """What the loss scale has to be, if one is needed."""
    name, worst = max(page.underflow.items(), key=lambda item: item[1].left, default=("", None))
    mend = (
        [f"Compute {page.overflow} in float32, or with smaller numbers."] if page.overflow else []
    )
    if worst and worst.left > _STILL_LOST:
        verdict = (
            f"No single loss scale fits: at {scale_name(fits.scale)} {_share(worst.left, name)} "
            f"are still lost to underflow, and from {scale_name(2 * fits.largest)} on others "
            "overflow."
        )
        yield verdict, [*mend, *_start(page, fits)]
    elif page.loss_scale is not None:
        yield from _about_theirs(page, fits, page.loss_scale)
    elif fits.largest < 1:
        yield (
            "Gradients overflow without a loss scale: float16 needs one below 1.",
            [*_start(page, fits), *mend],
        )
    elif not page.is_finite_without:
        yield (
            "float16 needs a loss scale: without one, gradients are not finite.",
            _start(page, fits),
        )
    elif page.underflow:
        name, group = next(iter(page.underflow.items()))  # of all parameters, or else the worst
        (wrap,) = _start(page, fits)
        wrap += " With so few lost, many models need none." * (group.lost < _STILL_LOST)
        yield (
            f"Without a loss scale, float16 loses {_share(group.lost, name)} to underflow.",
            [wrap],
        )


def _about_theirs(page: Diagnosis, fits: InitialScale, theirs: float) -> Findings:
    """Whether the loss scale in the optimizer's state fits."""
    needed = max((group.bits for group in page.underflow.values()), default=0)
    if theirs > fits.largest:
        verdict = f"Gradients overflow at your loss scale, {scale_name(theirs)}."
        yield (
            verdict,
            [f"Nothing, if it is dynamic: it will fall. Else set it to {scale_name(fits.scale)}."],
        )
    elif theirs < 2.0 ** min(needed, math.log2(fits.scale)):
        verdict = (
            f"Your loss scale, {scale_name(theirs)}, is lower than what fits: gradients are lost."
        )
        yield (
            verdict,
            [f"Nothing, if it is dynamic: it will grow. Else set it to {scale_name(fits.scale)}."],
        )


def _start(page: Diagnosis, fits: InitialScale) -> list[str]:
    """How to begin with the scale that fits; nothing for who has a loss scale."""
    if page.loss_scale is not None:
        return []
    exponent = math.log2(fits.scale)
    floor = max(exponent - 16, _LOWEST)  # which leaves room to fall
    bound = f", min_scale=2.0**{floor:.0f}" if exponent < 0 else ""
    ours = (
        f"with_loss_scale(optimizer, DynamicLossScale(initial_scale=2.0**{exponent:.0f}{bound}))"
    )
    start = round(math.log2(DynamicLossScale.initial_scale))
    needed = max((group.bits for group in page.underflow.values()), default=0)
    if needed <= start <= exponent and page.is_finite_without:
        ours = f"with_loss_scale(optimizer), whose initial scale of 2**{start} suffices here"
    return [f"Wrap the optimizer: {ours}."]


def _share(lost: float, group: str) -> str:
    return f"{lost:.1%} of the gradients" + f" ({group})" * (group != "all")


def _about_loss_and_moments(page: Diagnosis) -> Findings:
    if page.wrong:
        return
    if page.loss_dtype == np.float16:
        verdict = "float16 is fine except for the loss: its gradient is the scale, at most 2**15."
        yield verdict, ["Compute the loss in float32: cast what it averages or sums."]
    moments = page.moments
    if moments and moments.below_eps > _DROWNED:
        verdict = (
            f"float16 is fine, but the optimizer is not: {moments.below_eps:.1%} of the gradients "
            f"are below Adam's eps of {moments.eps:g}, and move their parameters too little."
        )
        small = "clipping to a small norm shrinks them, and so does dividing the loss"
        yield verdict, [f"Give Adam a smaller eps, 1e-15 say, or larger gradients: {small}."]
    if moments and moments.vanished > _DROWNED:
        dtypes = " and ".join(map(str, moments.dtypes))
        verdict = (
            f"float16 is fine for the gradients, but {dtypes} is not for Adam's second moments: "
            f"{moments.vanished:.1%} of the squares are zero in it."
        )
        yield verdict, ["Initialize the optimizer with float32 parameters."]
