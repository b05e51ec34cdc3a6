"""What the passes forward and backward found out of the values of a program, by their numbers."""

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
    """How programs are rewritten."""

    dtype: np.dtype  # of the products
    recomputes: bool = True  # unless the user's own `jax.checkpoint` says what is kept
    # Some reductions, unless in a rule of derivatives: a name has no transpose
    keeps: bool = True
    prevent_cse: bool = True  # as `jax.checkpoint` has it


class Facts(NamedTuple):
    """What is known of the values of a program."""

    program: Flat
    kinds: Mapping[int, Kind]
    uses: Mapping[int, Use]
    sent: frozenset[int]  # what is moved in 16 bits, since only products read it
    dtypes: Mapping[int, Any]  # in which each value is stored, if it is
    casting: Casting

    @property
    def low(self) -> np.dtype:
        """The dtype of products."""
        return self.casting.dtype

    @property
    def of_products(self) -> frozenset[int]:
        """What is in 16 bits as it comes, a sum with a product, or where such sums begin."""
        streams = (Kind.SUM, Kind.ROWS)
        return frozenset(
            i
            for i, dtype in self.dtypes.items()
            if dtype == self.low or self.kinds[i] in streams
        )

    def is_fused(self, step: Step) -> bool:
        """Whether a step can be a part of an island: it is cheap, and sends nothing in 16 bits."""
        return is_cheap(step.eqn) and self.sent.isdisjoint(step.outs)


def facts_of(
    jaxpr: Any,
    takes: Sequence[Any],
    kinds: tuple[Kind, ...],
    results: Uses,
    casting: Casting,
) -> Facts:
    """What is known of the values of a program.

    Args:
      jaxpr: the program.
      takes: the dtypes in which it takes its arguments.
      kinds: the kinds of these.
      results: what is done with its results.
      casting: how it is rewritten.
    """
    low = casting.dtype
    program = flat(jaxpr)
    kind_of = dict(classify(jaxpr, kinds))
    kind_of |= dict.fromkeys(_where_streams_begin(program, kind_of), Kind.SUM)
    after = uses(jaxpr, results)
    sent = _sent(program)
    dtypes: dict[int, Any] = {}
    for i, aval in program.types.items():
        dtypes[i] = dtype_in(aval)
        is_low = i in sent or is_stored_low(kind_of[i], after[i])
        if dtypes[i] == FLOAT32 and is_low:
            dtypes[i] = low
    dtypes |= zip(program.ins, takes, strict=True)
    return Facts(program, kind_of, after, sent, dtypes, casting)


def is_stored_low(kind: Kind, use: Use) -> bool:
    """Whether a float32 value of a kind is in 16 bits from where it is made.

    The result of a product is so already. A sum that no product depends on is never
    rounded, and one that is used up before the next product is not rounded either:
    whatever holds the programs that make it and read it, its digits are the same.
    """
    return kind == Kind.PRODUCT or (kind == Kind.SUM and KEPT in use)


def _where_streams_begin(program: Flat, kinds: Mapping[int, Kind]) -> set[int]:
    """The rows of an embedding to which the result of a product is added.

    They are stored as such sums are, and as a cast by hand of the embedding stores them.
    """
    begins: set[int] = set()
    for step in program.steps:
        if Is.ADDS_TWO in traits(step.eqn) and kinds[step.outs[0]] == Kind.SUM:
            begins.update(i for i in step.reads if kinds[i] == Kind.ROWS)
    return begins


def _sent(program: Flat) -> frozenset[int]:
    """What goes from device to device, or is given a name, and then goes only to products.

    So devices send each other 16 bits, as by hand. On one device, compiled for an H100,
    a Llama with names takes 1.13 of the memory without this, and moves 0.96 of the
    bytes.
    """
    # Products round what they read, and rounding commutes with moving.
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
