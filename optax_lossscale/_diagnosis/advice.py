"""The verdict on a model, and the advice for it.

Each function `_about_...` looks at one side of the page, and yields its findings: a
sentence that can be the verdict, with a sentence that says what to do. The first of all
findings gives the verdict, and the advice has what to do about each.
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np

from optax_lossscale._arrays.names import scale_name, without_numbers
from optax_lossscale._diagnosis.cause import How, Wrong
from optax_lossscale._diagnosis.dtypes import Operation
from optax_lossscale._diagnosis.figures import TOLERANCE
from optax_lossscale._diagnosis.notes import (
    A_VALUE_INSIDE,
    ALL,
    FIFTH,
    THE_LOSS,
)
from optax_lossscale._diagnosis.page import (
    Diagnosis,
    has_wrong_result,
    scale_that_fits,
)
from optax_lossscale._diagnosis.scale import InitialScale, Underflow
from optax_lossscale._diagnosis.text import lines_of, percent
from optax_lossscale._programs.operations import Is
from optax_lossscale._programs.values import HALVES
from optax_lossscale._scales.dynamic import DynamicLossScale

_START = round(math.log2(DynamicLossScale.initial_scale))

_Findings = Iterator[tuple[str, str]]
"""Sentences that can be the verdict, the most important first, each with what to do."""


def advised(page: Diagnosis) -> Diagnosis:
    """The same page with its verdict and advice."""
    findings = [
        *_about_what_is_wrong(page),
        *_about_choices(page),
        *_about_products(page),
        *_about_gradients(page),
        *_about_scale(page),
        *_about_the_loss(page),
    ] or [(_fine(page), "Nothing.")]
    verdicts, remedies = zip(*findings, strict=True)
    return page._replace(verdict=verdicts[0], advice=list(dict.fromkeys(remedies)))


def _fine(page: Diagnosis) -> str:
    """The verdict on a model without findings."""
    if not page.computes_in:
        return (
            "Nothing is computed in 16 bits, nor would autocast compute anything in it."
        )
    scale = " as it is, without a loss scale"
    if page.loss_scale is not None:
        scale = f", and so is a loss scale of {scale_name(page.loss_scale)}"
    return f"{page.computes_in[0]} is fine{scale}."


# --- what is wrong ---


def _about_what_is_wrong(page: Diagnosis) -> _Findings:
    """Findings about the loss, gradients or values inside that are off."""
    for one in page.wrong:
        yield f"{_what_is_wrong(page, one)}: {one.because}.", _remedy(one)


def _what_is_wrong(page: Diagnosis, one: Wrong) -> str:
    """What is wrong, as the beginning of a sentence."""
    dtypes = " and ".join(map(str, page.computes_in))
    give = "give" if page.computes_in[1:] else "gives"
    if one.is_in_float32:
        what = "The loss is" if one.name == THE_LOSS else "The gradients are"
        return f"{what} not finite in float32 either, so no loss scale helps"
    if one.name == THE_LOSS:
        return (
            f"The loss is {page.loss:.4g} at any loss scale; in float32 it is "
            f"{page.loss_in_float32:.4g}"
        )
    if one.name == A_VALUE_INSIDE:
        agree = ", though loss and gradients agree as far as float32 determines them"
        return (
            f"{dtypes} {give} wrong values inside{'' if page.off_by_choices else agree}"
        )
    if page.initial_scale is None:
        return "The gradients are not finite at any loss scale, but are in float32"
    if one.how is How.IS_NOT_LINEAR:
        scale = scale_name(page.scale)
        return f"A loss scale of {scale} changes the gradient of {one.name} by {one.off:.1%}"
    off = f"that of {one.name} is off by {one.off:.1%}"
    return f"{dtypes} {give} wrong gradients: {off}, at the scale that fits best"


_KEEP_FINITE = (
    "Keep the arguments of roots and logarithms above 0, divisors away from 0, indices "
    "in bounds, exponents small, masks finite (-3e4 instead of -inf), and the batch free "
    "of NaNs. Use jnp.where before such an operation, not after it, as 0 times infinity "
    "is NaN."
)
_INNER = (
    "The derivative at {source} is taken inside of the loss function, where no loss "
    "scale reaches: scale its own loss by a fixed number, as in "
    "ols.value_and_scaled_grad(inner_loss, 2.0**10)(x), and divide what it returns."
)
_PRODUCTS = (
    "Keep the products at {lines} in float32: with "
    "precision=jax.lax.Precision.HIGHEST under autocast, else by casting the operands."
)
_BETWEEN = " Keep in float32, too, what is computed from them at {between}."
_SUM = "Compute {line} in float32, as small terms are lost beside a large sum: "
_BACKWARD_SUM = (
    "cast a parameter where it is read, such as the rows of an embedding and not its "
    "table, or a weight inside the loop."
)
_DIGITS = "Compute {line}, and what it is made of, in float32: it needs more digits."
_MADE_OF = " That is made of what is rounded at {between}."
_REMEDIES = {
    How.OVERFLOWS: "Compute {line} in float32, or with smaller numbers.",
    How.VANISHES: "Compute {line} in float32, or with larger numbers.",
    How.CANCELS: _DIGITS,
    How.STAGNATES: f"{_SUM}cast to float32 first.",
    How.SATURATES: (
        "Compute {line} in float32: 16 bits round it to its limit, where its "
        "derivative is 0."
    ),
    How.ROUNDS: _DIGITS,
    How.AMPLIFIES: _DIGITS,
    How.IS_UNDEFINED: _DIGITS,
    How.IS_A_KERNEL: (
        "Give {line} float32, or look into it: no one sees what it computes."
    ),
    How.IS_NOT_LINEAR: (
        "Have the optimizer clip or normalize gradients, which it gets without the loss "
        "scale, and not the backward pass at {source}."
    ),
    How.ADDS_UP: "Compute more in float32: no one line is at fault.",
}
_WITHOUT_PRODUCTS = (How.ROUNDS, How.IS_A_KERNEL, How.IS_NOT_LINEAR, How.ADDS_UP)


def _remedy(one: Wrong) -> str:
    """What to do about a result that is wrong, by what its cause does."""
    place = one.place
    products = [row for row in one.rounded if row.is_any(Is.PRODUCT)]
    between = lines_of([row for row in one.rounded if row not in products])
    if place.is_any(Is.PRODUCT):
        products = products or [place]
    remedy = _REMEDIES[one.how]
    if one.is_in_float32:
        remedy = _KEEP_FINITE
    elif one.is_inner and one.how in (How.VANISHES, How.OVERFLOWS):
        remedy = _INNER
    elif products and one.how not in _WITHOUT_PRODUCTS:
        remedy = _PRODUCTS + (_BETWEEN if between else "")
    elif one.how is How.STAGNATES and place.is_backward:
        remedy = _SUM + _BACKWARD_SUM
    elif between not in ("", place.source):
        remedy += _MADE_OF
    return remedy.format(
        line=place.line,
        source=place.source,
        lines=lines_of(products),
        between=between,
    )


# --- what is not as the user meant it ---


def _about_choices(page: Diagnosis) -> _Findings:
    """A finding about choices that float32 makes otherwise, if they matter.

    They do if they change the loss, or a gradient by a fifth. If they change gradients
    by less, they may be as good as float32's, as where a ReLU is given a number near 0:
    then many have to differ.
    """
    if has_wrong_result(page) or not page.off_by_choices:
        return
    name = max(page.off_by_choices, key=page.off_by_choices.__getitem__)
    what = f"the gradient of {name}"
    if THE_LOSS in page.off_by_choices:
        name = THE_LOSS
        what = name
    off = page.off_by_choices[name]
    are_many = any(choice.decided > TOLERANCE for choice in page.choices)
    if name != THE_LOSS and not are_many and off <= FIFTH:
        return
    lines = lines_of(page.choices)
    yield (
        f"Float32 chooses otherwise at {lines}, and so {what} is off by {percent(off)}.",
        "Compute what is chosen from there in float32, unless either choice is as good, "
        "as between numbers that are nearly equal.",
    )


def _about_products(page: Diagnosis) -> _Findings:
    """A finding about products that a wide operand widens, if most of them are wide."""
    firsts: dict[str, Operation] = {}  # of each line, that of the forward pass
    for product in page.dtypes.products:
        firsts.setdefault(product.source, product)
    widened = [p for p in firsts.values() if p.is_widened]
    is_meant = all(HALVES.issuperset(p.before) for p in widened)  # or there are none
    if page.wrong or is_meant:
        return
    dtype = widened[0].dtype
    share = page.dtypes.shares[dtype]
    if share > 0.5:
        yield (
            f"Hardly anything is computed in 16 bits: {share:.1%} of the "
            f"multiplications are in {dtype}, to which an operand is widened.",
            "Wrap the loss function in autocast, or cast both operands to 16 bits at "
            f"{lines_of(widened)}.",
        )


def _about_gradients(page: Diagnosis) -> _Findings:
    """A finding about a loss that is only rounding, or gradients that are all 0."""
    if page.wrong or not page.computes_in:
        return
    if THE_LOSS not in page.off:
        yield (
            f"The loss is nothing but rounding, {page.loss:.3g} for "
            f"{page.loss_in_float32:.3g} in float32, and so may be its gradients.",
            "Diagnose other parameters or another batch. If it compares two things "
            "that are to be equal, compute both in the same dtype.",
        )
    elif not page.has_gradients:
        yield (
            "All gradients are 0, in float32 as well.",
            "Look for what stops them, such as a ReLU that is 0 for every input.",
        )
    elif len(page.off) == 1:  # that of the loss
        yield (
            "The gradients are nothing but rounding, in float32 as well.",
            "Diagnose other parameters or another batch.",
        )


def _about_the_loss(page: Diagnosis) -> _Findings:
    """A finding about a loss in float16."""
    if page.loss_dtype == np.float16 and not page.wrong:
        yield (
            "float16 is fine except for the loss: its gradient is the scale, at most "
            "2**15.",
            "Compute the loss in float32: cast what it averages or sums.",
        )


# --- the loss scale ---


def _about_scale(page: Diagnosis) -> _Findings:
    """Findings about the loss scale: whether one is needed, and which."""
    fits = scale_that_fits(page)
    if not fits or (page.wrong and fits.largest < 1):  # the cause is what is wrong
        return
    lost = _lost_for_want_of_a_scale(page)
    least = 1 if page.off_without else 0
    bits = max((group.bits for group in lost), default=least)
    scale = scale_name(fits.scale)
    if page.overflow and any(group.left > TOLERANCE for group in lost):
        yield (
            f"No single loss scale fits: at {scale} gradients are still lost to "
            f"underflow, and from {scale_name(2 * fits.largest)} on others overflow.",
            _REMEDIES[How.OVERFLOWS].format(line=page.overflow.line),
        )
    theirs = page.loss_scale
    if theirs is not None:
        problem = "overflow" if theirs > fits.largest else "are lost"
        if not min(2.0**bits, fits.scale) <= theirs <= fits.largest:
            yield (
                f"Gradients {problem} at your loss scale, {scale_name(theirs)}.",
                f"Unless it is dynamic, set it to {scale}.",
            )
    elif lost or page.off_without or not page.is_finite_without:
        yield _without_a_scale(page, scale, lost), _wrap(page, fits, bits)


def _without_a_scale(page: Diagnosis, scale: str, lost: Sequence[Underflow]) -> str:
    """What happens to gradients without a loss scale, such as the one that fits."""
    without = f"Without a loss scale of about {scale},"
    if not page.is_finite_without:
        return f"{without} gradients are not finite."
    if lost:
        name, group = next(iter(page.underflow.items()))
        of = "" if name == ALL else f" ({name})"
        return (
            f"Without a loss scale, float16 loses {group.lost:.1%} of the "
            f"gradients{of} to underflow."
        )
    worst = max(page.off_without, key=page.off_without.__getitem__)
    return f"{without} the gradient of {worst} is off by {page.off_without[worst]:.1%}."


def _lost_for_want_of_a_scale(page: Diagnosis) -> list[Underflow]:
    """The groups that underflow, and have a gradient that is right and determined."""
    wrong = {one.name for one in page.wrong}
    groups = {without_numbers(name) for name in page.off if name not in wrong}
    return [group for name, group in page.underflow.items() if name in groups]


def _wrap(page: Diagnosis, fits: InitialScale, bits: int) -> str:
    """The advice to wrap the optimizer, with a scale unless the default one fits."""
    exponent = round(math.log2(fits.scale))
    if bits <= _START <= exponent and page.is_finite_without:
        return "Wrap the optimizer: with_loss_scale(optimizer)."
    # A bound that leaves the scale room to fall
    bound = f", min_scale=2.0**{exponent - 16}" if exponent < 0 else ""
    scale = f"DynamicLossScale(initial_scale=2.0**{exponent}{bound})"
    return f"Wrap the optimizer: with_loss_scale(optimizer, {scale})."
