"""Keys that are equal for equations that compute the same, whatever their variables.

The layers of a model often repeat the same equations. By its key, a layer is recognized
as one that was traced or compiled before. The variables differ from layer to layer, so
`key_of` leaves the operands out. The caller adds them as positions in the layer: in
both `c = mul a b` and `f = mul d e`, the operands are numbers 0 and 1.
"""

from collections.abc import Hashable
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn, Literal

from optax_lossscale._programs.values import dtype_in


def key_of(eqn: JaxprEqn) -> Hashable:
    """A key for what an equation does to its operands, which may not be hashable."""
    # The sort compares only names: no two parameters have the same one.
    params = tuple(sorted(eqn.params.items()))
    return eqn.primitive, params, eqn.ctx


def key_of_literal(literal: Literal) -> Hashable:
    """A key for a literal: its dtype and bytes, which tell 0.0 from -0.0."""
    return dtype_in(literal), np.asarray(literal.val).tobytes()


def hashable(key: Hashable, described: Any) -> Hashable:
    """Returns the key, or the `id` of the object it describes if it is not hashable.

    The caller has to keep the object alive. Once it is freed, another object may get
    the same `id`.
    """
    try:
        hash(key)
    except TypeError:
        return id(described)
    return key
