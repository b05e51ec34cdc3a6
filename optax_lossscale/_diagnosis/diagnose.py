"""A full diagnosis of a model in 16 bits, from one loss function and a batch."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale._arrays import validation
from optax_lossscale._autocast.autocast import autocast
from optax_lossscale._diagnosis.advice import judged
from optax_lossscale._diagnosis.cause import cause_in_float32, cause_of
from optax_lossscale._diagnosis.dtypes import report_of
from optax_lossscale._diagnosis.gradient import Gradient, gradient_of
from optax_lossscale._diagnosis.moments import moments_of
from optax_lossscale._diagnosis.notes import FIFTH, TOLERANCE, Note
from optax_lossscale._diagnosis.page import Choice, Diagnosis, Place, Wrong
from optax_lossscale._diagnosis.run import Run, Runs, runs_of
from optax_lossscale._diagnosis.scale import underflow
from optax_lossscale._diagnosis.table import layer_of, table_of
from optax_lossscale._step.get import get_loss_scale, loss_scales_in
from optax_lossscale._step.gradient import refuse_shared_names

_FEW = 0.01  # of choices, which may be decided either way


def diagnose(
    loss_fn: Callable[..., Any],
    params: Any,
    *args: Any,
    has_aux: bool = False,
    opt_state: Any = None,
    **kwargs: Any,
) -> Diagnosis:
    """Says whether 16 bits are fine for a model as it is, and if not, what to do.

    Runs the gradient of the loss function with every value beside what float32 gives for it, at a
    loss scale of 1 and at the one that fits. It reports whether the loss, the gradients and the
    values inside are right; if not, in which line and layer they go wrong, and what to do; which
    loss scale fits, and how many gradients are lost to underflow. Choices, such as indices and
    branches, are those of the program. A loss function that computes in float32 is diagnosed as
    `autocast` makes it. Call it on the host, with a loss function that names no axis of `pmap`
    or `shard_map` around it. A skipped step has left everything as it was, so that it can be
    diagnosed afterwards. Other parameters and batches may behave differently.

    Args:
      loss_fn: called as `loss_fn(params, *args, **kwargs)`; returns the loss, which need not be
        scaled. A scale from `scale_gradient` is left out.
      params: the parameters: a tree of arrays, a module of NNX or Equinox.
      *args: a batch; what is not an array is passed on as it is.
      has_aux: whether `loss_fn` returns `(loss, aux)`.
      opt_state: the optimizer's state. If it holds a loss scale, that is compared with the one
        that fits. If it is that of Adam or the like, its second moments are examined: as they are
        or, before the first step, as these gradients will make them.
      **kwargs: further keyword arguments of `loss_fn`.

    Returns:
      A `Diagnosis`: print it, or read its `verdict`, `advice`, `wrong`, `table` and other fields.

    Raises:
      TypeError: if the loss is not a real floating-point scalar, or `loss_fn` is not a function.

    Example:
      >>> import jax.numpy as jnp
      >>> import optax_lossscale as ols
      >>> def loss_fn(params, x):
      ...     y = params["w"].astype(jnp.float16) * x
      ...     return jnp.mean(y.astype(jnp.float32)) * 1e-3
      >>> x = jnp.full(256, 0.01, jnp.float16)
      >>> report = ols.diagnose(loss_fn, {"w": jnp.ones(256)}, x)  # print it for the whole page
      >>> print(report.verdict)
      Without a loss scale, float16 loses 100.0% of the gradients to underflow.
      >>> print(report.initial_scale)
      2**31, with 2 bits to spare before gradients overflow
    """
    validation.function("loss_fn", loss_fn)
    refuse_shared_names(loss_fn, ["has_aux", "opt_state"], (params, *args))
    validation.at_hand("diagnose", (params, args, kwargs, opt_state))
    # What is not finite is to be found here, and what is on the host to be looked at.
    with jax.debug_nans(False), jax.debug_infs(False), jax.transfer_guard("allow"):
        gradient = gradient_of(loss_fn, params, args, kwargs, has_aux)
        is_wide = not gradient.narrow_dtypes
        if is_wide:
            gradient = gradient_of(autocast(loss_fn), params, args, kwargs, has_aux)
        return judged(_page(gradient, runs_of(gradient), is_wide, opt_state))


def _page(gradient: Gradient, runs: Runs, is_autocast: bool, opt_state: Any) -> Diagnosis:
    """What the runs say, without a verdict."""
    run = runs.fitting
    true_grads = {name: np.asarray(x.pair.true) / run.scale for name, x in run.grads.items()}
    loss_scales = loss_scales_in(opt_state)
    dtypes = gradient.narrow_dtypes
    off, wrong = _off_and_wrong(run)
    lost = {}
    if runs.fits and np.float16 in dtypes:
        at_1, fitting = (list(one.grads.values()) for one in (runs.at_1, run))
        lost = underflow(gradient.grad_names, at_1, fitting)
    return Diagnosis(
        verdict="",
        advice=[],
        is_autocast=is_autocast and bool(dtypes),
        dtypes=report_of(gradient.jaxpr.jaxpr),
        computes_in=dtypes,
        loss=float(run.loss.pair.low),
        loss_in_float32=float(run.loss.pair.true),
        loss_dtype=gradient.loss_dtype,
        scale=run.scale,
        loss_scale=float(get_loss_scale(opt_state)()) if loss_scales else None,
        wrong=wrong,
        off=off,
        choices=tuple(_choices(run)),
        initial_scale=runs.fits,
        overflow=_place(runs.overflow) if runs.overflow else None,
        is_finite_without=runs.at_1.is_finite(),
        underflow=lost,
        moments=moments_of(opt_state, true_grads),
        not_compared=tuple((operation, line) for line, operation in runs.passed.items()),
        table=table_of(run.notes),
    )


def _off_and_wrong(run: Run) -> tuple[dict[str, float], tuple[Wrong, ...]]:
    """How far the loss and gradients are off, without what float32 does not determine; and why."""
    off = {}
    wrong = []
    for name, value in run.results.items():
        note = value.note
        if note is None:  # it depends on nothing
            continue
        if note.bad_true:
            wrong.append(_wrong(name, note, cause_in_float32(note)))
            continue
        cause = cause_of(note) if note.off > TOLERANCE else None
        if cause is not None:
            wrong.append(_wrong(name, note, cause))
        if cause is not None or note.off <= TOLERANCE:
            off[name] = note.off
    wrong = sorted(wrong, key=lambda one: (one.name != "the loss", -one.off))
    if not wrong:
        wrong = list(_wrong_inside(run))
    return off, tuple(wrong)


def _wrong_inside(run: Run) -> Iterator[Wrong]:
    """The first value inside of which a fifth is off, and what follows from it too."""
    spread = [note for note in run.notes if not note.seeded and note.off_share > FIFTH]
    read = {id(one) for note in spread for one in note.reads}
    for note in spread:
        if id(note) in read:
            cause = cause_of(note)
            if cause is not None:
                yield _wrong("a value inside", note, cause)._replace(off=note.off_share)
                return


def _wrong(name: str, note: Note, cause: Any) -> Wrong:
    at = cause.note
    is_inner = at.place.is_derivative and not at.seeded
    return Wrong(
        name,
        note.off,
        cause.how,
        _place(at),
        tuple(_place(product) for product in cause.products),
        at.seeded,
        is_inner,
        at.bad_true,
    )


def _place(note: Note) -> Place:
    place = note.place
    return Place(
        place.primitive or place.name, place.source, layer_of(note), note.rounds, note.dtype
    )


def _choices(run: Run) -> Iterator[Choice]:
    """Indices and integers of which float32 would have decided some otherwise."""
    worst: dict[int, Note] = {}
    for note in run.notes:
        is_bool = jnp.issubdtype(note.dtype, jnp.bool_) and note.count > 1
        before = worst[note.number].decided if note.number in worst else 0.0
        if note.decided > max(FIFTH if is_bool else _FEW, before):
            worst[note.number] = note
    for note in worst.values():
        yield Choice(note.decided, note.count, _place(note))
