"""Master weights: trains 16-bit parameters in float32.

An update that is too small to change a 16-bit parameter would be lost, so the optimizer
trains a float32 number, the *master weight*, and the parameter is this number rounded
to 16 bits. The *remainder* is what must be stored beside the parameter to recover the
master weight. Each step joins parameter and remainder, adds the update and splits the
sum (`_arrays/rounding.py`)::

    weight = join(param, remainder)
    new_param, remainder = split(weight + inner_update)
    update = new_param - param
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_lossscale._arrays.precision import at_least_float32, is_narrow_leaf
from optax_lossscale._arrays.rounding import narrow_dtype, split
from optax_lossscale._step.master_weights_state import (
    MasterWeightsState,
    check_remainders,
    initial_remainder,
    is_master_weights_state,
)
from optax_lossscale._step.missing_gradients import fill_missing, update_or_zeros
from optax_lossscale._step.state import check_inner_dtypes
from optax_lossscale._step.update import as_transformation, check_update_shape


def with_master_weights(
    inner: optax.GradientTransformation | optax.MultiSteps,
) -> optax.GradientTransformationExtraArgs:
    """Trains 16-bit parameters in float32, so that small updates are not lost.

    Use it if the parameters themselves are float16 or bfloat16. You do not need it for
    float32 parameters, even if the model computes in 16 bits, as under `autocast`.

    An update that is smaller than half the distance from a parameter to the next 16-bit
    number changes nothing when it is added to the parameter. Therefore `inner` updates
    float32 numbers, the *master weights*. For each 16-bit parameter, the state stores a
    *remainder*: what is needed, beside the parameter, to recover its master weight. The
    updates that the wrapper returns turn the parameters into the rounded master
    weights::

        weights = join(params, remainders)
        new_params, remainders = split(weights + inner's updates)
        updates = new_params - params

    `optax.apply_updates(params, updates)` is exact wherever float32 can represent the
    difference.

    A bfloat16 parameter has a remainder of 16 bits, which takes half the memory of a
    float32 copy. Each step recovers the master weights bit for bit, except for those
    that round to zero or to infinity. Ties are rounded away from zero, because 16 bits
    would not be enough with ties to even, so a parameter may differ in its last place
    from what `astype` would give.

    For float16 parameters, whose range is smaller, the remainder is the master weight
    itself, a float32 copy.

    A program may change its parameters between steps. A changed float16 parameter
    replaces the float32 copy. A changed bfloat16 parameter still gets the old
    remainder, which moves it by at most half a unit in its last place.

    Pass the whole optimizer: `with_loss_scale(with_master_weights(optax.chain(…)))`. If
    something changes the updates of `with_master_weights` afterwards, the parameters
    are no longer the rounded master weights, and each step loses the low bits of these.
    Two kinds of mistakes raise an error, in the `init` of `with_loss_scale`, and also
    in `value_and_scaled_grad` and `scale_gradient` if these are given the state:

    - another of Optax's transformations after this one in a chain, and
    - a wrapper around it that replaces its updates: `optax.lookahead`, or `mechanize`,
      `sam` or `schedule_free` of `optax.contrib`.

    Any other change may go undetected, such as one by a transformation of your own.
    `testing.assert_scale_invariant` detects it for float16 parameters but not for
    bfloat16 ones.

    Transformations before `with_master_weights` in an `optax.chain` receive the rounded
    parameters.

    Args:
      inner: any Optax transformation. It receives gradients and parameters in float32
        or wider.

    Returns:
      An `optax.GradientTransformationExtraArgs` with a `MasterWeightsState`. Its
      `update` needs `params` and returns updates in float32 or wider. A parameter whose
      gradient is `None` stays as it is, and so do its slots in the inner state.
      For parameters in float32 or wider, the updates are those of `inner`, and no
      second copy is stored.

    Raises:
      TypeError: if `inner` is not a gradient transformation.
      TypeError: in `update`, if the state is not a state of this transformation.
      ValueError: in `init`, if a parameter has 8 bits.
      ValueError: in `update`, if `params` is None or does not have the structure of the
        gradients.
      ValueError: in `update`, if the state was made for parameters of other shapes or
        dtypes, or holds the inner state of an optimizer of 16-bit parameters. (Float32
        parameters are accepted in place of 16-bit ones, because `with_loss_scale`
        converts them.)

    Source: Micikevicius et al., "Mixed Precision Training"
    (https://arxiv.org/abs/1710.03740), as in Apex's level O2, Megatron-LM and
    DeepSpeed. Storing 16 bits beside bfloat16 parameters is the "split SGD" of Kalamkar
    et al., "Optimizing Deep Learning Recommender Systems' Training On CPU Cluster
    Architectures" (https://arxiv.org/abs/2005.04680).

    Example:
      Sixteen steps, each of which changes a weight of 1 by a quarter of the smallest
      change that float16 allows:

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
        remainders = jax.tree.map(initial_remainder, params)
        wide_params = jax.tree.map(at_least_float32, params)
        return MasterWeightsState(remainders, inner_tx.init(wide_params))

    def update(updates, state, params=None, **extra_args):
        _check_arguments(state, params)
        # `with_loss_scale` passes all parameters in float32 and has made this check
        # already, with the parameters in their own dtypes.
        if any(map(is_narrow_leaf, jax.tree.leaves(params))):
            check_remainders(state, init, params)
        grads, missing = fill_missing(updates, params)
        weights = state.weights(params)
        check_inner_dtypes(state.inner_state, inner_tx.init, weights)
        wide_grads = jax.tree.map(at_least_float32, grads)
        inner_updates, inner_state = inner_tx.update(
            wide_grads, state.inner_state, weights, **extra_args
        )
        # A tree like `params`, with a pair in place of each parameter
        pairs = jax.tree.map(
            _update_and_remainder, params, state.remainders, weights, inner_updates
        )
        new_updates = jax.tree.map(lambda _, pair: pair.update, params, pairs)
        new_updates = missing.map_updates(update_or_zeros, params, new_updates)
        remainders = jax.tree.map(lambda _, pair: pair.remainder, params, pairs)
        new_state = MasterWeightsState(remainders, inner_state)
        return new_updates, missing.keep_slots(init, new_state, state)

    return optax.GradientTransformationExtraArgs(init, update)


def _check_arguments(state: Any, params: Any) -> None:
    """Raises unless `update` has received a `MasterWeightsState` and parameters."""
    if not is_master_weights_state(state):
        raise TypeError(
            "the state of with_master_weights must be the MasterWeightsState that its "
            f"init or its last step returned, got a {type(state).__name__}. To begin "
            "with master weights in a run that had none, restore the optimizer's "
            "state into that of init:\n"
            "    state = tx.init(params)\n"
            "    inner_state = optax.tree.cast_like(restored, state.inner_state)\n"
            "    state = state._replace(inner_state=inner_state)"
        )
    if params is None:
        raise ValueError(
            "with_master_weights needs the parameters: call update(updates, state, "
            "params)"
        )


class _UpdateAndRemainder(NamedTuple):
    """The results of a step for one parameter.

    Attributes:
      update: what to add to the parameter, in its shape, in float32 or wider.
      remainder: the new remainder, in the shape and dtype of the old one, or
        `optax.MaskedNode()` for a parameter in float32 or wider.
    """

    update: Any
    remainder: Any


def _update_and_remainder(
    param: Any, remainder: Any, weight: Any, inner_update: Any
) -> _UpdateAndRemainder:
    """Computes the update of a parameter and its new remainder.

    `inner_update` is the update of the master weight `weight`.
    """
    is_wide = isinstance(remainder, optax.MaskedNode)
    if is_wide:
        return _UpdateAndRemainder(inner_update, remainder)
    check_update_shape(param, inner_update)
    new_weight = (weight + inner_update).astype(jnp.float32)
    new_param, new_remainder = split(new_weight, narrow_dtype(remainder))
    param = at_least_float32(param)
    # The difference of two equal infinities would be NaN.
    update = jnp.where(new_param == param, 0, new_param - param)
    return _UpdateAndRemainder(update, new_remainder)
