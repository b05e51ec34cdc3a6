"""A program in pieces: equations that are compiled together, and those that hold programs."""

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
    """Equations that follow each other: some that hold no loop, or one that holds programs.

    A piece ends at each product, so that the layers of a model, which are alike, share
    what is compiled for one.
    """

    eqns: Sequence[Any]
    programs: Sequence[Any]  # of the one equation, to be run by themselves
    reads: Sequence[Any]  # the variables that were there before
    frees: Sequence[Any]  # the variables that nothing reads after it
    key: Hashable  # equal for what computes the same


@remembered
def pieces_of(jaxpr: Any) -> list[Piece]:
    """The pieces of a program, in its order."""
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
    """The programs of a call, a loop or a branch; of an equation that is compiled, none."""
    programs = programs_in(eqn)
    is_loop = bool(traits(eqn) & _LOOPS) and any(map(_has_floats, programs))
    return programs if is_loop or is_call(eqn) else ()


def is_call(eqn: Any) -> bool:
    """Whether an equation is no more than the one program that it holds."""
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
    """What equations compute, with their variables numbered."""
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
    except TypeError:  # of a parameter that is compared with no other
        return tuple(map(id, eqns))
    return tuple(key)
