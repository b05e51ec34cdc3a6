"""Keeping other values as they were if the step was skipped, such as batch statistics.

A skipped step has run the forward pass all the same. What the forward pass computes,
and what the training step computes from that, may hold the NaN for which the step was
skipped.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from optax_lossscale._arrays.messages import shown
from optax_lossscale._arrays.names import path_name
from optax_lossscale._arrays.precision import (
    T,
    is_array_leaf,
    is_inexact_leaf,
    strongly_typed,
)
from optax_lossscale._arrays.variables import variable_ids, without_variables
from optax_lossscale._step.state import loss_scale_states_in


def where_applied(state: Any, new: T, old: T) -> T:
    """`new` if the last step was applied, else `old`.

    Use it for batch statistics, in which a NaN would stay forever, for an average of
    the parameters, and for all other values that a skipped step should not change.
    Skipping by itself protects only the parameters and the optimizer's state.

    Args:
      state: the optimizer state after the step, with one `LossScaleState` in it; a
        train state or an `nnx.Optimizer` that holds it.
      new: any pytree that the step made; leaves that are not arrays are returned as
        they are.
      old: the values before the step, a tree of the same structure, with arrays in the
        same places.

    Returns:
      A tree of the structure and the dtypes of `old`, with the values of `new` or those
      of `old`. An `nnx.State` is returned as one, with variables of its own.

    Raises:
      ValueError: if the state holds no `LossScaleState`, or several; if the trees
        differ; or if both hold the same `nnx` variables, which have changed in place.
      TypeError: if arrays differ in shape; or if `new` has floats where `old` has
        integers, complex numbers where it has real ones, or integers that are wider.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> import optax_lossscale as ols
      >>> tx = ols.with_loss_scale(optax.sgd(0.1))
      >>> params, overflow = jnp.ones(2), jnp.full(2, jnp.inf)
      >>> params, state = tx.apply_gradients(overflow, tx.init(params), params)
      >>> print(ols.where_applied(state, {"mean": jnp.nan}, {"mean": 0.5}))
      {'mean': Array(0.5, dtype=float32)}
    """
    states = loss_scale_states_in(state)
    if len(states) != 1:
        raise ValueError(
            f"expected exactly one LossScaleState, found {len(states)} in a "
            f"{type(state).__name__}. Pass the optimizer state that the step returned"
        )
    should_apply = states[0].should_apply
    # `nnx.state` hands out a module's own variables, which change in place.
    if set(variable_ids(old)) & set(variable_ids(new)):
        raise ValueError(
            "old holds the same variables as new, which the step has changed in "
            "place. Take a copy before the step: old = nnx.clone(nnx.state(model, "
            "nnx.BatchStat))"
        )

    def chosen(path, old, new):
        if is_array_leaf(old) != is_array_leaf(new):
            raise ValueError(
                "new and old must have arrays in the same places; got "
                f"{shown(new)} for {shown(old)} at {path_name(path)}"
            )
        if not is_array_leaf(old):
            return new
        old = strongly_typed(old)
        new = jnp.asarray(new)
        _check_holds(old, new, path_name(path))
        return lax.select(should_apply, strongly_typed(new, old.dtype), old)

    arrays = jax.tree.map_with_path(
        chosen, without_variables(old), without_variables(new)
    )
    # The structure of `old` puts the arrays into new variables where it has variables.
    return jax.tree.unflatten(jax.tree.structure(old), jax.tree.leaves(arrays))


def _check_holds(old: jax.Array, new: jax.Array, name: str) -> None:
    """Raises a `TypeError` unless `old`'s shape and dtype hold numbers such as `new`'s.

    Floats hold integers, and complex numbers hold both, even if they round them. But
    integers hold neither floats nor wider integers.
    """
    if new.shape != old.shape:
        raise TypeError(
            f"new has shape {new.shape} where old has shape {old.shape}, at {name}"
        )
    if is_inexact_leaf(old):
        is_held = jnp.iscomplexobj(old) or not jnp.iscomplexobj(new)
    else:
        is_held = jnp.result_type(old, new) == old.dtype
    if not is_held:
        raise TypeError(
            f"new has {new.dtype} where old has {old.dtype}, at {name}, which does not "
            f"hold all of its numbers: let old begin with {new.dtype}"
        )
