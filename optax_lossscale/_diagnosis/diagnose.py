"""The whole story of a model in float16, from one loss function and a batch."""

import bisect
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from optax_lossscale._arrays.names import scale_name, without_numbers
from optax_lossscale._diagnosis.accuracy import GradientError, find_errors, known, off_by
from optax_lossscale._diagnosis.calibration import HIGHEST, MARGIN, NEAR, InitialScale, search
from optax_lossscale._diagnosis.dtypes import report_of
from optax_lossscale._diagnosis.explain import Explanation, explain
from optax_lossscale._diagnosis.inspection import ROUNDED, WIDE, Inspection
from optax_lossscale._diagnosis.makers import Maker, maker
from optax_lossscale._diagnosis.moments import moments_of
from optax_lossscale._diagnosis.origin import Place, may_be_masked, recorded_places
from optax_lossscale._diagnosis.page import Diagnosis, Underflow
from optax_lossscale._diagnosis.places import refuse_unordered
from optax_lossscale._diagnosis.program import Evidence, Program
from optax_lossscale._diagnosis.summary import inexact_leaves, summary_at_hand
from optax_lossscale._diagnosis.widened import HALVES
from optax_lossscale._scales import validation
from optax_lossscale._step.inputs import refuse_other_leaves

_NOTABLE = 0.01  # a share of gradients that is worth a word
_DROWNED = 0.1  # a share that an optimizer should not lose
_FLOAT16 = jnp.dtype(jnp.float16)
_TINY = float(jnp.finfo(_FLOAT16).tiny)
_REACH = 2.0**-40  # from the largest float16 to the smallest: no one scale holds more
_HIGH_ENOUGH = 30  # 2**30 brings what float16 would flush from 2**-54 on into its range
_STRIDE = 4  # from one scale to the next, to see what underflows
_LINES = 3


def diagnose(
    loss_fn: Callable[..., Any],
    params: Any,
    *args: Any,
    probes: Any = None,
    has_aux: bool = False,
    opt_state: Any = None,
    **kwargs: Any,
) -> Diagnosis:
    """Whether float16 is fine for a model as it is, and if not what to do.

    Says in which dtype the model computes; how far its gradients are from those of the same
    function in float32, to which it is rewritten, and what takes them there: sums that stagnate,
    functions that saturate, numbers that vanish; which loss scale fits, where gradients overflow
    first and how many are lost to underflow; and of what is not finite in float32 either, what
    makes it. It compiles two programs and runs them some twenty times, and a third where
    something is wrong, on the host: call it before training, with a `loss_fn` that names no axis
    of `pmap` or `shard_map`. It says what these parameters and this batch do; later ones may do
    otherwise.

    Args:
      loss_fn: called as `loss_fn(params, *args, **kwargs)`, as by `value_and_grad`; with probes
        as `loss_fn(params, *args, probes=probes, **kwargs)`.
      params: the parameters.
      *args: a batch. Arrays; bind what else there is with `functools.partial`.
      probes: a tree of probes, each from `probe()`, in the order of the model, which `loss_fn`
        gives to its taps; or None. With them the page names places in the model, without
        them parameters and lines.
      has_aux: whether `loss_fn` returns `(loss, aux)`.
      opt_state: the optimizer's state, whose second moments are looked at if it is Adam's or of
        its kind: after some steps as they are, and before the first as these gradients make them.
      **kwargs: further keyword arguments of `loss_fn`, arrays.

    Returns:
      A `Diagnosis`: print it, or read its `verdict`, `advice`, `dtypes`, `errors`, `off`,
      `initial_scale`, `overflow`, `underflow` and `moments`.

    Raises:
      TypeError: if the loss is not a real floating-point scalar, or an argument is not what is
        said above.
      ValueError: if `probes` have no order, as in `explain`.

    Example:
      >>> import jax.numpy as jnp
      >>> import optax_lossscale as ols
      >>> def loss_fn(params, x):
      ...     y = params["w"].astype(jnp.float16) * x
      ...     return jnp.mean(y.astype(jnp.float32)) * 1e-3
      >>> x = jnp.full(256, 0.01, jnp.float16)
      >>> print(ols.diagnose(loss_fn, {"w": jnp.ones(256)}, x))
      Computes in float16, without matrix products; the loss is float32.
      float16 needs a loss scale: without one, 100.0% of the gradients are lost to underflow.
      Gradients: within 0.0% of float32's, at a scale of 2**31.
      Loss scale: 2**31, with 2 bits to spare before gradients overflow.
      Overflow: from 2**34 on, first at w: 256 inf and 0 NaN of 256 in its gradient.
      Underflow:  lost at 1  at 2**31  bits needed
        all          100.0%      0.0%           11
        w            100.0%      0.0%           11
      What to do:
      - Wrap the optimizer: with_loss_scale(optimizer, DynamicLossScale(initial_scale=2.0**31)).
    """
    validation.function("loss_fn", loss_fn)
    refuse_other_leaves("params", params)
    refuse_other_leaves("what loss_fn takes", (args, kwargs))
    validation.at_hand("diagnose", (params, args, kwargs, probes, opt_state))
    refuse_unordered(probes)
    program = Program(loss_fn, params, probes, args, kwargs, has_aux)
    truth = program.truth()
    page = Diagnosis(
        verdict="",
        advice=[],
        dtypes=report_of(program.jaxpr.jaxpr),
        computes_in=program.narrow,
        loss_dtype=program.loss_dtype,
        errors={},
        off={},
        initial_scale=None,
        overflow=None,
        underflow={},
        moments=moments_of(opt_state, truth.grads),
    )
    if not (np.isfinite(truth.loss) and truth.is_finite):
        return _in_no_dtype(page, program, {"params": params, "args": args, "kwargs": kwargs})
    if not np.isfinite(program.at(0).loss):
        verdict = (
            f"The loss is {program.at(0).loss} at any loss scale, as that multiplies gradients "
            f"alone; in float32 it is {truth.loss:.4g}."
        )
        return _at_no_scale(page, program, verdict)
    fits = search(lambda exponent: program.at(exponent).is_finite, near=_guess(truth))
    if fits is None:
        verdict = (
            "The loss is finite, and its gradients are at no loss scale; in float32 they are."
        )
        return _at_no_scale(page, program, verdict)
    return _at_a_scale(page, program, truth, fits)


# --- what is not finite ---

_REMEDIES = {
    "root": "Keep what is under the root above 0: add to it a number that the dtype holds, or "
    "replace it by jnp.where before the root; after it is too late, as 0 times infinity is NaN.",
    "logarithm": "Keep what the logarithm is taken of above 0: add to it a number that the dtype "
    "holds, or replace it by jnp.where before the logarithm; after it is too late, as 0 times "
    "infinity is NaN.",
    "divisor": "Keep the divisor away from 0: add to it a number that the dtype holds, or replace "
    "it by jnp.where before the division; after it is too late, as 0 times infinity is NaN.",
    "power": "Keep what the power is taken of above 0: add to it a number that the dtype holds.",
    "mask": "If the infinities are a mask's: mask with a finite number, such as -3e4, instead of "
    "-inf, as a softmax of nothing but -inf is NaN.",
}


_OF_SMALL_NUMBERS = (
    ": it is 0 there in 16 bits and not in float32, as small numbers vanish, and differences of "
    "large ones."
)


def _in_no_dtype(page: Diagnosis, program: Program, inputs: dict[str, Any]) -> Diagnosis:
    """Of a loss or gradients that are not finite in float32 either."""
    what = "The gradients are" if np.isfinite(program.truth().loss) else "The loss is"
    verdict = f"{what} not finite in float32 either, and no dtype and no loss scale helps"
    given = [name for name, x in inexact_leaves(inputs).items() if np.isnan(np.asarray(x)).any()]
    if given:
        advice = [f"Look for where the NaNs of {', '.join(given[:_LINES])} come from."]
        return page._replace(
            verdict=f"{verdict}: there are NaNs in {given[0]}.",
            advice=advice,
            overflow=_explained(program, 0),
        )
    at_fault, overflow = maker(Inspection(program), 0, WIDE), _explained(program, 0)
    advice = ["Compute with smaller numbers."]
    if at_fault is not None and at_fault.kind:
        mask = _unmask(overflow, recorded_places(program.at(0).taps))
        advice = [mask if mask and at_fault.kind == "mask" else _REMEDIES[at_fault.kind]]
    return page._replace(
        verdict=f"{verdict}: {at_fault}." if at_fault else f"{verdict}.",
        advice=advice,
        overflow=overflow,
    )


def _at_no_scale(page: Diagnosis, program: Program, verdict: str) -> Diagnosis:
    """Of a loss or gradients that are finite in float32 alone."""
    at_fault = maker(Inspection(program), 0, ROUNDED)
    tapped = recorded_places(program.at(0).taps)
    overflow = _explained(program, 0)
    advice = _mend(overflow, tapped, at_fault)
    if at_fault:
        verdict = f"{verdict} What is not finite comes of {at_fault}."
    return page._replace(verdict=verdict, advice=advice, overflow=overflow)


def _explained(program: Program, exponent: int) -> Explanation:
    evidence = program.at(exponent)
    leaves = {name: summary_at_hand(g) for name, g in evidence.grads.items()}
    return explain(leaves, taps=evidence.taps, loss=evidence.loss)


# --- what is finite at some scale ---


def _at_a_scale(
    page: Diagnosis, program: Program, truth: Evidence, fits: InitialScale
) -> Diagnosis:
    """Of gradients that are finite at some scale, and in float32."""
    page = page._replace(initial_scale=fits)
    if not page.computes_in:
        nothing = ("Nothing is computed in float16, and nothing has to be done.", "Nothing.")
        (verdict, advice), *_ = [*_about_products(page), nothing]
        return page._replace(verdict=verdict, advice=[advice])
    exponent = round(math.log2(fits.scale))
    if fits.largest == 2.0**HIGHEST:  # as of bfloat16, or where all vanishes: one as good as any
        exponent = max(0, _guess(truth) - MARGIN) if _FLOAT16 in page.computes_in else 0
    certain = known(program, truth)
    off = {n: o for n, o in off_by(program.at(exponent), exponent, truth).items() if n in certain}
    page = page._replace(
        off=off,
        errors=find_errors(program, Inspection(program), exponent, truth, off),
    )
    if fits.largest < 2.0**HIGHEST:
        page = page._replace(
            overflow=_explained(program, round(math.log2(fits.largest)) + 1),
            underflow=_underflow(program, truth, certain, fits),
        )
    verdict, advice = _judge(page, program)
    return page._replace(verdict=verdict, advice=advice)


def _underflow(
    program: Program, truth: Evidence, certain: set[str], fits: InitialScale
) -> dict[str, Underflow]:
    """What each group loses, against the scale at which it loses least."""
    exponent, largest = (round(math.log2(scale)) for scale in (fits.scale, fits.largest))
    in_16_bits = {n for n in certain if _is_of_float16(program.at(0).grads[n])}

    def shares(e: int) -> dict[str, float]:
        return _lost(program.at(e), truth, certain, in_16_bits)

    top = max(largest, _HIGH_ENOUGH)
    sweep = {e: shares(e) for e in {0, exponent, *range(largest, top + 1, _STRIDE)}}
    found = {}
    for name in sweep[exponent]:
        least_at = min((e for e in sweep if name in sweep[e]), key=lambda e: (sweep[e][name], e))
        least = sweep[least_at][name]
        lost, left = (sweep[e].get(name, least) - least for e in (0, exponent))
        if max(lost, left) <= _NOTABLE:
            continue
        is_kept = lambda e, name=name, least=least: shares(e).get(name, 1.0) <= least + _NOTABLE
        bits = bisect.bisect_left(range(least_at), True, key=is_kept)
        found[name] = Underflow(lost, left, bits)
    return dict(sorted(found.items(), key=lambda item: (item[0] != "all", -item[1].lost)))


def _lost(
    evidence: Evidence, truth: Evidence, certain: set[str], in_16_bits: set[str]
) -> dict[str, float]:
    """The share of each group that underflows; but for groups that overflow."""
    counts: dict[str, list[tuple[float, float]]] = {}
    for name, g in evidence.grads.items():
        if name not in certain:
            continue
        size, true = np.abs(g), np.abs(truth.grads[name])
        in_reach = true > true.max(initial=0) * _REACH
        gone = (size == 0) | (size < _TINY if name in in_16_bits else False)
        share = np.count_nonzero(gone & in_reach) if np.isfinite(size).all() else np.nan
        for group in ("all", without_numbers(name)):
            counts.setdefault(group, []).append((float(share), float(g.size)))
    for name, record in recorded_places(evidence.taps):
        gradient = record.cotangent
        share = np.nan if gradient.nonfinite else gradient.zeros + gradient.subnormals
        group = f"arriving at {without_numbers(name)}"
        counts.setdefault(group, []).append((float(share), float(gradient.size)))
    totals = {group: np.sum(of, axis=0) for group, of in counts.items()}
    return {
        group: float(n / max(size, 1)) for group, (n, size) in totals.items() if not np.isnan(n)
    }


def _is_of_float16(x: np.ndarray) -> bool:
    """Whether these are numbers of float16, whatever dtype they have since been cast to."""
    if x.dtype == jnp.bfloat16 or np.iscomplexobj(x):
        return False
    with np.errstate(over="ignore"):
        return bool((x == x.astype(np.float16)).all())


def _guess(truth: Evidence) -> int:
    """The exponent from which on the largest gradient is infinite in float16."""
    largest = max((float(np.abs(g).max(initial=0)) for g in truth.grads.values()), default=0)
    return round(math.log2(float(jnp.finfo(_FLOAT16).max) / largest)) if largest else NEAR


# --- in words ---


def _judge(page: Diagnosis, program: Program) -> tuple[str, list[str]]:
    """The verdict and the advice, where some scale gives finite gradients."""
    fits = page.initial_scale
    assert fits is not None
    name16 = " and ".join(map(str, page.computes_in))
    tapped = recorded_places(program.at(0).taps)
    verdict, advice = _about_scale(page, program, tapped)
    products = _about_products(page)
    others = [*_about_loss(page), *_about_moments(page)]
    to_do = [*advice, *(what for _, what in others)]
    if page.errors:
        name, worst = next(iter(page.errors.items()))
        verdict = (
            f"{name16} gives wrong gradients: that of {name} is off by {worst.off:.1%}, at the "
            "scale that fits best."
        )
        return verdict, [*_corrections(page.errors), *(what for _, what in products), *to_do]
    if products:
        return products[0][0], [products[0][1], *to_do]
    if verdict or others:
        return verdict or others[0][0], to_do
    if _FLOAT16 not in page.computes_in:
        return f"{name16} is fine as it is, and needs no loss scale.", ["Nothing."]
    room = round(math.log2(fits.largest))
    return f"float16 is fine as it is, without a loss scale, with {room} bits to spare.", [
        "Nothing."
    ]


def _about_scale(page: Diagnosis, program: Program, tapped: list[Place]) -> tuple[str, list[str]]:
    """What the loss scale has to be, if there has to be one."""
    fits, underflow = page.initial_scale, page.underflow
    assert fits is not None
    exponent = round(math.log2(fits.scale))
    is_finite = lambda e: program.at(e).is_finite
    least = 0
    if exponent > 0 and not is_finite(0):
        least = next(e + 1 for e in range(exponent, -1, -1) if not is_finite(e))
    bounds = f", min_scale=2.0**{least or exponent}" if least or exponent < 0 else ""
    wrap = (
        "Wrap the optimizer: with_loss_scale(optimizer, "
        f"DynamicLossScale(initial_scale=2.0**{exponent}{bounds}))."
    )
    worst = max(underflow, key=lambda name: underflow[name].left, default="")
    if worst and underflow[worst].left > 5 * _NOTABLE and page.overflow is not None:
        verdict = (
            f"No one loss scale fits: at {scale_name(fits.scale)} "
            f"{underflow[worst].left:.1%} of {_gradients(worst)} are still lost to underflow, and "
            f"from {scale_name(2 * fits.largest)} on others overflow."
        )
        return verdict, [*_mend(page.overflow, tapped), wrap.replace("Wrap", "Until then, wrap")]
    if fits.largest < 1 and page.overflow is not None:
        verdict = "Gradients overflow without a loss scale: float16 needs one below 1."
        return verdict, [wrap, *_mend(page.overflow, tapped)]
    if least:
        return f"float16 needs a loss scale: below 2**{least} gradients are not finite.", [wrap]
    if underflow:
        name = next(iter(underflow))  # of all parameters, or else the worst
        lost = f"{underflow[name].lost:.1%} of {_gradients(name)}"
        return f"float16 needs a loss scale: without one, {lost} are lost to underflow.", [wrap]
    return "", []


def _about_products(page: Diagnosis) -> list[tuple[str, str]]:
    """Where operands in 16 bits were widened, and most is computed in float32."""
    products = page.dtypes.products
    wide = [p for p in products if p.dtype.itemsize > 2]
    widened = [p for p in wide if HALVES.intersection(p.before)]
    share = sum(share for dtype, share in page.dtypes.shares.items() if dtype.itemsize > 2)
    count, total = (sum(p.count for p in of) for of in (wide, products))
    if not widened or share <= 0.5 or count <= total / 2:
        return []
    dtype = next(dtype for p in widened for dtype in p.before if dtype in HALVES)
    lines = list(dict.fromkeys(p.source for p in widened))
    verdict = (
        f"Hardly anything is computed in {dtype}: {count} of {total} matrix products are in "
        f"{wide[0].dtype}, to which their operands are widened."
    )
    more = f" and {len(lines) - _LINES} more lines" if len(lines) > _LINES else ""
    in_dtype = "" if dtype == _FLOAT16 else ", jnp.bfloat16"
    advice = (
        f"Wrap the loss function: autocast(loss_fn{in_dtype}) computes every matrix product in "
        f"{dtype}. Or cast both operands to {dtype} at {', '.join(lines[:_LINES])}{more}."
    )
    return [(verdict, advice)]


def _about_loss(page: Diagnosis) -> list[tuple[str, str]]:
    if page.loss_dtype != _FLOAT16:
        return []
    verdict = "float16 is fine but for the loss, which is float16: no scale above 2**15 fits it."
    advice = (
        "Compute the loss in float32: cast what it is the mean of first, as in "
        "jnp.mean(losses.astype(jnp.float32)). Its own gradient is the loss scale."
    )
    return [(verdict, advice)]


def _about_moments(page: Diagnosis) -> list[tuple[str, str]]:
    moments, found = page.moments, []
    if moments is None:
        return []
    if moments.below_eps > _DROWNED:
        verdict = (
            f"float16 is fine, and the optimizer is not: {moments.below_eps:.1%} of the gradients "
            f"are below Adam's eps of {moments.eps:g}, and move their parameters too little."
        )
        advice = (
            "Give Adam a smaller eps, 1e-15 say, or larger gradients: a clip by a norm far below "
            "that of the gradients makes them small, and so does a loss that is divided by much."
        )
        found.append((verdict, advice))
    if moments.vanished > _DROWNED:
        dtypes = " and ".join(map(str, moments.dtypes))
        verdict = (
            f"float16 is fine for the gradients, and {dtypes} is not for Adam's second moments: "
            f"{moments.vanished:.1%} of the squares are zero in it."
        )
        advice = (
            "Keep the second moments in float32: initialize the optimizer with float32 parameters."
        )
        found.append((verdict, advice))
    return found


def _corrections(errors: dict[str, GradientError]) -> list[str]:
    """What to do about wrong gradients, once for each line."""
    return list(dict.fromkeys(map(_correction, errors.values())))


def _correction(error: GradientError) -> str:
    at = f" at {error.source}" if error.source else ""
    if error.cause == "stagnates":
        how = {
            "scatter-add": "look up in the float32 table and cast what was found, not the table",
            "add_any": "cast a weight that many share where each uses it, inside the loop",
            "reduce_sum": "cast to float32 before, or give jnp.sum the dtype",
        }.get(error.primitive, "cast to float32 before")
        return f"Sum in float32{at}, where small terms are lost beside a large sum: {how}."
    if error.cause == "saturates":
        return (
            f"Compute {error.primitive}{at} in float32: float16 rounds it to its limit, where its "
            "derivative is 0."
        )
    if error.cause in ("vanishes", "overflows"):
        beyond = "below 6e-8 is 0" if error.cause == "vanishes" else "above 65504 is infinite"
        return (
            f"Compute {error.primitive}{at} in float32, or with other numbers: what is {beyond}."
        )
    if error.primitive:
        return f"Compute {error.primitive}{at} in float32: it takes more digits than 16 bits have."
    return (
        "Compute more in float32: rounding adds up over many lines, of which no one is at fault."
    )


def _gradients(group: str) -> str:
    if group == "all":
        return "the gradients"
    return f"those {group}" if group.startswith("arriving") else f"those of {group}"


def _mend(overflow: Explanation, tapped: list[Place], at_fault: Maker | None = None) -> list[str]:
    """What to do about the place that overflows."""
    name = overflow.suspects[0].name if overflow.suspects else "the loss"
    if name in [name for name, _ in tapped]:
        mask = _unmask(overflow, tapped)
        return [f"Compute {name} in float32, or with smaller numbers.", *([mask] if mask else [])]
    if at_fault is not None:
        how = _OF_SMALL_NUMBERS if at_fault.kind else ", or with smaller numbers."
        return [f"Compute what is at {at_fault.source} in float32{how}"]
    what = "the loss" if name == "the loss" else f"the layer of {name}"
    advice = [f"Compute {what} in float32, or with smaller numbers."]
    if not tapped:
        advice.append("To see which layer it is, tap their ends, and give probes.")
    return advice


def _unmask(overflow: Explanation, tapped: list[Place]) -> str:
    """What to do if infinities beside the place that overflows are a mask's; else nothing."""
    names = [name for name, _ in tapped]
    name = overflow.suspects[0].name if overflow.suspects else ""
    if name not in names:
        return ""
    i = names.index(name)
    here = [record.value for _, record in tapped[max(i - 1, 0) : i + 2]]
    is_infinite = [may_be_masked(value) for value in here]
    if not (any(is_infinite) and any(value.nans for value in here)):
        return ""
    infinite = names[max(i - 1, 0) + is_infinite.index(True)]
    return (
        f"If the infinities of {infinite} are a mask's: mask with a finite number, such as -3e4, "
        "instead of -inf, as a softmax of nothing but -inf is NaN."
    )
