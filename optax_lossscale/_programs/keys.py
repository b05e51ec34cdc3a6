"""Keys that are equal for equations that compute the same, whatever their variables.

The layers of a model are often alike, and by its key a layer is known to be one that
was traced or compiled before. As each layer has variables of its own, the keys here
leave the operands out; a caller adds them, numbered by their positions in the layer.
"""

from collections.abc import Hashable
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn, Literal

from optax_lossscale._programs.values import dtype_in


def key_of(eqn: JaxprEqn) -> Hashable:
    """A key of what an equation does to its operands; it may have no hash."""
    # Sorting compares names alone, as no two parameters have the same name.
    return eqn.primitive, tuple(sorted(eqn.params.items())), eqn.ctx


def key_of_literal(literal: Literal) -> Hashable:
    """A key of a literal, by its dtype and its bytes: 0.0 is not -0.0."""
    return dtype_in(literal), np.asarray(literal.val).tobytes()


def hashable(key: Hashable, things: Any) -> Hashable:
    """The key; or, if it has no hash, `id(things)`.

    `things` are what the key describes. The caller has to keep them alive: until they
    are freed, nothing else has their `id`.
    """
    try:
        hash(key)
    except TypeError:
        return id(things)
    return key
