"""`diagnose`: a full report on a model in 16 bits, from a loss function and a batch.

The gradient is traced (`gradient`) and run beside float32 (`run`). From the notes of
these runs, this file finds what is off and why (`cause`), and fills the page.
"""

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from optax_lossscale._arrays import validation
from optax_lossscale._arrays.contexts import IS_REPORTED
from optax_lossscale._autocast.autocast import autocast
from optax_lossscale._diagnosis.advice import advised
from optax_lossscale._diagnosis.cause import How, Wrong, cause_in_float32, cause_of
from optax_lossscale._diagnosis.dtypes import report_of
from optax_lossscale._diagnosis.figures import TOLERANCE
from optax_lossscale._diagnosis.gradient import Gradient, gradient_of
from optax_lossscale._diagnosis.loops import notes_of
from optax_lossscale._diagnosis.notes import (
    A_VALUE_INSIDE,
    FIFTH,
    THE_LOSS,
    Note,
    all_before,
    limits,
)
from optax_lossscale._diagnosis.page import Diagnosis
from optax_lossscale._diagnosis.pairs import Pair
from optax_lossscale._diagnosis.run import Run, Runs, runs_of
from optax_lossscale._diagnosis.scale import underflow
from optax_lossscale._diagnosis.table import rounds_of, table_of
from optax_lossscale._step.get import get_loss_scale, loss_scales_in
from optax_lossscale._step.gradient import check_keywords

# The least size to compare: smaller numbers may lack digits in float32.
_COMPARABLE = 2.0**-100
# Of a result that is 0 in float32, these say that two things are to be equal.
_OF_DIFFERENCES = (How.CANCELS, How.SATURATES)
_FAR_LESS = 4  # times: an error of float32 that is so much less than that of 16 bits
_NOTHING_RIGHT = 0.5  # an error from which on a number has no digit that is right
_FEW = 0.01  # the share of choices that may differ, as near a tie either is as good


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
    for it, at a loss scale of 1 and at the one that fits. It reports whether the loss,
    the gradients and the values inside are right; if not, in which line and layer they
    go wrong, and what to do; which loss scale fits, and how many gradients are lost to
    underflow. Float32 makes the same choices as the program, such as indices and
    branches; if it would make others, it is run with its own choices as well. Constants
    are as they were rounded when the program was traced: 0.999 is 1 in bfloat16. A loss
    function that computes in float32 is diagnosed as `autocast` runs it. Call
    `diagnose` on the host, with a loss function that names no axis of `pmap` or
    `shard_map` around it. A skipped step has left everything as it was, so that it can
    be diagnosed afterwards. Other parameters and batches may behave differently.

    Args:
      loss_fn: called as `loss_fn(params, *args, **kwargs)`; returns the loss, which
        need not be scaled. A scale from `scale_gradient` is left out.
      params: the parameters: a tree of arrays, a module of NNX or Equinox.
      *args: a batch; what is not an array is passed on as it is.
      has_aux: whether `loss_fn` returns `(loss, aux)`; the floats in `aux` are compared
        as values inside.
      opt_state: the optimizer's state, whose loss scale is compared with the one that
        fits.
      **kwargs: further keyword arguments of `loss_fn`.

    Returns:
      A `Diagnosis`: print it, or read its `verdict`, `advice`, `wrong`, `table` and
        other fields.

    Raises:
      TypeError: if the loss is not a real floating-point scalar, or `loss_fn` is not a
        function, or makes a `jax.Ref`.

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
        IS_REPORTED(True),
    ):
        gradient = gradient_of(loss_fn, params, args, kwargs, has_aux)
        is_wide = not gradient.narrow_dtypes
        if is_wide:
            gradient = gradient_of(autocast(loss_fn), params, args, kwargs, has_aux)
        return _page(gradient, runs_of(gradient), is_wide, opt_state)


def _page(
    gradient: Gradient, runs: Runs, is_autocast: bool, opt_state: Any
) -> Diagnosis:
    """The page that the runs give."""
    run = runs.fitting
    dtypes = gradient.narrow_dtypes
    off, wrong = _off_and_wrong(runs)
    inside = [] if wrong else _wrong_inside(runs, dtypes)
    off_by_choices = _off_by_choices(runs, off)
    lost = {}
    if runs.fits and np.float16 in dtypes:
        lost = underflow(runs.at_1.grads, run.grads, off)
    has_scale = loss_scales_in(opt_state)
    page = Diagnosis(
        verdict="",
        advice=[],
        is_autocast=is_autocast and bool(dtypes),
        dtypes=report_of(gradient.jaxpr.jaxpr),
        computes_in=dtypes,
        loss=float(run.loss.pair.low),
        loss_in_float32=_loss_in_float32(runs),
        loss_dtype=gradient.jaxpr.out_avals[0].dtype,
        scale=run.scale,
        loss_scale=float(get_loss_scale(opt_state)()) if has_scale else None,
        wrong=tuple(_in_a_report(one, run) for one in wrong or inside),
        off=off,
        off_by_choices=off_by_choices,
        # Where results are wrong, they are off for that reason.
        choices=tuple(_choices(run, {} if wrong else off_by_choices)),
        initial_scale=runs.fits,
        overflow=runs.overflow and runs.overflow.row,
        has_gradients=any(np.any(x.pair.true) for x in run.grads.values()),
        is_finite_without=runs.at_1.is_finite(),
        off_without=_off_without(runs, off),
        underflow=lost,
        not_compared=runs.passed,
        table=table_of(run.notes),
    )
    return advised(page)


def _loss_in_float32(runs: Runs) -> float:
    """The loss in float32: by the program's choices, or else its own if it is finite."""
    loss = runs.fitting.loss.pair.true
    if runs.in_float32 and not np.isfinite(loss):
        loss = runs.in_float32.loss.pair.low
    return float(loss)


def _off_and_wrong(runs: Runs) -> tuple[dict[str, float], list[Wrong]]:
    """How far the loss and gradients are off, by name; and which of them are wrong.

    A result that float32 does not determine is in neither.
    """
    off = {}
    wrong = []
    in_float32 = runs.in_float32.results if runs.in_float32 else {}
    for name, value in runs.fitting.results.items():
        note = value.note
        if note is None:  # it is a constant, and so exact
            if name == THE_LOSS:
                off[name] = 0.0
            continue
        if not note.is_finite:
            wrong.append(_cause_of_infinity(runs, name, note))
        elif note.bad or not in_float32 or _determines(in_float32[name].note, note):
            one = _what_is_wrong(runs, name, note)
            if one is None:
                off[name] = note.error
            elif note.typical or one.how not in _OF_DIFFERENCES:
                off[name] = one.off
                wrong.append(one)
    wrong.sort(key=lambda one: (one.name != THE_LOSS, -one.off))
    return off, wrong


def _cause_of_infinity(runs: Runs, name: str, note: Note) -> Wrong:
    """Why a result is not finite in float32 if that makes the choices of the program.

    By its own choices, float32 may be finite. Then the first number that 16 bits do not
    hold is at fault, as one that `logsumexp` finds infinite and does not subtract.
    """
    if runs.in_float32 and np.isfinite(runs.in_float32.results[name].pair.low).all():
        before = set(all_before([note]))
        for one in runs.fitting.notes:
            if one.bad and one in before:
                return cause_of(name, one)
    return cause_in_float32(name, note)


def _determines(in_float32: Note | None, note: Note) -> bool:
    """Whether float32 determines a value so well that 16 bits can be wrong about it.

    So float32 is off from float64 by 5% at most, or by far less than 16 bits are from
    float32, unless nothing is right in it.

    Args:
      in_float32: the note of the value in float32 beside float64, if there is one.
      note: its note in 16 bits beside float32.
    """
    least = min(note.error / _FAR_LESS, _NOTHING_RIGHT)
    return in_float32 is None or in_float32.error <= max(TOLERANCE, least)


def _what_is_wrong(runs: Runs, name: str, note: Note) -> Wrong | None:
    """What is wrong with the loss or a gradient, if anything is."""
    if note.error > TOLERANCE:
        return cause_of(name, note)
    scale = runs.fitting.scale
    off = _out_of_proportion(runs.at_1.results[name].note, note, scale)
    if off <= TOLERANCE:
        return None
    at_1 = runs.at_1.by_result
    at_fault = (
        one
        for one in runs.fitting.notes
        if _out_of_proportion(at_1.get(one.result), one, scale) > TOLERANCE
    )
    return Wrong(name, off, How.IS_NOT_LINEAR, next(at_fault, note))


def _out_of_proportion(at_1: Note | None, note: Note, scale: float) -> float:
    """How far a result in float32 is from being in proportion to the loss scale."""
    if at_1 is None or not note.is_backward or at_1.typical < _COMPARABLE:
        return 0.0
    return abs(note.typical / (at_1.typical * scale) - 1)


def _off_without(runs: Runs, off: Mapping[str, float]) -> dict[str, float]:
    """How far gradients are off without a loss scale, of those that are right with one."""
    return {
        name: value.note.error
        for name, value in runs.at_1.grads.items()
        if value.note and off.get(name, 1.0) <= TOLERANCE < value.note.error
    }


def _off_by_choices(runs: Runs, determined: Container[str]) -> dict[str, float]:
    """How far results are off from float32 with its own choices, if by much.

    `determined` has the names of the results that float32 determines.
    """
    if runs.in_float32 is None or not any(note.decided for note in runs.fitting.notes):
        return {}
    results = runs.fitting.results
    off = {}
    for name, value in runs.in_float32.results.items():
        pair = Pair(results[name].pair.low, value.pair.low)
        error = pair.compared().figures.error
        if name in determined and error > TOLERANCE:
            off[name] = error
    return off


def _wrong_inside(runs: Runs, dtypes: Sequence[np.dtype]) -> list[Wrong]:
    """The first value inside of which a fifth is off, as is a value computed from it.

    A value does not count if float32 does not determine it, if all that is computed
    from it is below float16's normal numbers in a program of float16, or if no result
    is computed from it, as of a loop's condition. What the loss function returns beside
    the loss counts by itself, and also if it is not finite.
    """
    run = runs.fitting
    least = limits(np.float16)[1] if np.float16 in dtypes else 0.0
    aux = notes_of(run.aux)
    used = set(all_before([*notes_of(run.results.values()), *aux]))
    in_float32 = runs.in_float32.by_result if runs.in_float32 else {}
    spread = []
    for note in run.notes:
        if note not in used or note.is_backward or note.off_share <= FIFTH:
            continue
        beside = in_float32.get(note.result)
        if beside is None or beside.off_share <= FIFTH or _determines(beside, note):
            spread.append(note)
    follows = {
        read
        for note in spread + aux
        if note.typical >= least
        for read in all_before(note.reads, _if_moved)
    }
    for note in aux:
        if note.bad:
            return [cause_of(A_VALUE_INSIDE, note)]
    for note in spread:
        if note in follows:
            return [cause_of(A_VALUE_INSIDE, note)._replace(off=note.off_share)]
    return []


def _if_moved(note: Note) -> Sequence[Note]:
    """What a note is of, if a loop only moved that; nothing for the note of an equation."""
    return () if note.is_computed else note.reads


def _in_a_report(one: Wrong, run: Run) -> Wrong:
    """Drops the notes before it, and finds whether it is in an inner derivative."""
    at = one.place
    # The loss depends on a derivative inside of its function, and not on one in a rule
    # for the backward pass.
    is_before_the_loss = at in all_before(notes_of([run.loss]))
    return one._replace(
        place=at.row,
        rounded=tuple(note.row for note in one.rounded),
        is_inner=at.place.is_derivative and not at.is_backward and is_before_the_loss,
    )


def _choices(run: Run, off_by_choices: Mapping[str, float]) -> list[Note]:
    """The choices that float32 would have made otherwise, each in its worst round.

    Those that differ most come first. Unless the loss is off by them, or a gradient by
    a fifth, these are masks that differ in a fifth, and others that differ in more than
    a few numbers. There are none if the loss is not finite, as a comparison with NaN
    means nothing.
    """
    if not np.isfinite(run.loss.pair.low):
        return []
    are_all = (
        THE_LOSS in off_by_choices or max(off_by_choices.values(), default=0) > FIFTH
    )
    choices = []
    for rounds in rounds_of(run.notes):
        note = max(rounds, key=lambda note: note.decided)
        is_mask = note.dtype == np.bool_ and note.count > 1
        least = FIFTH if is_mask else _FEW
        if note.decided > (0.0 if are_all else least):
            choices.append(note.row)
    return sorted(choices, key=lambda row: row.decided, reverse=True)
