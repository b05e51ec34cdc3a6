"""The dtype in which each value of a program is stored, by its kind and its use.

`classify` finds the kind of a value, and `uses` how the value is used later. Take
`h = x @ w + b` and `y = h + jnp.tanh(h @ w)`, where `b` is a parameter. By the rule in
`stored_dtype`, `h` is stored in 16 bits for two reasons: its kind is SUM, a sum with a
product's result; and its use is BOTH, because the product `h @ w` depends on `h`, and
the sum reads `h` after that product.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import Var

from optax_lossscale._autocast.classify import Kind, Kinds, classify
from optax_lossscale._autocast.uses import BOTH, Use, Uses, uses
from optax_lossscale._programs.flat import Flat, flat
from optax_lossscale._programs.values import FLOAT32, Atom, dtype_in
from optax_lossscale._programs.versions import AnyJaxpr


class Casting(NamedTuple):
    """The options of a rewrite: the 16-bit dtype, and what the backward pass saves.

    Attributes:
      low: the dtype of narrowed products.
      recomputes: whether the backward pass recomputes islands. This is False in the
        user's own `jax.checkpoint`, whose policy decides which residuals are saved.
      keeps_reductions: whether some reductions get a name, by which they are saved as
        residuals. This is False in a custom derivative, because JAX may have to
        transpose the derivative and a name has no transpose. It is also False in a
        program whose equations have different meshes.
      prevent_cse: the argument of `jax.checkpoint`.
    """

    low: np.dtype
    recomputes: bool = True
    keeps_reductions: bool = True
    prevent_cse: bool = True


class Facts(NamedTuple):
    """The results of the first two passes, for a program in the place where it runs.

    Attributes:
      program: the program, with its short calls inlined.
      kinds: the kind of each variable.
      dtypes: the dtype in which each variable is stored, if it is stored.
      uses: how each variable is used later.
      casting: the options of the rewrite.
    """

    program: Flat
    kinds: Mapping[Var, Kind]
    dtypes: Mapping[Var, Any]
    uses: Mapping[Var, Use]
    casting: Casting

    @property
    def low(self) -> np.dtype:
        """The dtype of narrowed products."""
        return self.casting.low


def facts_of(
    jaxpr: AnyJaxpr,
    in_dtypes: Sequence[Any],
    in_kinds: Kinds,
    result_uses: Uses,
    casting: Casting,
) -> Facts:
    """Runs the first two passes on a program.

    Args:
      jaxpr: the program.
      in_dtypes: the dtypes of its arguments.
      in_kinds: the kinds of its arguments.
      result_uses: the uses of its results.
      casting: the options of the rewrite.
    """
    program = flat(jaxpr)
    kinds = classify(jaxpr, in_kinds)
    use_of = uses(jaxpr, result_uses)
    dtypes = {}
    for v, kind in kinds.items():
        dtypes[v] = stored_dtype(v, kind, use_of[v], casting.low)
    dtypes.update(zip(program.ins, in_dtypes, strict=True))
    return Facts(
        program=program,
        kinds=kinds,
        dtypes=dtypes,
        uses=use_of,
        casting=casting,
    )


def stored_dtype(v: Atom, kind: Kind, use: Use, low: np.dtype) -> Any:
    """Returns the dtype in which to store a value of this kind and use.

    A NARROWED value is in 16 bits already. A SUM is stored in 16 bits if a product
    depends on it and it is live across one. Any other value has the dtype in which it
    was traced, but `store` may still round it if only products read it. `store` also
    decides whether a value is stored at all.

    The rule depends on the use, not on the program that holds the reader: a `scan` or
    `cond` around the reader does not change the dtype.
    """
    traced = dtype_in(v)
    is_low = kind == Kind.NARROWED or (kind == Kind.SUM and use == BOTH)
    if is_low and traced == FLOAT32:
        return low
    return traced
