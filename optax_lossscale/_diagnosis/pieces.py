"""A program in pieces: some equations to compile together, or one that holds programs.

Consecutive equations without loops are one piece, which is compiled as a whole; a piece
ends at each product, so that the layers of a model, which are alike, share what is
compiled for one. A call, and a loop or branch that computes floats, is a piece by
itself, whose programs are divided in turn.
"""

from collections.abc import Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import Literal

from optax_lossscale._programs.operations import Is, traits
from optax_lossscale._programs.remembered import remembered
from optax_lossscale._programs.values import dtype_in, is_float
from optax_lossscale._programs.versions import open_jaxpr
from optax_lossscale._programs.walk import programs_in

_LOOPS = Is.SCANS | Is.WAITS | Is.BRANCHES | Is.MAPS
_CALLS = Is.INLINED | Is.KEEPS | Is.JVP | Is.VJP
_OTHER_CALLS = ("custom_vmap_call", "composite", "xla_metadata_call")


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
    needed = {v for v in jaxpr.outvars if not isinstance(v, Literal)}
    for eqns in reversed(list(_parts(jaxpr))):
        made = [v for eqn in eqns for v in eqn.outvars]
        read = dict.fromkeys(
            v for eqn in eqns for v in eqn.invars if not isinstance(v, Literal)
        )
        frees = [v for v in {**read, **dict.fromkeys(made)} if v not in needed]
        needed.update(read)
        reads = [v for v in read if v not in made]
        key = _key(eqns, reads)
        pieces.append(Piece(eqns, programs_to_run(eqns[0]), reads, frees, key))
    return pieces[::-1]


def programs_to_run(eqn: Any) -> Sequence[Any]:
    """The programs of an equation that is run piece by piece; else none.

    Such an equation is a call, or a loop or branch that computes floats.
    """
    programs = programs_in(eqn)
    is_loop = bool(traits(eqn) & _LOOPS) and any(map(_has_floats, programs))
    return programs if is_loop or is_call(eqn) else ()


def is_call(eqn: Any) -> bool:
    """Whether an equation only runs the one program that it holds."""
    is_one = traits(eqn) & _CALLS or eqn.primitive.name in _OTHER_CALLS
    return bool(is_one) and len(programs_in(eqn)) == 1


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
    """Whether any value that a program makes or passes on is a float."""
    jaxpr = open_jaxpr(program)
    inside = (inner for eqn in jaxpr.eqns for inner in programs_in(eqn))
    made = [*jaxpr.outvars, *(v for eqn in jaxpr.eqns for v in eqn.outvars)]
    return any(map(is_float, made)) or any(map(_has_floats, inside))


def _key(eqns: Sequence[Any], reads: Sequence[Any]) -> Hashable:
    """A key that is equal for equations that compute the same.

    Variables are numbered in it, as layers that are alike have different ones.
    """
    numbers = {v: n for n, v in enumerate(reads)}
    key: list[Hashable] = [v.aval for v in reads]
    for eqn in eqns:
        operands = [
            (dtype_in(v), np.asarray(v.val).tobytes())
            if isinstance(v, Literal)
            else numbers[v]
            for v in eqn.invars
        ]
        numbers.update({v: len(numbers) + n for n, v in enumerate(eqn.outvars)})
        key.append((eqn.primitive, tuple(eqn.params.items()), tuple(operands)))
    try:
        hash(tuple(key))
    except TypeError:  # a parameter has no hash: equal to no other
        return tuple(map(id, eqns))
    return tuple(key)
