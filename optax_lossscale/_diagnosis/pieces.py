"""A program in pieces: some equations to compile together, or one that holds programs.

Consecutive equations without loops are one piece, which is compiled as a whole; a piece
ends at each product, so that the layers of a model, which are alike, share what is
compiled for one. A call, and a loop or branch that computes floats, is a piece by
itself, whose programs are divided in turn.
"""

from collections.abc import Hashable, Iterator, Sequence
from typing import Any, NamedTuple

from jax.extend.core import Literal

from optax_lossscale._diagnosis.equations import dtypes_within
from optax_lossscale._programs.alike import hashable, key_of, key_of_literal
from optax_lossscale._programs.operations import Is, traits
from optax_lossscale._programs.remembered import remembered
from optax_lossscale._programs.values import is_inexact
from optax_lossscale._programs.walk import programs_in

_LOOPS = Is.SCANS | Is.WAITS | Is.BRANCHES | Is.MAPS


class Piece(NamedTuple):
    """Consecutive equations of a program."""

    eqns: Sequence[Any]
    programs: Sequence[Any]  # those of the only equation, to be run piece by piece
    reads: Sequence[Any]  # the variables from earlier pieces or arguments
    frees: Sequence[Any]  # the variables that no later piece reads
    key: Hashable  # equal for pieces that compute the same


@remembered
def pieces_of(jaxpr: Any) -> list[Piece]:
    """The pieces of an open jaxpr, in its order."""
    pieces = []
    needed = set(_variables(jaxpr.outvars))
    for eqns in reversed(list(_parts(jaxpr))):
        made = dict.fromkeys(v for eqn in eqns for v in eqn.outvars)
        read = dict.fromkeys(v for eqn in eqns for v in _variables(eqn.invars))
        frees = [v for v in {**read, **made} if v not in needed]
        needed.update(read)
        reads = [v for v in read if v not in made]
        key = _key(eqns, reads)
        pieces.append(Piece(eqns, programs_to_run(eqns[0]), reads, frees, key))
    return pieces[::-1]


def programs_to_run(eqn: Any) -> Sequence[Any]:
    """The programs of an equation that is run piece by piece; else none.

    Such an equation is a call, or a loop or branch that computes floats. A `scan` of no
    rounds has nothing to run.
    """
    kind = traits(eqn)
    programs = programs_in(eqn)
    has_rounds = eqn.params.get("length") != 0
    is_loop = bool(kind & _LOOPS) and any(map(_has_floats, programs)) and has_rounds
    return programs if is_loop or Is.CALLS in kind else ()


def _parts(jaxpr: Any) -> Iterator[list[Any]]:
    """The equations of each piece."""
    part: list[Any] = []
    for eqn in jaxpr.eqns:
        is_alone = bool(programs_to_run(eqn))
        if is_alone and part:
            yield part
            part = []
        part.append(eqn)
        if is_alone or Is.PRODUCT in traits(eqn):
            yield part
            part = []
    if part:
        yield part


def _has_floats(program: Any) -> bool:
    return any(map(is_inexact, dtypes_within(program)))


def _variables(operands: Sequence[Any]) -> Iterator[Any]:
    """Operands without literals."""
    return (v for v in operands if not isinstance(v, Literal))


def _key(eqns: Sequence[Any], reads: Sequence[Any]) -> Hashable:
    """A key that is equal for equations that compute the same."""
    numbers = {v: n for n, v in enumerate(reads)}
    key: list[Hashable] = [v.aval for v in reads]
    for eqn in eqns:
        operands = [
            key_of_literal(v) if isinstance(v, Literal) else numbers[v]
            for v in eqn.invars
        ]
        numbers.update({v: len(numbers) + n for n, v in enumerate(eqn.outvars)})
        key.append((key_of(eqn), tuple(operands)))
    return hashable(tuple(key), eqns)
