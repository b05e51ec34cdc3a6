"""The optimizer wrapper: unscale, check, apply or skip, adapt."""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from optax_lossscale._arrays.precision import at_least_float32, dtype_of, is_inexact, strong
from optax_lossscale._arrays.variables import plain
from optax_lossscale._scales.get import LossScaleLike, get
from optax_lossscale._scales.loss_scale import AxisName, LossScale, on_all_replicas
from optax_lossscale._scales.validation import refuse, shown
from optax_lossscale._step.branch import Branch, apply_or_skip
from optax_lossscale._step.gradient import value_and_grad
from optax_lossscale._step.inputs import (
    Mask,
    mask_of,
    refuse_other_leaves,
    refuse_other_masks,
    refuse_other_shapes,
)
from optax_lossscale._step.master_weights import with_copies_of_narrow
from optax_lossscale._step.missing import (
    as_inner_sees,
    drop_missing,
    fill_missing,
    keep_slots,
    zeros_for_missing,
)


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
    inner_state: Any
    should_apply: jax.Array
    skipped_steps: jax.Array
    consecutive_skipped_steps: jax.Array


class _Init(Protocol):
    def __call__(self, params: Any) -> LossScaleState: ...


class _Update(Protocol):
    def __call__(
        self,
        updates: Any,
        state: LossScaleState,
        params: Any = None,
        *,
        value: ArrayLike | None = None,
        **extra_args: Any,
    ) -> tuple[Any, LossScaleState]: ...


class LossScaledTransformation(optax.GradientTransformationExtraArgs):
    """An optimizer that takes scaled gradients, as `with_loss_scale` makes it.

    A pair of `init` and `update`, as every Optax transformation, with two methods more.

    Attributes:
      init: from the parameters to a `LossScaleState`.
      update: from scaled gradients, the state and the parameters to `(updates, state)`.
    """

    init: _Init  # pyrefly: ignore[bad-override]
    update: _Update  # pyrefly: ignore[bad-override]

    def apply_gradients(
        self,
        scaled_grads: Any,
        state: LossScaleState,
        params: Any,
        *,
        value: ArrayLike | None = None,
        **extra_args: Any,
    ) -> tuple[Any, LossScaleState]:
        """One optimizer step, from scaled gradients to new parameters.

        The same step as `update` followed by `optax.apply_updates`, but one in which
        the new parameters are computed where the step is applied or skipped. On CPU the
        unscaled gradients and the updates are then never written to memory.

        Args:
          scaled_grads: gradients of the scaled loss, as `value_and_grad` returns
            them; a tree like `params`. A parameter whose gradient is `None`, and what the
            inner state keeps of that parameter alone, stay as they are.
          state: the state that `init` or the last step returned.
          params: the parameters, in any floating-point dtype.
          value: the true loss, shape (), which is passed on to the inner transformation
            too. One that is not finite skips the step, and leaves the loss scale as it was:
            the forward pass does not depend on it, so no scale would have helped.
          **extra_args: passed on to the inner transformation.

        Returns:
          `(params, state)`: at a skipped step the parameters and the inner state are
          bit for bit those before it.

        Raises:
          TypeError: if `state` is no `LossScaleState`, or `update` was replaced: this is
            another method of what it is bound to.
          ValueError: if the gradients' structure is not the parameters', or the state is that
            of another configuration.
        """
        wrapper = getattr(self.update, "__self__", None)
        if not isinstance(wrapper, _Wrapper):
            raise TypeError(
                "apply_gradients is the step of with_loss_scale's own update, which was replaced: "
                "call update and optax.apply_updates instead"
            )
        return wrapper.apply_gradients(scaled_grads, state, params, value=value, **extra_args)

    def minimize(
        self,
        loss_fn: Callable[..., Any],
        state: LossScaleState,
        params: Any,
        *args: Any,
        has_aux: bool = False,
        compute_dtype: DTypeLike | None = None,
        extra_args: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> tuple[Any, Any, LossScaleState]:
        """The loss, its gradients and the step that they make, in one call.

        The loss is passed on as the step's `value`: one that is not finite skips it.

        Args:
          loss_fn: called as `loss_fn(params, *args, **kwargs)`.
          state: the state that `init` or the last step returned.
          params: the parameters.
          *args: further arguments of `loss_fn`.
          has_aux: whether `loss_fn` returns `(loss, aux)`.
          compute_dtype: what the parameters are cast to first, as in `value_and_grad`.
          extra_args: passed on to the inner transformation, as the keyword arguments of
            `apply_gradients` are.
          **kwargs: further keyword arguments of `loss_fn`.

        Returns:
          `(loss, params, state)`, or `((loss, aux), params, state)` with `has_aux`.

        Raises:
          TypeError: if `loss_fn` is no function or `state` no `LossScaleState`.
        """
        order = "loss_fn, state, params, and what else loss_fn takes"
        if not callable(loss_fn):
            raise TypeError(
                f"loss_fn must be a function, got a {type(loss_fn).__name__}; the order of the "
                f"arguments is {order}"
            )
        _refuse_other_states(state, order)
        differentiate = value_and_grad(
            loss_fn, state, has_aux=has_aux, compute_dtype=compute_dtype
        )
        value, scaled_grads = differentiate(params, *args, **kwargs)
        extra_args = {"value": value[0] if has_aux else value} | dict(extra_args or {})
        return value, *self.apply_gradients(scaled_grads, state, params, **extra_args)


def with_loss_scale(
    inner: optax.GradientTransformation | optax.MultiSteps,
    loss_scale: LossScaleLike = "dynamic",
    *,
    axis_name: AxisName | None = None,
    mask: Mask | None = None,
    branch: Branch | None = None,
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
      branch: how a step is skipped: `"cond"`, by a `lax.cond`; `"select"`, by a select in
        each kernel that computes a result; or None, by whichever keeps the step in place
        on the platform that it is compiled for, the first on CPU and the second on GPU and
        TPU. Under a select `inner` runs at every step, with zeros for what is not finite. So
        say `"cond"` where that would be wrong or dear: an `inner` that acts on the outside,
        by a callback, or takes long to compute, as a line search or an `eigh`.

    Returns:
      An `optax.GradientTransformationExtraArgs` with the further methods
      `apply_gradients` and `minimize`. Its state is a `LossScaleState`.

    Raises:
      TypeError: if `inner` is no transformation, or `mask` no tree of bools.
      ValueError: if `inner` is wrapped already, `loss_scale` is not what `get` takes, or
        `branch` is none of its values.

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
    if isinstance(inner, LossScaledTransformation):
        raise ValueError(
            "inner is already wrapped in with_loss_scale, and would see its gradients divided by "
            "the loss scale twice: wrap the optimizer once, outside of all that it consists of"
        )
    if isinstance(inner, optax.MultiSteps):
        inner = inner.gradient_transformation()
    if branch is not None and branch not in get_args(Branch):
        refuse("branch", branch, "'cond', 'select', or None for the platform's own")
    refuse_other_masks(mask)
    wrapper = _Wrapper(inner, get(loss_scale), axis_name, mask, branch)
    return LossScaledTransformation(wrapper.init, wrapper.update)


@dataclasses.dataclass(frozen=True, eq=False)
class _Wrapper:
    """What a step needs to know, and the step."""

    inner: optax.GradientTransformation
    loss_scale: LossScale
    axis_name: AxisName | None
    mask: Mask | None
    branch: Branch | None

    def init(self, params: Any) -> LossScaleState:
        """The state before the first step."""
        refuse_other_leaves("params", params)
        inner_state = self.inner.init(jax.tree.map(as_inner_sees, params))
        inner_state = with_copies_of_narrow(inner_state, self.inner.init, params)
        if wrapper_states(inner_state):
            raise ValueError(
                "a part of inner is wrapped in with_loss_scale already, and would see its "
                "gradients divided by the loss scale twice: wrap the whole optimizer, once"
            )
        return LossScaleState(
            # Copies: what init hands out may be donated, and the optimizer lives on.
            loss_scale=jax.tree.map(jnp.array, self.loss_scale),
            inner_state=_unaliased(jax.tree.map(strong, inner_state), params),
            should_apply=jnp.array(True),
            skipped_steps=jnp.zeros((), jnp.int32),
            consecutive_skipped_steps=jnp.zeros((), jnp.int32),
        )

    def update(
        self,
        updates: Any,
        state: LossScaleState,
        params: Any = None,
        *,
        value: ArrayLike | None = None,
        **extra_args: Any,
    ) -> tuple[Any, LossScaleState]:
        """One step, from scaled gradients to updates; a skipped one gives zeros."""
        zeros = lambda updates: jax.tree.map(jnp.zeros_like, updates)
        return self._step(updates, state, params, value, extra_args, zeros_for_missing, zeros)

    def apply_gradients(
        self,
        scaled_grads: Any,
        state: LossScaleState,
        params: Any,
        *,
        value: ArrayLike | None = None,
        **extra_args: Any,
    ) -> tuple[Any, LossScaleState]:
        """One step, from scaled gradients to parameters; a skipped one gives those before."""
        if params is None:
            raise ValueError("apply_gradients needs the parameters: gradients, state, params")
        kept = lambda new_params: jax.tree.map(strong, params)
        return self._step(scaled_grads, state, params, value, extra_args, _apply_updates, kept)

    def _step(self, scaled_grads, state, params, value, extra_args, result, skipped):
        """One step to `result(updates, params)`, or to what is `skipped` in its place."""
        _refuse_other_states(state, "gradients, state, params")
        _refuse_another_configuration(state.loss_scale, self.loss_scale)
        _refuse_masked(scaled_grads)
        refuse_other_leaves("the gradients", scaled_grads)
        filled = fill_missing(scaled_grads, params)
        if params is not None and not isinstance(params, optax.LookaheadParams):
            refuse_other_shapes(filled, params)
        value = None if value is None else _scalar(value)
        loss_scale, should_apply = self._check(filled, value, state.loss_scale)

        def apply(finite):
            # The gradients are unscaled a second time, here where that fuses with the
            # inner update: so the check leaves no unscaled copy of them in memory.
            finite_only = partial(_zeros_for_nonfinite, finite)
            grads = _unscale(state.loss_scale, filled, self.mask, unscaled=finite_only)
            loss = finite_only(value)
            updates, inner_state = self._inner_update(
                grads, state.inner_state, params, loss, extra_args
            )
            inner_state = keep_slots(self.inner, inner_state, state.inner_state, scaled_grads)
            return result(drop_missing(updates, scaled_grads), params), inner_state

        if should_apply is True:
            new, inner_state = apply(True)
            return new, state._replace(loss_scale=loss_scale, inner_state=inner_state)

        kept = lambda result: (skipped(result[0]), state.inner_state)
        new, inner_state = apply_or_skip(should_apply, apply, kept, self.branch)
        return new, LossScaleState(loss_scale, inner_state, **_counted(state, should_apply))

    def _check(self, scaled_grads, value, loss_scale):
        """The adapted loss scale, and whether gradients and loss are such that they apply."""
        checked = _unscale(loss_scale, scaled_grads, self.mask, masked=lambda grads: None)
        adapted, should_apply = loss_scale.update(checked, self.axis_name)
        if jax.tree.structure(adapted) != jax.tree.structure(loss_scale):
            raise TypeError(
                f"{type(loss_scale).__name__} must adapt to another of its kind, with the same "
                f"configuration: return self.replace(…) from adjust. Got {adapted!r}"
            )
        if value is None:
            return adapted, should_apply
        # The forward pass does not depend on the loss scale: no other would have helped.
        loss_finite = on_all_replicas(jnp.isfinite(value), self.axis_name)
        kept = partial(jnp.where, loss_finite)
        return jax.tree.map(kept, adapted, loss_scale), loss_finite & should_apply

    def _inner_update(self, grads, inner_state, params, value, extra_args):
        """The inner update, which sees parameters in float32 or wider."""
        inner = optax.with_extra_args_support(self.inner)
        extra_args = extra_args if value is None else {"value": value} | extra_args
        wide_params = jax.tree.map(as_inner_sees, params)
        updates, new_state = inner.update(grads, inner_state, wide_params, **extra_args)
        keep_dtype = lambda new, old: strong(new, dtype_of(old))
        return updates, jax.tree.map(keep_dtype, new_state, inner_state)


def wrapper_states(state: Any) -> list[LossScaleState]:
    """Every `LossScaleState` in an optimizer state, however deep it lies."""
    is_state = lambda x: isinstance(x, LossScaleState)
    return [plain(x) for x in jax.tree.leaves(state, is_leaf=is_state) if is_state(x)]


def _unscale(
    loss_scale: LossScale,
    scaled_grads: Any,
    mask: Any,
    masked=at_least_float32,
    unscaled=lambda grads: grads,
) -> Any:
    """`unscaled` of unscaled gradients; where the mask is False, `masked` of each leaf instead."""
    return jax.tree.map(
        lambda keep, g: unscaled(loss_scale.unscale(g)) if keep else jax.tree.map(masked, g),
        mask_of(scaled_grads, mask),
        scaled_grads,
    )


def _zeros_for_nonfinite(known: Any, grads: Any) -> Any:
    """The gradients, zero where they are not finite, unless all are known to be.

    Number by number, which waits for no answer from the check: so a clip's norm of them is
    computed in the check's own pass.
    """
    if known is True:
        return grads
    zeros = {jax.typeof(g): g for g in jax.tree.leaves(grads) if is_inexact(g)}
    zeros = {kind: jnp.zeros_like(g) for kind, g in zeros.items()}

    def zero_for_nonfinite(g):
        is_finite = jnp.isfinite if jnp.iscomplexobj(g) else lax.is_finite  # quicker to trace
        return lax.select(known, g, lax.select(is_finite(g), g, zeros[jax.typeof(g)]))

    return jax.tree.map(lambda g: zero_for_nonfinite(g) if is_inexact(g) else g, grads)


def _counted(state: LossScaleState, should_apply: jax.Array) -> dict[str, jax.Array]:
    """Whether the step was applied, and the skipped ones counted."""
    one_more = optax.safe_increment
    skipped, in_a_row = state.skipped_steps, state.consecutive_skipped_steps
    return {
        "should_apply": jnp.asarray(should_apply, bool),
        "skipped_steps": jnp.where(should_apply, skipped, one_more(skipped)),
        "consecutive_skipped_steps": jnp.where(should_apply, 0, one_more(in_a_row)),
    }


def _scalar(value: ArrayLike) -> jax.Array:
    if np.shape(value) != ():
        raise TypeError(
            f"value must be the true loss, a scalar, got shape {np.shape(value)}; reduce it, with "
            "jnp.mean say"
        )
    return jnp.asarray(value)


def _refuse_other_states(state: Any, order: str) -> None:
    if not isinstance(state, LossScaleState):
        raise TypeError(
            "the state must be the LossScaleState that this transformation's init or its "
            f"last step returned, got a {type(state).__name__}; the order of the arguments "
            f"is {order}"
        )
    if not isinstance(state.loss_scale, LossScale):
        raise TypeError(
            f"the state's loss_scale must be a LossScale, got {shown(state.loss_scale)}: restore "
            "a checkpoint into the state that tx.init(params) returns"
        )
    kind = dtype_of(state.should_apply)
    if kind != np.bool_:
        raise TypeError(
            f"the state's should_apply came back as {kind}: a transformation around the wrapper "
            "has computed with its state, as SAM's transparent mode does. Put it inside: "
            "with_loss_scale(optax.contrib.sam(…))"
        )


def _refuse_another_configuration(given: LossScale, own: LossScale) -> None:
    if jax.tree.structure(given) != jax.tree.structure(own):
        raise ValueError(
            "the state's loss scale is of another configuration than this transformation's:\n"
            f"  state:          {given.get_config()}\n  transformation: {own.get_config()}\n"
            "To go on with this configuration, keep the rest of the state: "
            "tx.init(params)._replace(inner_state=state.inner_state)"
        )


def _refuse_masked(scaled_grads: Any) -> None:
    is_masked = lambda x: isinstance(x, optax.MaskedNode)
    if any(map(is_masked, jax.tree.leaves(scaled_grads, is_leaf=is_masked))):
        raise ValueError(
            "with_loss_scale is inside optax.masked, optax.partition or optax.multi_transform, "
            "which hand the gradients of all other parameters on as they are, scaled: wrap the "
            "whole of it, as in with_loss_scale(optax.masked(inner, mask))"
        )


def _unaliased(state: Any, params: Any) -> Any:
    """A state that shares no array with the parameters or itself, for both to be donated."""
    seen = {id(p) for p in jax.tree.leaves(params)}

    def unaliased(x):
        if isinstance(x, jax.Array) and id(x) in seen:
            return jnp.copy(x)
        seen.add(id(x))
        return x

    return jax.tree.map(unaliased, state)


def _apply_updates(updates: Any, params: Any) -> Any:
    """`optax.apply_updates`, in float32 or wider; a parameter without an update stays."""

    def apply(p, u):
        if u is not None and np.shape(u) != np.shape(p):
            raise ValueError(
                f"the update of a parameter of shape {np.shape(p)} has the shape {np.shape(u)}; "
                "gradients of a batch are to be averaged first"
            )
        new = p if u is None else optax.apply_updates(at_least_float32(p), u)
        return strong(new, dtype_of(p))

    return jax.tree.map(apply, params, updates)
