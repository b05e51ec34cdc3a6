"""Saving with `flax.serialization`, without importing it."""

import sys
from typing import Any

_registered: set[Any] = set()


def register_with_flax(cls: Any) -> None:
    """Makes Flax know a class with `_to_state_dict` and `_from_state_dict`, once it is imported.

    Flax restores a type that it does not know as whatever was saved, without a word: a
    dict where the loss scale was. Flax may be imported after the class was defined, so call this
    whenever an instance is made, as each step makes one.
    """
    flax = sys.modules.get("flax.serialization")
    register = getattr(flax, "register_serialization_state", None)  # not while it is imported
    if register and (register, cls) not in _registered:
        _registered.add((register, cls))
        register(cls, cls._to_state_dict, cls._from_state_dict)
