"""The state of `with_master_weights`, which stores the remainders of 16-bit parameters.

A *remainder* is what must be stored beside a 16-bit parameter to recover its float32
master weight (`master_weights.py`).

`with_loss_scale` passes the inner optimizer all parameters in float32, so a
`with_master_weights` inside it cannot tell which of them have 16 bits. The `init` of
`with_loss_scale` therefore adds the remainders of these to the state
(`with_remainders`). From then on, a parameter counts as one of 16 bits if the state
stores a remainder for it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from optax_lossscale._arrays.messages import shown
from optax_lossscale._arrays.names import path_name
from optax_lossscale._arrays.precision import at_least_float32, dtype_of, is_narrow_leaf
from optax_lossscale._arrays.rounding import join, split
from optax_lossscale._arrays.variables import find_nodes


class MasterWeightsState(NamedTuple):
    """The state of `with_master_weights`.

    Attributes:
      remainders: a tree like the parameters, with what is needed to recover the float32
        master weight of each 16-bit parameter. To get the master weights, call
        `weights`. For a bfloat16 parameter, the remainder is a uint16 array of its
        shape. If 0x8000 is added to the bits of the master weight, the high half of the
        sum is the parameter, and the low half is the remainder. For a float16
        parameter, the remainder is the master weight itself, in float32. For every
        other parameter, it is `optax.MaskedNode()`.
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
          If you changed a float16 parameter after the last step, its new value is
          returned as it is. A changed bfloat16 parameter still gets the old remainder,
          which moves it by at most half a unit in its last place.
        """

        def weight(param, remainder):
            is_wide = isinstance(remainder, optax.MaskedNode)
            return param if is_wide else join(param, remainder)

        return jax.tree.map(weight, params, self.remainders)


def is_master_weights_state(x: Any) -> bool:
    """Whether `x` is a `MasterWeightsState`; a predicate for `find_nodes`."""
    return isinstance(x, MasterWeightsState)


def initial_remainder(param: Any) -> Any:
    """Returns a parameter's first remainder; `optax.MaskedNode()` if it is wide."""
    if not is_narrow_leaf(param):
        return optax.MaskedNode()
    _, remainder = split(at_least_float32(param), dtype_of(param))
    return remainder


def with_remainders(state: Any, init: Callable[[Any], Any], params: Any) -> Any:
    """Adds the remainders of 16-bit parameters to an inner state.

    The inner optimizer's `init` made `state` for the parameters in float32, which have
    no remainders. It is therefore called again, for `params` in their own dtypes, and
    each `MasterWeightsState` is replaced by the new one. If `state` contains none, it
    is returned unchanged.
    """
    if not find_nodes(is_master_weights_state, state):
        return state

    def replace(new, old):
        return new if is_master_weights_state(new) else old

    return jax.tree.map(replace, init(params), state, is_leaf=is_master_weights_state)


def check_remainders(state: Any, init: Callable[[Any], Any], params: Any) -> None:
    """Raises a `ValueError` unless the remainders in `state` fit the parameters.

    The remainders must have the same paths, shapes and dtypes as in `init(params)`.
    """
    master_states = find_nodes(is_master_weights_state, state)
    if not master_states:
        return
    kept = _describe_remainders(master_states)
    initial_state = jax.eval_shape(init, params)
    needed = _describe_remainders(find_nodes(is_master_weights_state, initial_state))
    if kept != needed:
        raise ValueError(
            "the state of with_master_weights was made for other parameters: it keeps "
            f"{shown(kept)}, but these need {shown(needed)}. Make a new state: "
            "tx.init(params)"
        )


def _describe_remainders(states: list[MasterWeightsState]) -> list[str]:
    """Describes each remainder by dtype, shape and path: `uint16[8, 4] at dense/w`."""
    remainders = [state.remainders for state in states]
    descriptions = []
    for path, x in jax.tree.leaves_with_path(remainders):
        name = path_name(path[1:])
        descriptions.append(f"{dtype_of(x)}{list(np.shape(x))} at {name}")
    return descriptions
