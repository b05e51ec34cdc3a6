"""What the first two passes found out, and the dtype of each value that follows.

`classify` says what a value is made of, and `uses` what is done with it. Together they
decide in which dtype it is stored, if it is: in 16 bits if it is a PRODUCT, or a SUM
that is read past a product and on which another product depends. Everything else keeps
the dtype in which it was traced.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from optax_lossscale._autocast.cheap import is_cheap
from optax_lossscale._autocast.classify import Kind, classify
from optax_lossscale._autocast.flat import Flat, Step, flat
from optax_lossscale._autocast.products import is_narrowed
from optax_lossscale._autocast.uses import KEPT, Use, Uses, uses
from optax_lossscale._programs.operations import Is, traits
from optax_lossscale._programs.values import FLOAT32, dtype_in


class Casting(NamedTuple):
    """How a program is rewritten."""

    dtype: np.dtype  # the low one, of products
    # Whether the backward pass recomputes islands; not inside of the user's own
    # `jax.checkpoint`, which says itself what is kept
    recomputes: bool = True
    # Whether some reductions are kept, by a name; not in a custom derivative, which JAX
    # may have to transpose, as a name has no transpose
    keeps: bool = True
    prevent_cse: bool = True  # the argument of `jax.checkpoint`


class Facts(NamedTuple):
    """What is known of each value of a program, by number."""

    program: Flat
    kinds: Mapping[int, Kind]
    uses: Mapping[int, Use]
    sent: frozenset[int]  # the values that are sent in 16 bits: see `_sent`
    dtypes: Mapping[int, Any]  # the dtype in which each value is stored, if it is
    of_products: frozenset[int]  # those in 16 bits, and SUMs: with them islands begin
    casting: Casting
    keeps: bool  # whether some reductions may be kept: see `Casting`

    @property
    def low(self) -> np.dtype:
        """The dtype of narrowed products."""
        return self.casting.dtype

    def is_fused(self, step: Step) -> bool:
        """Whether a step can be in an island: if it is cheap, and sends nothing."""
        return is_cheap(step.eqn) and self.sent.isdisjoint(step.outs)


def facts_of(
    jaxpr: Any,
    takes: Sequence[Any],
    kinds: tuple[Kind, ...],
    results: Uses,
    casting: Casting,
) -> Facts:
    """The facts about a program, in the place where it runs.

    Args:
      jaxpr: the program.
      takes: the dtypes of its arguments.
      kinds: the kinds of its arguments.
      results: what is done with its results.
      casting: how it is rewritten.
    """
    low = casting.dtype
    program = flat(jaxpr)
    kind_of = classify(jaxpr, kinds)
    after = uses(jaxpr, results)
    sent = _sent(program)
    dtypes: dict[int, Any] = {}
    for i, aval in program.types.items():
        traced = dtype_in(aval)
        if i in sent and traced == FLOAT32:
            dtypes[i] = low
        else:
            dtypes[i] = stored_dtype(traced, kind_of[i], after[i], low)
    dtypes |= zip(program.ins, takes, strict=True)
    of_products = frozenset(
        i for i in dtypes if dtypes[i] == low or kind_of[i] == Kind.SUM
    )
    # JAX rounds what it keeps by name, in the mesh around the program, which has to be
    # the mesh of all steps.
    meshes = {step.eqn.ctx.cur_abstract_mesh for step in program.steps}
    keeps = casting.keeps and len(meshes) <= 1
    return Facts(program, kind_of, after, sent, dtypes, of_products, casting, keeps)


def stored_dtype(traced: Any, kind: Kind, use: Use, low: np.dtype) -> Any:
    """The dtype in which a value of this kind and use is stored, if it is.

    The result of a product is in 16 bits already. A SUM on which no product depends is
    never rounded, and neither is one that nothing reads past the next product. So its
    digits are the same whether the steps that make and read it are in one program or,
    as with a `scan` or `cond` between them, in several.
    """
    is_low = kind == Kind.PRODUCT or (kind == Kind.SUM and KEPT in use)
    return low if is_low and traced == FLOAT32 else traced


def _sent(program: Flat) -> frozenset[int]:
    """The results of communications, names and barriers that only products read.

    So devices send each other 16 bits, as in a model cast by hand. Without this, they
    send 1.59 times the weights and activations in a ring, and 1.33 times with a
    sequence gathered, as compiled for eight H100s with jax 0.12.
    """
    # Products round their operands, and numbers can be rounded before they are moved as
    # well as after it. `read_widely` has the values that anything else reads.
    sent: set[int] = set()
    read_widely = set(program.outs)
    for step in reversed(program.steps):
        its_traits = traits(step.eqn)
        moves = its_traits & (Is.MOVES | Is.SENDS | Is.SPREADS)
        is_for_products = read_widely.isdisjoint(step.outs)
        if is_narrowed(step.eqn):
            read_widely.update(step.ins[2:])
        elif not moves or Is.ADDS_MANY in its_traits or not is_for_products:
            read_widely.update(step.ins)
        elif its_traits & (Is.SENDS | Is.CHEAP) != Is.CHEAP:
            sent.update(step.outs)
    return frozenset(sent)
