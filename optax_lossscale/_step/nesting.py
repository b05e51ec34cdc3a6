"""Rejects combinations of transformations with which training silently goes wrong.

Two kinds are rejected:

- One of the four wrappers in `_BELONG_INSIDE` around `with_loss_scale`. For example,
  `optax.MultiSteps(with_loss_scale(…), 4)` would sum scaled gradients.
- A transformation after `with_master_weights` in a chain, or one of the wrappers in
  `_REPLACE_UPDATES` around it, because either changes the updates of
  `with_master_weights`.

Training may also go wrong with other combinations, which are allowed. In a chain, a
transformation before `with_loss_scale` that sums gradients keeps the NaN of an
overflow, and one after `with_loss_scale` may move parameters on a skipped step.

An optimizer is a pair of functions, which do not show what it consists of, but its
state shows it, because the state of a transformation holds the states of those inside
it. Optax's classes of states are recognized by name rather than imported, so that this
package works with versions of Optax that have moved one of them.
"""

from collections import OrderedDict
from typing import Any

import jax

from optax_lossscale._arrays.variables import find_nodes
from optax_lossscale._step.master_weights_state import is_master_weights_state
from optax_lossscale._step.state import loss_scales_in

# The wrappers that belong inside `with_loss_scale`. The key is the name of a wrapper's
# state class. The value is the wrapper's name and the harm that the wrapper does around
# `with_loss_scale`.
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
        "hides overflows from it, so the loss scale never falls",
    ),
    "MechanicState": (
        "contrib.mechanize",
        "learns its learning rate from scaled gradients",
    ),
}

# The wrappers that replace the updates of the transformation inside them. The key is
# the name of a wrapper's state class.
_REPLACE_UPDATES = {
    "LookaheadState": "lookahead",
    "MechanicState": "contrib.mechanize",
    "SAMState": "contrib.sam",
    "ScheduleFreeState": "contrib.schedule_free",
}


def name_in_optax(state: Any) -> str | None:
    """Returns the name of a state's class if Optax defines the class, else None."""
    cls = type(state)
    return cls.__name__ if cls.__module__.split(".")[0] == "optax" else None


def check_wrappers_are_inside(state: Any) -> None:
    """Raises if a `_BELONG_INSIDE` wrapper is around `with_loss_scale`."""
    states_around = find_nodes(_is_around, state)
    if states_around:
        name, harm = _BELONG_INSIDE[type(states_around[0]).__name__]
        raise ValueError(
            f"optax.{name} around with_loss_scale {harm}. Put it inside, where "
            "gradients are unscaled and finite: "
            f"with_loss_scale(optax.{name}(inner, …))"
        )


def _is_around(state: Any) -> bool:
    """Whether this is the state of a `_BELONG_INSIDE` wrapper around a loss scale."""
    return name_in_optax(state) in _BELONG_INSIDE and bool(loss_scales_in(state))


def check_master_weights_are_last(state: Any) -> None:
    """Raises a `ValueError` if `with_master_weights` is not the last in its optimizer.

    If it is not, another transformation changes its updates: one whose state comes
    after the `MasterWeightsState` in a chain, or a wrapper around `with_master_weights`
    that replaces updates.
    """
    if is_master_weights_state(state):
        return  # `with_master_weights` comes after whatever is inside it.
    if not find_nodes(is_master_weights_state, state):
        return
    children = _children(state)
    if _is_chain(state) and find_nodes(is_master_weights_state, children[:-1]):
        raise _not_last(
            "is followed by other transformations in optax.chain, which change"
        )
    name = name_in_optax(state)
    if name in _REPLACE_UPDATES:
        raise _not_last(f"is inside optax.{_REPLACE_UPDATES[name]}, which changes")
    for child in children:
        check_master_weights_are_last(child)


def _not_last(fault: str) -> ValueError:
    """Builds the error for a transformation after or around `with_master_weights`."""
    return ValueError(
        f"with_master_weights {fault} its updates. Give it the whole optimizer: "
        "with_loss_scale(with_master_weights(optax.chain(…)))"
    )


def _is_chain(state: Any) -> bool:
    """Whether this is a state of `optax.chain`, a tuple, or of `named_chain`, a dict.

    The children of a chain's state must themselves be states: named tuples or chains. A
    tuple of arrays is not a chain, because another transformation may hold one for a
    tuple of parameters.
    """
    if type(state) not in (tuple, OrderedDict):
        return False
    return all(hasattr(x, "_fields") or _is_chain(x) for x in _children(state))


def _children(state: Any) -> list[Any]:
    """Returns the children of a pytree node, in order."""
    return jax.tree.leaves(state, is_leaf=lambda x: x is not state)
