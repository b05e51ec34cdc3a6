"""Two assertions that run a step at loss scales of their choice.

Scaling by a power of two is exact. So between two loss scales at which nothing
underflows or overflows, whatever does not depend on the loss scale agrees to the last
bits, which `assert_scale_invariant` compares. At an infinite loss scale, all gradients
overflow, and `assert_survives_overflow` sees what the skipped step leaves behind.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from optax_lossscale._arrays.precision import is_inexact_leaf
from optax_lossscale.testing._run import (
    Number,
    Outcome,
    Runner,
    check_no_drift,
    is_equal,
    listed,
    not_ignored,
)

# The highest loss scale tried is 2**40: the squares of gradients stay finite in float32
_HIGHEST = 40
_LOWEST = -24
# How many octaves lie between the loss scales that are compared. With eight, underflow
# changes the gradient of a bias before a batch norm, which is nothing but rounding.
_OCTAVES = 4


def assert_scale_invariant(
    step: Callable[..., Any],
    /,
    *args: Any,
    carry: Mapping[int, int] | None = None,
    ignore: str | Collection[str] = (),
    rtol: float = 1e-3,
) -> None:
    runner = Runner("assert_scale_invariant", step, args, carry)
    if not runner.loss_scales:
        raise ValueError(
            "no loss scale among the step's arguments adapts, so none can be varied. "
            "Test the step with one that does: with_loss_scale(optimizer, 'dynamic'). "
            "In bfloat16, without a loss scale, a step needs no such test"
        )
    highest, exponent = _highest_applied(runner)
    if highest.norms and not np.any(highest.norms):
        raise ValueError(
            "all gradients are zero, so nothing can be seen of the loss scale. Pass "
            "arguments at which the loss has gradients"
        )
    lower = runner.at(exponent - _OCTAVES, before_growth=True)
    if runner.at(np.inf).was_applied:
        raise AssertionError(_NEVER_SCALED)
    check_no_drift(highest, ignore)
    changes = {
        name: _change(highest.numbers[name], lower.numbers[name])
        for name in highest.numbers.keys() & lower.numbers.keys()
    }
    changes = not_ignored(changes, ignore, highest.numbers)
    wrong = {name: change for name, change in changes.items() if not change <= rtol}
    if wrong:
        lines = [f"{name} by {wrong[name]:.0%}" for name in sorted(wrong)]
        raise AssertionError(
            _DEPENDS.format(
                lower=exponent - _OCTAVES, higher=exponent, names=listed(lines)
            )
        )


def assert_survives_overflow(
    step: Callable[..., Any],
    /,
    *args: Any,
    carry: Mapping[int, int] | None = None,
    ignore: str | Collection[str] = (),
    nan_in: int | None = None,
) -> None:
    runner = Runner("assert_survives_overflow", step, args, carry)
    if not runner.loss_scales and nan_in is None:
        raise ValueError(
            "no loss scale among the step's arguments adapts, so none can be set to "
            "infinity. Say which argument to put a NaN in, usually the batch: nan_in=2"
        )
    applied = runner.at(0) if runner.loss_scales else runner.as_given()
    check_no_drift(applied, ignore)
    if applied.lost or all(x.before is None for x in applied.numbers.values()):
        raise ValueError(_NOT_HANDED_ON)
    if runner.loss_scales:
        overflow = runner.at(np.inf)
        if overflow.was_applied:
            raise AssertionError(_APPLIED.format(situation="at an infinite loss scale"))
        _check_kept(runner, overflow, ignore, "an overflow")
        is_same = all(map(is_equal, overflow.scales, applied.scales))
        if is_same or not np.all(np.isfinite(np.concatenate(overflow.scales, None))):
            raise AssertionError(_NOT_ADAPTED)
    if nan_in is not None:
        spoiled = runner.with_nan_in(nan_in)
        if spoiled.was_applied and spoiled.norms:
            where = f"with a NaN in argument {nan_in}"
            raise AssertionError(_APPLIED.format(situation=where))
        _check_kept(runner, spoiled, ignore, f"a NaN in argument {nan_in}")


def _highest_applied(runner: Runner) -> tuple[Outcome, int]:
    """Returns the outcome at the highest loss scale at which the step is applied."""
    for exponent in range(_HIGHEST, _LOWEST - 1, -_OCTAVES):
        outcome = runner.at(exponent)
        if outcome.was_applied:
            return outcome, exponent
    raise AssertionError(_ALWAYS_SKIPPED)


def _change(x: Number, y: Number) -> float:
    """Returns the relative difference of an array at two loss scales.

    Of what is handed on, only its change by the step counts. Numbers are equal if they
    are neighbors in their dtype, as rounding may part them.
    """
    if not is_inexact_leaf(x.value):
        return 0.0 if is_equal(x.value, y.value) else np.inf
    wide = np.complex128 if np.iscomplexobj(x.value) else np.float64
    a = x.value.astype(wide)
    b = y.value.astype(wide)
    is_finite = np.isfinite(a) & np.isfinite(b)
    if not is_equal(x.value[~is_finite], y.value[~is_finite]):
        return np.inf
    a = a[is_finite]
    b = b[is_finite]
    before = 0 if x.before is None else np.nan_to_num(x.before.astype(wide)[is_finite])
    import ml_dtypes
    eps = float(ml_dtypes.finfo(np.zeros((), x.value.dtype).real.dtype).eps)
    off = np.where(np.abs(a - b) <= eps * np.abs(a), 0, a - b)
    size = (np.linalg.norm(a - before) + np.linalg.norm(b - before)) / 2
    return float(np.linalg.norm(off) / size) if np.any(off) else 0.0


def _check_kept(
    runner: Runner, outcome: Outcome, ignore: str | Collection[str], cause: str
) -> None:
    """Raises an `AssertionError` if a skipped step has changed what it hands on."""
    check_no_drift(outcome, ignore)
    changed = {
        name: x
        for name, x in outcome.numbers.items()
        if x.is_protected and x.before is not None and not is_equal(x.value, x.before)
    }
    changed = not_ignored(changed, ignore, outcome.numbers)
    if changed:
        raise AssertionError(_CHANGED.format(cause=cause, names=listed(changed)))
    if outcome.norms and outcome.skips <= 0:
        raise AssertionError(_UNCOUNTED)


_ALWAYS_SKIPPED = f"""\
the step is skipped at every loss scale tried, from 2**{_HIGHEST} to 2**{_LOWEST}.
Either its gradients are multiplied by a scale other than that of the state that it is
given, such as an older one: use value_and_scaled_grad(loss_fn, state) inside the step.
Or there is a NaN in the arguments, the loss or the model: diagnose(loss_fn, params,
batch) says where."""
_NEVER_SCALED = """\
the step depends on the loss scale: it is applied at an infinite one.
So the gradients are not multiplied by the scale that they are divided by, or what
overflows is replaced before it is seen.
- Compute them with value_and_scaled_grad(loss_fn, state) inside the step, or from
  scale_gradient(loss, state), with the state that the step is given.
- Do not call nan_to_num on gradients, and leave out skip=None."""
_DEPENDS = """\
the step depends on the loss scale.
Between 2**{lower} and 2**{higher}, these change:
{names}
A loss scale multiplies the loss, and the gradients are divided by it once.
- Multiply by the scale of the state that the step is given, and leave it to the
  optimizer to divide by it, before the scale adapts.
- Put what depends on the size of gradients, such as a clip, inside:
  with_loss_scale(optax.chain(clip, …)).
- To log a norm, return ols.metrics(state), or unscale the gradients first:
  get_loss_scale(state).unscale(scaled_grads).
- In a custom_vjp, divide by the loss scale first, and multiply by it afterwards.
- If a result stands for an argument in another place, say so: carry={{argument: result}}.
- If something may depend on the loss scale, name it in ignore=."""
_APPLIED = """\
the step is applied {situation}.
- Compute the gradients with value_and_scaled_grad(loss_fn, state), or from
  scale_gradient(loss, state), with the state that the step is given.
- Do not call nan_to_num on gradients, and leave out skip=None.
- Return the new state as it is, not the old one or one put together from both.
- If gradients do not depend on that NaN, or are all zero, pass other arguments."""
_CHANGED = """\
{cause} changed it: what the step hands on is not what was given:
{names}
- Of a result outside the optimizer, keep the old value if the step was skipped:
  new = ols.where_applied(state, new, old), with the state after the step.
- Put what is chained after the wrapper inside: with_loss_scale(optax.chain(…)).
- In a step of your own, keep parameters and optimizer state, or call tx.minimize.
- If it is no new value of the argument in its place, say which is:
  carry={{argument: result}}, as in carry={{0: 0, 1: 1}}."""
_UNCOUNTED = """\
the step is skipped, but the state that comes back does not count the skip.
Return the new state as it is, not one put together from the old and the new."""
_NOT_ADAPTED = """\
the step does not adapt its loss scale.
After an overflow it comes back as it was given, or as it always is. Return the state
that the optimizer returned."""
_NOT_HANDED_ON = """\
the state is not handed on: no result has the structure and shapes of the argument in
its place. Say which result stands for which argument: carry={argument: result}, as in
carry={0: 1, 1: 2} for a step that takes (params, state, batch) and returns (loss, params,
state)"""
