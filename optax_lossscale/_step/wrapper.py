"""The optimizer wrapper `with_loss_scale` and the transformation that it returns.

This file is the interface: the arguments, their checks, and the methods that users
call. All three ways to take a step end in `ScaledStep.step`, in `step.py`::

    updates, state = tx.update(scaled_grads, state, params)
    params, state = tx.apply_gradients(scaled_grads, state, params)
    loss, params, state = tx.minimize(loss_fn, state, params, batch)
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import optax
from jax.typing import ArrayLike

from optax_lossscale._arrays.checks import refuse
from optax_lossscale._arrays.replicas import AxisName
from optax_lossscale._arrays.variables import is_variable
from optax_lossscale._step.branch import Branch
from optax_lossscale._step.decision import Skip
from optax_lossscale._step.get_loss_scale import LossScaleLike, as_loss_scale
from optax_lossscale._step.gradient import value_and_scaled_grad
from optax_lossscale._step.loss import loss_of
from optax_lossscale._step.mask import Mask, check_mask
from optax_lossscale._step.state import LossScaleState
from optax_lossscale._step.step import ScaledStep
from optax_lossscale._step.update import as_transformation
from optax_lossscale.skips import SkipRule


class LossScaledTransformation(optax.GradientTransformationExtraArgs):
    """An optimizer for scaled gradients, which `with_loss_scale` returns.

    Like every Optax transformation, it is a pair of `init` and `update`. Two more
    methods take a whole step: `minimize`, if you have a loss function, and
    `apply_gradients`, if you have scaled gradients.

    Attributes:
      init: `init(params)` returns a `LossScaleState`.
      update: `update(scaled_grads, state, params=None, *, value=None, **extra_args)`
        returns `(updates, state)`. The updates are zero if the step is skipped. `value`
        is the true loss.
    """

    init: Callable[[Any], LossScaleState]  # pyrefly: ignore[bad-override]
    update: ScaledStep  # pyrefly: ignore[bad-override]

    def apply_gradients(
        self,
        scaled_grads: Any,
        state: LossScaleState,
        params: Any,
        *,
        value: ArrayLike | None = None,
        **extra_args: Any,
    ) -> tuple[Any, LossScaleState]:
        """Takes one optimizer step, from scaled gradients to new parameters.

        The method does the same as these two lines, but inside the branch that applies
        or skips the step::

            updates, state = tx.update(scaled_grads, state, params, value=loss)
            params = optax.apply_updates(params, updates)

        On CPU, XLA can then fuse both lines with the unscaling, so that compiled
        programs write neither the unscaled gradients nor the updates to memory. An
        `optax.chain` around the wrapper does not have this method: write the two lines
        there.

        Args:
          scaled_grads: the gradients of the scaled loss, a tree like `params`. Where a
            gradient or a whole branch is `None`, the parameters and their slots in the
            inner state stay as they are.
          state: the state that `init` or the last step returned.
          params: the parameters, in any floating-point dtype.
          value: the true loss, shape (). If the loss is not finite, the step is skipped
            and the loss scale does not change (unless `skip=None`). The loss is also
            passed on to the inner transformation if that accepts a `value`.
          **extra_args: passed on to the inner transformation.

        Returns:
          `(params, state)`. After a skipped step, the parameters and the inner state
          are bit for bit what they were before it.

        Raises:
          TypeError: if `state` is not a `LossScaleState` with a bool `should_apply`.
          TypeError: if a gradient is not an array, or `value` not a real number of
            shape ().
          TypeError: if the `update` of this optimizer was replaced.
          TypeError: if a method of your own loss scale or skip rule does not return
            what it must return.
          ValueError: if `params` is None.
          ValueError: if the gradients do not have the structure and shapes of the
            parameters, are integers where the parameters are floats, or do not fit the
            mask.
          ValueError: if the state is configured differently from this optimizer, is a
            stack of several states, or holds the inner state of an optimizer of 16-bit
            parameters.
          ValueError: under `shard_map`, if the loss or the decision varies along an
            axis over which the gradients or the state do not.
        """
        if not isinstance(self.update, ScaledStep):
            raise TypeError(
                "apply_gradients takes the step of with_loss_scale's own update, which "
                "was replaced. Call the new update, and then optax.apply_updates:\n"
                "    updates, state = tx.update(scaled_grads, state, params)\n"
                "    params = optax.apply_updates(params, updates)"
            )
        if params is None:
            raise ValueError(
                "apply_gradients needs the parameters: "
                "tx.apply_gradients(scaled_grads, state, params)"
            )
        return self.update.step(
            scaled_grads, state, params, value, extra_args, to_params=True
        )

    def minimize(
        self,
        loss_fn: Callable[..., Any],
        state: LossScaleState,
        params: Any,
        /,
        *args: Any,
        has_aux: bool = False,
        extra_args: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> tuple[Any, Any, LossScaleState]:
        """Computes the loss and its gradients, and takes a step, in one call.

        The method calls `value_and_scaled_grad(loss_fn, state)(params, …)` and then
        `apply_gradients` with the loss as `value`, so a step whose loss is not finite
        is skipped (unless `skip=None`). If your step needs the gradients, for example
        for a `pmean` under `pmap`, call these two functions instead.

        Args:
          loss_fn: is called as `loss_fn(params, *args, **kwargs)` and returns the loss,
            a scalar. For matrix products in float16, pass `autocast(loss_fn)`.
          state: the state that `init` or the last step returned.
          params: the parameters, a tree of arrays.
          *args: further arguments of `loss_fn`.
          has_aux: whether `loss_fn` returns `(loss, aux)`.
          extra_args: passed on to the inner transformation, in addition to the loss as
            `value`.
          **kwargs: further keyword arguments of `loss_fn`.

        Returns:
          `(loss, params, state)`, or `((loss, aux), params, state)` with `has_aux`. The
          loss is unscaled, as `loss_fn` returned it.

        Raises:
          TypeError: if `loss_fn` is not a function.
          TypeError: if `state` is not a `LossScaleState`.
          TypeError: if `extra_args` contains a `value`.
          TypeError, ValueError: for what `value_and_scaled_grad` and `apply_gradients`
            reject.

        Example:
          >>> import jax.numpy as jnp, optax
          >>> import optax_lossscale as ols
          >>> tx = ols.with_loss_scale(optax.sgd(0.1))
          >>> params = {"w": jnp.array([1.0, 2.0])}
          >>> loss_fn = lambda params, x: jnp.sum((params["w"] * x) ** 2)
          >>> loss, params, state = tx.minimize(loss_fn, tx.init(params), params, 1.0)
          >>> print(loss, params["w"], state.loss_scale())
          5.0 [0.8 1.6] 32768.0
        """
        _check_minimize_arguments(loss_fn, state, params)
        extra_args = extra_args or {}
        if "value" in extra_args:
            raise TypeError(
                "minimize got multiple values for keyword argument 'value': it passes "
                "the loss itself, so leave value out of extra_args"
            )
        # The gradient of an integer is a float0, and leaves it as it is.
        gradient = value_and_scaled_grad(
            loss_fn, state, has_aux=has_aux, allow_int=True
        )
        returned, scaled_grads = gradient(params, *args, **kwargs)
        loss = loss_of(returned, has_aux)
        new_params, new_state = self.apply_gradients(
            scaled_grads, state, params, value=loss, **extra_args
        )
        return returned, new_params, new_state


def _check_minimize_arguments(loss_fn: Any, state: Any, params: Any) -> None:
    """Raises a `TypeError` unless `minimize` received a function, then a state."""
    # An `nnx.Optimizer` holds a `LossScaleState` of variables instead of arrays.
    is_state = isinstance(state, LossScaleState) and not is_variable(state.should_apply)
    if callable(loss_fn) and is_state:
        return
    first, second, third = (type(x).__name__ for x in (loss_fn, state, params))
    raise TypeError(
        f"call minimize(loss_fn, state, params, …); got {first}, {second} and "
        f"{third}. loss_fn is the function itself, not a loss that it returned. state "
        "is the one that tx.init(params) or the last step returned, not the optimizer "
        "or train state around it.\n"
        "With an nnx.Optimizer around it, let the loss function return "
        "scale_gradient(loss, optimizer), and call optimizer.update(model, "
        "scaled_grads, value=loss) instead of minimize"
    )


def with_loss_scale(
    inner: optax.GradientTransformation | optax.MultiSteps,
    loss_scale: LossScaleLike = "dynamic",
    *,
    axis_name: AxisName | None = None,
    mask: Mask | None = None,
    branch: Branch | None = None,
    skip: Skip | None = "nonfinite",
) -> LossScaledTransformation:
    """Wraps an optimizer so that it accepts the gradients of a scaled loss.

    By default, each step computes the following. `value` is the loss; in a step that is
    not given the loss, `isfinite(value)` stands for True::

        grads = scaled_grads / loss_scale  # in float32 or wider
        finite = all_finite(grads)
        if finite and isfinite(norm(grads)) and isfinite(value):
            updates, inner_state = inner.update(grads, inner_state, params)
            loss_scale = loss_scale.adjust(True)
        else:
            updates = zeros
            if not finite and isfinite(value):
                loss_scale = loss_scale.adjust(False)

    The norm is infinite if the sum of the squares of finite gradients overflows in
    float32: a gradient of 1e20 would make Adam's second moment infinite for good.

    The scaled gradients come from `value_and_scaled_grad` or from a loss function that
    returns `scale_gradient(loss, state)`. The method `minimize` computes them itself.

    `inner` receives unscaled gradients, parameters and state in float32 or wider. Pass
    the whole optimizer as `inner`: `with_loss_scale(optax.chain(clip, optimizer))`. In
    a chain around the wrapper, a transformation before the wrapper would receive scaled
    gradients, and one that sums these, such as `optax.trace`, would keep the NaN of an
    overflow for good. A transformation after the wrapper may move the parameters even
    on a skipped step, as weight decay and `optax.ema` do.

    A step is skipped in one of two ways. With `branch="cond"`, a `lax.cond` runs
    `inner` only if the step is applied. With `"select"`, `inner` runs on every step,
    and its results or the old values are selected. On a skipped step, `inner` then
    receives zeros in place of NaN and infinities, except in gradients that `mask`
    excludes. (With `skip=None`, it receives them as they are.) Use `"cond"` if `inner`
    should not run on a skipped step, because it has side effects, such as a callback,
    or is expensive, such as an `eigh`. The default is `"cond"` on CPU and `"select"` on
    GPU and TPU, where compiled programs may copy the results of a conditional.

    Replicas must decide together, along `axis_name`. If they decided independently,
    their parameters would diverge, and a collective inside `inner` would deadlock under
    `branch="cond"`. All of them skip a step if the gradients on one of them are not
    finite, and a skip rule uses the largest of their norms and the mean of their
    losses. The wrapper does not reduce the gradients themselves. Reduce them before the
    step:

    - Under `pmap`, and under `shard_map(…, check_vma=False)`, pass the wrapper
      `pmean(scaled_grads, axis_name)`.
    - Otherwise, under `shard_map`, JAX already sums the gradients of replicated
      parameters, so differentiate the mean of the loss,
      `pmean(loss_fn(…), axis_name)`.

    Args:
      inner: any Optax transformation. To accumulate gradients, pass
        `optax.MultiSteps(inner, k)`.
      loss_scale: one of the following:

        - `"dynamic"`: a `DynamicLossScale` with its defaults.
        - `"headroom"`: a `HeadroomLossScale` with its defaults. It suits gradients
          that jump, and those that are all zero on most steps.
        - A number, or a concrete array of shape (): a `FixedLossScale` with that scale.
        - None: no scaling, for bfloat16 and float32. The wrapper then only skips steps,
          as `skip` says. `skip_nonfinite` is another name for this.
        - A `LossScale`, or a dict from its `get_config`.
      axis_name: under `pmap` or `shard_map`, the axis or axes over which all replicas
        decide together. Under `jit` alone, leave it out.
      mask: as in `optax.masked`, a tree of bools that is a prefix of the gradients, or
        a function from the gradients to such a tree. Gradients marked False are neither
        unscaled nor checked. Exclude leaves that are not gradients but new values of
        their parameters, such as Flax's float8 scales: `mask={"params": True,
        "_overwrite_with_gradient": False}`.
      branch: how a step is skipped, `"cond"` or `"select"` (see above), or None for the
        platform's default. Where the step is not traced, `"cond"` and None branch in
        Python.
      skip: which steps to skip:

        - `"nonfinite"`: whatever the loss scale, steps whose gradients or whose norm is
          not finite, and steps whose loss is passed as `value` and is not finite.
        - A rule from `skips`: the same steps, and finite steps that the rule rejects,
          such as spikes of the gradient norm. A step that the rule rejects leaves the
          loss scale as it was. The rule receives the global norm of the unscaled
          gradients that `mask` keeps, and the loss if the step is given one as `value`.
        - None: only the steps that the loss scale itself skips, as in TensorFlow. The
          loss is ignored, and with a fixed loss scale or none *nothing is checked*, so
          an overflow writes NaN into the parameters.

    Returns:
      An `optax.GradientTransformationExtraArgs` that also has the methods
      `apply_gradients` and `minimize`. Its state is a `LossScaleState`.

    Raises:
      TypeError: if `inner` is not a transformation.
      TypeError: in `init`, if a parameter is not an array.
      ValueError: if `loss_scale`, `mask`, `branch` or `skip` is not allowed.
      ValueError: in `init`, if a part of `inner` is already wrapped.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> import optax_lossscale as ols
      >>> tx = ols.with_loss_scale(optax.sgd(0.1))
      >>> params = {"w": jnp.array([1.0, 2.0])}
      >>> state = tx.init(params)
      >>> loss_fn = lambda params: jnp.sum(params["w"] ** 2)
      >>> loss, scaled_grads = ols.value_and_scaled_grad(loss_fn, state)(params)
      >>> params, state = tx.apply_gradients(scaled_grads, state, params, value=loss)
      >>> print(loss, params["w"], state.should_apply)
      5.0 [0.8 1.6] True
    """
    inner_tx = as_transformation(inner)
    if branch is not None and branch not in get_args(Branch):
        refuse("branch", branch, "'cond', 'select', or None for the platform's own")
    if not isinstance(skip, SkipRule | None) and skip != "nonfinite":
        refuse("skip", skip, "None, 'nonfinite', or a rule such as skips.spikes()")
    check_mask(mask)
    step = ScaledStep(
        inner_tx, as_loss_scale(loss_scale), axis_name, mask, branch, skip
    )
    return LossScaledTransformation(step.init, step)


def skip_nonfinite(
    inner: optax.GradientTransformation | optax.MultiSteps,
    *,
    axis_name: AxisName | None = None,
    mask: Mask | None = None,
    branch: Branch | None = None,
    skip: SkipRule | Literal["nonfinite"] = "nonfinite",
) -> LossScaledTransformation:
    """Wraps an optimizer to skip steps that are not finite, without a loss scale.

    Use it for bfloat16 and float32, whose range needs no scaling. It is
    `with_loss_scale(inner, None, …)`, with the same arguments, methods and state.

    Args:
      inner: any Optax transformation.
      axis_name: under `pmap` or `shard_map`, the axis or axes over which all replicas
        decide together.
      mask: which gradients are checked.
      branch: how a step is skipped.
      skip: `"nonfinite"`, or a rule from `skips` that also skips finite steps.

    Returns:
      What `with_loss_scale` returns.

    Raises:
      TypeError: if `inner` is not a transformation.
      ValueError: if `mask`, `branch` or `skip` is not allowed.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> import optax_lossscale as ols
      >>> tx = ols.skip_nonfinite(optax.sgd(0.1))
      >>> params = jnp.ones(2)
      >>> grads = jnp.array([1.0, jnp.nan])
      >>> params, state = tx.apply_gradients(grads, tx.init(params), params)
      >>> print(params, state.skipped_steps)
      [1. 1.] 1
    """
    return with_loss_scale(
        inner, None, axis_name=axis_name, mask=mask, branch=branch, skip=skip
    )
