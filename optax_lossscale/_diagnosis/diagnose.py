"""`diagnose`: a full report on a model in 16 bits, from a loss function and a batch.

The gradient is traced (`gradient.py`) and run beside float32 (`run.py`). From these
runs, this file fills in the report: what is off and why (`wrong.py`, `choices.py`),
which loss scale fits (`scale.py`), and what to do (`advice.py`). The docstring of the
package explains its words, such as *note* and *reference*.
"""

import dataclasses
from collections.abc import Callable, Container
from typing import Any

import jax
import numpy as np

from optax_lossscale._arrays import checks
from optax_lossscale._arrays.contexts import DIAGNOSING
from optax_lossscale._autocast.autocast import autocast
from optax_lossscale._autocast.products import why_none_is_narrowed
from optax_lossscale._diagnosis.advice import verdict_and_advice
from optax_lossscale._diagnosis.choices import choices_of, off_by_choices
from optax_lossscale._diagnosis.figures import TOLERANCE
from optax_lossscale._diagnosis.gradient import Gradient, gradient_of
from optax_lossscale._diagnosis.old_dtypes import report_of
from optax_lossscale._diagnosis.page import Diagnosis
from optax_lossscale._diagnosis.placement import in_mesh_of
from optax_lossscale._diagnosis.run import Run, Runs, runs_of
from optax_lossscale._diagnosis.scale import underflow_by_group
from optax_lossscale._diagnosis.table import table_of
from optax_lossscale._diagnosis.wrong import off_and_wrong, wrong_intermediate_value
from optax_lossscale._programs.call import as_program
from optax_lossscale._programs.values import is_inexact_dtype, is_narrow_dtype
from optax_lossscale._scales.fixed import FixedLossScale
from optax_lossscale._scales.loss_scale import LossScale
from optax_lossscale._step.get_loss_scale import get_loss_scale
from optax_lossscale._step.state import loss_scales_in


def diagnose(
    loss_fn: Callable[..., Any],
    params: Any,
    *args: Any,
    has_aux: bool = False,
    opt_state: Any = None,
    **kwargs: Any,
) -> Diagnosis:
    """Reports whether a model can run in 16 bits, and if not, what to change.

    Call it before you train a model in 16 bits. Call it also when training goes wrong:
    when the loss scale collapses, the loss is NaN, or gradients vanish or look wrong.
    Then pass the parameters and the batch of a step at which it happens, because others
    may behave differently. A skipped step leaves the parameters as they were, so you
    can still diagnose it afterward if you have kept its batch.

    The report says whether the loss, the gradients and the intermediate values are
    right. Where they are wrong, it names the line and the layer and says what to do. It
    also says which loss scale fits, and how many gradients are lost to underflow. For
    this, `diagnose` runs the gradient of the loss function and computes every value
    twice: as the program does, and in float32. The first run has a loss scale of 1. If
    the backward pass computes in float16, others look for a loss scale that fits.

    A loss function that computes in float32 is diagnosed as `autocast` runs it in
    float16. For bfloat16, pass `autocast(loss_fn, jnp.bfloat16)`. If `autocast` has
    reasons to leave every product as it is, the advice names them.

    The values in float32 follow the choices of the program, such as indices and
    branches. If float32 would choose differently, or if anything is off, the gradient
    also runs in float32 with its own choices and is compared with float64.

    An error that was made before or during tracing is not found. For example, if the
    traced program holds a constant 0.999 that bfloat16 has rounded to 1, this constant
    is 1 in float32 as well.

    Call `diagnose` on the host, outside `jit`, with a loss function that names no axis
    of a surrounding `pmap` or `shard_map`. It compiles the gradient in many small
    pieces and compares their results on the host, so it takes far longer than a
    training step. In a long run, it prints its progress to stderr about every 10
    seconds.

    Args:
      loss_fn: a function of `(params, *args, **kwargs)` that returns the loss. The loss
        need not be scaled: `scale_gradient` has no effect here.
      params: the parameters: a tree of arrays, or a module of NNX or Equinox. The
        gradient is taken with respect to its floating-point and complex arrays.
      *args: a batch. Anything that is not an array is passed on as it is.
      has_aux: whether `loss_fn` returns `(loss, aux)`. The floats in `aux` are
        compared, too, like intermediate values.
      opt_state: the optimizer's state. If you give it, the report says whether its loss
        scale is too large or too small.
      **kwargs: further keyword arguments of `loss_fn`.

    Returns:
      A `Diagnosis`. Print it, or read its `verdict`, `advice`, `wrong`, `table` and
      other fields.

    Raises:
      TypeError: if `loss_fn` is not a function, or has a keyword argument named
        `has_aux` or `opt_state`.
      TypeError: if `loss_fn` does not return a real floating-point scalar, or makes a
        `jax.Ref`.
      TypeError: if an argument is a traced array, as inside `jit`, or a
        `jax.ShapeDtypeStruct`.
      ValueError: if `opt_state` holds more than one loss scale.
      ValueError: if a wrapper that `get_loss_scale` refuses, such as
        `optax.MultiSteps`, is around `with_loss_scale`.

    Example:
      >>> import jax.numpy as jnp
      >>> import optax_lossscale as ols
      >>> def loss_fn(params, x):
      ...     y = params["w"].astype(jnp.float16) * x
      ...     return jnp.mean(y.astype(jnp.float32)) * 1e-3
      >>> x = jnp.full(256, 0.01, jnp.float16)
      >>> report = ols.diagnose(loss_fn, {"w": jnp.ones(256)}, x)  # print it to see all
      >>> print(report.verdict)
      Without a loss scale, float16 loses 100.0% of the gradients to underflow.
      >>> print(report.initial_scale)
      2**31, with 2 bits to spare before gradients overflow
    """
    checks.check_function("loss_fn", loss_fn)
    checks.check_concrete("diagnose", (params, args, kwargs, opt_state))
    # Values that are not finite must be reported, not raised as errors, and the host
    # must be allowed to read all values.
    DIAGNOSING.create()
    with (
        jax.debug_nans(False),
        jax.debug_infs(False),
        jax.transfer_guard("allow"),
        DIAGNOSING(True),
        in_mesh_of((params, args, kwargs)),
    ):
        gradient = gradient_of(loss_fn, params, args, kwargs, has_aux)
        is_autocast = False
        why_wide = ()
        if _computes_in_float32(gradient):
            function = autocast(loss_fn)
            under_autocast = gradient_of(function, params, args, kwargs, has_aux)
            is_autocast = not _computes_in_float32(under_autocast)
            if is_autocast:
                gradient = under_autocast
            elif not gradient.narrow_dtypes:
                why_wide = _why_wide(loss_fn, (params, *args), kwargs)
        report = _collect(gradient, runs_of(gradient), is_autocast, opt_state)
        products = report_of(gradient.forward).products
        widened = [product for product in products if product.is_widened]
    verdict, advice = verdict_and_advice(report, widened, why_wide)
    return dataclasses.replace(report, verdict=verdict, advice=advice)


def _computes_in_float32(gradient: Gradient) -> bool:
    """Whether a gradient is computed in float32, as its products show.

    If they do, a few 16-bit values beside them, such as a metric or a table, do not
    count. If an operand of a product was widened, 16 bits were meant.
    """
    products = report_of(gradient.jaxpr.jaxpr).products
    of_floats = [x for x in products if is_inexact_dtype(x.dtype)]
    if not of_floats:
        return not gradient.narrow_dtypes
    return not any(is_narrow_dtype(x.dtype) or x.is_widened for x in of_floats)


def _why_wide(
    loss_fn: Callable[..., Any], args: tuple, kwargs: dict
) -> tuple[str, ...]:
    """Returns the reasons why `autocast` narrows no product of a loss function.

    Outside `diagnose`, a warning of `autocast` gives them.
    """
    with as_program(loss_fn, args, kwargs, low=np.dtype(np.float16)) as call:
        return why_none_is_narrowed(call.program)


def _collect(
    gradient: Gradient, runs: Runs, is_autocast: bool, opt_state: Any
) -> Diagnosis:
    """Collects what the runs of a gradient show, without a verdict and advice."""
    run = runs.judged
    loss_scale = _loss_scale_in(opt_state)
    dtypes = gradient.narrow_dtypes
    overflow = runs.fit.overflow
    off, wrong_results = off_and_wrong(runs)
    wrong_names = {result.name for result in wrong_results}
    right = off.keys() - wrong_names
    underflow = {}
    if runs.fit.scale is not None and np.float16 in dtypes:
        underflow = underflow_by_group(runs.at_1.grads, run.grads, right)
    # If a result is wrong already, one cannot tell how much of its error is due to
    # choices.
    by_choices = {} if wrong_results else off_by_choices(runs, right)
    return Diagnosis(
        is_autocast=is_autocast,
        dtypes=report_of(gradient.jaxpr.jaxpr),
        computes_in=dtypes,
        loss=float(run.loss.pair.actual),
        loss_in_float32=_loss_in_float32(runs),
        loss_dtype=gradient.jaxpr.out_avals[0].dtype,
        scale=run.scale,
        undetermined=_undetermined(run, judged=off.keys() | wrong_names),
        loss_scale=None if loss_scale is None else float(loss_scale()),
        is_scale_fixed=isinstance(loss_scale, FixedLossScale),
        wrong=tuple(wrong_results or wrong_intermediate_value(runs, dtypes)),
        off=off,
        off_by_choices=by_choices,
        choices=tuple(choices_of(run, by_choices)),
        initial_scale=runs.fit.scale,
        overflow=overflow.row if overflow else None,
        has_gradients=any(np.any(x.pair.reference) for x in run.grads.values()),
        is_finite_unscaled=runs.at_1.is_finite,
        off_unscaled=_off_unscaled(runs, right),
        underflow=underflow,
        not_compared=runs.not_compared,
        table=table_of(run.notes),
    )


def _loss_scale_in(opt_state: Any) -> LossScale | None:
    """Returns the loss scale in an optimizer's state, or None if there is none."""
    return get_loss_scale(opt_state) if loss_scales_in(opt_state) else None


def _undetermined(run: Run, judged: Container[str]) -> tuple[str, ...]:
    """Names the gradients that were not judged, except for constant ones."""
    return tuple(
        name for name, value in run.grads.items() if value.note and name not in judged
    )


def _loss_in_float32(runs: Runs) -> float:
    """Returns the loss in float32, for the report to compare with the program's.

    It follows the program's choices. If it is not finite with these, the loss with
    float32's own choices is returned instead, if there was a run in float32.
    """
    loss = runs.judged.loss.pair.reference
    if runs.in_float32 and not np.isfinite(loss):
        loss = runs.in_float32.loss.pair.actual
    return float(loss)


def _off_unscaled(runs: Runs, right: Container[str]) -> dict[str, float]:
    """Finds the gradients that need a loss scale, and how far they are off without one.

    These are right in the judged run, and off by more than 5% at a scale of 1.
    """
    off = {}
    for name, value in runs.at_1.grads.items():
        if name in right and value.note and value.note.error > TOLERANCE:
            off[name] = value.note.error
    return off
