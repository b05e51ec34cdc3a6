"""The traced program as a list of instructions, in pieces to compile together.

An *instruction* is an equation with its place in the program. Consecutive instructions
without loops are one piece, which is compiled as a whole; outside of loops, a piece
ends at each product, so that the layers of a model, which are alike, share what is
compiled for one. A loop or branch that computes floats is a piece by itself, whose
programs are divided in turn.
"""

import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from optax_lossscale._autocast.products import SCOPE
from optax_lossscale._diagnosis.equations import dtypes_within, keeps_numbers
from optax_lossscale._diagnosis.notes import Place
from optax_lossscale._diagnosis.wide import runs_no_rounds, stays_narrow
from optax_lossscale._programs.flat import all_flat
from optax_lossscale._programs.keys import hashable, key_of, key_of_literal
from optax_lossscale._programs.lines import line_of
from optax_lossscale._programs.operations import Trait, traits
from optax_lossscale._programs.values import (
    Atom,
    dtype_in,
    is_inexact,
    is_inexact_dtype,
    size_of,
    variables,
)
from optax_lossscale._programs.versions import name_of, scopes_of
from optax_lossscale._programs.walk import programs_in
from optax_lossscale._programs.work import terms_of

_LOOPS = Trait.SCANS | Trait.WHILE | Trait.BRANCHES | Trait.MAPS
_MANY = 2**20  # numbers that a round of a loop may have in one piece
# Scopes that JAX and autocast make; one with an arrow has the formula of an `einsum`
_NOT_THE_USERS = rf"{SCOPE}|rematted_computation|jit\(.*\)|.*->.*"


class Instruction(NamedTuple):
    """An equation in its place, with variables that no other instruction makes."""

    eqn: JaxprEqn
    place: Place
    programs: Sequence["Program"]  # those of a loop or branch, to be run in Python
    # Its results that have notes, by their positions: floats, and choices that depend on
    # floats. Others have the note of the first operand, as they have all of its numbers,
    # or are integers.
    noted: Mapping[int, Var]
    stays_narrow: bool  # whether it computes in 16 bits although it is given float32


class Piece(NamedTuple):
    """Consecutive instructions."""

    instructions: Sequence[Instruction]
    reads: Sequence[Var]  # the variables from earlier pieces or arguments
    leaves: Sequence[Var]  # those that it makes for later pieces or as results
    frees: frozenset[Var]  # those that it reads, and no later piece
    key: Hashable  # equal for pieces that compute the same


class Program(NamedTuple):
    """A program in pieces."""

    takes: Sequence[Var]  # the variables of its arguments
    gives: Sequence[Atom]  # those of its results, or literals
    constants: Mapping[Var, np.ndarray]
    pieces: Sequence[Piece]


def program_of(program: ClosedJaxpr | Jaxpr, outer: Place, limit: int = 0) -> Program:
    """A program in pieces.

    Args:
      program: a jaxpr.
      outer: the place of the equation that holds it.
      limit: a product ends its piece once the results of the piece hold more numbers
        than this.
    """
    flat = all_flat(program)
    instructions = [_instruction(eqn, outer) for eqn in flat.eqns]
    constants = {v: jax.device_get(x) for v, x in flat.consts.items()}
    return Program(
        flat.ins, flat.outs, constants, _pieces(instructions, flat.outs, limit)
    )


def _instruction(eqn: JaxprEqn, outer: Place) -> Instruction:
    """An equation in its place, with the programs of a loop or branch in pieces."""
    place = _place_of(eqn, outer)
    held = [program_of(program, place, _MANY) for program in _programs_to_run(eqn)]
    return Instruction(
        eqn,
        place,
        held,
        _noted(eqn),
        stays_narrow=not held and stays_narrow(eqn),
    )


def _programs_to_run(eqn: JaxprEqn) -> Sequence[ClosedJaxpr | Jaxpr]:
    """The programs of a loop or branch that computes floats, if it runs at all."""
    if not traits(eqn) & _LOOPS or runs_no_rounds(eqn):
        return ()
    programs = programs_in(eqn)
    dtypes = frozenset().union(*map(dtypes_within, programs))
    return programs if any(map(is_inexact_dtype, dtypes)) else ()


def _noted(eqn: JaxprEqn) -> Mapping[int, Var]:
    """The results of an equation that have notes of their own, by their positions."""
    if keeps_numbers(eqn) and Trait.SELECTS not in traits(eqn):
        return {}
    has_floats = any(map(is_inexact, eqn.invars))
    results = enumerate(eqn.outvars)
    return {n: v for n, v in results if has_floats or is_inexact(v)}


def _place_of(eqn: JaxprEqn, outer: Place) -> Place:
    """Where an equation is: its line, and the names of the scopes that it is in.

    The names come from the stack that JAX keeps for profiles, without what JAX and
    autocast add to it: `transpose(jvp(ols.autocast))/jvp(block_3)` becomes `block_3`.
    """
    own = [x for x in scopes_of(eqn) if not re.fullmatch(_NOT_THE_USERS, x)]
    scopes = [outer.scope, *own] if outer.scope else own
    is_transposed = "transpose(" in str(eqn.source_info.name_stack)
    return Place(
        primitive=name_of(eqn),
        source=line_of(eqn, outer.source),
        scope="/".join(scopes),
        is_derivative=outer.is_derivative or is_transposed,
        terms=terms_of(eqn),
    )


def _pieces(
    instructions: Sequence[Instruction], gives: Sequence[Atom], limit: int
) -> list[Piece]:
    """Divides instructions into pieces, with what each reads and leaves to the next."""
    pieces = []
    needed = set(variables(gives))
    parts = filter(None, _parts(instructions, limit))
    for part in reversed(list(parts)):
        made: dict[Var, None] = {}
        read: dict[Var, None] = {}
        for instruction in part:
            made.update(dict.fromkeys(instruction.eqn.outvars))
            read.update(dict.fromkeys(variables(instruction.eqn.invars)))
        leaves = [v for v in made if v in needed]
        reads = [v for v in read if v not in made]
        frees = frozenset(reads) - needed
        needed.update(reads)
        pieces.append(Piece(part, reads, leaves, frees, _key(part, reads, leaves)))
    return pieces[::-1]


def _parts(
    instructions: Sequence[Instruction], limit: int
) -> Iterator[list[Instruction]]:
    """The instructions of each piece, of which some have none."""
    part: list[Instruction] = []
    for instruction in instructions:
        if instruction.programs:
            yield part
            yield [instruction]
            part = []
            continue
        part.append(instruction)
        is_product = Trait.PRODUCT in traits(instruction.eqn)
        if is_product and _numbers(part) > limit:
            yield part
            part = []
    yield part


def _numbers(instructions: Sequence[Instruction]) -> int:
    """How many numbers the results of instructions have."""
    results = (v for instruction in instructions for v in instruction.eqn.outvars)
    return sum(size_of(v.aval) for v in results if dtype_in(v) is not None)


def _key(
    instructions: Sequence[Instruction], reads: Sequence[Var], leaves: Sequence[Var]
) -> Hashable:
    """A key that is equal for instructions that compute the same."""
    numbers = {v: n for n, v in enumerate(reads)}
    key: list[Hashable] = [v.aval for v in reads]
    for instruction in instructions:
        operands = tuple(
            key_of_literal(v) if isinstance(v, Literal) else numbers[v]
            for v in instruction.eqn.invars
        )
        key.append((key_of(instruction.eqn), operands))
        for v in instruction.eqn.outvars:
            numbers[v] = len(numbers)
    key.append(tuple(numbers[v] for v in leaves))
    return hashable(tuple(key), instructions)
