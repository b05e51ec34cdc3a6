"""Saving loss scales and skip rules with `flax.serialization`, without importing it.

`flax.serialization.to_bytes(train_state)` saves a loss scale inside it as a dict of its
state, such as `{"loss_scale": 1024.0, …}`. `from_bytes` puts that state into the loss
scale of its target, whose configuration it keeps.

Flax looks up how to do this in a table with two functions for each type: one converts
an instance to a dict, and the other restores an instance from such a dict.
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
    """Adds a `Stateful` class to Flax's table, if Flax is imported.

    Flax treats a type that is not in its table as a leaf and restores whatever was
    saved in its place. Because Flax may be imported after the class was defined, this
    is called whenever an instance is created, which happens whenever a step is traced
    or returns. Flax must therefore be imported before the step whose state is saved.
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
    """Returns `stateful` with the saved state, which must have the same shapes."""
    state = _to_state_dict(stateful)
    shapes = jax.tree.map(np.shape, state)
    saved_shapes = jax.tree.map(np.shape, saved)
    if saved_shapes != shapes:
        raise ValueError(
            f"a saved {type(stateful).__name__} must hold arrays of the shapes that "
            f"its configuration gives them, {shapes}, got "
            f"{messages.shown(saved_shapes)}. Restore it into an instance with the "
            "configuration with which it was saved"
        )
    return stateful.replace(**saved)
