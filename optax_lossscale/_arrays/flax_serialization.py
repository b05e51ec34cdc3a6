"""Saving loss scales and skip rules with `flax.serialization`, without importing it.

Flax keeps a table with two functions for each type: one converts an instance to a dict,
and the other restores an instance from such a dict. For a loss scale, the dict holds
only its state, such as `{"loss_scale": 1024.0, …}`. Restoring keeps the configuration
of the instance that the state is restored into.
"""

import contextlib
import functools
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from optax_lossscale._arrays import messages


def register_with_flax(cls: Any) -> None:
    """Tells Flax how to save and restore a `Stateful` class, if Flax is imported.

    Flax would treat an unregistered type as a leaf, and restore whatever was saved in
    its place. Flax may be imported after the class was defined, so this is called
    whenever an instance is created, as happens at each step. Flax must be imported
    before the step whose state is saved.
    """
    flax = sys.modules.get("flax.serialization")
    register = getattr(flax, "register_serialization_state", None)
    if register is not None:  # None if Flax is not imported, or not completely yet
        _register(cls, register)


@functools.cache  # registers each class only once
def _register(cls: Any, register: Callable[..., Any]) -> None:
    """Adds a class to Flax's table, unless its author has already done so."""
    with contextlib.suppress(ValueError):  # raised if the table has an entry
        register(cls, _to_state_dict, _from_state_dict)


def _to_state_dict(stateful: Any) -> dict[str, Any]:
    """Returns the state fields by name, without the configuration."""
    return {name: getattr(stateful, name) for name in stateful._state_names}


def _from_state_dict(stateful: Any, saved: Any) -> Any:
    """A copy of `stateful` with the saved state, whose shapes must be the same."""
    state = _to_state_dict(stateful)
    shapes = jax.tree.map(np.shape, state)
    saved_shapes = jax.tree.map(np.shape, saved)
    if saved_shapes != shapes:
        raise ValueError(
            f"a saved {type(stateful).__name__} must hold arrays of the shapes that "
            f"its configuration gives them, {shapes}; got "
            f"{messages.shown(saved_shapes)}"
        )
    return stateful.replace(**saved)
