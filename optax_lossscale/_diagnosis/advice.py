"""What to say of a model, and what to do about it, of what `diagnose` found."""

import math
from collections.abc import Iterator

import jax.numpy as jnp

from optax_lossscale._arrays.names import scale_name
from optax_lossscale._diagnosis.accuracy import GradientError
from optax_lossscale._diagnosis.calibration import InitialScale
from optax_lossscale._diagnosis.explain import Explanation
from optax_lossscale._diagnosis.makers import Maker
from optax_lossscale._diagnosis.page import Diagnosis
from optax_lossscale._diagnosis.places import recorded_places
from optax_lossscale._diagnosis.program import Program
from optax_lossscale._diagnosis.text import some
from optax_lossscale._programs.values import HALVES

_STILL_LOST = 0.05  # a share of gradients for which one scale is not enough
_DROWNED = 0.1  # a share that an optimizer should not lose
_FLOAT16 = jnp.dtype(jnp.float16)

Findings = Iterator[tuple[str, list[str]]]
"""Verdicts, the one that matters most first, each with what to do, one sentence each."""


def judged(page: Diagnosis, program: Program) -> Diagnosis:
    """The page with a verdict and advice, where some scale gives finite gradients."""
    fits, dtypes = page.initial_scale, page.computes_in
    assert fits is not None
    findings = [*_about_errors(page), *_about_products(page)]
    if dtypes:
        findings += [*_about_scale(page, fits, program), *_about_loss(page), *_about_moments(page)]
    fine = "Nothing is computed in float16, and nothing has to be done."
    if _FLOAT16 in dtypes:
        room = round(math.log2(fits.largest))
        fine = f"float16 is fine as it is, without a loss scale, with {room} bits to spare."
    elif dtypes:
        fine = f"{dtypes[0]} is fine as it is, and needs no loss scale."
    (verdict, _), *_ = findings = findings or [(fine, ["Nothing."])]
    to_do = [sentence for _, sentences in findings for sentence in sentences]
    return page._replace(verdict=verdict, advice=to_do)


def _about_errors(page: Diagnosis) -> Findings:
    if page.errors:
        name, worst = next(iter(page.errors.items()))
        verdict = (
            f"{' and '.join(map(str, page.computes_in))} gives wrong gradients: that of {name} is "
            f"off by {worst.off:.1%}, at the scale that fits best."
        )
        yield verdict, list(dict.fromkeys(map(_correction, page.errors.values())))


_CORRECTIONS = {
    "vanishes": ", or with other numbers: what is below 6e-8 is 0.",
    "overflows": ", or with other numbers: what is above 65504 is infinite.",
    "saturates": ": float16 rounds it to its limit, where its derivative is 0.",
    "rounding": ": it takes more digits than 16 bits have.",
}
_SUMS = {
    "scatter-add": "look up in the float32 table and cast what was found, not the table",
    "add_any": "cast a weight that many share where each uses it, inside the loop",
    "reduce_sum": "cast to float32 before, or give jnp.sum the dtype",
}


def _correction(error: GradientError) -> str:
    if error.cause == "stagnates":
        how = _SUMS.get(error.primitive, "cast to float32 before")
        lost = "where small terms are lost beside a large sum"
        return f"Sum in float32 at {error.source}, {lost}: {how}."
    if error.primitive:
        where = f"{error.primitive} at {error.source}"
        return f"Compute {where} in float32{_CORRECTIONS[error.cause]}"
    many = "rounding adds up over many lines, of which no one is at fault."
    return f"Compute more in float32: {many}"


def _about_products(page: Diagnosis) -> Findings:
    """Where operands in 16 bits were widened, and most is computed in float32."""
    products = page.dtypes.products
    wide = [p for p in products if p.dtype.itemsize > 2]
    widened = [p for p in wide if HALVES.intersection(p.before)]
    share = sum(share for dtype, share in page.dtypes.shares.items() if dtype.itemsize > 2)
    count, total = (sum(p.count for p in of) for of in (wide, products))
    if not widened or share <= 0.5 or count <= total / 2:
        return
    dtype = next(dtype for p in widened for dtype in p.before if dtype in HALVES)
    verdict = (
        f"Hardly anything is computed in {dtype}: {count} of {total} matrix products are in "
        f"{wide[0].dtype}, to which their operands are widened."
    )
    in_dtype = "" if dtype == _FLOAT16 else ", jnp.bfloat16"
    lines = some(list(dict.fromkeys(p.source for p in widened)), "more lines")
    advice = (
        f"Wrap the loss function: autocast(loss_fn{in_dtype}) computes every matrix product in "
        f"{dtype}. Or cast both operands to {dtype} at {lines}."
    )
    yield verdict, [advice]


def _about_scale(page: Diagnosis, fits: InitialScale, program: Program) -> Findings:
    """What the loss scale has to be, if there has to be one."""
    underflow, exponent = page.underflow, round(math.log2(fits.scale))
    is_finite = lambda e: program.at(e).is_finite
    least = 0
    if exponent > 0 and not is_finite(0):
        least = next(e + 1 for e in range(exponent, -1, -1) if not is_finite(e))
    bounds = f", min_scale=2.0**{least or exponent}" if least or exponent < 0 else ""
    ours = f"with_loss_scale(optimizer, DynamicLossScale(initial_scale=2.0**{exponent}{bounds}))"
    wrap = f"Wrap the optimizer: {ours}."
    mend = mended(page.overflow, program) if page.overflow else []
    worst = max(underflow, key=lambda name: underflow[name].left, default="")
    if worst and underflow[worst].left > _STILL_LOST:
        verdict = (
            f"No one loss scale fits: at {scale_name(fits.scale)} {underflow[worst].left:.1%} of "
            f"{_gradients(worst)} are still lost to underflow, and from "
            f"{scale_name(2 * fits.largest)} on others overflow."
        )
        yield verdict, [*mend, f"Until then, wrap the optimizer: {ours}."]
    elif fits.largest < 1:
        verdict = "Gradients overflow without a loss scale: float16 needs one below 1."
        yield verdict, [wrap, *mend]
    elif least:
        yield f"float16 needs a loss scale: below 2**{least} gradients are not finite.", [wrap]
    elif underflow:
        name = next(iter(underflow))  # of all parameters, or else the worst
        lost = f"{underflow[name].lost:.1%} of {_gradients(name)}"
        yield f"float16 needs a loss scale: without one, {lost} are lost to underflow.", [wrap]


def _gradients(group: str) -> str:
    if group == "all":
        return "the gradients"
    return f"those {group}" if group.startswith("arriving") else f"those of {group}"


def _about_loss(page: Diagnosis) -> Findings:
    if page.loss_dtype == _FLOAT16:
        verdict = (
            "float16 is fine but for the loss, which is float16: no scale above 2**15 fits it."
        )
        advice = (
            "Compute the loss in float32: cast what it is the mean of first, as in "
            "jnp.mean(losses.astype(jnp.float32)). Its own gradient is the loss scale."
        )
        yield f"{verdict}: no scale above 2**15 fits it.", [advice]


def _about_moments(page: Diagnosis) -> Findings:
    moments = page.moments
    if moments and moments.below_eps > _DROWNED:
        verdict = (
            f"float16 is fine, and the optimizer is not: {moments.below_eps:.1%} of the gradients "
            f"are below Adam's eps of {moments.eps:g}, and move their parameters too little."
        )
        advice = (
            "Give Adam a smaller eps, 1e-15 say, or larger gradients: a clip by a norm far below "
            "that of the gradients makes them small, and so does a loss that is divided by much."
        )
        yield verdict, [advice]
    if moments and moments.vanished > _DROWNED:
        verdict = (
            f"float16 is fine for the gradients, and {' and '.join(map(str, moments.dtypes))} is "
            f"not for Adam's second moments: {moments.vanished:.1%} of the squares are zero in it."
        )
        advice = "initialize the optimizer with float32 parameters."
        yield verdict, [f"Keep the second moments in float32: {advice}"]


_AWAY_FROM_0 = (
    "{}: add to it a number that the dtype holds, or replace it by jnp.where before the {}; after "
    "it is too late, as 0 times infinity is NaN."
).format
REMEDIES = {
    "root": _AWAY_FROM_0("Keep what is under the root above 0", "root"),
    "logarithm": _AWAY_FROM_0("Keep what the logarithm is taken of above 0", "logarithm"),
    "divisor": _AWAY_FROM_0("Keep the divisor away from 0", "division"),
    "power": "Keep what the power is taken of above 0: add to it a number that the dtype holds.",
    "mask": "If the infinities are a mask's: mask with a finite number, such as -3e4, instead of "
    "-inf, as a softmax of nothing but -inf is NaN.",
    "index": "Keep indices in bounds: jnp.take gives NaN for one that is not.",
    "domain": "Keep what the function is taken of where it is defined.",
    "": "Compute with smaller numbers.",
}
"""What to do about what is not finite in float32 either, of each kind that a `Maker` has."""


def mended(overflow: Explanation, program: Program, at_fault: Maker | None = None) -> list[str]:
    """What to do about the place that overflows in 16 bits, or the line."""
    tapped = [name for name, _ in recorded_places(program.at(0).taps)]
    name = overflow.suspects[0].name if overflow.suspects else "the loss"
    kind = at_fault.kind if at_fault else ""
    how, more = ", or with smaller numbers.", [REMEDIES["mask"]] if kind == "mask" else []
    if name in tapped:
        what = name
    elif at_fault:
        what = f"what is at {at_fault.source}"
        if kind in ("root", "logarithm", "divisor", "power"):
            how = (
                ": it is 0 there in 16 bits and not in float32, as small numbers vanish, and "
                "differences of large ones."
            )
    else:
        what = "the loss" if name == "the loss" else f"the layer of {name}"
        if not tapped:
            more = ["To see which layer it is, tap their ends, and give probes."]
    return [f"Compute {what} in float32{how}", *more]
