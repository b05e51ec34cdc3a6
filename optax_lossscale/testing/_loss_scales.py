"""Two assertions that run a step at loss scales of their choice.

Scaling by a power of two is exact. So between two loss scales at which nothing
underflows or overflows, whatever does not depend on the loss scale agrees to the last
bits, which `assert_scale_invariant` compares. At an infinite loss scale, all gradients
overflow, and `assert_survives_overflow` sees what the skipped step leaves behind.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax.numpy as jnp
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
# How many octaves lie between the loss scales tried, until the step is applied
_STRIDE = 4
# How many octaves lie between the two that are compared. With six, underflow changes the
# gradient of a bias before a batch norm, which is nothing but rounding, by 90%; with
# four, not at all.
_OCTAVES = 2


def assert_scale_invariant(
    step: Callable[..., Any],
    /,
    *args: Any,
    carry: Mapping[int, int] | None = None,
    ignore: str | Collection[str] = (),
    rtol: float = 2e-5,
) -> None:
    """Raises if anything that a training step computes depends on the loss scale.

    A correct step multiplies the loss by the loss scale and divides the gradients by
    it. Scaling by a power of two is exact, so its results agree to the last bits at all
    loss scales between underflow and overflow. In a wrong step, the two do not cancel.
    Training may not reveal this, because Adam hides the size of gradients.

    The step is run at the highest loss scale at which it is applied, two octaves
    below, where the scale is also about to grow, and at an infinite one: 4 to 19 runs
    on copies of its arguments, and 9 for most models in float16. A toy configuration
    will do: that takes milliseconds, besides the seconds to compile the step once.

    Of what the step hands on, its change is compared; of anything else, its value. Loss
    scales are left out, and so is a dict with all entries of `metrics`, perhaps with a
    prefix. It does not find a threshold on scaled gradients that no scale tried crosses
    (a flag, a histogram), nor what is added to scaled gradients and vanishes beside
    them. A leaf whose gradients underflow even at the highest scale is accused: name it
    in `ignore`.

    Args:
      step: the training step, best compiled. It returns its new state or changes it in
        place, and may donate its arguments. Bind keyword arguments before.
      *args: its arguments, with a loss scale that adapts.
      carry: `{argument: result}`, which result is the new value of which argument, by
        position. By default, that in its place, if structure and shapes agree.
      ignore: names of results that may depend on the loss scale, as in the error:
        `"result[2]['scale']"`, or `"result[2]"` for everything in it.
      rtol: by how much a leaf may differ, in the 2-norm. Float16 models from an MLP to
        a ResNet with biases before batch norm differ by 1e-5 at most.

    Raises:
      AssertionError: if something depends on the loss scale, devices drift apart, the
        step is never or always skipped, or its state does not come back.
      ValueError: if no loss scale adapts, or `carry` or `ignore` does not fit.
      TypeError: if `step` is not a function, or the arguments are traced.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> import optax_lossscale as ols
      >>> tx = ols.with_loss_scale(optax.adam(1e-3))
      >>> loss_fn = lambda params, x: jnp.mean((x @ params) ** 2)
      >>> @jax.jit
      ... def wrong(params, state, x):
      ...     loss, scaled_grads = jax.value_and_grad(loss_fn)(params, x)
      ...     return *tx.apply_gradients(scaled_grads, state, params), loss
      >>> params, x = jnp.ones(3), jnp.ones((2, 3))
      >>> ols.testing.assert_scale_invariant(wrong, params, tx.init(params), x)
      Traceback (most recent call last):
          ...
      AssertionError: the step depends on the loss scale...
    """
    runner = Runner("assert_scale_invariant", step, args, carry)
    if not runner.loss_scales:
        raise ValueError(
            "no loss scale among the step's arguments adapts, so none can be varied. "
            "Test the step with one that does: with_loss_scale(optimizer, 'dynamic'). "
            "In bfloat16, without a loss scale, a step needs no such test"
        )
    highest, exponent = _highest_applied(runner)
    if any(norm is not None and not np.any(norm) for norm in highest.norms):
        raise AssertionError(_ZERO.format(exponent=exponent))
    lower = runner.at(exponent - _OCTAVES, before_growth=True)
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
    # Some optimizers hide the size of gradients, so that nothing changes.
    if runner.at(np.inf).was_applied:
        raise AssertionError(_NEVER_SCALED)


def assert_survives_overflow(
    step: Callable[..., Any],
    /,
    *args: Any,
    carry: Mapping[int, int] | None = None,
    ignore: str | Collection[str] = (),
    nan_in: int | None = None,
) -> None:
    """Raises if a step that is skipped changes what it hands on to the next step.

    At an infinite loss scale, all gradients overflow. A correct step is then skipped:
    what it hands on is what it was given, the skip is counted, and the loss scale is
    finite again. With `nan_in`, the same must hold for a NaN in that argument. Every
    float that is handed on is compared, and in a `LossScaleState` every integer, but
    not integers elsewhere, which may be counters of calls or keys.

    The step is run twice, or three times with `nan_in`, on copies of its arguments: in
    the first run at a loss scale of 1. A toy configuration will do: that takes
    milliseconds, besides the seconds to compile the step once.

    Under `pmap` and `shard_map`, what is the same on all devices must stay so in each
    run. That devices decide alone shows only with `nan_in`. It takes two devices.

    It does not find a schedule outside the wrapper that moves on, an average that
    begins as a copy of the parameters, or a momentum outside that begins at zero: test
    with the arguments of a later step.

    Args:
      step: the training step, compiled or not. It returns its new state or changes it
        in place, and may donate its arguments. Bind keyword arguments before.
      *args: its arguments. Without a loss scale that adapts, `nan_in` is needed.
      carry: `{argument: result}`, which result is the new value of which argument, by
        position. By default, that in its place, if structure and shapes agree.
      ignore: names of results that a skipped step may change, as in the error:
        `"result[2]['mean']"`, or `"result[2]"` for everything in it.
      nan_in: the position of an argument to put a NaN in, usually that of the batch; of
        the parameters, if the batch holds tokens.

    Raises:
      AssertionError: if the step is not skipped or leaves something behind, devices
        drift apart, or its state does not come back.
      ValueError: if no loss scale adapts and there is no `nan_in`, the state is not
        handed on, or `carry`, `ignore` or `nan_in` does not fit.
      TypeError: if `step` is not a function, or the arguments are traced.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> import optax_lossscale as ols
      >>> tx = ols.with_loss_scale(optax.adam(1e-3))
      >>> loss_fn = lambda params, x: jnp.mean((x @ params) ** 2)
      >>> @jax.jit
      ... def wrong(params, state, mean, x):
      ...     loss, params, state = tx.minimize(loss_fn, state, params, x)
      ...     return params, state, 0.9 * mean + 0.1 * jnp.mean(x), loss
      >>> params, mean, x = jnp.ones(3), jnp.zeros(()), jnp.ones((2, 3))
      >>> ols.testing.assert_survives_overflow(wrong, params, tx.init(params), mean, x)
      Traceback (most recent call last):
          ...
      AssertionError: an overflow changed it...

      The error names `result[2]`, the mean. In its place, a correct step returns
      `ols.where_applied(state, 0.9 * mean + 0.1 * jnp.mean(x), mean)`.
    """
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
        _check_kept(overflow, ignore, "an overflow")
        is_same = all(map(is_equal, overflow.scales, applied.scales))
        if is_same or not np.all(np.isfinite(np.concatenate(overflow.scales, None))):
            raise AssertionError(_NOT_ADAPTED)
    if nan_in is not None:
        spoiled = runner.with_nan_in(nan_in)
        if spoiled.was_applied and spoiled.norms:
            where = f"with a NaN in argument {nan_in}"
            raise AssertionError(_APPLIED.format(situation=where))
        _check_kept(spoiled, ignore, f"a NaN in argument {nan_in}")


def _highest_applied(runner: Runner) -> tuple[Outcome, int]:
    """Returns the outcome at the highest loss scale at which the step is applied."""
    for exponent in range(_HIGHEST, _LOWEST - 1, -_STRIDE):
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
    before = np.zeros_like(a) if x.before is None else x.before.astype(wide)
    is_finite = np.isfinite(a) & np.isfinite(b) & np.isfinite(before)
    if not is_equal(x.value[~is_finite], y.value[~is_finite]):
        return np.inf
    a = a[is_finite]
    b = b[is_finite]
    before = before[is_finite]
    eps = float(jnp.finfo(x.value.dtype).eps)
    off = np.where(np.abs(a - b) <= eps * np.abs(a), 0, a - b)
    size = (np.linalg.norm(a - before) + np.linalg.norm(b - before)) / 2
    return float(np.linalg.norm(off) / size) if np.any(off) else 0.0


def _check_kept(outcome: Outcome, ignore: str | Collection[str], cause: str) -> None:
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
_ZERO = """\
at a loss scale of 2**{exponent}, the step is applied with gradients that are all zero.
Pass arguments at which the loss has gradients. Do not call nan_to_num on gradients."""
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
The loss is to be multiplied by the loss scale, and the gradients divided by it once.
- Compute them with value_and_scaled_grad(loss_fn, state) inside the step, or from
  scale_gradient(loss, state), with the state that the step is given.
- Leave it to the optimizer to divide by the scale, before the scale adapts.
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
