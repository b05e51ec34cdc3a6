"""Master weights: trains 16-bit parameters in float32.

An update that is too small to change a 16-bit parameter would be lost, so the optimizer
trains a float32 number, the *master weight*, and the parameter is this number rounded
to 16 bits. The *remainder* is what must be stored beside the parameter to recover the
master weight. Each step joins parameter and remainder, adds the update and splits the
sum (`_arrays/rounding.py`)::

    weight = join(param, remainder)
    new_param, remainder = split(weight + inner_update)
    update = new_param - param

`with_loss_scale` passes the inner optimizer all parameters in float32, so a
`with_master_weights` inside it cannot tell which of them have 16 bits. The `init` of
`with_loss_scale` therefore adds the remainders of these to the state
(`with_remainders`). From then on, a parameter counts as one of 16 bits if the state
stores a remainder for it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_lossscale._arrays.precision import (
    at_least_float32,
    dtype_of,
    is_narrow_leaf,
    param_for_inner,
)
from optax_lossscale._arrays.rounding import join, narrow_dtype, split
from optax_lossscale._arrays.variables import find_nodes
from optax_lossscale._step.missing_gradients import fill_missing, update_or_zeros
from optax_lossscale._step.state import check_inner_state
from optax_lossscale._step.update import as_transformation, check_update_shape


class MasterWeightsState(NamedTuple):
    """The state of `with_master_weights`.

    Attributes:
      remainders: a tree like the parameters. For a bfloat16 parameter, a uint16 array
        of its shape: if 0x8000 is added to the bits of the master weight, the high half
        of the sum is the parameter, and the low half is the remainder. For a float16
        parameter, the master weight itself, in float32. For every other parameter,
        `optax.MaskedNode()`.
      inner_state: the state of the wrapped optimizer, for parameters in float32 or
        wider.
    """

    remainders: Any
    inner_state: Any

    def weights(self, params: Any) -> Any:
        """Returns the float32 master weights, for evaluation and export.

        With `tx = with_loss_scale(with_master_weights(inner))`, call
        `state.inner_state.weights(params)`.

        Args:
          params: the parameters that belong to this state.

        Returns:
          A tree like `params`, with the master weights in place of 16-bit parameters.
        """

        def weight(param, remainder):
            is_wide = isinstance(remainder, optax.MaskedNode)
            return param if is_wide else join(param, remainder)

        return jax.tree.map(weight, params, self.remainders)


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
    something changes the updates of `with_master_weights` afterwards, such as another
    transformation after it in a chain or `optax.lookahead` around it, the parameters
    are no longer the rounded master weights, and each step loses the low bits of these.

    Transformations before `with_master_weights` in an `optax.chain` receive the rounded
    parameters.

    Args:
      inner: any Optax transformation. It receives gradients and parameters in float32
        or wider.

    Returns:
      An `optax.GradientTransformationExtraArgs`. Its `update` needs `params` and
      returns updates in float32 or wider. The method `weights(params)` of its state
      returns the master weights, for evaluation and export. A parameter whose gradient
      is `None` stays as it is, and so do its slots in the inner state. For parameters
      in float32 or wider, the updates are those of `inner`, and no second copy is
      stored.

    Raises:
      TypeError: if `inner` is not a gradient transformation.
      ValueError: in `init`, if a parameter has 8 bits.
      ValueError: in `update`, if `params` is None, does not have the structure of the
        gradients, or does not fit the remainders in the state.

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
        wide_params = jax.tree.map(param_for_inner, params)
        return MasterWeightsState(_remainders(params), inner_tx.init(wide_params))

    def update(updates, state, params=None, **extra_args):
        if params is None:
            raise ValueError(
                "with_master_weights needs the parameters: call update(updates, state, "
                "params)"
            )
        # `with_loss_scale` passes all parameters in float32 and has made this check
        # already, with the parameters in their own dtypes.
        if any(map(is_narrow_leaf, jax.tree.leaves(params))):
            check_inner_state(state, init, params)
        grads, missing = fill_missing(updates, params)
        weights = state.weights(params)
        wide_grads = jax.tree.map(at_least_float32, grads)
        inner_updates, inner_state = inner_tx.update(
            wide_grads, state.inner_state, weights, **extra_args
        )
        # A tree like `params`, with a pair in place of each parameter
        pairs = jax.tree.map(
            _update_and_remainder, params, state.remainders, weights, inner_updates
        )
        new_updates = jax.tree.map(lambda _, pair: pair[0], params, pairs)
        new_updates = missing.map_updates(update_or_zeros, params, new_updates)
        remainders = jax.tree.map(lambda _, pair: pair[1], params, pairs)
        new_state = MasterWeightsState(remainders, inner_state)
        return new_updates, missing.keep_slots(init, new_state, state)

    return optax.GradientTransformationExtraArgs(init, update)


def _update_and_remainder(
    param: Any, remainder: Any, weight: Any, inner_update: Any
) -> tuple[Any, Any]:
    """Returns what to add to a parameter, in float32 or wider, and its new remainder.

    `inner_update` is the update of the master weight `weight`.
    """
    if isinstance(remainder, optax.MaskedNode):
        return inner_update, remainder
    check_update_shape(param, inner_update)
    new_weight = (weight + inner_update).astype(jnp.float32)
    new_param, new_remainder = split(new_weight, narrow_dtype(remainder))
    param = at_least_float32(param)
    # The difference of two equal infinities would be NaN.
    update = jnp.where(new_param == param, 0, new_param - param)
    return update, new_remainder


def _remainders(params: Any) -> Any:
    """Returns the first remainders of parameters."""

    def remainder(param):
        if not is_narrow_leaf(param):
            return optax.MaskedNode()
        return split(at_least_float32(param), dtype_of(param))[1]

    return jax.tree.map(remainder, params)


def with_remainders(state: Any, init: Callable[[Any], Any], params: Any) -> Any:
    """Adds the remainders of 16-bit parameters to an inner state.

    The inner optimizer's `init` made `state` for the parameters in float32, which have
    no remainders. It is therefore called again, for `params` in their own dtypes, and
    each `MasterWeightsState` is replaced by the new one. If `state` contains none, it
    is returned unchanged.
    """
    if not find_nodes(_is_master_weights_state, state):
        return state

    def replace(new, old):
        return new if _is_master_weights_state(new) else old

    return jax.tree.map(replace, init(params), state, is_leaf=_is_master_weights_state)


def _is_master_weights_state(x: Any) -> bool:
    """Whether `x` is a `MasterWeightsState`; a predicate for `find_nodes`."""
    return isinstance(x, MasterWeightsState)
