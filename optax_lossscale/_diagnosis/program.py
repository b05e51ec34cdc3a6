"""The traced program as a list of instructions, in pieces to compile together.

An *instruction* is an equation with its origin in the program. A *piece* is a number of
consecutive instructions. It ends at each product, so that the layers of a model, which
are alike, share what is compiled for one. A loop, branch or `shard_map` that reads or
gives floats is a piece by itself, whose programs are divided in turn.
"""

import math
import re
from collections.abc import Collection, Container, Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from optax_lossscale._autocast.products import SCOPE
from optax_lossscale._diagnosis.equations import is_one_to_one, keeps_numbers
from optax_lossscale._diagnosis.notes import Origin
from optax_lossscale._diagnosis.wide import runs_no_iterations, stays_narrow
from optax_lossscale._programs.flat import all_flat
from optax_lossscale._programs.keys import hashable, key_of
from optax_lossscale._programs.lines import line_of
from optax_lossscale._programs.operations import Trait, traits
from optax_lossscale._programs.values import (
    Array,
    Atom,
    dtype_in,
    is_inexact,
    is_narrow_dtype,
)
from optax_lossscale._programs.versions import name_of, scopes_of
from optax_lossscale._programs.walk import programs_in
from optax_lossscale._programs.work import terms_of

_RUN_IN_PYTHON = Trait.SCANS | Trait.WHILE | Trait.BRANCHES | Trait.MAPS
# Scopes that JAX and autocast make; one with an arrow has the formula of an `einsum`
_SCOPES_OF_JAX = rf"{re.escape(SCOPE)}|rematted_computation|jit\(.*\)|.*->.*"


class Instruction(NamedTuple):
    """An equation with its origin, with variables that no other instruction makes."""

    eqn: JaxprEqn
    ins: Sequence[Var]  # its operands; a literal has a variable of its own
    origin: Origin
    programs: Sequence[
        "Program"
    ]  # of a loop, branch or `shard_map`, to be run in Python
    # The positions of the results that have notes of their own: floats, and choices that
    # depend on floats. Any other result only moves numbers, or is an integer that no
    # float decides, and has the note of its first operand.
    noted: Container[int]
    frees: Collection[Var]  # those that it reads or makes, and no later one reads

    def operands_of(self, position: int) -> Sequence[Var]:
        """The operands that the result in this position is made of."""
        return [self.ins[position]] if is_one_to_one(self.eqn) else self.ins


class Piece(NamedTuple):
    """Consecutive instructions."""

    instructions: Sequence[Instruction]
    reads: Sequence[Var]  # the variables that earlier ones make
    key: Hashable  # equal for pieces that compute the same of what they read


class Program(NamedTuple):
    """A program in pieces."""

    takes: Sequence[Var]  # the variables of its arguments
    gives: Sequence[Var]  # those of its results
    constants: Mapping[Var, Array]  # literals included
    pieces: Sequence[Piece]


def program_of(program: ClosedJaxpr | Jaxpr, outer: Origin) -> Program:
    """A jaxpr in pieces, where `outer` is the origin of the equation that holds it."""
    flat = all_flat(program)
    constants = {v: jax.device_get(x) for v, x in flat.consts.items()}

    def named(v: Atom) -> Var:
        """A variable as it is, and a new one for a literal."""
        if not isinstance(v, Literal):
            return v
        constant = Var(v.aval)
        constants[constant] = np.asarray(v.val, dtype_in(v))
        return constant

    gives = list(map(named, flat.outs))
    instructions = []
    needed = set(gives)
    for eqn in reversed(flat.eqns):
        ins = list(map(named, eqn.invars))
        frees = {*ins, *eqn.outvars} - needed
        needed |= frees
        origin = _origin_of(eqn, outer)
        programs = [program_of(jaxpr, origin) for jaxpr in _programs_to_run(eqn)]
        noted = _noted(eqn)
        instructions.append(Instruction(eqn, ins, origin, programs, noted, frees))
    pieces = list(map(_piece, _divided(instructions[::-1])))
    return Program(flat.ins, gives, constants, pieces)


def _programs_to_run(eqn: JaxprEqn) -> Sequence[ClosedJaxpr | Jaxpr]:
    """The programs that an equation with floats runs, if they are to be run in Python."""
    if not traits(eqn) & _RUN_IN_PYTHON or runs_no_iterations(eqn):
        return ()
    has_floats = any(map(is_inexact, (*eqn.invars, *eqn.outvars)))
    return programs_in(eqn) if has_floats else ()


def _noted(eqn: JaxprEqn) -> Container[int]:
    """The positions of the results of an equation that have notes of their own."""
    if keeps_numbers(eqn) and Trait.SELECTS not in traits(eqn):
        return ()
    if any(map(is_inexact, eqn.invars)):
        return range(len(eqn.outvars))
    return [n for n, v in enumerate(eqn.outvars) if is_inexact(v)]


def _origin_of(eqn: JaxprEqn, outer: Origin) -> Origin:
    """Where an equation is: its line, and the names of the scopes that it is in.

    The names come from the stack that JAX keeps for profiles, without what JAX and
    autocast add to it: `transpose(jvp(ols.autocast))/jvp(block_3)` becomes `block_3`.
    """
    own = [x for x in scopes_of(eqn) if not re.fullmatch(_SCOPES_OF_JAX, x)]
    scopes = [outer.scope, *own] if outer.scope else own
    is_transposed = "transpose(" in str(eqn.source_info.name_stack)
    return Origin(
        primitive=name_of(eqn),
        source=line_of(eqn, outer.source),
        scope="/".join(scopes),
        is_derivative=outer.is_derivative or is_transposed,
        terms=terms_of(eqn),
        stays_narrow=stays_narrow(eqn),
        has_lost_constant=_has_lost_constant(eqn),
    )


def _has_lost_constant(eqn: JaxprEqn) -> bool:
    """Whether an equation adds 0 or an infinity in 16 bits, or multiplies by infinity.

    The 0 or infinity may be what rounding left of a constant: in float16, it is 0 for
    1e-8, and minus infinity for -1e9. What the user wrote is not known.
    """
    constants = [
        float(v.val)
        for v in eqn.invars
        if isinstance(v, Literal) and is_narrow_dtype(dtype_in(v))
    ]
    adds = Trait.ADDS_TWO in traits(eqn)
    if not adds and Trait.MULTIPLIES not in traits(eqn):
        return False
    return any(math.isinf(x) or (adds and x == 0) for x in constants)


def _divided(instructions: Iterable[Instruction]) -> list[list[Instruction]]:
    """The instructions of each piece."""
    parts: list[list[Instruction]] = [[]]
    for instruction in instructions:
        if instruction.programs:
            parts.append([])
        parts[-1].append(instruction)
        if instruction.programs or Trait.PRODUCT in traits(instruction.eqn):
            parts.append([])
    return list(filter(None, parts))


def _piece(instructions: Sequence[Instruction]) -> Piece:
    """A piece of these instructions."""
    numbers: dict[Var, int] = {}  # in the order in which they appear
    reads = []
    key: list[Hashable] = []
    for instruction in instructions:
        eqn = instruction.eqn
        for v in instruction.ins:
            if v not in numbers:
                numbers[v] = len(numbers)
                reads.append(v)
        key.append((key_of(eqn), tuple(numbers[v] for v in instruction.ins)))
        for v in eqn.outvars:
            numbers[v] = len(numbers)
    key += [v.aval for v in reads]
    return Piece(instructions, reads, hashable(tuple(key), instructions))
