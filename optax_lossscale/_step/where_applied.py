"""Keeps values outside the optimizer as they were before a skipped step.

Batch statistics are an example: by the time a step is skipped, its forward pass has run
and may have put a NaN or an infinity into them.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from optax_lossscale._arrays.checks import path_name, shown
from optax_lossscale._arrays.precision import (
    T,
    is_array_leaf,
    strongly_typed,
)
from optax_lossscale._arrays.variables import variable_ids, without_variables
from optax_lossscale._step.state import check_no_stack, loss_scale_states_in


def where_applied(state: Any, new: T, old: T) -> T:
    """Returns `new` if the last step was applied, and `old` if it was skipped.

    Skipping a step protects only the parameters and the optimizer's state. Use
    `where_applied` for every other value that a skipped step should not change, such as
    an average of the parameters, or batch statistics, which would keep a NaN forever::

        params, state = tx.apply_gradients(scaled_grads, state, params)
        batch_stats = ols.where_applied(state, new_batch_stats, batch_stats)

    Args:
      state: the optimizer state after the step, with one `LossScaleState` in it, or a
        train state or `nnx.Optimizer` that holds it.
      new: any pytree that the step computed. Its leaves that are not arrays are
        returned as they are, even after a skipped step.
      old: the values before the step, a tree of the same structure, with arrays in the
        same places.

    Returns:
      A tree with the structure and the dtypes of `old`, and the values of `new` or
      `old`. An `nnx.State` is returned with new variables.

    Raises:
      ValueError: if the state holds no `LossScaleState` or several.
      ValueError: if `new` and `old` differ in structure or in where they have arrays.
      ValueError: if `new` and `old` hold the same `nnx` variables, which the step has
        changed in place.
      TypeError: if an array has another shape in `new` than in `old`.
      TypeError: if `old` has a dtype that does not hold that of `new`, such as bfloat16
        for a float32 average, which would never move.

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
    check_no_stack(should_apply)
    # `nnx.state` returns the variables of the module itself, which change in place.
    if set(variable_ids(old)) & set(variable_ids(new)):
        raise ValueError(
            "old holds the same variables as new, which the step has changed in "
            "place. Copy them before the step: old = nnx.clone(nnx.state(model, "
            "nnx.BatchStat))"
        )

    def select(path, old_leaf, new_leaf):
        if is_array_leaf(old_leaf) != is_array_leaf(new_leaf):
            raise ValueError(
                "new and old must have arrays in the same places; got "
                f"{shown(new_leaf)} for {shown(old_leaf)} at {path_name(path)}"
            )
        if not is_array_leaf(old_leaf):
            return new_leaf
        old_array = strongly_typed(old_leaf)
        new_array = jnp.asarray(new_leaf)
        _check_fits(new_array, old_array, path_name(path))
        new_array = strongly_typed(new_array, old_array.dtype)
        return lax.select(should_apply, new_array, old_array)

    arrays = jax.tree.map_with_path(
        select, without_variables(old), without_variables(new)
    )
    # Where `old` has variables, unflattening puts the arrays into new variables.
    return jax.tree.unflatten(jax.tree.structure(old), jax.tree.leaves(arrays))


def _check_fits(new: jax.Array, old: jax.Array, name: str) -> None:
    """Raises a `TypeError` unless `old` can hold `new`, in shape and dtype."""
    if new.shape != old.shape:
        raise TypeError(
            f"new has shape {new.shape} where old has shape {old.shape}, at {name}"
        )
    if jnp.result_type(old, new) != old.dtype:
        raise TypeError(
            f"new has {new.dtype} where old has {old.dtype}, at {name}. It would be "
            f"cast to {old.dtype}, which cannot represent all of its values. Make old "
            f"{new.dtype} from the start; start the average of 16-bit parameters in "
            "float32"
        )
