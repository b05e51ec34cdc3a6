"""What `diagnose` alone still asks, until it is rewritten: see `keys` below.

Keys that are equal for equations that do the same computation on any variables.

The layers of a model often repeat the same equations. If the keys of a layer equal
those of an earlier layer, what was traced or compiled for the earlier layer is used
again. The variables differ from layer to layer, so `key_of` leaves the operands out,
and the caller adds their positions in the layer instead: in both `c = mul a b` and
`f = mul d e`, the operands have the positions 0 and 1.
"""

from collections.abc import Hashable
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn, Literal

from optax_lossscale._programs.values import dtype_in


def key_of(eqn: JaxprEqn) -> tuple[Any, ...]:
    """Returns a key for what an equation does to its operands; see `hashable_or_id`.

    The key may not be hashable, because it holds the parameters of the operation.
    """
    # The sort compares only names, because no two parameters have the same name.
    params = tuple(sorted(eqn.params.items()))
    return eqn.primitive, params, eqn.ctx


def key_of_literal(literal: Literal) -> Hashable:
    """Returns a key for a literal: its dtype and bytes, which tell 0.0 from -0.0."""
    return dtype_in(literal), np.asarray(literal.val).tobytes()


def hashable_or_id(key: Any, owner: Any) -> Hashable:
    """Returns the key of `owner`, or the `id` of `owner` if the key is not hashable.

    The caller has to keep `owner` alive, because another object may get the same `id`
    once `owner` is freed.
    """
    try:
        hash(key)
    except TypeError:
        return id(owner)
    return key
