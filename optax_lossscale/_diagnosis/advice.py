"""The verdict on a model, and the advice for it.

Each generator `_about_...` looks at one part of the report and yields remarks. A
remark is a pair of texts: a sentence that can be the verdict, and a *remedy*, which
says what to do. For a model whose gradients are all 0, these are

    "All gradients are 0, in float32 as well."
    "Look for what makes the gradients 0, such as a ReLU that is 0 for every input."

The generators run in order of importance. The sentence of the first remark is the
verdict, and the remedies of all remarks are the advice. To add a piece of advice, write
one more generator and give it a place in `verdict_and_advice`.
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np

from optax_lossscale._diagnosis.cause import SENSITIVE, How
from optax_lossscale._diagnosis.figures import TOLERANCE
from optax_lossscale._diagnosis.names import scale_name
from optax_lossscale._diagnosis.notes import ALL, AN_INTERMEDIATE_VALUE, THE_LOSS, Note
from optax_lossscale._diagnosis.old_dtypes import Operation
from optax_lossscale._diagnosis.old_operations import Trait
from optax_lossscale._diagnosis.page import Diagnosis
from optax_lossscale._diagnosis.scale import InitialScale
from optax_lossscale._diagnosis.text import lines_of, listed, percent
from optax_lossscale._diagnosis.wrong import Wrong
from optax_lossscale._programs.values import HALVES
from optax_lossscale._scales.dynamic import DynamicLossScale

# By default, `DynamicLossScale` begins at 2 to this power.
_DEFAULT_EXPONENT = round(math.log2(DynamicLossScale.initial_scale))

# How many bits below an initial scale the advised `min_scale` is. A heuristic: the
# default scale can fall about as far, by 15 bits to its floor of 1.
_ROOM_TO_FALL = 16

_NOTHING_NARROW = "Nothing is computed in 16 bits, and autocast would not change that."

# Pairs of a sentence that can be the verdict and a remedy.
_Remarks = Iterator[tuple[str, str]]


def verdict_and_advice(
    report: Diagnosis, widened: Sequence[Operation], why_wide: Sequence[str]
) -> tuple[str, list[str]]:
    """Writes the verdict and the list of remedies.

    Args:
      report: what the runs show.
      widened: the products of the forward pass that have a widened operand.
      why_wide: the reasons why `autocast` narrows no product; empty if it has none, or
        if something is computed in 16 bits.
    """
    remarks = [
        *_about_what_is_wrong(report),
        *_about_choices(report),
        *_about_products(report, widened),
        *_about_gradients(report),
        *_about_scale(report),
        *_about_loss_dtype(report),
        *_about_autocast(why_wide),
    ]
    if not remarks:
        return _verdict_if_fine(report), ["Nothing."]
    sentences, remedies = zip(*remarks, strict=True)
    return sentences[0], list(dict.fromkeys(remedies))


def _verdict_if_fine(report: Diagnosis) -> str:
    """Writes the verdict on a model about which there is nothing to remark."""
    if not report.computes_in:
        return _NOTHING_NARROW
    many = len(report.computes_in) > 1
    fine = f"{_dtypes(report)} {'are' if many else 'is'} fine"
    if report.loss_scale is None:
        return f"{fine} as {'they are' if many else 'it is'}, without a loss scale."
    return f"{fine}, and so is a loss scale of {scale_name(report.loss_scale)}."


# --- What is wrong ---


def _about_what_is_wrong(report: Diagnosis) -> _Remarks:
    """Yields a remark on each result that is wrong."""
    for wrong in report.wrong:
        verdict = f"{_what_is_wrong(report, wrong)}, because {wrong.because}."
        yield verdict, _remedy(wrong)


def _what_is_wrong(report: Diagnosis, wrong: Wrong) -> str:
    """Writes the first half of a verdict, which says what is wrong but not why."""
    is_loss = wrong.name == THE_LOSS
    if wrong.is_in_float32:
        what = THE_LOSS if is_loss else f"the gradient of {wrong.name}"
        return f"No loss scale helps: {what} is not finite in float32 either"
    if is_loss:
        return _wrong_loss(report)
    if wrong.name == AN_INTERMEDIATE_VALUE:
        return _wrong_intermediate_value(report)
    return _wrong_gradient(report, wrong)


def _wrong_loss(report: Diagnosis) -> str:
    """Writes what the loss is and, if it is finite, what float32's is."""
    loss = f"The loss is {report.loss:.4g} at any loss scale"
    if not math.isfinite(report.loss_in_float32):  # such as after a kernel
        return loss
    return f"{loss} (in float32, it is {report.loss_in_float32:.4g})"


def _wrong_intermediate_value(report: Diagnosis) -> str:
    """Says that intermediate values are wrong, although the loss and gradients are not.

    The loss and gradients are not mentioned if float32's own choices change them.
    """
    what = f"{_dtypes_give(report)} wrong intermediate values"
    if report.off_by_choices:
        return what
    return (
        "The loss and gradients are right, as far as float32 determines them, but "
        f"{what}"
    )


def _wrong_gradient(report: Diagnosis, wrong: Wrong) -> str:
    """Says how far a gradient is off, or how much the loss scale changes it."""
    if report.initial_scale is None:
        gradient = f"The gradient of {wrong.name} is"
        if wrong.how is How.IS_A_KERNEL:  # what float32 would give is not known
            return f"{gradient} not finite at any loss scale"
        dtypes = _dtypes(report)
        return f"{gradient} finite in float32, but not in {dtypes} at any loss scale"
    if wrong.how is How.IS_NOT_LINEAR:
        return (
            f"A loss scale of {scale_name(report.scale)} changes the gradient of "
            f"{wrong.name} by {wrong.off:.1%}"
        )
    what = (
        f"{_dtypes_give(report)} wrong gradients: that of {wrong.name} differs from "
        f"float32 by {wrong.off:.1%}"
    )
    if report.scale_that_fits is None:
        return what
    return f"{what}, even at a loss scale of {scale_name(report.scale)}"


def _dtypes(report: Diagnosis) -> str:
    """Names the dtypes of 16 bits or fewer, as in `bfloat16 and float16`."""
    return listed(report.computes_in)


def _dtypes_give(report: Diagnosis) -> str:
    """Begins a sentence, as in `float16 gives` or `bfloat16 and float16 give`."""
    give = "give" if len(report.computes_in) > 1 else "gives"
    return f"{_dtypes(report)} {give}"


_KEEP_FINITE = (
    "Keep the arguments of roots and logarithms above 0, divisors away from 0, indices "
    "in bounds, exponents small, masks finite (-3e4 instead of -inf), and the batch "
    "free of NaNs. Use jnp.where before such an operation, not after it, because 0 "
    "times infinity is NaN."
)
_SCALE_INNER_LOSS = (
    "The derivative at {source} is taken inside the loss function, where the loss "
    "scale does not reach. Scale the inner loss by a fixed number, as in "
    "ols.value_and_scaled_grad(inner_loss, 2.0**10)(x), and divide the gradient that "
    "this returns by the same number."
)
_SUM_IN_FLOAT32 = (
    "Compute {line} in float32, because small terms are lost beside a large sum."
)
_CAST_WHERE_READ = (
    "Cast parameters to 16 bits only where they are read: the rows of an embedding "
    "instead of its table, or a weight inside the loop."
)
_MORE_DIGITS = (
    "Compute {line} and its operands in float32, because it needs more digits."
)
# An operand that autocast casts for a product has the line of what computed it.
_KEEP_OPERAND = (
    "Keep the result of {source} in float32 where it is read: under autocast, by "
    "precision=jax.lax.Precision.HIGHEST in the product that reads it; otherwise, "
    "without the cast. Or give it {change} values."
)
_REMEDIES = dict.fromkeys(SENSITIVE, _MORE_DIGITS) | {
    How.OVERFLOWS: "Compute {line} in float32, or with smaller values.",
    How.VANISHES: "Compute {line} in float32, or with larger values.",
    How.STAGNATES: f"{_SUM_IN_FLOAT32} Cast the terms to float32 first.",
    How.SATURATES: (
        "Compute {line} in float32, because 16 bits round the result to a limit, where "
        "the derivative is 0."
    ),
    How.IS_A_KERNEL: "Pass float32 to {line}, or test it by itself.",
    How.IS_NOT_LINEAR: (
        "Clip or normalize gradients in the optimizer, where they are unscaled, "
        "instead of in the backward pass at {source}."
    ),
    How.ADDS_UP: "Compute more in float32, because no single line is at fault.",
}

# The faults that products in float32 would not cure.
_NOT_CURED = (How.ROUNDS, How.IS_A_KERNEL, How.IS_NOT_LINEAR, How.ADDS_UP)


def _remedy(wrong: Wrong) -> str:
    """Says what to do about a wrong result.

    If 16-bit products are to blame, the remedy is to keep these in float32. Otherwise
    it depends on what the equation at fault does.
    """
    if wrong.is_in_float32:
        return _remedy_in_float32(wrong)
    place = wrong.place
    if wrong.is_inner and wrong.how in (How.VANISHES, How.OVERFLOWS):
        return _SCALE_INNER_LOSS.format(source=place.source)
    products = [row for row in wrong.rounded if row.has_any(Trait.PRODUCT)]
    between = lines_of(row for row in wrong.rounded if row not in products)
    if not products and place.has_any(Trait.PRODUCT):
        products = [place]
    if products and wrong.how not in _NOT_CURED:
        return _keep_products(products, between)
    if place.has_any(Trait.CASTS) and wrong.how in (How.OVERFLOWS, How.VANISHES):
        change = "smaller" if wrong.how is How.OVERFLOWS else "larger"
        return _KEEP_OPERAND.format(source=place.source, change=change)
    if wrong.how is How.STAGNATES and place.is_backward:
        return f"{_SUM_IN_FLOAT32.format(line=place.line)} {_CAST_WHERE_READ}"
    remedy = _REMEDIES[wrong.how].format(line=place.line, source=place.source)
    if between in ("", place.source):
        return remedy
    return f"{remedy} The operands are rounded at {between}."


def _remedy_in_float32(wrong: Wrong) -> str:
    """Says how to keep a result finite that is not finite in float32 either.

    The program holds constants as 16 bits rounded them, so the user may not recognize a
    0 or an infinity as the 1e-8 or -1e9 that they wrote. The remedy names their lines.
    """
    if not wrong.rounded:
        return _KEEP_FINITE
    return (
        f"{_KEEP_FINITE} A constant at {lines_of(wrong.rounded)} is 0 or infinite in "
        "16 bits. If you wrote another number, such as 1e-8, write it as a float32 "
        "array, or compute in float32 there."
    )


def _keep_products(products: Sequence[Note], between: str) -> str:
    """Says to keep products in float32, as well as what is computed from them.

    Args:
      products: the results of the products.
      between: the lines between the products and the equation at fault, or "".
    """
    keep = (
        f"Keep the products at {lines_of(products)} in float32: under autocast, by "
        "precision=jax.lax.Precision.HIGHEST; otherwise, by casting the operands."
    )
    if not between:
        return keep
    return f"{keep} Also keep in float32 what is computed from these at {between}."


# --- What is right, but maybe not what the user intended ---


def _about_choices(report: Diagnosis) -> _Remarks:
    """Yields a remark if other choices of float32 change a result."""
    off = report.off_by_choices
    if not off or not report.choices:
        return
    if THE_LOSS in off:
        effect = f"the loss differs by {percent(off[THE_LOSS])}"
    else:
        worst = max(off, key=off.__getitem__)
        effect = f"the gradient of {worst} differs by {percent(off[worst])}"
    lines = lines_of(report.choices)
    yield (
        f"Float32 chooses differently at {lines}, so {effect}.",
        f"Compute in float32 what decides the choices at {lines}, unless one choice is "
        "as good as the other, as between nearly equal values.",
    )


def _about_products(report: Diagnosis, widened: Sequence[Operation]) -> _Remarks:
    """Yields a remark if most multiplications are wide because one operand was widened.

    Such a product is usually an accident: one float32 array, such as an input, makes
    everything after it float32. But a product whose operands are both widened is meant
    to be wide. If all widened products are of this kind, there is no remark. If only
    some are, the remedy names them along with the others.
    """
    # This also holds if `widened` is empty.
    are_intended = all(HALVES.issuperset(product.before) for product in widened)
    if report.wrong or are_intended:
        return
    # Backward products have the dtypes of the forward ones, so they count as well.
    # Products that are wide by choice do not count.
    dtypes = list(dict.fromkeys(product.dtype for product in widened))
    total = sum(report.dtypes.multiplications.values())
    n_wide = sum(
        product.multiplications
        for product in report.dtypes.products
        if product.dtype in dtypes and not product.by_choice
    )
    share = n_wide / max(total, 1)  # an empty batch multiplies nothing
    if share > 0.5:
        # "Hardly anything" is less than a fifth.
        how_much = "Hardly anything" if share > 0.8 else "Less than half"
        yield (
            f"{how_much} is computed in 16 bits: {share:.1%} of the multiplications "
            f"are in {listed(dtypes)}, because one operand was widened.",
            "Wrap the loss function in autocast, or cast both operands to 16 bits at "
            f"{lines_of(widened)}.",
        )


def _about_gradients(report: Diagnosis) -> _Remarks:
    """Yields a remark if the comparison with float32 is no evidence that all is well.

    The comparison is no evidence if the loss or all gradients are nothing but rounding
    error, if all gradients are 0, or if float32 does not determine most gradients.
    """
    if report.wrong or not report.computes_in:
        return
    n_undetermined = len(report.undetermined)
    n_determined = len(report.off.keys() - {THE_LOSS})
    if THE_LOSS not in report.off:
        yield (
            f"The loss of {report.loss:.3g} is nothing but rounding error (in float32, "
            f"it is {report.loss_in_float32:.3g}), and its gradients may be, too.",
            "Diagnose other parameters or another batch. If the loss compares two "
            "values that should be equal, compute both in the same dtype.",
        )
    elif not report.has_gradients:
        yield (
            "All gradients are 0, in float32 as well.",
            "Look for what makes the gradients 0, such as a ReLU that is 0 for every "
            "input.",
        )
    elif not n_determined:
        yield (
            "The gradients are nothing but rounding error, in float32 as well.",
            "Diagnose other parameters or another batch.",
        )
    elif n_undetermined > n_determined:
        total = n_undetermined + n_determined
        yield (
            f"Float32 itself does not determine {n_undetermined} of {total} gradients, "
            "and 16 bits round more coarsely.",
            "Look for differences of nearly equal values, such as small deviations "
            "from a large mean, or diagnose other parameters.",
        )


def _about_loss_dtype(report: Diagnosis) -> _Remarks:
    """Yields a remark on a loss in float16, whose range bounds the loss scale."""
    if report.loss_dtype == np.float16 and not report.wrong:
        yield (
            "float16 is fine except for the loss. The gradient of the loss is the loss "
            "scale, and float16 holds no power of two above 2**15.",
            "Compute the loss in float32: cast the values that it averages or sums.",
        )


def _about_autocast(why_wide: Sequence[str]) -> _Remarks:
    """Yields a remark if `autocast` finds products but has reasons to narrow none."""
    if why_wide:
        yield (
            _NOTHING_NARROW,
            "Change what keeps autocast from computing matrix products in 16 bits: "
            f"{'; '.join(why_wide)}.",
        )


# --- The loss scale ---


def _about_scale(report: Diagnosis) -> _Remarks:
    """Yields remarks on the loss scale: whether one is needed, and which one fits."""
    fits = report.scale_that_fits
    # If even a scale of 1 is too large, the cause is what is wrong, not the scale.
    if not fits or (report.wrong and fits.largest < 1):
        return
    groups = report.underflow.values()
    are_still_lost = any(group.left > TOLERANCE for group in groups)
    if are_still_lost and report.overflow:
        yield (
            f"No single loss scale fits: at {scale_name(report.scale)}, gradients are "
            f"still lost to underflow, and from {scale_name(2 * fits.largest)} on, "
            "others overflow.",
            _REMEDIES[How.OVERFLOWS].format(line=report.overflow.line),
        )
    # Gradients that do not underflow, but are off at a scale of 1, need at least 2**1.
    least_bits = 1 if report.off_unscaled else 0
    bits = max((group.bits for group in groups), default=least_bits)
    if report.loss_scale is None:
        yield from _about_missing_scale(report, fits, bits)
    else:
        yield from _about_users_scale(report, fits, report.loss_scale, bits)


def _about_missing_scale(report: Diagnosis, fits: InitialScale, bits: int) -> _Remarks:
    """Yields a remark if gradients go wrong without a loss scale.

    Args:
      report: what the runs show.
      fits: the loss scale that fits.
      bits: the smallest loss scale that is large enough is 2**bits.
    """
    if report.underflow or report.off_unscaled or not report.is_finite_unscaled:
        scale = scale_name(fits.scale)
        yield _without_a_scale(report, scale), _wrap(report, fits, bits)


def _about_users_scale(
    report: Diagnosis, fits: InitialScale, yours: float, bits: int
) -> _Remarks:
    """Yields a remark if the user's loss scale, `yours`, is too small or too large."""
    smallest = min(2.0**bits, fits.scale)
    if smallest <= yours <= fits.largest:
        return
    problem = "overflow" if yours > fits.largest else "underflow"
    scale = scale_name(fits.scale)
    remedy = f"Let the loss scale adapt, or start at {scale}."
    if report.is_scale_fixed:
        remedy = f"Set the loss scale to {scale}."
    yield f"Gradients {problem} at your loss scale of {scale_name(yours)}.", remedy


def _without_a_scale(report: Diagnosis, scale: str) -> str:
    """Says what goes wrong without a loss scale.

    Args:
      report: what the runs show.
      scale: the loss scale that fits, as text.
    """
    without = f"Without a loss scale of about {scale},"
    if not report.is_finite_unscaled:
        return f"{without} gradients are not finite."
    if report.underflow:
        # The groups are sorted: the group of all gradients, if listed, then the worst.
        name, group = next(iter(report.underflow.items()))
        of_group = "" if name == ALL else f" of {name}"
        return (
            f"Without a loss scale, float16 loses {group.lost:.1%} of the "
            f"gradients{of_group} to underflow."
        )
    off = report.off_unscaled
    worst = max(off, key=off.__getitem__)
    return (
        f"{without} the gradient of {worst} differs from float32 by {off[worst]:.1%}."
    )


def _wrap(report: Diagnosis, fits: InitialScale, bits: int) -> str:
    """Says to wrap the optimizer; names a scale unless the default one fits.

    Args:
      report: what the runs show.
      fits: the loss scale that fits.
      bits: the smallest loss scale that is large enough is 2**bits.
    """
    exponent = round(math.log2(fits.scale))
    if bits <= _DEFAULT_EXPONENT <= exponent and report.is_finite_unscaled:
        return "Wrap the optimizer: with_loss_scale(optimizer)."
    scale = f"initial_scale=2.0**{exponent}"
    if exponent < 0:
        scale += f", min_scale=2.0**{exponent - _ROOM_TO_FALL}"
    return f"Wrap the optimizer: with_loss_scale(optimizer, DynamicLossScale({scale}))."
