"""A test for training steps: of an overflow, or of a NaN in the batch, nothing is left."""

from collections.abc import Callable, Collection
from typing import Any

import jax
import numpy as np

from optax_lossscale._step.gradient import refuse_shared_names
from optax_lossscale.testing._names import listed, name_of, not_ignored
from optax_lossscale.testing._places import what_comes_back
from optax_lossscale.testing._runs import Path, Run, Trial, equal, flat, outcomes, same


def assert_survives_overflow(
    step: Callable[..., Any], *args: Any, ignore: str | Collection[str] = (), **kwargs: Any
) -> None:
    """Raises if a step whose gradients overflow, or whose batch holds a NaN, leaves a trace.

    Such a step is to be skipped: the parameters, the optimizer's state and every other float that
    comes back, to be given to the next step, are as they were given. Only integers may count and
    keys move on, the skip is counted, and the loss scale adapts, unless it is fixed. What is only
    returned, such as the loss and norms to be logged, may be anything. It finds batch statistics,
    hidden states and averages without `where_applied`, and steps that are not skipped at all. Put
    it into your tests beside `assert_scale_invariant`, with the same arguments.

    It runs the step on copies of its arguments: with a loss scale that is beyond all numbers; with
    a NaN in the first array of floats that does not come back, the batch, if there is one (tokens
    are none); and some times with small changes, to see which numbers come back.

    Args:
      step: the training step, compiled or not. It returns its new state or changes it in place,
        and may donate its arguments.
      *args: its arguments, which stay as they are. Somewhere among them is one loss scale: in an
        optimizer state, a train state, an `nnx.Optimizer`.
      ignore: outputs that an overflow may change, one or several, by their names in the error:
        `"result[2]['mean']"`, or `"result[2]"` for everything in it.
      **kwargs: its keyword arguments, likewise; bind one named `ignore` with `functools.partial`.

    Raises:
      AssertionError: if something is left of an overflow or a NaN, what it is, and what to do.
      ValueError: if there is no loss scale among the arguments, or several; or if a name to ignore
        is not that of an output.
      TypeError: if the arguments are traced.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> import optax_lossscale as ols
      >>> tx = ols.with_loss_scale(optax.adam(1e-3))
      >>> loss_fn = lambda params, x: jnp.mean((x @ params) ** 2)
      >>> @jax.jit
      ... def wrong(params, mean, state, x):
      ...     loss, params, state = tx.minimize(loss_fn, state, params, x)
      ...     return params, 0.9 * mean + 0.1 * jnp.mean(x), state, loss
      >>> params, mean, x = jnp.ones(3), jnp.zeros(()), jnp.ones((2, 3))
      >>> ols.testing.assert_survives_overflow(wrong, params, mean, tx.init(params), x)
      Traceback (most recent call last):
          ...
      AssertionError: the step does not survive an overflow. Skipped, it changes
        result[1]...
    """
    refuse_shared_names(step, ["ignore"], args)
    trial = Trial("assert_survives_overflow", step, args, kwargs)
    usual = trial.run(trial.loss_scale)
    overflowing = trial.overflowing()
    varied = [run for run in overflowing[-1:] if jax.tree.leaves(run.before)]
    back = what_comes_back(trial, [usual, *varied])
    judged = {path: back[path] for path in not_ignored(ignore, usual) if path in back}
    said = _after_overflow(trial, overflowing, judged) or _after_nan(trial, back, judged)
    if said:
        raise AssertionError(f"the step does not survive an overflow. {said}")


def is_stuck(run: Run) -> bool:
    """Whether the loss scale comes back as it was given, where it would have changed."""
    backed_off, other = outcomes(run.before)
    possible = [backed_off] if run.was_skipped else [backed_off, other]
    is_given = [same(x, run.before) for x in run.loss_scales]
    return bool(is_given) and all(is_given) and not any(same(x, run.before) for x in possible)


def changed(trial: Trial, run: Run, judged: dict[Path, Path]) -> list[Path]:
    """What comes back from a run other than it was given."""
    pairs = [(path, place) for path, place in judged.items() if path in run.outputs]
    return [
        path for path, place in pairs if not equal(run.outputs[path], flat(trial.floats[place]))
    ]


def _after_overflow(trial: Trial, runs: list[Run], judged: dict[Path, Path]) -> str:
    """What is wrong after gradients overflow, and what to do; empty if nothing is."""
    for run in runs:
        is_applied = run.flags.size > 0 and not run.was_skipped
        left = [] if is_applied else changed(trial, run, judged)
        if is_stuck(run):
            return STUCK
        if left:
            return "\n".join([*listed(_LEFT, left), KEEP])
        if run.was_skipped and run.states and not run.counts_a_skip:
            return _UNCOUNTED
    return APPLIED if is_applied else ""


def _after_nan(trial: Trial, back: dict[Path, Path], judged: dict[Path, Path]) -> str:
    """What is wrong after a step on a batch with a NaN."""
    batch = [path for path, x in trial.floats.items() if x.ndim and path not in back.values()]
    if not batch:
        return ""
    numbers = trial.floats[batch[0]].copy()
    numbers.flat[0] = np.nan
    run = trial.run(trial.loss_scale, {batch[0]: numbers})
    left = changed(trial, run, judged)
    if not run.was_skipped:
        # The NaN may not reach the loss, or only the first of several steps.
        left = [path for path in left if not np.isfinite(run.outputs[path]).all()]
    title = _LEFT_BY_NAN.format(name=name_of(batch[0]))
    return "\n".join([*listed(title, left), KEEP]) if left else ""


_LEFT = "Gradients overflow, the step is to be skipped, and these come back other than given:"
_LEFT_BY_NAN = "With a NaN in {name}, these come back other than given:"
KEEP = """\
For parameters and the optimizer's state, let tx.apply_gradients or tx.minimize take the step: it
keeps them. All else that the step changes, batch statistics or an average of the parameters, has to be kept by
ols.where_applied(state, new, old), with the state that the step returns."""
APPLIED = """\
Gradients should overflow, as the loss scale is infinite, but the step is applied. Either they are
not multiplied by the loss scale of the state that the step is given: compute them with
value_and_scaled_grad(loss_fn, state) or from scale_gradient(loss, state). Or what is not finite is replaced before it is
checked (nan_to_num, a where): hand the optimizer the scaled gradients as they come. Or nothing is
checked, as with skip=None and a fixed loss scale: use skip="nonfinite". Or they are all zero: give the step a batch from which it
learns."""
STUCK = """\
Gradients overflow, and the loss scale comes back as it was, so that the next step overflows, too:
return the state that the step makes, with its loss scale, not that which it is given."""
_UNCOUNTED = """\
The step is skipped, but the state that comes back does not count it: return the state that the
step makes as it is, and not one that is put together from old and new."""
