"""Saving with `flax.serialization`, without importing it."""

import abc
import sys
from collections.abc import Callable
from typing import Any

_registered: set[tuple[Callable[..., None], int]] = set()


class SavedByFlax(abc.ABCMeta):
    """A class that `flax.serialization` finds in its registry whenever it looks.

    Flax restores a type that it does not know as whatever was saved, without a word: a
    dict where the loss scale was. To be known, a type has to be registered after Flax was
    imported, which may be after the class was defined, and after the last loss scale was
    made. So a class registers itself at the moment of the lookup: the registry is a dict
    by type, and a dict asks its key for the hash.
    """

    _to_state_dict: Callable[[Any], Any]
    _from_state_dict: Callable[[Any, Any], Any]

    def __hash__(cls):
        flax = sys.modules.get("flax.serialization")
        register = getattr(flax, "register_serialization_state", None)  # not while it is imported
        if register and (register, id(cls)) not in _registered:
            _registered.add((register, id(cls)))  # first, as to register is to look up
            register(cls, cls._to_state_dict, cls._from_state_dict)
        return super().__hash__()
