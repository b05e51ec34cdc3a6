"""Parameters in 16 bits, and the float32 copy of them that is what training updates."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax

from optax_lossscale._arrays.precision import at_least_float32, dtype_of, is_inexact


class MasterWeightsState(NamedTuple):
    """State of `with_master_weights`.

    Attributes:
      master_weights: the parameters in float32, where they are narrower; a tree like them,
        with `optax.MaskedNode()` for the others, which are their own.
      inner_state: the state of the wrapped optimizer, for parameters in float32 or wider.
    """

    master_weights: Any
    inner_state: optax.OptState


def with_master_weights(
    inner: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """Trains 16-bit parameters by a float32 copy of them, the master weights.

    A step changes a parameter by less than float16 or bfloat16 can add to it, more often than
    not, and the change is lost. So the state keeps the parameters in float32; `inner`
    updates those, and the updates handed out make the parameters their rounding::

        new_master_weights = master_weights + inner's updates
        updates = new_master_weights - params

    `optax.apply_updates(params, updates)` is then `new_master_weights` in the parameters'
    dtype, exactly wherever float32 holds the difference; and as each step starts from the
    master weights, no rounding adds up. They are what to evaluate and to save.

    Together with `with_loss_scale`, this goes inside:
    `with_loss_scale(with_master_weights(inner))`.

    Source: Micikevicius et al., "Mixed Precision Training"
    (https://arxiv.org/abs/1710.03740); it is what Apex's level O2, Megatron-LM and
    DeepSpeed do.

    Args:
      inner: any Optax transformation. It sees gradients and parameters in float32 or wider.

    Returns:
      An `optax.GradientTransformationExtraArgs` with a `MasterWeightsState`. Its `update`
      needs `params`; its updates are float32 or wider. Parameters in float32 or wider are
      left to `inner` alone, and kept once.

    Example:
      Sixteen steps, each of which changes a weight of 1 by a quarter of what float16 can:

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
    inner_tx = optax.with_extra_args_support(inner)

    def init(params):
        wide_params = jax.tree.map(at_least_float32, params)
        return MasterWeightsState(_copies(params), inner_tx.init(wide_params))

    def update(updates, state, params=None, **extra_args):
        if params is None:
            raise ValueError(
                "with_master_weights needs the parameters: call update(updates, state, params)"
            )
        own = lambda m, p: p if _is_masked(m) else m
        weights = jax.tree.map(own, state.master_weights, params, is_leaf=_is_masked)
        wide_grads = jax.tree.map(at_least_float32, updates)
        inner_updates, inner_state = inner_tx.update(
            wide_grads, state.inner_state, weights, **extra_args
        )
        new_weights = optax.apply_updates(weights, inner_updates)
        difference = lambda m, p, u, w: u if _is_masked(m) else w - at_least_float32(p)
        trees = (state.master_weights, params, inner_updates, new_weights)
        updates = jax.tree.map(difference, *trees, is_leaf=_is_masked)
        kept = lambda m, w: m if _is_masked(m) else w
        new_master = jax.tree.map(kept, state.master_weights, new_weights, is_leaf=_is_masked)
        return updates, MasterWeightsState(new_master, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def with_copies_of_narrow(state: Any, init: Callable[[Any], Any], params: Any) -> Any:
    """A state of `init` with the master weights that these parameters need.

    Inside `with_loss_scale` all parameters come in float32, and `init` saw none to copy.
    """
    is_state = lambda x: isinstance(x, MasterWeightsState)
    if not any(map(is_state, jax.tree.leaves(state, is_leaf=is_state))):
        return state
    copy = lambda needed, p: needed if _is_masked(needed) else at_least_float32(p)

    def filled(own, shape):
        if not is_state(own):
            return own
        copies = jax.tree.map(copy, shape.master_weights, params, is_leaf=_is_masked)
        return own._replace(master_weights=copies)

    return jax.tree.map(filled, state, jax.eval_shape(init, params), is_leaf=is_state)


def _copies(params: Any) -> Any:
    """16- and 8-bit parameters in float32, and masked nodes for all others."""
    is_narrow = lambda p: is_inexact(p) and dtype_of(p).itemsize < 4
    copy = lambda p: at_least_float32(p) if is_narrow(p) else optax.MaskedNode()
    return jax.tree.map(copy, params)


def _is_masked(x: Any) -> bool:
    return isinstance(x, optax.MaskedNode)
