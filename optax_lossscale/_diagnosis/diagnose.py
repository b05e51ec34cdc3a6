"""A full diagnosis of a model in float16, from one loss function and a batch."""

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from optax_lossscale._diagnosis.accuracy import errors_of, known, off_by
from optax_lossscale._diagnosis.advice import judged
from optax_lossscale._diagnosis.calibration import HIGHEST, MARGIN, NEAR, InitialScale, search
from optax_lossscale._diagnosis.dtypes import report_of
from optax_lossscale._diagnosis.explain import Explanation, explain
from optax_lossscale._diagnosis.lost import find_underflow
from optax_lossscale._diagnosis.moments import moments_of
from optax_lossscale._diagnosis.page import Diagnosis
from optax_lossscale._diagnosis.places import refuse_unordered
from optax_lossscale._diagnosis.program import Evidence, Program
from optax_lossscale._diagnosis.summary import Summary
from optax_lossscale._scales import validation
from optax_lossscale._step.gradient import refuse_shared_names
from optax_lossscale._step.inputs import refuse_other_leaves

_FLOAT16 = jnp.dtype(jnp.float16)


def diagnose(
    loss_fn: Callable[..., Any],
    params: Any,
    *args: Any,
    probes: Any = None,
    has_aux: bool = False,
    opt_state: Any = None,
    **kwargs: Any,
) -> Diagnosis:
    """Says whether float16 is fine for a model as it is, and if not, what to do.

    Reports in which dtype the model computes; how far its gradients are from those of the same
    function in float32, and why; which loss scale fits, where gradients overflow first and how
    many are lost to underflow; and the origin of numbers that are not finite even in float32.
    It compiles two or three programs and runs them some twenty times: call it before training, on
    the host, with a `loss_fn` that names no axis of `pmap` or `shard_map`. It describes these
    parameters and this batch; later ones may behave differently.

    Args:
      loss_fn: called as `loss_fn(params, *args, **kwargs)`, and with `probes=probes` if given.
      params: the parameters.
      *args: a batch of arrays; bind anything else with `functools.partial`.
      probes: a tree of probes, each from `probe()`, in the order of the model, which `loss_fn`
        passes to its taps, so that the page names places in the model; or None.
      has_aux: whether `loss_fn` returns `(loss, aux)`.
      opt_state: the optimizer's state. If it is that of Adam or the like, its second moments are
        examined: as they are or, before the first step, as these gradients will make them.
      **kwargs: further keyword arguments of `loss_fn`, arrays.

    Returns:
      A `Diagnosis`: print it, or read its `verdict`, `advice`, `errors` and other fields.

    Raises:
      TypeError: if the loss is not a real floating-point scalar, or an argument has a wrong type.
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
      float16 needs a loss scale, or it loses 100.0% of the gradients to underflow.
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
    refuse_shared_names(loss_fn, ["has_aux", "opt_state"], (params, *args))
    refuse_other_leaves("params", params)
    refuse_other_leaves("what loss_fn takes", (args, kwargs))
    validation.at_hand("diagnose", (params, args, kwargs, probes, opt_state))
    refuse_unordered(probes)
    program = Program(loss_fn, has_aux, params, probes, args, kwargs)
    truth, fits = program.truth, None
    if truth.is_finite and np.isfinite(program.at(0).loss):
        fits = search(lambda exponent: program.at(exponent).is_finite, near=_guess(truth))
    page = Diagnosis(
        verdict="",
        advice=[],
        dtypes=report_of(program.jaxpr.jaxpr),
        computes_in=program.narrow,
        loss_dtype=program.loss_dtype,
        errors={},
        off={},
        initial_scale=fits,
        overflow=None if fits else _explained(program, 0),
        underflow={},
        moments=moments_of(opt_state, truth.grads),
        not_compared=tuple(dict.fromkeys((e.name, e.source) for e in program.not_widened)),
    )
    if fits and page.computes_in:
        page = page._replace(**_at_a_scale(program, fits))
    return judged(page, program)


def _at_a_scale(program: Program, fits: InitialScale) -> dict[str, Any]:
    """What 16 bits do to gradients that are finite at some scale, and in float32."""
    exponent = round(math.log2(fits.scale))
    if fits.largest == 2.0**HIGHEST:  # as in bfloat16, or if all vanish: any will do
        exponent = max(0, _guess(program.truth) - MARGIN) if _FLOAT16 in program.narrow else 0
    certain = known(program)
    all_off = off_by(program.at(exponent), exponent, program.truth)
    off = {name: o for name, o in all_off.items() if name in certain}
    found: dict[str, Any] = {"off": off, "errors": errors_of(program, exponent, off)}
    if fits.largest < 2.0**HIGHEST:
        found["overflow"] = _explained(program, round(math.log2(fits.largest)) + 1)
        found["underflow"] = find_underflow(program, program.truth, certain, fits)
    return found


def _explained(program: Program, exponent: int) -> Explanation:
    """What `explain` says about gradients at a scale, counted on the host without compiling."""
    evidence, none = program.at(exponent), np.zeros(())
    counts: Any = lambda g: (g.size, none, none, np.isinf(g).sum(), none, np.isnan(g).sum(), none)
    leaves = {name: Summary(*counts(g)) for name, g in evidence.grads.items()}
    return explain(leaves, taps=evidence.taps, loss=evidence.loss)


def _guess(truth: Evidence) -> int:
    """The scale's exponent from which on the largest gradient is infinite in float16."""
    largest = max((float(np.abs(g).max(initial=0)) for g in truth.grads.values()), default=0)
    return round(math.log2(float(jnp.finfo(_FLOAT16).max) / largest)) if largest else NEAR
