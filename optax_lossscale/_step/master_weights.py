"""Master weights: parameters in 16 bits that train as float32 numbers.

The parameters of the model are 16-bit roundings of the numbers that are trained, and
the optimizer's state keeps the remainder of each number, as `_arrays/rounding.py`
splits it. (The field `MasterWeightsState.master_weights` has the name of these numbers,
but holds their remainders.) A step joins both to the float32 number, lets the inner
optimizer update that, and splits it again. The update that it returns is the difference
of the rounded numbers.

`with_loss_scale` passes this transformation all parameters in float32, so it cannot
tell which have 16 bits. `with_remainders` adds their remainders in `init`; from then
on, a parameter has 16 bits if the state holds a remainder for it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_lossscale._arrays.messages import shown
from optax_lossscale._arrays.names import path_name
from optax_lossscale._arrays.precision import at_least_float32, dtype_of, is_narrow_leaf
from optax_lossscale._arrays.rounding import join, narrow_dtype, split
from optax_lossscale._arrays.variables import find_nodes
from optax_lossscale._step.missing_gradients import completed, update_or_zero
from optax_lossscale._step.state import check_inner_dtypes
from optax_lossscale._step.update import as_transformation, check_update_shape


class MasterWeightsState(NamedTuple):
    """The state of `with_master_weights`.

    Attributes:
      master_weights: the remainders, a tree like the parameters: what each 16-bit
        parameter lacks to be the float32 number that is trained. For a bfloat16
        parameter, that is the 16 further bits, a uint16 array. For a float16 one, it is
        the float32 number itself. For all others, it is `optax.MaskedNode()`. For the
        float32 numbers themselves, call `weights`.
      inner_state: the state of the wrapped optimizer, for parameters in float32 or
        wider.
    """

    master_weights: Any
    inner_state: Any

    def weights(self, params: Any) -> Any:
        """The float32 numbers that are trained, for evaluation and export.

        Args:
          params: the parameters that belong to this state.

        Returns:
          A tree like `params`, with the float32 numbers in place of 16-bit parameters.
          If a parameter was changed since the last step, its new value counts: for
          float16 exactly; for bfloat16 to within half of its last place, as the old
          further bits are added to it.
        """

        def joined(param, remainder):
            is_wide = isinstance(remainder, optax.MaskedNode)
            return param if is_wide else join(param, remainder)

        return jax.tree.map(joined, params, self.master_weights)


def with_master_weights(
    inner: optax.GradientTransformation | optax.MultiSteps,
) -> optax.GradientTransformationExtraArgs:
    """Trains 16-bit parameters as float32 numbers, the master weights.

    Most updates are smaller than half the distance from a parameter to the next 16-bit
    number, and adding them changes nothing. So the state keeps the bits that the
    parameters lack to be float32 numbers; `inner` updates these numbers, and the
    updates returned take the parameters to the rounded ones::

        weights = join(params, remainder)
        new_params, remainder = split(weights + inner's updates)
        updates = new_params - params

    For bfloat16 parameters, `remainder` is the 16 further bits of each float32 number.
    They take half the memory of a float32 copy, and training is the same to the bit,
    except for subnormal numbers and those beyond bfloat16's largest. (Ties are rounded
    away from zero, so 16 bits are enough.) For float16 parameters, whose range is
    smaller, `remainder` is a float32 copy. `optax.apply_updates(params, updates)` is
    exact wherever float32 holds the difference.

    A program may change its parameters between steps: a float16 parameter that is no
    longer its rounded copy replaces the copy; a bfloat16 one keeps the 16 further bits.

    *Nothing may come after it*, as that would change where the parameters land: give it
    the whole optimizer, `with_loss_scale(with_master_weights(optax.chain(…)))`. Another
    order is refused by the `init` of `with_loss_scale` around it, and by
    `value_and_scaled_grad` of such a state. A transformation of your own that changes
    its updates cannot be seen: what the parameters lack is lost at each step.
    `testing.assert_scale_invariant` finds such a transformation for float16 parameters,
    but not for bfloat16 ones.
    Transformations before it in an `optax.chain` see rounded parameters.

    Source: Micikevicius et al., "Mixed Precision Training"
    (https://arxiv.org/abs/1710.03740), as in Apex's level O2, Megatron-LM and
    DeepSpeed. The 16 further bits are the "split SGD" of Kalamkar et al., "Optimizing
    Deep Learning Recommender Systems' Training On CPU Cluster Architectures"
    (https://arxiv.org/abs/2005.04680).

    Args:
      inner: any Optax transformation. It sees gradients and parameters in float32 or
        wider.

    Returns:
      An `optax.GradientTransformationExtraArgs` with a `MasterWeightsState`. Its
      `update` needs `params`; its updates are float32 or wider. A parameter whose
      gradient is `None` stays, as do its slots. Parameters in float32 or wider are left
      to `inner` alone, and kept only once.

    Raises:
      TypeError: if `inner` is not a gradient transformation; in `update`, if the state
        is not one of this transformation.
      ValueError: in `init`, if a parameter has 8 bits; in `update`, without `params`,
        or if the state is for other shapes or dtypes. (Float32 parameters are not
        refused, as `with_loss_scale` converts 16-bit ones to them.)

    Example:
      Sixteen steps, each of which changes a weight of 1 by a quarter of float16's least
      change:

      >>> import jax.numpy as jnp, optax
      >>> import optax_lossscale as ols
      >>> params, grad = jnp.ones((), jnp.float16), jnp.float16(1.0)
      >>> for tx in (optax.sgd(2**-13), ols.with_master_weights(optax.sgd(2**-13))):
      ...     trained, state = params, tx.init(params)
      ...     for _ in range(16):
      ...         updates, state = tx.update(grad, state, trained)
      ...         trained = optax.apply_updates(trained, updates)
      ...     print(1 - trained)
      0.0
      0.001953
    """
    inner_tx = optax.with_extra_args_support(as_transformation(inner))

    def init(params):
        wide_params = jax.tree.map(at_least_float32, params)
        return MasterWeightsState(
            jax.tree.map(_remainder_of, params), inner_tx.init(wide_params)
        )

    def update(updates, state, params=None, **extra_args):
        _check_arguments(state, params)
        # `with_loss_scale` passes all parameters in float32, after it has compared the
        # remainders with the parameters' own dtypes.
        if any(map(is_narrow_leaf, jax.tree.leaves(params))):
            check_remainders(state, init, params)
        grads, missing = completed(updates, params)
        weights = state.weights(params)
        check_inner_dtypes(state.inner_state, inner_tx.init, weights)
        inner_updates, inner_state = inner_tx.update(
            jax.tree.map(at_least_float32, grads),
            state.inner_state,
            weights,
            **extra_args,
        )
        pairs = jax.tree.map(
            _rounded, params, state.master_weights, weights, inner_updates
        )
        new_updates = jax.tree.map(lambda _, pair: pair.update, params, pairs)
        remainders = jax.tree.map(lambda _, pair: pair.remainder, params, pairs)
        new_state = missing.slots_kept(
            init, MasterWeightsState(remainders, inner_state), state
        )
        return missing.map_updates(update_or_zero, params, new_updates), new_state

    return optax.GradientTransformationExtraArgs(init, update)


def with_remainders(state: Any, init: Callable[[Any], Any], params: Any) -> Any:
    """An inner state with the remainders of 16-bit parameters, where there are any.

    `state` is what `init`, the inner optimizer's, made for the parameters in float32,
    which lack nothing. So `init` is called once more, for `params` in their own dtypes,
    and the `MasterWeightsState`s are taken from what it returns.
    """
    if not find_nodes(is_master_weights_state, state):
        return state

    def own_or_float32(for_params, for_float32):
        return for_params if is_master_weights_state(for_params) else for_float32

    return jax.tree.map(
        own_or_float32, init(params), state, is_leaf=is_master_weights_state
    )


def check_remainders(state: Any, init: Callable[[Any], Any], params: Any) -> None:
    """Raises unless a state has remainders like those that `init` makes of `params`."""
    own_states = find_nodes(is_master_weights_state, state)
    if not own_states:
        return
    kept = _described(own_states)
    initial_state = jax.eval_shape(init, params)
    needed = _described(find_nodes(is_master_weights_state, initial_state))
    if kept != needed:
        raise ValueError(
            "the state of with_master_weights was made for other parameters: it keeps "
            f"{shown(kept)}, but these need {shown(needed)}. Make a new state: "
            "tx.init(params)"
        )


def _described(states: list[MasterWeightsState]) -> list[str]:
    """The dtype, shape and path of each remainder, as text."""
    remainders = [state.master_weights for state in states]
    leaves = jax.tree.leaves_with_path(remainders)
    return [
        f"{dtype_of(x)}{list(np.shape(x))} at {path_name(path[1:])}"
        for path, x in leaves
    ]


def _check_arguments(state: Any, params: Any) -> None:
    """Raises unless `update` is given its own state and the parameters for it."""
    if not is_master_weights_state(state):
        raise TypeError(
            "the state of with_master_weights must be the MasterWeightsState that its "
            f"init or its last step returned, got a {type(state).__name__}. To begin "
            "with master weights in a run that had none, restore the optimizer's "
            "state into that of init: "
            "state._replace(inner_state=optax.tree.cast_like(restored, "
            "state.inner_state))"
        )
    if params is None:
        raise ValueError(
            "with_master_weights needs the parameters: call update(updates, state, "
            "params)"
        )


class _UpdateAndRemainder(NamedTuple):
    """What a step makes for one parameter."""

    update: Any
    remainder: Any  # what the updated parameter lacks


def _rounded(
    param: Any, remainder: Any, weight: Any, update: Any
) -> _UpdateAndRemainder:
    """A parameter's update and its new remainder, from the update of its master weight.

    `weight` is the float32 number, and `update` what the inner optimizer adds to it.
    """
    if isinstance(remainder, optax.MaskedNode):
        return _UpdateAndRemainder(update, remainder)
    check_update_shape(param, update)
    new_weight = (weight + update).astype(jnp.float32)
    rounded, new_remainder = split(new_weight, narrow_dtype(remainder))
    param = at_least_float32(param)
    # The difference of two equal infinities would be NaN.
    difference = jnp.where(rounded == param, 0, rounded - param)
    return _UpdateAndRemainder(difference, new_remainder)


def _remainder_of(param: Any) -> Any:
    """The remainder of a parameter at first; `optax.MaskedNode()` if it is wide."""
    if not is_narrow_leaf(param):
        return optax.MaskedNode()
    return split(at_least_float32(param), dtype_of(param))[1]


def is_master_weights_state(x: Any) -> bool:
    """Whether this is a `MasterWeightsState`, as a predicate for `find_nodes`."""
    return isinstance(x, MasterWeightsState)
