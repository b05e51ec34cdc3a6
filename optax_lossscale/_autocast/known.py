"""What the passes forward and backward found out of the values of a program, by their numbers."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from optax_lossscale._autocast.classify import Kind, classify
from optax_lossscale._autocast.flat import Flat, Instruction, flat
from optax_lossscale._autocast.products import is_narrowed
from optax_lossscale._autocast.uses import Arguments, Use, depths, is_kept_low, uses
from optax_lossscale._programs.operations import Is, traits
from optax_lossscale._programs.values import FLOAT32, dtype_in

Readers = Mapping[int, Sequence[Instruction | None]]


class Casting(NamedTuple):
    """How programs are narrowed."""

    dtype: np.dtype  # of the products
    recomputes: bool = True  # unless the user's own `jax.checkpoint` says what is kept
    # Some sums, unless in a rule of derivatives: a name has no transpose
    keeps: bool = True
    prevent_cse: bool = True  # as `jax.checkpoint` has it


class Known(NamedTuple):
    """What is known of the values of a program."""

    program: Flat
    arguments: Mapping[int, Any]  # the dtypes in which it takes them
    kinds: Mapping[int, Kind]
    depths: Mapping[int, int]
    uses: Mapping[int, Use]
    readers: Readers
    sent: frozenset[int]  # what is moved in 16 bits, since only products read it
    how: Casting

    @property
    def low(self) -> np.dtype:
        """The dtype of products."""
        return self.how.dtype

    def is_kept_low(self, i: int) -> bool:
        """Whether a value is kept in 16 bits."""
        is_float32 = dtype_in(self.program.types[i]) == FLOAT32
        return is_float32 and is_kept_low(self.kinds[i], self.uses[i])

    def kept_dtype(self, i: int) -> Any:
        """The dtype in which a value is kept, if not only products read it."""
        return self.low if self.is_kept_low(i) else dtype_in(self.program.types[i])

    def is_read_past(self, i: int) -> bool:
        """Whether a value is read again past a product."""
        return Use.PAST in self.uses[i]

    def is_sent(self, step: Instruction | None) -> bool:
        """Whether a step moves its operands in 16 bits."""
        return step is not None and not self.sent.isdisjoint(step.outs)

    def is_of_products(self, i: int) -> bool:
        """Whether a value is in 16 bits, or a sum with one that is."""
        return (
            self.kinds[i] == Kind.SUM
            or i in self.sent
            or self.kept_dtype(i) == self.low
        )


def known(
    jaxpr: Any, takes: Sequence[Any], arguments: Arguments, how: Casting
) -> Known:
    """What is known of the values of a program, given the same of its arguments and results."""
    program = flat(jaxpr)
    readers = program.readers()
    return Known(
        program,
        dict(zip(program.ins, takes, strict=True)),
        classify(jaxpr, arguments.kinds, how.dtype),
        depths(jaxpr, arguments),
        uses(jaxpr, arguments, how.dtype),
        readers,
        _sent(program, readers),
        how,
    )


def is_operand(i: int, step: Instruction | None) -> bool:
    """Whether a step takes a value in 16 bits, as one of the two operands of a product."""
    return step is not None and is_narrowed(step.eqn) and i in step.ins[:2]


def _sent(program: Flat, readers: Readers) -> frozenset[int]:
    """What goes from device to device, or is kept under a name, and then goes only to products."""
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

    def is_only_for_products(i: int) -> bool:
        return dtype_in(program.types[i]) == FLOAT32 and all(
            is_operand(i, reader)
            or (reader is not None and not moved.isdisjoint(reader.outs))
            for reader in readers.get(i, ())
        )

    for step in reversed(program.steps):
        moves = traits(step.eqn) & (Is.MOVES | Is.SENDS | Is.SPREADS)
        is_sum = Is.ADDS_MANY in traits(step.eqn)
        if moves and not is_sum and all(map(is_only_for_products, step.outs)):
            moved.update(step.outs)
    return moved
