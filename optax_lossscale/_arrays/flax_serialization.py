"""Saving with `flax.serialization`, without importing it."""

import contextlib
import sys
from typing import Any

import numpy as np

from optax_lossscale._arrays import validation


def register_with_flax(cls: Any) -> None:
    """Makes Flax, once it is imported, save and restore the state of a `Stateful` class.

    Flax would restore a type that it does not know as whatever was saved. As it may be
    imported after the class was defined, this is called whenever an instance is made.
    """
    flax = sys.modules.get("flax.serialization")
    # It has none while it is imported.
    if register := getattr(flax, "register_serialization_state", None):
        with contextlib.suppress(ValueError):  # Flax knows it already
            register(cls, _to_state_dict, _from_state_dict)


def _to_state_dict(stateful: Any) -> dict[str, Any]:
    return {name: getattr(stateful, name) for name in stateful._state_names}


def _from_state_dict(stateful: Any, saved: Any) -> Any:
    """The same configuration, with the state that was saved."""
    kind = type(stateful).__name__
    current = _to_state_dict(stateful)
    if not isinstance(saved, dict) or set(saved) != set(current):
        found = validation.shown(list(saved) if isinstance(saved, dict) else saved)
        raise ValueError(f"a saved {kind} must hold {list(current)}; got {found}")
    for name, here in current.items():
        shape = np.shape(here)
        saved_shape = np.shape(saved[name])
        if shape != saved_shape:
            given = f"has shape {saved_shape}; here, with another configuration, it has {shape}"
            raise ValueError(f"the saved {name} of a {kind} {given}")
    return stateful.replace(**saved)
