"""`assert_scale_invariant`: only the loss scale itself may depend on the loss scale.

The step is run in three situations, in which a correct step does the following:

- At falling loss scales, from a high one at which the step is applied, each output
  stays the same.
- At loss scales at which gradients overflow, the step is skipped.
- Where the loss scale grows, the outputs of the step are the same as those of a step
  that begins with the same scale but does not let it grow.

The float32 weights of `with_master_weights` must also round to the float16 parameters.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.tree_util import GetAttrKey

from optax_lossscale._scales.fixed import FixedLossScale
from optax_lossscale._scales.loss_scale import LossScale
from optax_lossscale.testing._carry import Carry, find_carry, within
from optax_lossscale.testing._dependence import powers_followed, unexplained_changes
from optax_lossscale.testing._experiment import Experiment, log2_of
from optax_lossscale.testing._numbers import Path, difference, equal, is_finite, norm
from optax_lossscale.testing._output_names import (
    format_fault,
    joined,
    name_of,
    without_ignored,
)
from optax_lossscale.testing._skipping import (
    carry_not_kept,
    overflow_applied,
    scale_not_adapted,
)
from optax_lossscale.testing._sweep import (
    LOWEST_EXPONENT,
    Sweep,
    sweep_of,
    trials_at_falling_scales,
)
from optax_lossscale.testing._trial import Trial

# The step must be applied at this many of the 13 loss scales of a sweep, or at more. A
# heuristic: `powers_followed` compares 4 neighbors, and `unexplained_changes` compares
# a change at a high scale with changes at lower ones.
_MIN_APPLIED = 8
# How many steps to wait for the loss scale to grow. A heuristic: 50 times the 2000
# steps after which a `DynamicLossScale` grows by default.
_MAX_STEPS_TO_GROWTH = 100_000
# The field `remainders` of a `MasterWeightsState`, as a key in the paths of its arrays
_REMAINDERS = GetAttrKey("remainders")


def assert_scale_invariant(
    step: Callable[..., Any],
    /,
    *args: Any,
    ignore: str | Collection[str] = (),
    **kwargs: Any,
) -> None:
    """Raises if anything that a training step computes depends on the loss scale.

    A correct step multiplies the loss by the loss scale and divides the gradients by
    it, so its outputs are the same at any loss scale at which gradients neither
    underflow nor overflow. In a wrong step, the two operations do not cancel. Training
    may not reveal this, because Adam's updates hardly depend on the magnitude of the
    gradients. Put this assertion into your tests, with the step that you train with,
    its initial state and a small batch.

    The step is run about 30 times, and twice more for each argument that holds arrays
    of floats, on copies of its arguments:

    - At falling loss scales, all powers of two, the assertion looks for outputs that
      follow a power of the scale, such as a norm of scaled gradients, or that change in
      a way that underflow does not explain.
    - At an infinite loss scale, it looks for a step that is not skipped. If the step
      raises an error there, that run is left out. Any other error of the step is passed
      on.
    - Where the loss scale grows, it looks for gradients that are unscaled by the new
      scale instead of the old one.
    - With small changes to one argument at a time, it looks for what the step passes on
      to the next step, and whether a skipped step changes this.

    Outputs are all numbers and bools, and arrays of these, that the step returns or
    changes in place. The loss scale is not compared, not even where `metrics` returns
    it, and neither is the state of a skip rule. Of an array with more than 2**16
    elements, only a regular sample is compared between loss scales.

    Args:
      step: the training step. Compile it with `jax.jit`, or the assertion takes several
        times as long. The step returns its new state or changes it in place, and may
        donate its arguments.
      *args: the step's arguments, which are not changed. They must hold exactly one
        loss scale that adapts, for instance in an optimizer state, a train state or an
        `nnx.Optimizer`.
      ignore: the name of an output that is meant to depend on the loss scale, or
        several names, as they appear in the error: `"result[2]['scaled_norm']"`, or
        `"result[2]"` for everything in it.
      **kwargs: the step's keyword arguments, which are not changed either. If the step
        has an argument named `ignore`, bind it with `functools.partial`.

    Raises:
      AssertionError: if an output depends on the loss scale, or the step is skipped at
        nearly every loss scale and returns only finite numbers. This error, like the
        next two, names the outputs concerned, if any, gives the reason, and suggests a
        fix. Of several faults, only the first is reported.
      AssertionError: if a step at which gradients overflow is not skipped, changes what
        is passed on to the next step, or does not adapt the loss scale.
      AssertionError: if float32 master weights no longer round to the parameters.
      ValueError: if the arguments hold no loss scale, several that adapt, or only a
        `FixedLossScale`, which compiled steps hold as a constant. Test the step with
        one that adapts, such as `DynamicLossScale()`.
      ValueError: if the step is skipped at nearly every loss scale and returns
        infinities or NaNs. `diagnose` says where they appear.
      ValueError: if two runs at the same loss scale differ by more than 1%, for example
        because the step draws random numbers by itself. Pass it a PRNG key instead.
      ValueError: if the step passes neither an array of floats nor a loss scale on to
        the next step. Let it return its new parameters and state.
      ValueError: if `ignore` names something that is not an output. The error lists the
        outputs.
      TypeError: if the arguments are traced, or the step has an argument named `ignore`
        that is not bound.

    Warns:
      UserWarning: if no fault is found, but the step raises an error at an infinite
        loss scale, other than the `LossScaleError` of `raise_if_stuck`.

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
      AssertionError: the step depends on the loss scale: gradients are divided by it...

      The loss was never multiplied by the loss scale. Instead of `jax.value_and_grad`,
      a correct step calls `ols.value_and_scaled_grad(loss_fn, state)(params, x)`.
    """
    experiment = Experiment("assert_scale_invariant", step, args, kwargs)
    if isinstance(experiment.loss_scale, FixedLossScale):
        raise ValueError(
            "a FixedLossScale cannot be varied, because compiled steps hold it as a "
            "constant. (A number or None stands for one.) Test the step with a loss "
            "scale that adapts: with_loss_scale(optimizer, DynamicLossScale())"
        )
    fault = _first_fault(experiment, ignore)
    if fault:
        raise AssertionError(fault)
    experiment.warn_of_error()


def _first_fault(experiment: Experiment, ignore: str | Collection[str]) -> str:
    """Returns the text of the error for the first fault, or "" if there is none."""
    trials = trials_at_falling_scales(experiment)
    overflow_trials = experiment.overflow_trials
    fault = scale_not_adapted(overflow_trials) or _rarely_applied(experiment, trials)
    if fault:
        return fault
    highest = trials[0]  # at the highest loss scale of those that were not skipped
    sweep = sweep_of(experiment, trials, without_ignored(ignore, highest.outputs))
    powers = powers_followed(sweep)
    carry = within(find_carry(experiment), sweep.outputs, experiment.floats)
    compared = [*trials, overflow_trials[-1]]
    from_gradients = {
        output: argument
        for output, argument in carry.items()
        if _is_from_gradients(output, compared)
    }
    return (
        _divided_twice(powers)
        or overflow_applied(experiment, highest, carry)
        or _still_scaled(powers, sweep, highest)
        or _not_finite(sweep, highest, carry)
        or carry_not_kept(experiment, from_gradients)
        or _master_weights_lost(experiment, highest, carry)
        or _differs_at_growth(experiment, sweep)
    )


def _rarely_applied(experiment: Experiment, trials: Sequence[Trial]) -> str:
    """Reports a step that is applied at too few loss scales to compare its outputs.

    Raises a `ValueError` if the outputs are not finite even at the lowest loss scale,
    because then the loss scale is not to blame.
    """
    if len(trials) >= _MIN_APPLIED:
        return ""
    times = f"only {len(trials)}" if trials else "none"
    lowest = experiment.trial_at(LOWEST_EXPONENT)
    if not all(map(is_finite, lowest.outputs.values())):
        raise ValueError(
            f"the step is applied at {times} of the loss scales tried: look for NaN or "
            "inf in the arguments, the loss and the model. diagnose(loss_fn, params, "
            "batch) says where they appear"
        )
    return _RARELY_APPLIED.format(times=times)


def _is_from_gradients(path: Path, trials: Iterable[Trial]) -> bool:
    """Whether an output is computed from gradients, as trials at several scales show.

    Such an output differs between trials, because it is not updated where gradients
    overflow; one that never differs, such as the mean of a batch, is computed without
    gradients.
    """
    fingerprints = [trial.output_fingerprints for trial in trials]
    distinct = {x[path] for x in fingerprints if path in x}
    return len(distinct) > 1


def _divided_twice(powers: Mapping[Path, float]) -> str:
    """Reports gradients that are divided by the loss scale once too often.

    If they are, most of the outputs that follow a power of the scale follow a negative
    one. If gradients are left scaled, only a few outputs follow a negative power,
    because of Adam's epsilon.
    """
    negative = {path: power for path, power in powers.items() if power < 0}
    if 2 * len(negative) <= len(powers):
        return ""
    return joined(_DIVIDED, _list_powers(negative), _DIVIDED_REMEDY)


def _still_scaled(
    powers: Mapping[Path, float],
    sweep: Sweep,
    highest: Trial,
) -> str:
    """Reports outputs that are computed from scaled gradients."""
    # A silent step does not show whether it was skipped (see `Trial.is_silent`), so a
    # change may only mean that the step was skipped.
    changes = {} if highest.is_silent else unexplained_changes(sweep)
    other_changes = [
        f"{name_of(path)}, between 2**{low:g} and 2**{high:g}"
        for path, (high, low) in changes.items()
        if path not in powers
    ]
    fault = joined(_list_powers(powers), format_fault(_BY_A_CHANGE, other_changes))
    return joined(_DEPENDS, fault, _STILL_SCALED_REMEDY) if fault else ""


def _list_powers(powers: Mapping[Path, float]) -> str:
    """Lists outputs with the powers of the loss scale that they follow."""
    rows = [f"2**{power}: {name_of(path)}" for path, power in powers.items()]
    return format_fault(_BY_A_POWER, rows)


def _not_finite(
    sweep: Sweep,
    highest: Trial,
    carry: Carry,
) -> str:
    """Reports outputs that are not finite although they update finite arguments."""
    not_finite = [
        output
        for output, argument in carry.items()
        if is_finite(highest.arguments[argument])
        and not is_finite(sweep.outputs[output])
    ]
    return format_fault(_NOT_FINITE, not_finite, _NOT_FINITE_REMEDY)


def _master_weights_lost(
    experiment: Experiment,
    highest: Trial,
    carry: Carry,
) -> str:
    """Reports float32 master weights that do not round to the float16 parameters.

    Nothing says which weights belong to which parameter, so weights are compared with
    each float16 array of the same size in the carry, and one of these must match. With
    bfloat16, nothing is compared, because the state holds only 16 bits of each weight,
    which fit any parameter.
    """
    outputs = highest.outputs
    sizes = {path: x.size for path, x in highest.output_fingerprints.items()}
    float16_outputs = [
        output
        for output, argument in carry.items()
        if experiment.floats[argument].dtype == np.float16
    ]
    master_weights = [path for path in carry if _REMAINDERS in path]
    lost = []
    for path in master_weights:
        rounded = outputs[path].astype(np.float16)
        candidates = [x for x in float16_outputs if sizes[x] == sizes[path]]
        matches = [equal(outputs[x], rounded) for x in candidates]
        if candidates and not any(matches):
            lost.append(path)
    return format_fault(_LOST, lost, _LOST_REMEDY)


def _differs_at_growth(experiment: Experiment, sweep: Sweep) -> str:
    """Reports outputs of a step that differ because the loss scale grows.

    Nothing is reported if that step is skipped. Integers and bools are not compared,
    because they may count or flag the growth.
    """
    # At a scale above the first one of the sweep, the step might be skipped.
    exponent = min(log2_of(experiment.loss_scale), sweep.exponents[0])
    steady = experiment.trial_at(exponent)
    before_growth = _before_growth(jax.device_put(steady.loss_scale))
    growing = experiment.trial(before_growth)
    if not growing.was_applied:
        return ""
    different = []
    for path in sweep.outputs:
        expected = steady.outputs[path]
        actual = growing.outputs.get(path, expected)
        tolerance = sweep.tolerance(path, expected)
        is_float = expected.dtype == np.float64
        if is_float and _differ(actual, expected, tolerance):
            different.append(path)
    return format_fault(_AT_GROWTH, different, _AT_GROWTH_REMEDY)


def _differ(
    actual: np.ndarray,
    expected: np.ndarray,
    tolerance: np.ndarray,
) -> bool:
    """Whether an output changes by more than a tolerance or is no longer finite."""
    is_changed = norm(difference(actual, expected)) > tolerance
    becomes_nonfinite = is_finite(expected) and not is_finite(actual)
    return bool(is_changed) or becomes_nonfinite


@jax.jit
def _before_growth(loss_scale: LossScale) -> LossScale:
    """Advances a loss scale by finite steps until one more would change it.

    If none of 100,000 steps changes it, the loss scale is returned as it is after them.
    """

    def is_steady(carry):
        n_steps, now = carry
        keeps_scale = jnp.all(now() == now.adjust(True)())
        return keeps_scale & (n_steps < _MAX_STEPS_TO_GROWTH)

    def next_step(carry):
        n_steps, now = carry
        return n_steps + 1, now.adjust(True)

    _, last = lax.while_loop(is_steady, next_step, (0, loss_scale))
    return last


_RARELY_APPLIED = """\
the step is applied at {times} of the loss scales tried, though its outputs are finite.
Most likely, gradients are multiplied by a scale other than that of the state that the
step is given, such as the scale of another optimizer or an older state. Use
value_and_scaled_grad(loss_fn, state) inside the step."""
_DIVIDED = (
    "the step depends on the loss scale: gradients are divided by it once too often."
)
_DIVIDED_REMEDY = """\
These gradients are not, or no longer, multiplied by the scale that they are divided by.
- Inside the step, compute them with value_and_scaled_grad(loss_fn, state), or from
  scale_gradient(loss, state).
- Use the state that the step is given, not an older one or a scale kept beside it.
- Leave the unscaling to the optimizer.
- Put anything that depends on the magnitude of gradients, such as a clip, inside:
  with_loss_scale(optax.chain(clip, …)). In a custom_vjp, divide by the loss scale
  first, and multiply by it afterwards.
- In ignore=, name outputs that are meant to depend on the loss scale."""
_DEPENDS = "the step depends on the loss scale."
_BY_A_POWER = (
    "Doubling the loss scale multiplies these outputs, or their changes, by the number "
    "in front:"
)
_BY_A_CHANGE = (
    "These outputs change with the loss scale in a way that underflow does not explain:"
)
_STILL_SCALED_REMEDY = """\
Most likely, they come from gradients that are still multiplied by the loss scale.
- To log a norm, unscale them first: get_loss_scale(state).unscale(scaled_grads).
- Anything before the wrapper in an optax.chain sees scaled gradients. Put it inside:
  with_loss_scale(optax.chain(…)).
- A custom_vjp sees them, too. If it clips them, divide by the loss scale first, and
  multiply by it afterwards.
- To log the loss scale, return ols.metrics(state).
- In ignore=, name other outputs that are meant to depend on the loss scale."""
_NOT_FINITE = """\
the step applies gradients that overflow.
These outputs become infinite or NaN:"""
_NOT_FINITE_REMEDY = """\
Skip the step if any gradient is infinite or NaN. By default, tx.apply_gradients and
tx.minimize do so. In a step of your own, call ols.all_finite(grads). It is not enough
to look for NaNs, or to check the loss."""
_LOST = """\
the step loses digits of its master weights.
These float32 weights of with_master_weights no longer round to the parameters:"""
_LOST_REMEDY = """\
Something changes the updates of with_master_weights, so each step loses the digits that
the parameters cannot hold. Let nothing come after this wrapper, not even a
transformation of your own. Wrap the whole optimizer, as in
with_loss_scale(with_master_weights(…)), and use optax.apply_updates."""
_AT_GROWTH = """\
the step goes wrong where the loss scale grows.
These outputs differ from what they are at the same loss scale without growth:"""
_AT_GROWTH_REMEDY = """\
Most likely, gradients are unscaled by the new loss scale. Unscale them by the scale
that the loss was multiplied by, which is in the state that the step is given. Adapt the
scale afterwards."""
