"""The dtype of each value of a program, by its kind and by what is done with it.

A value is stored in 16 bits if it is a PRODUCT, or a SUM that is read past a product
and on which another product depends. Any other value has the dtype in which it was
traced, unless `store` finds that only products read it.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import Var

from optax_lossscale._autocast.classify import Kind, classify
from optax_lossscale._autocast.uses import BOTH, Use, Uses, uses
from optax_lossscale._programs.flat import Flat, flat
from optax_lossscale._programs.values import FLOAT32, Atom, dtype_in


class Casting(NamedTuple):
    """The options by which a program is rewritten."""

    low: np.dtype  # the dtype of narrowed products
    # Whether the backward pass recomputes islands; not inside of the user's own
    # `jax.checkpoint`, whose policy says which residuals are kept
    recomputes: bool = True
    # Whether some reductions are kept, by a name; not in a custom derivative: JAX may
    # have to transpose it, and cannot transpose a name
    keeps_reductions: bool = True
    prevent_cse: bool = True  # the argument of `jax.checkpoint`


class Facts(NamedTuple):
    """What is known of a program, in the place where it runs."""

    program: Flat
    kinds: Mapping[Var, Kind]
    dtypes: Mapping[Var, Any]  # the dtype in which each value is stored, if it is
    uses: Mapping[Var, Use]
    casting: Casting

    @property
    def low(self) -> np.dtype:
        """The low dtype, that of narrowed products."""
        return self.casting.low


def facts_of(
    jaxpr: Any,
    takes: Sequence[Any],
    kinds: tuple[Kind, ...],
    results: Uses,
    casting: Casting,
) -> Facts:
    """The facts about a program.

    Args:
      jaxpr: the program.
      takes: the dtypes of its arguments.
      kinds: the kinds of its arguments.
      results: what is done with its results.
      casting: how it is rewritten.
    """
    program = flat(jaxpr)
    kind_of = classify(jaxpr, kinds)
    after = uses(jaxpr, results)
    low = casting.low
    dtypes = {v: stored_dtype(v, kind, after[v], low) for v, kind in kind_of.items()}
    dtypes |= zip(program.ins, takes, strict=True)
    return Facts(program, kind_of, dtypes, after, casting)


def stored_dtype(v: Atom, kind: Kind, use: Use, low: np.dtype) -> Any:
    """The dtype in which a value of this kind and use is stored, if it is.

    The result of a product is in 16 bits already. A SUM is stored in 16 bits only if a
    product depends on it and it is read past a product. Any other SUM is in float32
    unless only products read it. The rule looks at use, and not at which program holds
    the reader: so a `scan` or `cond` around the reader does not change the dtype.
    """
    is_low = kind == Kind.PRODUCT or (kind == Kind.SUM and use == BOTH)
    return low if is_low and dtype_in(v) == FLOAT32 else dtype_in(v)
