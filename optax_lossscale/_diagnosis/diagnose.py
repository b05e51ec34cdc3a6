"""The whole story of a model in float16, on one page."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale._arrays.names import scale_name, shortened, without_numbers
from optax_lossscale._diagnosis.calibration import HIGHEST, InitialScale, search
from optax_lossscale._diagnosis.explain import WRAPPED, Explanation, explain, nonfinite_leaves
from optax_lossscale._diagnosis.origin import Place, may_be_masked, recorded_places
from optax_lossscale._diagnosis.places import refuse_unordered
from optax_lossscale._diagnosis.summary import Summary
from optax_lossscale._diagnosis.underflow import total_of, underflow_report
from optax_lossscale._scales import validation
from optax_lossscale._step.gradient import loss_of, scale_gradient
from optax_lossscale._step.inputs import refuse_other_leaves

_NOTABLE = 0.01  # a share of gradients that is worth a word
_HIGH_ENOUGH = 30  # 2**30 brings what float16 would flush from 2**-54 on into its range
_PASSES = 32  # at most, to see what underflows from one scale to the next
_SHOWN = 8


class Underflow(NamedTuple):
    """What underflow takes of the gradients of one kind of parameter, or at one kind of place.

    Attributes:
      lost: the share that is zero or subnormal at a loss scale of 1, and at a larger one is not.
      left: the share that still is at the scale that fits, likewise.
      bits: how large a power of two it takes for next to nothing of it to be lost.

    Example:
      >>> import jax.numpy as jnp
      >>> import optax_lossscale as ols
      >>> loss_fn = lambda params: jnp.sum(params["w"].astype(jnp.float16)) * 2.0**-20
      >>> found = ols.diagnose(loss_fn, {"w": jnp.ones(4)})
      >>> found.underflow["w"]
      Underflow(lost=1.0, left=0.0, bits=6)
    """

    lost: float
    left: float
    bits: int


class Diagnosis(NamedTuple):
    """What `diagnose` found; print it for the page.

    Attributes:
      verdict: whether float16 is fine as it is, and if not what it needs.
      advice: what to do, one sentence each.
      initial_scale: the scale that fits; None if none does.
      overflow: what `explain` says of the least scale at which gradients overflow; None if they
        do at none. Without a scale that fits, of a scale of 1.
      underflow: what is lost at a scale of 1, under the path of the parameters or of the tapped
        places, numbers aside; the worst first, and what loses next to nothing left out.

    Example:
      >>> import jax.numpy as jnp
      >>> import optax_lossscale as ols
      >>> loss_fn = lambda w: jnp.sum(w.astype(jnp.float16)) * 2.0**-20
      >>> diagnosis = ols.diagnose(loss_fn, jnp.ones(4))
      >>> ls = ols.DynamicLossScale(initial_scale=diagnosis.initial_scale.scale)
    """

    verdict: str
    advice: list[str]
    initial_scale: InitialScale | None
    overflow: Explanation | None
    underflow: dict[str, Underflow]

    def __str__(self) -> str:
        lines = [self.verdict]
        if self.initial_scale is not None:
            lines.append(f"Loss scale: {self.initial_scale}.")
        if self.overflow is not None and self.overflow.suspects:
            name, finding = self.overflow.suspects[0]
            where = "at any scale"
            if self.initial_scale is not None:
                where = f"from {scale_name(2 * self.initial_scale.largest)} on"
            lines.append(f"Overflow: {where}, first at {name}: {finding}.")
        paragraphs = [WRAPPED.fill(line) for line in lines]
        advice = [WRAPPED.fill(f"- {what}") for what in self.advice]
        return "\n".join([*paragraphs, *self._table(), "What to do:", *advice])

    def _table(self) -> list[str]:
        if not self.underflow or self.initial_scale is None:
            return []
        scale = scale_name(self.initial_scale.scale)
        rows = [("Underflow:", "lost at 1", f"at {scale}", "bits needed")]
        for name, (lost, left, bits) in list(self.underflow.items())[:_SHOWN]:
            rows.append((f"  {shortened(name, 56)}", f"{lost:.1%}", f"{left:.1%}", f"{bits}"))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        more = len(self.underflow) - _SHOWN
        return [
            *(
                "  ".join([r[0].ljust(widths[0]), *map(str.rjust, r[1:], widths[1:])])
                for r in rows
            ),
            *([f"  and {more} more"] if more > 0 else []),
        ]


class _Evidence(NamedTuple):
    """Of one pass at one loss scale."""

    loss: jax.Array
    leaves: dict[str, Summary]
    report: Any
    taps: Any


def diagnose(
    loss_fn: Callable[..., Any],
    params: Any,
    *args: Any,
    probes: Any = None,
    has_aux: bool = False,
    **kwargs: Any,
) -> Diagnosis:
    """Whether float16 is fine for a model as it is, and if not what to do.

    Looks at the loss, at the gradients as the loss scale rises, at where they overflow first
    and at how many are lost to underflow. It compiles one program and runs it some forty
    times, on the host: call it before training, with a `loss_fn` that names no axis of
    `pmap` or `shard_map`. It says what these parameters and this batch do; later ones may
    do otherwise.

    Args:
      loss_fn: called as `loss_fn(params, *args, **kwargs)`, as by `value_and_grad`; with probes
        as `loss_fn(params, *args, probes=probes, **kwargs)`.
      params: the parameters.
      *args: a batch. Arrays; bind what else there is with `functools.partial`.
      probes: a tree of probes, each from `probe()`, in the order of the model, which `loss_fn`
        gives to its taps; or None. With them the page names places in the model, without
        them parameters alone.
      has_aux: whether `loss_fn` returns `(loss, aux)`.
      **kwargs: further keyword arguments of `loss_fn`, arrays.

    Returns:
      A `Diagnosis`: print it, or read its `verdict`, `advice`, `initial_scale`, `overflow` and
      `underflow`.

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
      float16 needs a loss scale: without one, 100.0% of the gradients are lost to underflow.
      Loss scale: 2**31, with 2 bits to spare before gradients overflow.
      Overflow: from 2**34 on, first at w: 256 inf and 0 NaN of 256 in its gradient.
      Underflow:  lost at 1  at 2**31  bits needed
        all          100.0%      0.0%           12
        w            100.0%      0.0%           12
      What to do:
      - Wrap the optimizer: with_loss_scale(optimizer, DynamicLossScale(initial_scale=2.0**31)).
    """
    validation.function("loss_fn", loss_fn)
    refuse_other_leaves("params", params)
    refuse_other_leaves("what loss_fn takes", (args, kwargs))
    validation.at_hand("diagnose", (params, args, kwargs, probes))
    refuse_unordered(probes)
    compiled = jax.jit(functools.partial(_evidence, loss_fn, has_aux))

    @functools.cache
    def at(exponent: int) -> _Evidence:
        evidence = compiled(jnp.int32(exponent), params, probes, args, kwargs)
        return jax.device_get(evidence)

    def is_finite(exponent: int) -> bool:
        return not any(leaf.nonfinite for leaf in at(exponent).leaves.values())

    def explained(exponent: int) -> Explanation:
        evidence = at(exponent)
        return explain(evidence.leaves, taps=evidence.taps, loss=evidence.loss)

    tapped = recorded_places(at(0).taps)
    if not np.isfinite(at(0).loss):
        overflow = explained(0)
        verdict = (
            f"The loss is {at(0).loss} at any loss scale, as that multiplies gradients alone."
        )
        return Diagnosis(verdict, _mend(overflow, tapped), None, overflow, {})
    found = search(is_finite)
    if found is None:
        overflow = explained(0)
        verdict = "The loss is finite, and its gradients are at no loss scale."
        return Diagnosis(verdict, _mend(overflow, tapped), None, overflow, {})
    if found.largest == 2.0**HIGHEST:
        verdict = (
            f"Nothing overflows up to 2**{HIGHEST}; is float16 in use? Nothing has to be done."
        )
        return Diagnosis(verdict, ["Nothing."], found, None, {})

    exponent, largest = (round(math.log2(scale)) for scale in (found.scale, found.largest))
    top = max(largest, _HIGH_ENOUGH)
    sweep = sorted({*range(0, top + 1, -(-top // _PASSES)), min(exponent, 0), exponent})
    underflow = _underflow({e: _groups(at(e)) for e in sweep}, exponent)
    overflow = explained(largest + 1)
    verdict, advice = _judge(found, overflow, underflow, is_finite, tapped)
    return Diagnosis(verdict, advice, found, overflow, underflow)


def _evidence(loss_fn, has_aux, exponent, params, probes, args, kwargs) -> _Evidence:
    loss_scale = jnp.ldexp(jnp.float32(1), exponent)

    def scaled_fn(params, probes):  # not value_and_grad, which refuses modules
        given = {} if probes is None else {"probes": probes}
        value = loss_fn(params, *args, **given, **kwargs)
        return scale_gradient(loss_of(value, has_aux), loss_scale)

    gradient = jax.value_and_grad(scaled_fn, argnums=(0, 1), allow_int=True)
    loss, (grads, taps) = gradient(params, probes)
    return _Evidence(loss, nonfinite_leaves(grads), underflow_report(grads, loss_scale), taps)


def _groups(evidence: _Evidence) -> dict[str, Summary]:
    """The gradients of parameters and at taps, in groups, and those of all parameters."""
    tapped: dict[str, list[Summary]] = {}
    for name, record in recorded_places(evidence.taps):
        tapped.setdefault(f"arriving at {without_numbers(name)}", []).append(record.cotangent)
    groups = evidence.report.groups | {name: total_of(of) for name, of in tapped.items()}
    return jax.device_get({"all": evidence.report.total} | groups)


def _underflow(sweep: dict[int, dict[str, Summary]], fits: int) -> dict[str, Underflow]:
    """What each group loses, against the scale of the sweep at which it loses least."""
    found = {}
    for name in sweep[fits]:
        share = {e: float(of[name].underflow) for e, of in sweep.items() if not of[name].nonfinite}
        least = min(share.values(), default=0.0)
        bits = min((e for e in share if share[e] <= least + _NOTABLE), default=0)
        lost, left = (share.get(e, least) - least for e in (0, fits))
        if max(lost, left) > _NOTABLE:
            found[name] = Underflow(lost, left, bits)
    return dict(sorted(found.items(), key=lambda item: (item[0] != "all", -item[1].lost)))


def _judge(
    found: InitialScale,
    overflow: Explanation,
    underflow: dict[str, Underflow],
    is_finite: Callable[[int], bool],
    tapped: list[Place],
) -> tuple[str, list[str]]:
    """The verdict and the advice, where some scale gives finite gradients."""
    exponent = round(math.log2(found.scale))
    least = 0
    if exponent > 0 and not is_finite(0):
        least = next(e + 1 for e in range(exponent, -1, -1) if not is_finite(e))
    bounds = f", min_scale=2.0**{least or exponent}" if least or exponent < 0 else ""
    wrap = (
        "Wrap the optimizer: with_loss_scale(optimizer, "
        f"DynamicLossScale(initial_scale=2.0**{exponent}{bounds}))."
    )
    worst = max(underflow, key=lambda name: underflow[name].left, default="")
    if worst and underflow[worst].left > 5 * _NOTABLE:
        verdict = (
            f"No one loss scale fits: at {scale_name(found.scale)} "
            f"{underflow[worst].left:.1%} of {_gradients(worst)} are still lost to underflow, and "
            f"from {scale_name(2 * found.largest)} on others overflow."
        )
        return verdict, [*_mend(overflow, tapped), wrap.replace("Wrap", "Until then, wrap")]
    if found.largest < 1:
        verdict = "Gradients overflow without a loss scale: float16 needs one below 1."
        return verdict, [wrap, *_mend(overflow, tapped)]
    if least:
        verdict = f"float16 needs a loss scale: below 2**{least} gradients are not finite."
        return verdict, [wrap]
    if not underflow:
        room = round(math.log2(found.largest))
        verdict = f"float16 is fine as it is, without a loss scale, with {room} bits to spare."
        return verdict, ["Nothing."]
    name = next(iter(underflow))  # of all parameters, or else the worst
    lost = f"{underflow[name].lost:.1%} of {_gradients(name)}"
    return f"float16 needs a loss scale: without one, {lost} are lost to underflow.", [wrap]


def _gradients(group: str) -> str:
    if group == "all":
        return "the gradients"
    return f"those {group}" if group.startswith("arriving") else f"those of {group}"


def _mend(overflow: Explanation, tapped: list[Place]) -> list[str]:
    """What to do about the place that overflows."""
    names = [name for name, _ in tapped]
    name = overflow.suspects[0].name if overflow.suspects else "the loss"
    if name in names:
        advice = [f"Compute {name} in float32, or with smaller numbers."]
        i = names.index(name)
        here = [record.value for _, record in tapped[max(i - 1, 0) : i + 2]]
        is_infinite = [may_be_masked(value) for value in here]
        if any(is_infinite) and any(value.nans for value in here):
            infinite = names[max(i - 1, 0) + is_infinite.index(True)]
            advice.append(
                f"If the infinities of {infinite} are a mask's: mask with a finite number, such "
                "as -3e4, instead of -inf, as a softmax of nothing but -inf is NaN."
            )
        return advice
    if name == "the loss":
        advice = ["Compute the loss in float32, or with smaller numbers."]
    else:
        advice = [f"Compute the layer of {name} in float32, or with smaller numbers."]
    return (
        advice
        if tapped
        else [*advice, "To see which layer it is, tap their ends, and give probes."]
    )
