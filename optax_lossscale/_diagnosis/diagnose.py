"""`diagnose`: a full report on a model in 16 bits, from a loss function and a batch.

The gradient is traced (`gradient`) and run beside float32 (`run`). This file fills the
report with what follows from these runs: what is off and why (`wrong`, `choices`), and
which loss scale fits (`scale`).
"""

from collections.abc import Callable, Container
from typing import Any

import jax
import numpy as np

from optax_lossscale._arrays import validation
from optax_lossscale._arrays.contexts import DIAGNOSING
from optax_lossscale._arrays.placement import in_mesh_of
from optax_lossscale._autocast.autocast import autocast
from optax_lossscale._diagnosis.advice import verdict_and_advice
from optax_lossscale._diagnosis.choices import choices_of, off_by_choices
from optax_lossscale._diagnosis.dtypes import report_of
from optax_lossscale._diagnosis.figures import TOLERANCE
from optax_lossscale._diagnosis.gradient import Gradient, gradient_of
from optax_lossscale._diagnosis.page import Diagnosis, Findings
from optax_lossscale._diagnosis.run import Run, Runs, runs_of
from optax_lossscale._diagnosis.scale import underflow
from optax_lossscale._diagnosis.table import table_of
from optax_lossscale._diagnosis.wrong import off_and_wrong, wrong_inside
from optax_lossscale._step.get import get_loss_scale
from optax_lossscale._step.gradient import check_keywords
from optax_lossscale._step.state import loss_scales_in


def diagnose(
    loss_fn: Callable[..., Any],
    params: Any,
    *args: Any,
    has_aux: bool = False,
    opt_state: Any = None,
    **kwargs: Any,
) -> Diagnosis:
    """Says whether 16 bits are fine for a model as it is, and if not, what to do.

    Runs the gradient of the loss function with every value beside what float32 gives
    for it, at a loss scale of 1 and, where gradients are in float16, at the one that
    fits. It reports whether the loss,
    the gradients and the values inside are right. Where they are wrong, it names the
    line and the layer, and says what to do. It finds the loss scale that fits, and how
    many gradients are lost to underflow. A loss function that computes in float32 is
    diagnosed as `autocast` runs it.

    Float32 makes the same choices as the program, such as indices and branches. If it
    would make others, or if anything is off, the gradient is also run in float32 with
    its own choices, beside float64. Constants are the same
    in float32 as tracing the program left them: where bfloat16 has rounded 0.999 to 1, it
    is 1 in float32 too, and no error is found.

    A run that takes long prints a line of progress to stderr every 10 seconds or so.

    Call `diagnose` on the host, with a loss function that names no axis of `pmap` or
    `shard_map` around it. A skipped step has left everything as it was, so that it can
    be diagnosed afterwards. Other parameters and batches may behave differently.

    Args:
      loss_fn: a function of `(params, *args, **kwargs)` that returns the loss, which
        need not be scaled. A scale from `scale_gradient` is left out.
      params: the parameters: a tree of arrays, a module of NNX or Equinox.
      *args: a batch. What is not an array is passed on as it is.
      has_aux: whether `loss_fn` returns `(loss, aux)`. The floats in `aux` are compared
        as values inside.
      opt_state: the optimizer's state, whose loss scale is compared with the one that
        fits.
      **kwargs: further keyword arguments of `loss_fn`.

    Returns:
      A `Diagnosis`: print it, or read its `verdict`, `advice`, `wrong`, `table` and
        other fields.

    Raises:
      TypeError: if `loss_fn` is not a function, returns no real floating-point scalar,
        or makes a `jax.Ref`; if a keyword argument of it is named `has_aux` or
        `opt_state`; if an argument is a traced array, as inside of `jit`, or a
        `jax.ShapeDtypeStruct`.
      ValueError: if `opt_state` holds more than one loss scale.

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
    validation.check_function("loss_fn", loss_fn)
    check_keywords(loss_fn, ["has_aux", "opt_state"], (params, *args))
    validation.check_concrete("diagnose", (params, args, kwargs, opt_state))
    # Numbers that are not finite have to be found here, not raised, and the host has to
    # look at all of them.
    with (
        jax.debug_nans(False),
        jax.debug_infs(False),
        jax.transfer_guard("allow"),
        DIAGNOSING(True),
        in_mesh_of((params, args, kwargs)),
    ):
        gradient = gradient_of(loss_fn, params, args, kwargs, has_aux)
        is_wide = not gradient.narrow_dtypes
        if is_wide:
            gradient = gradient_of(autocast(loss_fn), params, args, kwargs, has_aux)
        return _report(gradient, runs_of(gradient), is_wide, opt_state)


def _report(
    gradient: Gradient, runs: Runs, is_autocast: bool, opt_state: Any
) -> Diagnosis:
    """The report on a gradient and its runs."""
    findings = _findings(gradient, runs, is_autocast, opt_state)
    products = report_of(gradient.forward).products
    widened = [product for product in products if product.is_widened]
    verdict, advice = verdict_and_advice(findings, widened)
    return Diagnosis(verdict=verdict, advice=advice, **vars(findings))


def _findings(
    gradient: Gradient, runs: Runs, is_autocast: bool, opt_state: Any
) -> Findings:
    """What the runs show."""
    run = runs.fitting
    dtypes = gradient.narrow_dtypes
    overflow = runs.fit.overflow
    may_scale = runs.fit.scale is not None and np.float16 in dtypes
    has_scale = loss_scales_in(opt_state)
    off, wrong_results = off_and_wrong(runs)
    right = off.keys() - {result.name for result in wrong_results}
    # Beside a result that is wrong, it would not be known what choices change.
    by_choices = {} if wrong_results else off_by_choices(runs, right)
    return Findings(
        is_autocast=is_autocast and bool(dtypes),
        dtypes=report_of(gradient.jaxpr.jaxpr),
        computes_in=dtypes,
        loss=float(run.loss.pair.actual),
        loss_in_float32=_loss_in_float32(runs),
        loss_dtype=gradient.jaxpr.out_avals[0].dtype,
        scale=run.scale,
        undetermined=_undetermined(run, {*off, *(x.name for x in wrong_results)}),
        loss_scale=float(get_loss_scale(opt_state)()) if has_scale else None,
        wrong=tuple(wrong_results or wrong_inside(runs, dtypes)),
        off=off,
        off_by_choices=by_choices,
        choices=tuple(choices_of(run, by_choices)),
        initial_scale=runs.fit.scale,
        overflow=overflow.row if overflow else None,
        has_gradients=any(np.any(x.pair.reference) for x in run.grads.values()),
        is_finite_without=runs.at_1.is_finite,
        off_without=_off_without(runs, right),
        underflow=underflow(runs.at_1.grads, run.grads, right) if may_scale else {},
        not_compared=runs.not_compared,
        table=table_of(run.notes),
    )


def _undetermined(run: Run, judged: Container[str]) -> tuple[str, ...]:
    """The names of the gradients that were not judged. One that is constant is right."""
    return tuple(
        name for name, value in run.grads.items() if value.note and name not in judged
    )


def _loss_in_float32(runs: Runs) -> float:
    """The loss in float32: by the program's choices, or else its own if it is finite."""
    loss = runs.fitting.loss.pair.reference
    if runs.in_float32 and not np.isfinite(loss):
        loss = runs.in_float32.loss.pair.actual
    return float(loss)


def _off_without(runs: Runs, right: Container[str]) -> dict[str, float]:
    """How far gradients are off without a loss scale, of those that are right with one."""
    return {
        name: value.note.error
        for name, value in runs.at_1.grads.items()
        if name in right and value.note and value.note.error > TOLERANCE
    }
