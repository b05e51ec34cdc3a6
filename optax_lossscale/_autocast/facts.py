"""What the passes forward and backward found out of the values of a program, by their numbers."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from optax_lossscale._autocast.classify import Kind, classify
from optax_lossscale._autocast.flat import Flat, Step, flat
from optax_lossscale._autocast.products import is_narrowed
from optax_lossscale._autocast.uses import Context, Use, depths, is_stored_low, uses
from optax_lossscale._programs.operations import Is, traits
from optax_lossscale._programs.values import FLOAT32, dtype_in

Reader = Step | None
"""A step that reads a value, or None for the program's results."""

Readers = Mapping[int, Sequence[Reader]]


class Casting(NamedTuple):
    """How programs are rewritten."""

    dtype: np.dtype  # of the products
    recomputes: bool = True  # unless the user's own `jax.checkpoint` says what is kept
    # Some sums, unless in a rule of derivatives: a name has no transpose
    keeps: bool = True
    prevent_cse: bool = True  # as `jax.checkpoint` has it


class Facts(NamedTuple):
    """What is known of the values of a program."""

    program: Flat
    arguments: Mapping[int, Any]  # the dtypes in which it takes them
    kinds: Mapping[int, Kind]
    depths: Mapping[int, int]
    uses: Mapping[int, Use]
    readers: Readers
    sent: frozenset[int]  # what is moved in 16 bits, since only products read it
    casting: Casting

    @property
    def low(self) -> np.dtype:
        """The dtype of products."""
        return self.casting.dtype

    def is_stored_low(self, i: int) -> bool:
        """Whether a value is stored in 16 bits."""
        is_float32 = dtype_in(self.program.types[i]) == FLOAT32
        return is_float32 and is_stored_low(self.kinds[i], self.uses[i])

    def stored_dtype(self, i: int) -> Any:
        """The dtype in which a value is stored, if not only products read it."""
        if self.is_stored_low(i):
            return self.low
        return dtype_in(self.program.types[i])

    def is_read_past(self, i: int) -> bool:
        """Whether a value is read again past a product."""
        return Use.PAST in self.uses[i]

    def is_sent(self, step: Reader) -> bool:
        """Whether a step moves its operands in 16 bits."""
        return step is not None and not self.sent.isdisjoint(step.outs)

    def is_of_products(self, i: int) -> bool:
        """Whether a value is in 16 bits as it comes, or a sum with one that is."""
        if self.kinds[i] == Kind.SUM:
            return True
        if i in self.arguments:
            return self.arguments[i] == self.low
        if i in self.program.consts:
            return dtype_in(self.program.consts[i]) == self.low
        return self.stored_dtype(i) == self.low


def facts_of(
    jaxpr: Any, takes: Sequence[Any], context: Context, casting: Casting
) -> Facts:
    """What is known of the values of a program that takes its arguments in dtypes."""
    program = flat(jaxpr)
    readers = program.readers()
    return Facts(
        program,
        dict(zip(program.ins, takes, strict=True)),
        classify(jaxpr, context.kinds, casting.dtype),
        depths(jaxpr, context.depths),
        uses(jaxpr, context, casting.dtype),
        readers,
        _sent(program, readers),
        casting,
    )


def is_operand(i: int, reader: Reader) -> bool:
    """Whether a reader takes a value in 16 bits, as one of the two operands of a product."""
    return reader is not None and is_narrowed(reader.eqn) and i in reader.ins[:2]


def _sent(program: Flat, readers: Readers) -> frozenset[int]:
    """What goes from device to device, or is given a name, and then goes only to products.

    So devices send each other 16 bits, as by hand. On one device, compiled for an H100,
    a Llama with names takes 1.13 of the memory without this, and moves 0.96 of the
    bytes.
    """
    for_products = _moved_to_products(program, readers)
    sent: set[int] = set()
    for step in program.steps:
        is_local = traits(step.eqn) & (Is.SENDS | Is.CHEAP) == Is.CHEAP
        if not is_local or not sent.isdisjoint(step.reads):
            sent.update(for_products.intersection(step.outs))
    return frozenset(sent)


def _moved_to_products(program: Flat, readers: Readers) -> set[int]:
    """What is moved, perhaps several times, and only products read it then."""
    # Products round it, and rounding commutes with moving.
    moved: set[int] = set()

    def rounds(i: int, reader: Reader) -> bool:
        """Whether a reader rounds a value, or moves it to those that do."""
        is_moved_on = reader is not None and not moved.isdisjoint(reader.outs)
        return is_moved_on or is_operand(i, reader)

    def is_only_for_products(i: int) -> bool:
        if dtype_in(program.types[i]) != FLOAT32:
            return False
        return all(rounds(i, reader) for reader in readers.get(i, ()))

    for step in reversed(program.steps):
        moves = traits(step.eqn) & (Is.MOVES | Is.SENDS | Is.SPREADS)
        is_sum = Is.ADDS_MANY in traits(step.eqn)
        if moves and not is_sum and all(map(is_only_for_products, step.outs)):
            moved.update(step.outs)
    return moved
