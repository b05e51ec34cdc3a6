"""Rejects combinations of Optax transformations that would silently do harm.

Two kinds are rejected. The four wrappers in `_BELONG_INSIDE` must not be around
`with_loss_scale`: `optax.MultiSteps(with_loss_scale(…), 4)`, for example, would sum
scaled gradients. And nothing may change the updates of `with_master_weights`.

Other combinations can do harm, too, but are allowed. Before `with_loss_scale` in a
chain, a transformation that sums gradients keeps the NaN of an overflow. After it, a
transformation may move parameters at a skipped step.

An optimizer is a pair of functions, which do not show what it consists of, but the
nesting of its state does. The state classes of Optax are recognized by name, and not
imported, so that this package works with versions of Optax that have moved one of them.
"""

from collections import OrderedDict
from typing import Any

import jax

from optax_lossscale._arrays.variables import find_nodes
from optax_lossscale._step.master_weights_state import is_master_weights_state
from optax_lossscale._step.state import loss_scales_in

# Wrappers that belong inside `with_loss_scale`, by the names of their state classes:
# the name of the wrapper, and the harm that it does around `with_loss_scale`
_BELONG_INSIDE = {
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

# State classes of wrappers that replace the updates of the transformation inside
_REPLACE_UPDATES = {
    "LookaheadState",
    "MechanicState",
    "SAMState",
    "ScheduleFreeState",
}


def name_in_optax(state: Any) -> str | None:
    """Returns the name of a state's class if Optax defines the class, else None."""
    cls = type(state)
    return cls.__name__ if cls.__module__.split(".")[0] == "optax" else None


def check_nothing_around(state: Any) -> None:
    """Raises if a wrapper in `_BELONG_INSIDE` is around `with_loss_scale`."""
    around = find_nodes(_is_around, state)
    if around:
        name, harm = _BELONG_INSIDE[type(around[0]).__name__]
        raise ValueError(
            f"optax.{name} around with_loss_scale {harm}: put it inside, where "
            "gradients are unscaled and finite, as in "
            f"with_loss_scale(optax.{name}(inner, …))"
        )


def _is_around(state: Any) -> bool:
    """Whether this is the state of a `_BELONG_INSIDE` wrapper around a loss scale."""
    return name_in_optax(state) in _BELONG_INSIDE and bool(loss_scales_in(state))


def check_nothing_follows(state: Any) -> None:
    """Raises if another transformation changes the updates of `with_master_weights`.

    In that case, its `MasterWeightsState` is not the last state in a chain, or is
    inside the state of a wrapper that replaces updates.
    """
    is_innermost = is_master_weights_state(state)
    if is_innermost or not find_nodes(is_master_weights_state, state):
        return
    children = _children(state)
    if _is_chain(state) and find_nodes(is_master_weights_state, children[:-1]):
        fault = "is followed by other transformations in optax.chain, which change"
    elif name_in_optax(state) in _REPLACE_UPDATES:
        fault = (
            f"is inside the transformation with a {type(state).__name__}, which changes"
        )
    else:
        for child in children:
            check_nothing_follows(child)
        return
    raise ValueError(
        f"with_master_weights {fault} its updates: give it the whole optimizer, as in "
        "with_loss_scale(with_master_weights(optax.chain(…)))"
    )


def _is_chain(state: Any) -> bool:
    """Whether this is a state of `optax.chain`, a tuple, or of `named_chain`, a dict.

    The children of a chain's state are states, too. That excludes a tuple of arrays,
    which another transformation may hold for a tuple of parameters.
    """
    if type(state) not in (tuple, OrderedDict):
        return False
    return all(hasattr(x, "_fields") or _is_chain(x) for x in _children(state))


def _children(state: Any) -> list[Any]:
    """Returns the children of a pytree node, in order."""
    return jax.tree.leaves(state, is_leaf=lambda x: x is not state)
