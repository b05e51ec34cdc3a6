"""Keys by which equations that compute the same are equal, whatever their variables.

The layers of a model are often alike, so that one of them is traced or compiled for
all. The same value has another variable in each layer, so callers number variables by
position.
"""

from collections.abc import Hashable
from typing import Any

import numpy as np

from optax_lossscale._programs.values import dtype_in


def key_of(eqn: Any) -> Hashable:
    """A key of what an equation does to its operands, which may not have a hash."""
    # Names of parameters differ, so that sorting compares none of their values.
    return eqn.primitive, tuple(sorted(eqn.params.items())), eqn.ctx


def key_of_literal(literal: Any) -> Hashable:
    """A key of a number in a program, by its bytes: 0.0 is not -0.0."""
    return dtype_in(literal), np.asarray(literal.val).tobytes()


def hashable(key: Hashable, things: Any) -> Hashable:
    """The key; where it has no hash, the `id` of `things`, which is in no other key."""
    try:
        hash(key)
    except TypeError:
        return id(things)
    return key
