"""Saving loss scales and skip rules with `flax.serialization`, without importing it.

Flax keeps a table of types with two functions for each: one turns an instance into a
dict, and one restores such a dict into an instance. What is saved is the state alone;
the configuration is that of the instance restored into.
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

    Flax treats an unknown type as a leaf, and restores whatever was saved in its place.
    As Flax may be imported after the class was defined, this is called whenever an
    instance is made, as at each step. So Flax must be imported before the step whose
    state is saved.
    """
    flax = sys.modules.get("flax.serialization")
    register = getattr(flax, "register_serialization_state", None)
    if register is not None:  # or Flax is not imported, or only in part so far
        _register(cls, register)


@functools.cache  # so that each class is registered once
def _register(cls: Any, register: Callable[..., Any]) -> None:
    """Enters a class into Flax's table, unless its author has."""
    with contextlib.suppress(ValueError):  # an entry is there
        register(cls, _to_state_dict, _from_state_dict)


def _to_state_dict(stateful: Any) -> dict[str, Any]:
    """The state fields by name, without the configuration."""
    return {name: getattr(stateful, name) for name in stateful._state_names}


def _from_state_dict(stateful: Any, saved: Any) -> Any:
    """A copy of `stateful` with the saved state, which must have the same shapes."""
    shapes = jax.tree.map(np.shape, _to_state_dict(stateful))
    saved_shapes = jax.tree.map(np.shape, saved)
    if saved_shapes != shapes:
        raise ValueError(
            f"a saved {type(stateful).__name__} must hold arrays of the shapes that "
            f"its configuration gives them, {shapes}; got "
            f"{messages.shown(saved_shapes)}"
        )
    return stateful.replace(**saved)
