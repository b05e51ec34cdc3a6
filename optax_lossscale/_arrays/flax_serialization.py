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
    current = _to_state_dict(stateful)
    names = list(saved) if isinstance(saved, dict) else saved
    if not isinstance(saved, dict) or set(names) != set(current):
        got = validation.shown(names)
        raise ValueError(f"a saved {kind} must hold {list(current)}; got {got}")
    for name, value in current.items():
        shape = np.shape(value)
        saved_shape = np.shape(saved[name])
        if saved_shape != shape:
            raise ValueError(
                f"the saved {name} of a {kind} has shape {saved_shape}; here, with "
                f"another configuration, it has {shape}"
            )
    return stateful.replace(**saved)
