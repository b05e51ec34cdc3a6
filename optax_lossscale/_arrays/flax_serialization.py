"""Saving with `flax.serialization`, without importing it."""

import contextlib
import sys
from typing import Any

import jax
import numpy as np

from optax_lossscale._arrays import validation


def register_with_flax(cls: Any) -> None:
    """Makes Flax, once it is imported, save and restore the state of a `Stateful` class.

    Flax would restore a type that it does not know as whatever was saved. As it may be
    imported after the class was defined, this is called whenever an instance is made.
    """
    flax = sys.modules.get("flax.serialization")
    register = getattr(flax, "register_serialization_state", None)
    if register is None:  # Flax is not imported, or in the middle of it
        return
    with contextlib.suppress(ValueError):  # Flax knows it already
        register(cls, _to_state_dict, _from_state_dict)


def _to_state_dict(stateful: Any) -> dict[str, Any]:
    """The state by name, without the configuration."""
    return {name: getattr(stateful, name) for name in stateful._state_names}


def _from_state_dict(stateful: Any, saved: Any) -> Any:
    """The same configuration, with the state that was saved."""
    kind = type(stateful).__name__
    shapes = jax.tree.map(np.shape, _to_state_dict(stateful))
    saved_shapes = jax.tree.map(np.shape, saved)
    if saved_shapes != shapes:
        raise ValueError(
            f"a saved {kind} must hold arrays of the shapes that its configuration "
            f"gives them, {shapes}; got {validation.shown(saved_shapes)}"
        )
    return stateful.replace(**saved)
