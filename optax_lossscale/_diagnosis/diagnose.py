"""`diagnose`: what 16 bits do to a loss function and its gradient, in numbers."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale._arrays import checks
from optax_lossscale._arrays.contexts import DIAGNOSING
from optax_lossscale._autocast.autocast import autocast
from optax_lossscale._autocast.products import usual_precision
from optax_lossscale._diagnosis.dtypes import DtypeReport, products_in
from optax_lossscale._diagnosis.equation import Value, value_of
from optax_lossscale._diagnosis.figures import compare
from optax_lossscale._diagnosis.gradient import Argument, Gradient, gradient_of
from optax_lossscale._diagnosis.program import Program, Run
from optax_lossscale._diagnosis.report import (
    MOST_SHOWN,
    Diagnosis,
    GradientFigures,
    counted,
)
from optax_lossscale._diagnosis.table import PARAMETER, Origins, Row, ranked
from optax_lossscale._programs.values import is_narrow_dtype
from optax_lossscale._scales.loss_scale import LARGEST_SCALE, SMALLEST_SCALE
from optax_lossscale._step.get_loss_scale import get_loss_scale


def diagnose(
    loss_fn: Callable[..., Any],
    params: Any,
    *args: Any,
    has_aux: bool = False,
    opt_state: Any = None,
    **kwargs: Any,
) -> Diagnosis:
    """Compares a loss and its gradients with float32, equation by equation.

    Call it before you train a model in 16 bits, and when the loss scale collapses, the
    loss is NaN, or gradients vanish or look wrong: then with the parameters and the
    batch of that step. A skipped step leaves the parameters as they were, so this works
    afterward if you have kept its batch.

    The report says how far the loss and the gradients are from float32's, in which line
    and layer they go wrong, which loss scale fits, and what underflows without one.
    `docs/when_something_is_wrong.md` says what to do about each of these.

    A loss function that computes in float32 is run as `autocast` makes it, in float16.
    For bfloat16, pass `autocast(loss_fn, jnp.bfloat16)`.

    Call `diagnose` on the host, outside `jit`, with a loss function that names no axis
    of a surrounding `pmap` or `shard_map`. It runs each equation twice, one by one, so
    it takes far longer than a training step.

    Args:
      loss_fn: a function of `(params, *args, **kwargs)` that returns the loss. The loss
        need not be scaled: `scale_gradient` has no effect here.
      params: the parameters: a tree of arrays, or a module of NNX or Equinox. The
        gradient is taken with respect to its floating-point and complex arrays.
      *args: a batch. Anything that is not an array is passed on as it is.
      has_aux: whether `loss_fn` returns `(loss, aux)`; `aux` is ignored.
      opt_state: the optimizer's state, whose loss scale the report then shows.
      **kwargs: further keyword arguments of `loss_fn`.

    Returns:
      A `Diagnosis`. Print it, or read its `suspects`, `gradients`, `table` and others.

    Raises:
      TypeError: if `loss_fn` is not a function, does not return a real floating-point
        scalar, or makes a `jax.Ref`.
      TypeError: if an argument is a traced array, as inside `jit`, or a
        `jax.ShapeDtypeStruct`.
      ValueError: if `params` holds no floating-point array, or `opt_state` is one that
        `get_loss_scale` refuses.

    Example:
      >>> import jax.numpy as jnp
      >>> import optax_lossscale as ols
      >>> def loss_fn(params, x):
      ...     y = params["w"].astype(jnp.float16) * x
      ...     return jnp.mean(y.astype(jnp.float32)) * 1e-5
      >>> x = jnp.full(256, 0.01, jnp.float16)
      >>> report = ols.diagnose(loss_fn, {"w": jnp.ones(256)}, x)  # print it to see all
      >>> report.gradients["w"].lost_unscaled, report.gradients["w"].lost
      (1.0, 0.0)
      >>> report.initial_scale == 2**38
      True
    """
    checks.check_function("loss_fn", loss_fn)
    checks.check_concrete("diagnose", (params, args, kwargs, opt_state))
    loss_scale = None
    if opt_state is not None:
        loss_scale = float(get_loss_scale(opt_state)())
    # Values that are not finite must be reported, not raised as errors, and the host
    # must be allowed to read all values.
    DIAGNOSING.create()
    with (
        jax.debug_nans(False),
        jax.debug_infs(False),
        jax.transfer_guard("allow"),
        DIAGNOSING(True),
    ):
        gradient = gradient_of(loss_fn, params, args, kwargs, has_aux)
        is_autocast = False
        if not _has_narrow_products(gradient):
            function = autocast(loss_fn)
            narrowed = gradient_of(function, params, args, kwargs, has_aux)
            is_autocast = _has_narrow_products(narrowed)
            gradient = narrowed if is_autocast else gradient
        return _diagnosis(gradient, is_autocast, loss_scale)


def _dtypes(gradient: Gradient) -> DtypeReport:
    return DtypeReport(products_in(gradient.program, usual_precision()))


def _has_narrow_products(gradient: Gradient) -> bool:
    """Whether a product is computed in 16 bits."""
    return any(map(is_narrow_dtype, _dtypes(gradient).shares))


def _diagnosis(
    gradient: Gradient, is_autocast: bool, loss_scale: float | None
) -> Diagnosis:
    """Runs a gradient at a loss scale of 1 and at the one that fits."""
    run = Run([], Origins(), {})
    arguments = [value_of(x.array, _row_of(x)) for x in gradient.arguments]
    loss, *kept = Program(gradient.forward, run)(arguments)
    forward = run.table.copy()

    def backward(scale):
        """Returns the gradients and the rows of a backward pass."""
        run.table.clear()
        seed = value_of(np.asarray(scale, np.float32), is_scaled=True)
        grads = Program(gradient.backward, run)([*kept, seed])
        by_name = dict(zip(gradient.parameters, grads, strict=True))
        return by_name, [row for row in run.table if row in run.origins.read]

    unscaled, unscaled_rows = backward(1.0)
    scale, overflow = _scale_that_fits(unscaled_rows)
    scaled, scaled_rows = (unscaled, unscaled_rows)
    if scale != 1:
        scaled, scaled_rows = backward(scale)
    # What 16 bits make of gradients may be larger than float32's, and so may be the
    # sums on the way to one.
    while scale > 1 and any(
        scaled[name].error == math.inf > unscaled[name].error for name in scaled
    ):
        scale /= 4
        scaled, scaled_rows = backward(scale)
    gradients = {name: _figures(unscaled[name], scaled[name], scale) for name in scaled}
    judged = counted(gradients)
    table = [row for row in (*forward, *scaled_rows) if row in run.origins.read]
    for row in (*table, *unscaled_rows):
        row.layer = row.layer or run.origins.nearest_parameters(row)

    def suspects(grads):
        results = [loss, *(grads[name] for name in judged)]
        return run.origins.suspects(x.fault for x in results if x.fault)

    rows = suspects(scaled)
    if rows:
        # Where no scale fits all, gradients vanish at the one that lets none overflow.
        rows += [x for x in suspects(unscaled) if x.cause == "overflows"]
    results = [loss, *(scaled[name] for name in judged)]
    worst = max(results, key=lambda x: x.error)
    return Diagnosis(
        is_autocast=is_autocast,
        dtypes=_dtypes(gradient),
        loss=float(loss.low),
        loss_in_float32=float(loss.true),
        loss_error=loss.error,
        gradients=gradients,
        suspects=tuple(ranked(rows)[:MOST_SHOWN]),
        largest_error=run.origins.source_of(worst.row) if worst.row else None,
        initial_scale=scale,
        overflow=overflow,
        loss_scale=loss_scale,
        not_finite=tuple(
            argument.name
            for argument, value in zip(gradient.arguments, arguments, strict=True)
            if value.fault
        ),
        not_compared=tuple(row for row in table if not row.is_compared),
        table=tuple(table),
    )


def _row_of(argument: Argument) -> Row | None:
    """Makes a row for a parameter, so that layers without a scope are named for it."""
    if not argument.is_parameter:
        return None
    return Row("", argument.name, PARAMETER, argument.array.dtype)


def _scale_that_fits(rows: Sequence[Row]) -> tuple[float, Row | None]:
    """Returns the loss scale that fits, and the row that overflows first beyond it.

    The backward pass is linear in the loss scale, so a run at 1 shows the largest scale
    at which nothing overflows. The one that fits leaves two bits for gradients to grow.

    Args:
      rows: the rows of a backward pass at a loss scale of 1.
    """
    backward = [row for row in rows if row.is_backward]
    first = min(backward, key=lambda row: row.overflows_at, default=None)
    if first is not None and first.overflows_at <= LARGEST_SCALE:
        return max(first.overflows_at / 8, SMALLEST_SCALE), first
    has_float16 = any(row.dtype == jnp.float16 for row in rows)
    return LARGEST_SCALE / 4 if has_float16 else 1.0, None


def _figures(unscaled: Value, scaled: Value, scale: float) -> GradientFigures:
    figures = compare(scaled.low, scaled.true)
    is_infinite = figures.infinite or figures.undefined
    return GradientFigures(
        error=figures.error,
        lost=figures.lost,
        lost_unscaled=compare(unscaled.low, unscaled.true).lost,
        size=math.inf if is_infinite else figures.size / scale,
    )
