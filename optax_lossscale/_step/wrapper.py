"""The optimizer wrapper: unscale, check, apply or skip, adapt."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from optax_lossscale._arrays.precision import at_least_float32, dtype_of, strong
from optax_lossscale._scales.get import get
from optax_lossscale._scales.loss_scale import AxisName, LossScale
from optax_lossscale._step.gradient import value_and_grad

Mask = Any | Callable[[Any], Any]


class LossScaleState(NamedTuple):
    """State of `with_loss_scale`.

    Attributes:
      loss_scale: the loss scale, with what it counts.
      inner_state: the state of the wrapped optimizer.
      should_apply: whether the last step was applied; bool, shape ().
      skipped_steps: the steps skipped so far; int32, shape ().
      consecutive_skipped_steps: those since the last applied step; int32, shape ().
    """

    loss_scale: LossScale
    inner_state: optax.OptState
    should_apply: jax.Array
    skipped_steps: jax.Array
    consecutive_skipped_steps: jax.Array


class LossScaledTransformation(optax.GradientTransformationExtraArgs):
    """An optimizer that takes scaled gradients: `init`, `update` and two methods more."""

    def apply_gradients(
        self, scaled_grads: Any, state: LossScaleState, params: Any, **extra_args: Any
    ) -> tuple[Any, LossScaleState]:
        """One optimizer step, from scaled gradients to new parameters.

        The same step as `update` followed by `optax.apply_updates`, but one in which
        the new parameters are computed inside the branch that applies the step. The
        unscaled gradients and the updates are then never written to memory.

        Args:
          scaled_grads: gradients of the scaled loss, as `value_and_grad` returns
            them; a tree like `params`, in which `None` leaves leave the parameter be.
          state: the state that `init` or the last step returned.
          params: the parameters, in any floating-point dtype.
          **extra_args: passed on to the inner transformation.

        Returns:
          `(params, state)`: at a skipped step the parameters and the inner state are
          bit for bit those before it.

        Raises:
          ValueError: if the gradients' structure is not the parameters'.
        """
        # A named tuple of `init` and `update` has no other place to keep a function.
        apply_gradients = getattr(self.update, "apply_gradients")  # noqa: B009
        return apply_gradients(scaled_grads, state, params, **extra_args)

    def minimize(
        self,
        loss_fn: Callable[..., Any],
        state: LossScaleState,
        params: Any,
        *args: Any,
        has_aux: bool = False,
        **kwargs: Any,
    ) -> tuple[Any, Any, LossScaleState]:
        """The loss, its gradients and the step that they make, in one call.

        Args:
          loss_fn: called as `loss_fn(params, *args, **kwargs)`.
          state: the state that `init` or the last step returned.
          params: the parameters.
          *args: further arguments of `loss_fn`.
          has_aux: whether `loss_fn` returns `(loss, aux)`.
          **kwargs: further keyword arguments of `loss_fn`.

        Returns:
          `(loss, params, state)`, or `((loss, aux), params, state)` with `has_aux`.
        """
        value, scaled_grads = value_and_grad(loss_fn, state, has_aux=has_aux)(
            params, *args, **kwargs
        )
        return value, *self.apply_gradients(scaled_grads, state, params)


def with_loss_scale(
    inner: optax.GradientTransformation,
    loss_scale: Any = "dynamic",
    *,
    axis_name: AxisName | None = None,
    mask: Mask | None = None,
) -> LossScaledTransformation:
    """Wraps an optimizer so that it takes the gradients of a scaled loss.

    Each step unscales the gradients, checks that they are finite, lets `inner`
    update or skips the step, and adapts the loss scale. `inner` sees unscaled
    gradients in float32 or wider, and parameters and state likewise. So what looks at
    the size of gradients, such as a clip, belongs inside the wrapper: before it, in
    `optax.chain(clip, with_loss_scale(…))`, it would look at scaled ones.

    Of the two ways to accumulate, `optax.MultiSteps(with_loss_scale(inner), k)` decides
    once a window, and `with_loss_scale(optax.MultiSteps(inner, k))` leaves out the bad
    micro-batch alone.

    Args:
      inner: any Optax transformation.
      loss_scale: whatever `get` takes: `"dynamic"`, a number, a `LossScale`, `None`.
      axis_name: under `pmap` or `shard_map`, the axis or axes over which all
        replicas decide alike; a reduction inside `inner` hangs if they do not. Reduce the
        gradients themselves with `pmean` before the wrapper or inside it; but under
        `shard_map`, where those of replicated parameters come out summed, take the mean in
        the loss: `pmean(loss_fn(…), axis_name)`. Under `jit` alone there is no axis to name.
      mask: as in `optax.masked`, a tree of bools that is a prefix of the gradients,
        or a function from them to one. Leaves marked False are neither unscaled nor
        checked.

    Returns:
      An `optax.GradientTransformationExtraArgs` with the further methods
      `apply_gradients` and `minimize`. Its state is a `LossScaleState`.

    Raises:
      TypeError: if `inner` is no transformation.
      ValueError: if `loss_scale` is not what `get` takes.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> import optax_lossscale as ols
      >>> tx = ols.with_loss_scale(optax.sgd(0.1))
      >>> params = {"w": jnp.array([1.0, 2.0])}
      >>> state = tx.init(params)
      >>> loss_fn = lambda params: jnp.sum(params["w"] ** 2)
      >>> loss, grads = ols.value_and_grad(loss_fn, state)(params)
      >>> params, state = tx.apply_gradients(grads, state, params)
      >>> print(loss, params["w"], state.should_apply)
      5.0 [0.8 1.6] True
    """
    if not callable(getattr(inner, "init", None)) or not callable(getattr(inner, "update", None)):
        raise TypeError(
            f"inner must be an Optax gradient transformation, with init and update; got {inner!r}"
        )
    if isinstance(inner, optax.MultiSteps):
        inner = inner.gradient_transformation()
    inner_tx = optax.with_extra_args_support(inner)
    initial_loss_scale = get(loss_scale)

    def init(params):
        wide_params = jax.tree.map(at_least_float32, params)
        return LossScaleState(
            # Copies: what init hands out may be donated, and the optimizer lives on.
            loss_scale=jax.tree.map(jnp.array, initial_loss_scale),
            inner_state=_unaliased(jax.tree.map(strong, inner_tx.init(wide_params)), params),
            should_apply=jnp.array(True),
            skipped_steps=jnp.zeros((), jnp.int32),
            consecutive_skipped_steps=jnp.zeros((), jnp.int32),
        )

    def unscale(loss_scale, scaled_grads, masked=at_least_float32):
        """Unscaled gradients; where the mask is False, `masked` of each leaf instead."""
        tree = mask(scaled_grads) if callable(mask) else mask
        return jax.tree.map(
            lambda keep, g: loss_scale.unscale(g) if keep else jax.tree.map(masked, g),
            True if tree is None else tree,
            scaled_grads,
        )

    def step(scaled_grads, state, params, extra_args, into_params):
        """One step to `(result, state)`: to new parameters, or else to updates."""
        if not isinstance(state, LossScaleState):
            raise TypeError(
                "the state must be the LossScaleState that this transformation's init or its "
                f"last step returned, got a {type(state).__name__}; the order of the arguments "
                "is gradients, state, params"
            )
        given, scaled_grads = scaled_grads, _fill_missing(scaled_grads, params)

        def apply():
            # The gradients are unscaled a second time, here where that fuses with the
            # inner update: so the check leaves no unscaled copy of them in memory.
            grads = unscale(state.loss_scale, scaled_grads)
            wide_params = jax.tree.map(at_least_float32, params)
            updates, inner_state = inner_tx.update(
                grads, state.inner_state, wide_params, **extra_args
            )
            inner_state = jax.tree.map(
                lambda new, old: strong(new, old.dtype), inner_state, state.inner_state
            )
            updates = _drop_missing(updates, given)
            apply_updates = _apply_updates if into_params else _zeros_if_none
            return apply_updates(params, updates), inner_state

        def skip():
            if into_params:
                return jax.tree.map(strong, params), state.inner_state
            return jax.tree.map(jnp.zeros_like, jax.eval_shape(apply)[0]), state.inner_state

        checked = unscale(state.loss_scale, scaled_grads, masked=lambda grads: None)
        loss_scale, should_apply = state.loss_scale.update(checked, axis_name)
        if jax.tree.structure(loss_scale) != jax.tree.structure(state.loss_scale):
            raise TypeError(
                f"{type(state.loss_scale).__name__} must adapt to another of its kind, with the "
                f"same configuration: return self.replace(…) from adjust. Got {loss_scale!r}"
            )
        if should_apply is True:
            result, inner_state = apply()
            return result, state._replace(loss_scale=loss_scale, inner_state=inner_state)

        result, inner_state = lax.cond(should_apply, apply, skip)
        return result, LossScaleState(
            loss_scale=loss_scale,
            inner_state=inner_state,
            should_apply=jnp.asarray(should_apply, bool),
            skipped_steps=jnp.where(
                should_apply, state.skipped_steps, optax.safe_increment(state.skipped_steps)
            ),
            consecutive_skipped_steps=jnp.where(
                should_apply, 0, optax.safe_increment(state.consecutive_skipped_steps)
            ),
        )

    def update(scaled_grads, state, params=None, **extra_args) -> Any:
        return step(scaled_grads, state, params, extra_args, into_params=False)

    def apply_gradients(scaled_grads, state, params, **extra_args):
        return step(scaled_grads, state, params, extra_args, into_params=True)

    transformation: Any = (init, update)
    setattr(update, "apply_gradients", apply_gradients)  # noqa: B010
    return LossScaledTransformation(*transformation)


def wrapper_states(state: Any) -> list[LossScaleState]:
    """Every `LossScaleState` in an optimizer state, however deep it lies."""
    is_state = lambda x: isinstance(x, LossScaleState)
    return [x for x in jax.tree.leaves(state, is_leaf=is_state) if is_state(x)]


def _unaliased(state: Any, params: Any) -> Any:
    """A state that shares no array with the parameters or itself, for both to be donated."""
    seen = {id(p) for p in jax.tree.leaves(params)}

    def unaliased(x):
        if isinstance(x, jax.Array) and id(x) in seen:
            return jnp.copy(x)
        seen.add(id(x))
        return x

    return jax.tree.map(unaliased, state)


def _is_none(x: Any) -> bool:
    return x is None


def _fill_missing(grads: Any, params: Any) -> Any:
    """Zeros for gradients that are None, as an inner state has a place for every parameter.

    Raises:
      ValueError: unless the gradients' structure is then the parameters'.
    """
    if params is None or isinstance(params, optax.LookaheadParams):
        return grads
    zeros_if_none = lambda p, g: jnp.zeros_like(p) if g is None else g
    try:
        filled = jax.tree.map(zeros_if_none, params, grads)
    except ValueError:
        filled = None
    if jax.tree.structure(filled) != jax.tree.structure(params):
        raise ValueError(
            "the gradients must have the structure of the parameters, with None where there is "
            f"no gradient.\nGradients: {jax.tree.structure(grads)}\n"
            f"Parameters: {jax.tree.structure(params)}"
        )
    return filled


def _drop_missing(updates: Any, grads: Any) -> Any:
    """The updates, None where the gradient was."""
    if not any(map(_is_none, jax.tree.leaves(grads, is_leaf=_is_none))):
        return updates
    return jax.tree.map(lambda g, u: None if g is None else u, grads, updates, is_leaf=_is_none)


def _zeros_if_none(params: Any, updates: Any) -> Any:
    """The updates, zero for a parameter that has none."""
    if params is None:
        return updates
    zeros = lambda u, p: jnp.zeros_like(at_least_float32(p)) if u is None and p is not None else u
    return jax.tree.map(zeros, updates, params, is_leaf=_is_none)


def _apply_updates(params: Any, updates: Any) -> Any:
    """`optax.apply_updates`, in float32 or wider; a parameter without an update stays."""

    def apply(p, u):
        new = p if u is None else optax.apply_updates(at_least_float32(p), u)
        return strong(new, dtype_of(p))

    return jax.tree.map(apply, params, updates)
