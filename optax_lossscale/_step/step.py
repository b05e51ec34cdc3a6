"""The optimizer step: unscale, check, apply or skip, adapt."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.typing import ArrayLike

from optax_lossscale._arrays.precision import at_least_float32, dtype_of, is_inexact, strong
from optax_lossscale._scales.loss_scale import AxisName, LossScale
from optax_lossscale._skips.rule import SkipRule
from optax_lossscale._step import inputs
from optax_lossscale._step.branch import Branch, apply_or_skip
from optax_lossscale._step.decision import Skip, decide
from optax_lossscale._step.inputs import Mask
from optax_lossscale._step.master_weights import (
    has_master_weights,
    refuse_around,
    refuse_other_master_weights,
    with_rest_of_narrow,
)
from optax_lossscale._step.missing import (
    as_inner_sees,
    drop_missing,
    fill_missing,
    keep_slots,
    zeros_for_missing,
)
from optax_lossscale._step.state import LossScaleState, wrapper_states
from optax_lossscale._step.surroundings import refuse_multi_steps


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """What a step needs to know, and the step."""

    inner: optax.GradientTransformation
    loss_scale: LossScale
    axis_name: AxisName | None
    mask: Mask | None
    branch: Branch | None
    skip: Skip | None

    @property
    def rule(self) -> SkipRule | None:
        """What decides about finite steps, in its first state."""
        return self.skip if isinstance(self.skip, SkipRule) else None

    def init(self, params: Any) -> LossScaleState:
        """The state before the first step."""
        refuse_multi_steps()
        inputs.refuse_other_leaves("params", params)
        inner_state = self.inner.init(jax.tree.map(as_inner_sees, params))
        refuse_around(inner_state)
        inner_state = with_rest_of_narrow(inner_state, self.inner.init, params)
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
            skip_rule=jax.tree.map(jnp.array, self.rule),
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
        return self._step(updates, state, params, value, extra_args, to_params=False)

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
        return self._step(scaled_grads, state, params, value, extra_args, to_params=True)

    def _step(self, scaled_grads, state, params, value, extra_args, *, to_params):
        """One step, to new parameters or to the updates that lead there."""
        inputs.refuse_other_states(state, "gradients, state, params")
        inputs.refuse_another_configuration(state.loss_scale, self.loss_scale)
        inputs.refuse_another_rule(state.skip_rule, self.rule)
        inputs.refuse_masked(scaled_grads)
        inputs.refuse_other_leaves("the gradients", scaled_grads)
        filled = fill_missing(scaled_grads, params)
        if params is not None and not isinstance(params, optax.LookaheadParams):
            inputs.refuse_other_shapes(filled, params)
        self._refuse_other_inner_states(state.inner_state, params)
        if value is None and self.rule is not None:
            value = extra_args.get("loss")  # which is its name in MaxText and Levanter
        value = None if value is None else inputs.scalar(value)

        mask = inputs.mask_of(filled, self.mask)
        unscale = partial(_unscale, mask=mask)

        def update(grads, inner_state, params, value):
            updates, new_state = self._inner_update(grads, inner_state, params, value, extra_args)
            updates = drop_missing(updates, scaled_grads)
            finish = _apply_updates if to_params else zeros_for_missing
            new_state = keep_slots(self.inner, new_state, inner_state, scaled_grads)
            return finish(updates, params), new_state

        # What is called several times, in the branches for several platforms, is traced once.
        if _is_traced(state.loss_scale):
            unscale = jax.jit(unscale)
        grads = unscale(state.loss_scale, filled)
        loss_scale, rule, should_apply = self._decided(_kept(grads, mask), value, state)
        if should_apply is True:
            new, inner_state = update(grads, state.inner_state, params, value)
            return new, state._replace(loss_scale=loss_scale, inner_state=inner_state)
        if _is_traced(should_apply):
            update = jax.jit(update)

        def apply(filled, state, params, value):
            # Unscaled a second time, where that fuses with the inner update: so the check
            # leaves no unscaled copy of the gradients in memory.
            grads = unscale(state.loss_scale, filled)
            return update(grads, state.inner_state, params, value)

        def apply_always(filled, state, params, value):
            grads = _finite(unscale(state.loss_scale, filled), mask)
            return update(grads, state.inner_state, params, _zeros_for_nonfinite(value))

        def skip(filled, state, params, value):
            if to_params:
                return jax.tree.map(strong, params), state.inner_state
            updates, _ = jax.eval_shape(update, grads, state.inner_state, params, value)
            return _zeros(updates), state.inner_state

        given = (filled, state, params, value)
        new, inner_state = apply_or_skip(
            should_apply, apply, apply_always, skip, given, self.branch
        )
        counts = _counted(state, should_apply)
        return new, LossScaleState(loss_scale, inner_state, **counts, skip_rule=rule)

    def _refuse_other_inner_states(self, inner_state, params):
        """Raises for an inner state that `init` would make in other dtypes."""
        if params is None:
            return
        expected = lambda: jax.eval_shape(self.init, params).inner_state
        if has_master_weights(inner_state):
            refuse_other_master_weights(inner_state, expected())
        inputs.refuse_narrower(inner_state, expected)

    def _decided(self, grads, value, state):
        """The loss scale and the rule after the step, and whether it is applied."""
        checks = self.skip is not None
        return decide(
            grads, value, state.loss_scale, state.skip_rule, self.axis_name, checks=checks
        )

    def _inner_update(self, grads, inner_state, params, value, extra_args):
        """The inner update, which sees parameters in float32 or wider."""
        inner = optax.with_extra_args_support(self.inner)
        extra_args = inputs.extra_args_of(inner, value, extra_args)
        wide_params = jax.tree.map(as_inner_sees, params)
        try:
            updates, new_state = inner.update(grads, inner_state, wide_params, **extra_args)
        except Exception as error:
            inputs.refuse_value_within(error)
            inputs.refuse_another_inner_state(error, inner_state, self.init, params)
            raise
        keep_dtype = lambda new, old: strong(new, dtype_of(old))
        return updates, jax.tree.map(keep_dtype, new_state, inner_state)


def _unscale(loss_scale: LossScale, scaled_grads: Any, mask: Any) -> Any:
    """Unscaled gradients; those that the mask leaves out as they are, in float32 at least."""
    unscaled = loss_scale.unscale(_kept(scaled_grads, mask))
    wide = lambda keep, u, g: u if keep else jax.tree.map(at_least_float32, g)
    return jax.tree.map(wide, mask, unscaled, scaled_grads)


def _kept(grads: Any, mask: Any) -> Any:
    """The gradients, None where the mask leaves them out."""
    return jax.tree.map(lambda keep, g: g if keep else None, mask, grads)


def _finite(grads: Any, mask: Any) -> Any:
    """The gradients, zero where they are not finite, but for those that the mask leaves out."""
    return jax.tree.map(lambda keep, g: _zeros_for_nonfinite(g) if keep else g, mask, grads)


def _zeros_for_nonfinite(tree: Any) -> Any:
    """The numbers, zero where they are not finite.

    Each by itself, which waits for no answer from the check: so a clip's norm of them is
    computed in the check's own pass.
    """

    def zero_for_nonfinite(x, zero):
        is_finite = jnp.isfinite if jnp.iscomplexobj(x) else lax.is_finite  # quicker to trace
        return lax.select(is_finite(x), x, zero)

    of_leaf = lambda x, zero: zero_for_nonfinite(x, zero) if is_inexact(x) else x
    return jax.tree.map(of_leaf, tree, _zeros(tree))


def _is_traced(tree: Any) -> bool:
    """Whether this is a step to compile, as far as it depends on what is given."""
    return any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(tree))


def _zeros(tree: Any) -> Any:
    """A tree of zeros; leaves of one type share theirs, as tracing them takes time."""
    of_kind = {jax.typeof(x): x for x in jax.tree.leaves(tree)}
    zeros = {kind: jnp.zeros_like(x) for kind, x in of_kind.items()}
    return jax.tree.map(lambda x: zeros[jax.typeof(x)], tree)


def _counted(state: LossScaleState, should_apply: jax.Array) -> dict[str, jax.Array]:
    """Whether the step was applied, and the skipped ones counted."""
    one_more = optax.safe_increment
    skipped, in_a_row = state.skipped_steps, state.consecutive_skipped_steps
    return {
        "should_apply": jnp.asarray(should_apply, bool),
        "skipped_steps": jnp.where(should_apply, skipped, one_more(skipped)),
        "consecutive_skipped_steps": jnp.where(should_apply, 0, one_more(in_a_row)),
    }


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
