"""The assertion that nothing but the loss scale depends on the loss scale.

There are three kinds of evidence. At falling loss scales, from the highest at which the
step is applied, each output should be the same. At loss scales at which gradients
overflow, the step should be skipped. And where the loss scale is about to grow, the
outputs should be those of any other step. The weights that `with_master_weights` keeps
are compared with float16 parameters, too.

`_fault` asks for one fault after the other, in an order in which the first that is
found may be the cause of all later ones. It returns that one alone.
"""

from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.tree_util import GetAttrKey

from optax_lossscale._scales.fixed import FixedLossScale
from optax_lossscale._step.loss import check_keywords
from optax_lossscale.testing._carry import find_carry, within
from optax_lossscale.testing._dependence import powers, unexplained_changes
from optax_lossscale.testing._experiment import Experiment, log2_of
from optax_lossscale.testing._numbers import difference, equal, is_finite, norm
from optax_lossscale.testing._output_names import listed, name_of, not_ignored
from optax_lossscale.testing._skipping import (
    APPLIED_REMEDY,
    left_behind,
    not_adapted,
    overflow_applied,
)
from optax_lossscale.testing._sweep import (
    LOWEST_EXPONENT,
    sweep_of,
    trials_at_falling_scales,
)

_MIN_APPLIED = 8  # at how many loss scales the step must be applied
_LONGEST_INTERVAL = 100_000  # steps
_WEIGHTS = GetAttrKey("master_weights")


def assert_scale_invariant(
    step: Callable[..., Any],
    /,
    *args: Any,
    ignore: str | Collection[str] = (),
    **kwargs: Any,
) -> None:
    """Raises if anything that a training step computes depends on the loss scale.

    A correct step multiplies the loss by the loss scale and divides the gradients by
    it, so its outputs are the same at any loss scale, except for underflow. In a wrong
    step the two do not cancel. Training may not show it, as the updates of Adam hardly
    depend on the size of the gradients. Put this into your tests, with the step that
    you train with, its first state and a small batch.

    It runs the step some thirty times on copies of its arguments. At falling loss
    scales, powers of two, it looks for outputs that follow a power of the scale, or
    change in a way that underflow does not explain; at an infinite loss scale, for a
    step that is not skipped; and where the loss scale grows, for gradients that are
    unscaled by the new one. The outputs are everything that the step returns or changes
    in place, except for the loss scale and `metrics`. Of an array of more than 2**16
    numbers, a regular sample is compared between loss scales. If the step raises an
    error at an infinite loss scale, it is judged by the other runs alone.

    Args:
      step: the training step; compile it, as this takes ten times as long otherwise. It
        returns its new state or changes it in place, and may donate its arguments.
      *args: its arguments, which stay as they are. Somewhere among them is one loss
        scale: in an optimizer state, a train state, an `nnx.Optimizer`.
      ignore: the outputs that are meant to depend on the loss scale, one or several, by
        their names in the error: `"result[2]['scaled_norm']"`, or `"result[2]"` for
        everything in it.
      **kwargs: its keyword arguments, likewise; bind one named `ignore` with
        `functools.partial`.

    Raises:
      AssertionError: if an output depends on the loss scale, an overflow is not
        skipped, the loss scale does not adapt, or master weights are lost. It says
        which outputs are concerned, if any, why, and what to do. Of several faults it
        reports the first.
      ValueError: if there is no loss scale among the arguments, or several; if it is a
        `FixedLossScale`, which compiled steps hold as a constant; if the step is
        skipped at nearly every loss scale and returns numbers that are not finite; if
        two runs at one loss scale differ by more than 1%; if neither an array of floats
        nor a loss scale that is given to the step comes back from it; or if a name to
        ignore is not that of an output.
      TypeError: if the arguments are traced, or the step itself has an argument named
        `ignore` that is not bound.

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
      AssertionError: the step depends on the loss scale, or is wrong in another way. With...
    """
    check_keywords(step, ["ignore"], args)
    experiment = Experiment("assert_scale_invariant", step, args, kwargs)
    if isinstance(experiment.loss_scale, FixedLossScale):
        raise ValueError(
            "a FixedLossScale cannot be varied, as compiled steps hold it as a constant; "
            "a number or None stands for one. Test the step with a loss scale that "
            "adapts, such as DynamicLossScale(): the rest is the same"
        )
    fault = _fault(experiment, ignore)
    if fault:
        raise AssertionError(f"{_HEADLINE} {fault}")


def _fault(experiment, ignore):
    """The first fault of a step that depends on the loss scale; empty if there is none.

    The text names the outputs, says how they depend on it, and what to do.
    """
    trials = trials_at_falling_scales(experiment)
    fault = not_adapted(experiment.overflowing) or _never_applied(experiment, trials)
    if fault:
        return fault
    usual = trials[0]
    sweep = sweep_of(experiment, trials, not_ignored(ignore, usual.outputs))
    by_powers = powers(sweep)
    carry = within(find_carry(experiment), sweep.outputs, experiment.floats)
    compared = [*trials, experiment.overflowing[-1]]
    dependent = {x: carry[x] for x in carry if _is_dependent(x, compared)}
    return (
        _divided(by_powers)
        or overflow_applied(experiment, usual, dependent)
        or _multiplied(by_powers, sweep, usual)
        or _not_finite(sweep, usual, carry)
        or left_behind(experiment.to_be_skipped, dependent)
        or _lost_weights(experiment, usual, carry)
        or _at_growth(experiment, sweep)
    )


def _never_applied(experiment, trials):
    """The fault of a step that is applied at too few loss scales to compare.

    If its outputs are not finite, it raises a `ValueError`, as no loss scale helps.
    """
    if len(trials) >= _MIN_APPLIED:
        return ""
    lowest = experiment.at(LOWEST_EXPONENT)
    if not all(map(is_finite, lowest.outputs.values())):
        raise ValueError(
            f"the step is skipped at all but {len(trials)} loss scales: look for NaN "
            "or inf in the arguments, the loss and the model; diagnose(loss_fn, "
            "params, batch) says where"
        )
    return _NEVER.format(times=len(trials))


def _is_dependent(path, trials):
    """Whether an output differs between trials at different loss scales.

    An output that never differs, such as the mean of a batch, is made without
    gradients.
    """
    outputs = [trial.output_fingerprints for trial in trials]
    return len({x[path] for x in outputs if path in x}) > 1


def _divided(by_powers):
    """The fault that gradients are divided once too often.

    That is the fault only if most outputs follow a negative power: where gradients stay
    multiplied, Adam's epsilon makes a few outputs follow one, too.
    """
    negative = {path: power for path, power in by_powers.items() if power < 0}
    if 2 * len(negative) <= len(by_powers):
        return ""
    return _following(negative, _DIVIDED)


def _multiplied(by_powers, sweep, usual):
    """The fault that outputs depend on gradients that are still scaled."""
    # In a silent step, a change may be that of a step that was skipped.
    changes = {} if usual.is_silent else unexplained_changes(sweep)
    other_changes = [
        f"{name_of(path)}, between 2**{low:g} and 2**{high:g}"
        for path, (high, low) in changes.items()
        if path not in by_powers
    ]
    fault = _following(by_powers) + listed(_BY_A_CHANGE, other_changes)
    return fault + _MULTIPLIED if fault else ""


def _following(by_powers, remedy=""):
    """Text that lists the outputs that follow a power of the loss scale."""
    named = [f"2**{power}: {name_of(path)}" for path, power in by_powers.items()]
    return listed(_BY_A_POWER, named, remedy)


def _not_finite(sweep, usual, carry):
    """The fault that outputs come back not finite, though their arguments are."""
    not_finite = [
        output
        for output, argument in carry.items()
        if is_finite(usual.given[argument]) and not is_finite(sweep.outputs[output])
    ]
    return listed(_NOT_FINITE, not_finite, APPLIED_REMEDY)


def _lost_weights(experiment, usual, carry):
    """The fault that float32 master weights do not round to float16 parameters."""
    outputs = usual.outputs
    sizes = {path: x.size for path, x in usual.output_fingerprints.items()}
    halves = [
        output
        for output, argument in carry.items()
        if experiment.floats[argument].dtype == np.float16
    ]

    def is_lost(weights):
        rounded = outputs[weights].astype(np.float16)
        alike = [outputs[half] for half in halves if sizes[half] == sizes[weights]]
        return alike and not any(equal(half, rounded) for half in alike)

    lost = [path for path in carry if _WEIGHTS in path and is_lost(path)]
    return listed(_LOST, lost, _LAST)


def _at_growth(experiment, sweep):
    """The fault that outputs differ at a step at which the loss scale grows.

    It is not judged if that step is skipped. Integers and bools are left out, as they
    may be counts and flags of the growth.
    """
    exponent = min(log2_of(experiment.loss_scale), sweep.exponents[0])
    steady = experiment.at(exponent)
    growing = experiment.trial(_about_to_grow(jax.device_put(steady.loss_scale)))
    if not growing.was_applied:
        return ""
    changing = []
    for path in sweep.outputs:
        numbers = steady.outputs[path]
        grown = growing.outputs.get(path, numbers)
        is_float = numbers.dtype == np.float64
        change = norm(difference(grown, numbers))
        is_other = change > sweep.negligible(path, numbers)
        becomes_not_finite = is_finite(numbers) and not is_finite(grown)
        if is_float and (is_other or becomes_not_finite):
            changing.append(path)
    return listed(_AT_GROWTH, changing, _ADAPTED)


@jax.jit
def _about_to_grow(loss_scale):
    """The loss scale one finite step before it changes, or after 100,000 such steps."""

    def goes_on(steps_and_scale):
        steps, now = steps_and_scale
        is_steady = jnp.all(now() == now.adjust(True)())
        return is_steady & (steps < _LONGEST_INTERVAL)

    def next_step(steps_and_scale):
        steps, now = steps_and_scale
        return steps + 1, now.adjust(True)

    _, last = lax.while_loop(goes_on, next_step, (0, loss_scale))
    return last


_HEADLINE = "the step depends on the loss scale, or is wrong in another way."
_BY_A_POWER = (
    "With twice the loss scale, these outputs, or their changes, are multiplied by"
)
_BY_A_CHANGE = (
    "These outputs change as the loss scale rises, and underflow does not explain it:"
)
_AT_GROWTH = """\
At a step at which the loss scale grows, these differ from those at the same loss scale
without growth:"""
_NOT_FINITE = "Some gradients overflow, but the step is applied, and these become infinite or NaN:"
_LOST = "These float32 copies of with_master_weights no longer match the parameters:"

_DIVIDED = """\
So gradients are divided by a loss scale that they are not, or no longer, multiplied by. Compute
them with value_and_scaled_grad(loss_fn, state), or from scale_gradient(loss, state), inside the
step, with the state that it is given and not an older one or a scale kept beside it; leave the
unscaling to the optimizer; and put anything that looks at the size of gradients, such as a clip,
inside: with_loss_scale(optax.chain(clip, …))."""
_MULTIPLIED = """\
So they come from gradients that are still multiplied by the loss scale. To log a norm, unscale
them first: get_loss_scale(state).unscale(scaled_grads). And anything before the wrapper in an
optax.chain sees scaled gradients: put it inside, with_loss_scale(optax.chain(…)). To log the loss
scale, return ols.metrics(state). Name other outputs that are meant to depend on it in ignore=."""
_ADAPTED = """\
So they are unscaled by the new loss scale. Unscale by the one that the loss was multiplied by,
from the state that the step is given, and adapt it afterwards."""
_NEVER = """\
It is skipped at all but {times} loss scales, although what it returns is finite. So gradients are
multiplied by another scale than that of the state that the step is given, such as that of another
optimizer or an older state: use value_and_scaled_grad(loss_fn, state) inside the step."""
_LAST = """\
So something changes the updates of with_master_weights, and what the parameters cannot hold is
lost at every step. Let nothing come after it, not even a transformation of your own: wrap the
whole optimizer, with_loss_scale(with_master_weights(…)), and use optax.apply_updates."""
