"""Refuses some of Optax's wrappers where they would do harm.

They are the four of `_AROUND` around `with_loss_scale`, and whatever changes the
updates of `with_master_weights`. Transformations before or after `with_loss_scale` in a
chain are not refused, though some do harm, too: one before it that sums up gradients
keeps the NaN of an overflow, and one after it may move parameters at a skipped step.

The nesting of a state shows how its optimizer is put together. The states of Optax's
wrappers are known by the names of their classes, which are not imported: so this
package works with a version of Optax that has moved one of them.
"""

from collections import OrderedDict
from typing import Any

import jax

from optax_lossscale._arrays.variables import find_nodes
from optax_lossscale._step.master_weights import is_master_weights_state
from optax_lossscale._step.state import loss_scales_in

# The states of wrappers that belong inside `with_loss_scale`: the wrapper's name, and
# the harm that it does around `with_loss_scale`
_AROUND = {
    "MultiStepsState": (
        "MultiSteps",
        "sums scaled gradients and keeps the NaN of an overflow",
    ),
    "ConditionallyTransformState": (
        "conditionally_transform",
        "passes some gradients on scaled",
    ),
    "ApplyIfFiniteState": (
        "apply_if_finite",
        "hides overflows from it, so they never lower it",
    ),
    "MechanicState": (
        "contrib.mechanize",
        "learns its learning rate from scaled gradients",
    ),
}

# The states of wrappers that replace the updates of what they wrap
_REPLACE_UPDATES = {
    "LookaheadState",
    "MechanicState",
    "SAMState",
    "ScheduleFreeState",
}


def name_in_optax(state: Any) -> str | None:
    """The name of a state's class if Optax defines the class, else None."""
    cls = type(state)
    return cls.__name__ if cls.__module__.split(".")[0] == "optax" else None


def check_nothing_around(state: Any) -> None:
    """Raises if a wrapper of `_AROUND` is around `with_loss_scale`."""
    around = find_nodes(_is_around, state)
    if around:
        name, harm = _AROUND[type(around[0]).__name__]
        raise ValueError(
            f"optax.{name} around with_loss_scale {harm}: put it inside, where "
            "gradients are unscaled and finite, as in "
            f"with_loss_scale(optax.{name}(inner, …))"
        )


def _is_around(state: Any) -> bool:
    """Whether this is the state of a wrapper in `_AROUND`, with a loss scale inside."""
    return name_in_optax(state) in _AROUND and bool(loss_scales_in(state))


def check_nothing_follows(state: Any) -> None:
    """Raises if another transformation changes the updates of `with_master_weights`.

    Then its `MasterWeightsState` is not the last in a chain, or is inside the state of
    a wrapper that replaces updates.
    """
    is_own = is_master_weights_state(state)
    if is_own or not find_nodes(is_master_weights_state, state):
        return
    parts = _parts(state)
    if _is_chain(state) and find_nodes(is_master_weights_state, parts[:-1]):
        fault = "is followed by other transformations in optax.chain, which change"
    elif name_in_optax(state) in _REPLACE_UPDATES:
        fault = (
            f"is inside the transformation with a {type(state).__name__}, which changes"
        )
    else:
        for part in parts:
            check_nothing_follows(part)
        return
    raise ValueError(
        f"with_master_weights {fault} its updates: give it the whole optimizer, as in "
        "with_loss_scale(with_master_weights(optax.chain(…)))"
    )


def _is_chain(state: Any) -> bool:
    """Whether this is a state of `optax.chain`, a tuple, or of `named_chain`, a dict.

    Its parts are states themselves. So a tuple of arrays, as another transformation may
    keep for the parameters, is no chain.
    """
    if type(state) not in (tuple, OrderedDict):
        return False
    return all(hasattr(x, "_fields") or _is_chain(x) for x in _parts(state))


def _parts(state: Any) -> list[Any]:
    """The children of a state in its pytree, in order."""
    return jax.tree.leaves(state, is_leaf=lambda x: x is not state)
