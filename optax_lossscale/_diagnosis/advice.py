"""The verdict on a model, and the advice for it, from what `diagnose` found."""

import math
from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np

from optax_lossscale._arrays.names import scale_name
from optax_lossscale._diagnosis.accuracy import GradientError
from optax_lossscale._diagnosis.calibration import LOWEST, InitialScale
from optax_lossscale._diagnosis.makers import Maker, maker
from optax_lossscale._diagnosis.page import Diagnosis
from optax_lossscale._diagnosis.places import recorded_places
from optax_lossscale._diagnosis.program import Program
from optax_lossscale._diagnosis.summary import inexact_leaves
from optax_lossscale._diagnosis.text import some
from optax_lossscale._diagnosis.widened import ROUNDED, WIDE
from optax_lossscale._programs.values import HALVES
from optax_lossscale._scales.dynamic import DynamicLossScale

_STILL_LOST = 0.05  # a share of gradients for which one scale is not enough
_DROWNED = 0.1  # a share that an optimizer should not lose
_FLOAT16 = jnp.dtype(jnp.float16)

Findings = Iterator[tuple[str, list[str]]]
"""Verdicts, the most important first, each with what to do, in one sentence each."""


def judged(page: Diagnosis, program: Program) -> Diagnosis:
    """The page with its verdict and advice."""
    dtypes, fits = page.computes_in, page.initial_scale
    if fits is None:
        findings = list(_about_what_is_not_finite(page, program))
    else:
        fine, advice = "Nothing is computed in float16.", "To ask about it, pass autocast(loss_fn)"
        findings = [*_about_errors(page), *_about_products(page)]
        if dtypes:
            fine, advice = f"{dtypes[0]} is fine as it is, and needs no loss scale.", "Nothing"
            findings += [*_about_scale(page, fits, program), *_about_loss_and_moments(page)]
        if _FLOAT16 in dtypes:
            room = f"{math.log2(fits.largest):.0f} bits to spare"
            fine = f"float16 is fine as it is, without a loss scale, with {room}."
            if fits.scale < DynamicLossScale.initial_scale:
                advice += f". A dynamic loss scale would start at {scale_name(fits.scale)}"
        findings = findings or [(fine, [f"{advice}."])]
    to_do = [sentence for _, sentences in findings for sentence in sentences]
    return page._replace(verdict=findings[0][0], advice=to_do)


def _about_what_is_not_finite(page: Diagnosis, program: Program) -> Findings:
    truth, loss = program.truth, program.at(0).loss
    if truth.is_finite:
        verdict = "The loss is finite; its gradients are not at any scale, but are in float32."
        if not np.isfinite(loss):
            alone = "at any loss scale, as that only multiplies gradients"
            verdict = f"The loss is {loss} {alone}; in float32 it is {truth.loss:.4g}."
        at_fault = maker(program, ROUNDED)
        because = f" The cause: {at_fault.what}." if at_fault else ""
        yield f"{verdict}{because}", _mended(page, program, at_fault)
        return
    what = "The gradients are" if np.isfinite(truth.loss) else "The loss is"
    verdict = f"{what} not finite in float32 either, so no dtype and no loss scale helps"
    params, _, args, kwargs = program.inputs
    given = inexact_leaves({"params": params, "args": args, "kwargs": kwargs})
    if nans := [name for name, x in given.items() if np.isnan(np.asarray(x)).any()]:
        yield f"{verdict}: there are NaNs in {some(nans)}.", ["Find out where the NaNs come from."]
    elif at_fault := maker(program, WIDE):
        yield f"{verdict}: {at_fault.what}.", [at_fault.remedy or "Compute with smaller numbers."]
    else:
        yield f"{verdict}.", ["Look for infinities in its inputs."]


def _mended(page: Diagnosis, program: Program, at_fault: Maker | None = None) -> list[str]:
    """What to do about the place that overflows in 16 bits, or the line."""
    suspects = page.overflow.suspects if page.overflow else []
    what = suspects[0].name if suspects else "the loss"
    tapped = [name for name, _ in recorded_places(program.at(0).taps)]
    more = [at_fault.remedy] if at_fault and at_fault.remedy else []
    if what not in tapped and at_fault:
        what = f"what is at {at_fault.source}"
    elif what not in tapped:
        what = what if what == "the loss" else f"the layer of {what}"
        more = [] if tapped else ["To see which layer, tap the ends of layers, and pass probes."]
    return [f"Compute {what} in float32, or with smaller numbers.", *more]


def _about_errors(page: Diagnosis) -> Findings:
    if page.errors:
        name, worst = next(iter(page.errors.items()))
        verdict = (
            f"{' and '.join(map(str, page.computes_in))} gives wrong gradients: that of {name} is "
            f"off by {worst.off:.1%}, at the scale that fits best."
        )
        yield verdict, list(dict.fromkeys(map(_correction, page.errors.values())))


_CORRECTIONS = {
    "stagnates": ", as small terms are lost beside a large sum: ",
    "vanishes": ", or with other numbers: those below 6e-8 become 0.",
    "overflows": ", or with other numbers: those above 65504 become infinite.",
    "saturates": ": float16 rounds it to its limit, where its derivative is 0.",
    "rounding": ": it needs more digits than 16 bits have.",
}
_SUMS = {
    "scatter-add": "index the float32 table and cast the result, not the table.",
    "add_any": "cast a shared weight where it is used, inside the loop.",
    "reduce_sum": "cast to float32 first, or pass the dtype to jnp.sum.",
}


def _correction(error: GradientError) -> str:
    if not error.primitive:
        return "Compute more in float32: rounding adds up over many lines, none at fault alone."
    if error.primitive == "convert_element_type":
        return f"Keep the product at {error.source} in float32: precision=lax.Precision.HIGHEST."
    how = f"Compute {error.primitive} at {error.source} in float32{_CORRECTIONS[error.cause]}"
    is_sum = error.cause == "stagnates"
    return how + is_sum * _SUMS.get(error.primitive, "cast to float32 first.")


def _about_products(page: Diagnosis) -> Findings:
    """Where operands in 16 bits were widened, and most is computed in float32."""
    products = page.dtypes.products
    wide = [p for p in products if p.dtype.itemsize > 2]
    widened = [p for p in wide if HALVES.intersection(p.before)]
    share = sum(share for dtype, share in page.dtypes.shares.items() if dtype.itemsize > 2)
    count, total = (sum(p.count for p in of) for of in (wide, products))
    if widened and share > 0.5 and count > total / 2:
        dtype = next(dtype for p in widened for dtype in p.before if dtype in HALVES)
        in_dtype = "" if dtype == _FLOAT16 else ", jnp.bfloat16"
        lines = some(list(dict.fromkeys(p.source for p in widened)), "more lines")
        verdict = (
            f"Hardly anything is computed in {dtype}: {count} of {total} matrix products are in "
            f"{wide[0].dtype}, to which their operands are widened."
        )
        advice = (
            f"Wrap the loss function: autocast(loss_fn{in_dtype}) computes every matrix product "
            f"in {dtype}. Or cast both operands to {dtype} at {lines}."
        )
        yield verdict, [advice]


def _about_scale(page: Diagnosis, fits: InitialScale, program: Program) -> Findings:
    """What the loss scale has to be, if one is needed."""
    underflow, exponent = page.underflow, math.log2(fits.scale)
    scale, floor = f"2.0**{exponent:.0f}", max(exponent - 16, LOWEST)  # which leaves room to fall
    bound = f", min_scale=2.0**{floor:.0f}" if exponent < 0 else ""
    ours = f"with_loss_scale(optimizer, DynamicLossScale(initial_scale={scale}{bound}))"
    start = round(math.log2(DynamicLossScale.initial_scale))
    needed = max((of.bits for of in underflow.values()), default=0)
    if needed <= start <= exponent and program.at(0).is_finite:
        ours = f"with_loss_scale(optimizer), whose initial scale of 2**{start} suffices here"
    wrap, mend = f"Wrap the optimizer: {ours}.", _mended(page, program) if page.overflow else []
    share = lambda lost, group: f"{lost:.1%} of the gradients" + f" ({group})" * (group != "all")
    name, of = max(underflow.items(), key=lambda item: item[1].left, default=("", None))
    if of and of.left > _STILL_LOST:
        verdict = (
            f"No single loss scale fits: at {scale_name(fits.scale)} {share(of.left, name)} are "
            f"still lost to underflow, and from {scale_name(2 * fits.largest)} on others overflow."
        )
        yield verdict, [*mend, f"Until then, wrap the optimizer: {ours}."]
    elif fits.largest < 1:
        yield "Gradients overflow without a loss scale: float16 needs one below 1.", [wrap, *mend]
    elif not program.at(0).is_finite:
        yield "float16 needs a loss scale: without one, gradients are not finite.", [wrap]
    elif underflow:
        name, of = next(iter(underflow.items()))  # of all parameters, or else the worst
        wrap += " With so few lost, many models need none." * (of.lost < _STILL_LOST)
        yield f"Without a loss scale, float16 loses {share(of.lost, name)} to underflow.", [wrap]


def _about_loss_and_moments(page: Diagnosis) -> Findings:
    if page.loss_dtype == _FLOAT16:
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
