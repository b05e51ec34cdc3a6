"""The optimizer step: prepare what is given, decide, apply or skip."""

import dataclasses
import inspect
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_lossscale._arrays.finite import AxisName
from optax_lossscale._arrays.precision import at_least_float32, dtype_of, strong
from optax_lossscale._arrays.validation import shown
from optax_lossscale._scales.loss_scale import LossScale
from optax_lossscale._skips.rule import SkipRule
from optax_lossscale._step import inputs, master_weights
from optax_lossscale._step.branch import Branch, apply_or_skip
from optax_lossscale._step.decision import Skip, decide
from optax_lossscale._step.state import (
    LossScaleState,
    check_configuration,
    check_inner_dtypes,
    check_state,
    wrapper_states,
)


@dataclasses.dataclass(frozen=True, eq=False)
class ScaledStep:
    """The optimizer step, and what it needs to know."""

    inner: optax.GradientTransformation
    loss_scale: LossScale
    axis_name: AxisName | None
    mask: inputs.Mask | None
    branch: Branch | None
    skip: Skip | None

    def init(self, params: Any) -> LossScaleState:
        """The state before the first step."""
        inputs.check_arrays("params", params)
        inner_state = self.inner.init(jax.tree.map(inputs.as_inner_sees, params))
        master_weights.check_order(inner_state)
        inner_state = master_weights.with_rest_of_narrow(
            inner_state, self.inner.init, params
        )
        if wrapper_states(inner_state):
            raise ValueError(
                "a part of inner is wrapped in with_loss_scale already, and would see "
                "its gradients divided by the loss scale twice: wrap the whole "
                "optimizer, once"
            )
        return LossScaleState(
            # Copies: what init returns may be donated, and the optimizer is used again.
            loss_scale=jax.tree.map(jnp.array, self.loss_scale),
            inner_state=_unaliased(jax.tree.map(strong, inner_state), params),
            should_apply=jnp.array(True),
            skipped_steps=jnp.zeros((), jnp.int32),
            consecutive_skipped_steps=jnp.zeros((), jnp.int32),
            skip_rule=jax.tree.map(jnp.array, self.rule),
        )

    def __call__(self, updates, state, params=None, *, value=None, **extra_args):
        """The transformation's `update`: one step, to updates; a skipped one gives zeros."""
        return self.step(updates, state, params, value, extra_args, to_params=False)

    @property
    def rule(self) -> SkipRule | None:
        """The rule that decides about finite steps, in its initial state."""
        return self.skip if isinstance(self.skip, SkipRule) else None

    def step(self, scaled_grads, state, params, value, extra_args, *, to_params):
        """One step, to new parameters or to the updates that lead there."""
        check_state(state)
        check_configuration(state, self.loss_scale, self.rule)
        if params is not None:

            def expected():
                """The inner state of these parameters, traced only if it is asked for."""
                return jax.eval_shape(self.init, params).inner_state

            master_weights.check_master_weights(state.inner_state, expected)
            check_inner_dtypes(state.inner_state, expected)
        if value is None and self.rule is not None:
            value = extra_args.get("loss")  # its name in MaxText and Levanter
        given = inputs.prepare(scaled_grads, params, value, self.mask)
        unscaled = given.unscaled(state.loss_scale)
        should_apply, new_state = decide(unscaled, state, self.skip, self.axis_name)
        update = partial(self._inner_update, extra_args=extra_args, to_params=to_params)
        new, inner_state = apply_or_skip(
            should_apply,
            update,
            given,
            unscaled,
            state,
            self.branch,
            to_params=to_params,
            is_checked=self.skip is not None,
        )
        return new, new_state._replace(inner_state=inner_state)

    def _inner_update(self, unscaled, inner_state, *, extra_args, to_params):
        """What the step gives if it is applied, and the new inner state."""
        inner = optax.with_extra_args_support(self.inner)
        params = unscaled.params
        parameters = inspect.signature(inner.update).parameters
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        if unscaled.value is not None and (takes_any or "value" in parameters):
            extra_args = {"value": unscaled.value} | extra_args
        wide_params = jax.tree.map(inputs.as_inner_sees, params)
        try:
            updates, new = inner.update(
                unscaled.grads, inner_state, wide_params, **extra_args
            )
        except Exception as error:
            self._check_inner_state(error, inner_state, params)
            raise
        if params is not None:
            updates = unscaled.moved(
                _param_after if to_params else inputs.update_or_zero, updates
            )
        new = jax.tree.map(
            lambda new, old: strong(new, dtype_of(old)), new, inner_state
        )
        return updates, unscaled.slots_kept(self.inner.init, new, inner_state)

    def _check_inner_state(self, error, inner_state, params):
        """Raises for a state that is not this optimizer's, if that is why it failed."""
        expected = (
            inner_state
            if params is None
            else jax.eval_shape(self.init, params).inner_state
        )
        if _structure_and_shapes(inner_state) != _structure_and_shapes(expected):
            raise ValueError(
                "the state's inner_state is that of another optimizer, or of other "
                f"parameters: this one's is {shown(expected)}, got "
                f"{shown(inner_state)}. Begin with tx.init(params). The optimizer "
                f"says: {error}"
            ) from error


def _structure_and_shapes(tree: Any) -> tuple[Any, list[tuple[int, ...]]]:
    """What two states of one optimizer for the same parameters have in common."""
    return jax.tree.structure(tree), [np.shape(x) for x in jax.tree.leaves(tree)]


def _unaliased(state: Any, params: Any) -> Any:
    """A state that shares no array with the parameters or itself, for both to be donated."""
    seen = {id(p) for p in jax.tree.leaves(params)}

    def unaliased(x):
        if isinstance(x, jax.Array) and id(x) in seen:
            return jnp.copy(x)
        seen.add(id(x))
        return x

    return jax.tree.map(unaliased, state)


def _param_after(param: Any, update: Any) -> Any:
    """`optax.apply_updates`, in float32 or wider; a parameter without an update stays."""
    if update is None:
        return strong(param, dtype_of(param))
    inputs.check_update_shape(param, update)
    return strong(optax.apply_updates(at_least_float32(param), update), dtype_of(param))
