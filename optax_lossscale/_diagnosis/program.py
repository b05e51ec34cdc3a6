"""Divides a traced program into pieces, which are compiled or run one by one.

An *instruction* is an equation with what a run needs to know about it, such as its
source line. A *piece* is a sequence of consecutive instructions, which are compiled as
one function. A piece ends after each product: `relu(relu(x @ v) @ w) @ u` becomes the
pieces `x @ v`, `relu, @ w` and `relu, @ u`. So layers that are alike become pieces that
are alike, and share one compiled function. A loop, branch or `shard_map` with floats is
a piece by itself, which Python runs, and the programs inside it are divided in turn.
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
from optax_lossscale._programs.keys import hashable_or_id, key_of
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
# Scopes that JAX and autocast add; one with an arrow is the formula of an `einsum`
_SCOPES_OF_JAX = rf"{re.escape(SCOPE)}|rematted_computation|jit\(.*\)|.*->.*"


class Instruction(NamedTuple):
    """An equation with what a run needs to know about it."""

    eqn: JaxprEqn
    operands: Sequence[Var]  # a new variable stands for each literal
    origin: Origin
    # The programs of a loop, branch or `shard_map`, which Python runs; else empty
    programs: Sequence["Program"]
    # The positions of the results that get a note: floats that are computed, and
    # choices that depend on floats. Any other result, such as a transpose, shares the
    # note of its first operand.
    noted: Container[int]
    frees: Collection[Var]  # its operands and results that no later instruction reads

    def operands_of(self, position: int) -> Sequence[Var]:
        """Returns the operands that the result in this position depends on."""
        return [self.operands[position]] if is_one_to_one(self.eqn) else self.operands


class Piece(NamedTuple):
    """Consecutive instructions that run together."""

    instructions: Sequence[Instruction]
    reads: Sequence[Var]  # the variables that it reads, without those that it computes
    key: Hashable  # equal for pieces that compute the same function of `reads`


class Program(NamedTuple):
    """A jaxpr divided into pieces. No variable is assigned twice."""

    invars: Sequence[Var]
    outvars: Sequence[Var]
    constants: Mapping[Var, Array]  # with the literals
    pieces: Sequence[Piece]


def program_of(jaxpr: ClosedJaxpr | Jaxpr, outer: Origin) -> Program:
    """Inlines the calls of a jaxpr, and divides it into pieces.

    Args:
      jaxpr: the jaxpr.
      outer: the origin of the equation that holds the jaxpr, or an empty one.
    """
    flat = all_flat(jaxpr)
    constants = {v: jax.device_get(x) for v, x in flat.consts.items()}

    def variable_for(atom: Atom) -> Var:
        """Replaces a literal by a new variable for a constant."""
        if not isinstance(atom, Literal):
            return atom
        v = Var(atom.aval)
        constants[v] = np.asarray(atom.val, dtype_in(atom))
        return v

    outvars = list(map(variable_for, flat.outs))
    instructions = []
    needed_later = set(outvars)
    for eqn in reversed(flat.eqns):
        operands = list(map(variable_for, eqn.invars))
        frees = {*operands, *eqn.outvars} - needed_later
        needed_later |= frees
        origin = _origin_of(eqn, outer)
        programs = [program_of(inner, origin) for inner in _jaxprs_to_run(eqn)]
        instructions.append(
            Instruction(
                eqn=eqn,
                operands=operands,
                origin=origin,
                programs=programs,
                noted=_noted(eqn),
                frees=frees,
            )
        )
    instructions.reverse()
    pieces = list(map(_piece_of, _grouped(instructions)))
    return Program(flat.ins, outvars, constants, pieces)


def _jaxprs_to_run(eqn: JaxprEqn) -> Sequence[ClosedJaxpr | Jaxpr]:
    """Returns the jaxprs of a loop, branch or `shard_map` with floats; else none."""
    if not traits(eqn) & _RUN_IN_PYTHON or runs_no_iterations(eqn):
        return ()
    involves_floats = any(map(is_inexact, (*eqn.invars, *eqn.outvars)))
    return programs_in(eqn) if involves_floats else ()


def _noted(eqn: JaxprEqn) -> Container[int]:
    """The positions of an equation's results that get a note of their own."""
    if keeps_numbers(eqn) and Trait.SELECTS not in traits(eqn):
        return ()
    if any(map(is_inexact, eqn.invars)):
        return range(len(eqn.outvars))
    return [n for n, v in enumerate(eqn.outvars) if is_inexact(v)]


def _origin_of(eqn: JaxprEqn, outer: Origin) -> Origin:
    """Builds the origin of an equation.

    The scopes are those of JAX's name stack, without what JAX and autocast add to it:
    `transpose(jvp(ols.autocast))/jvp(block_3)` becomes `block_3`.
    """
    scopes = [outer.scope] if outer.scope else []
    for scope in scopes_of(eqn):
        if not re.fullmatch(_SCOPES_OF_JAX, scope):
            scopes.append(scope)
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

    Such a constant may be a rounded one: float16 rounds 1e-8 to 0, and -1e9 to minus
    infinity. The jaxpr does not show what the user wrote.
    """
    adds = Trait.ADDS_TWO in traits(eqn)
    if not adds and Trait.MULTIPLIES not in traits(eqn):
        return False
    for v in eqn.invars:
        if isinstance(v, Literal) and is_narrow_dtype(dtype_in(v)):
            constant = float(v.val)
            if math.isinf(constant) or (adds and constant == 0):
                return True
    return False


def _grouped(instructions: Iterable[Instruction]) -> list[list[Instruction]]:
    """Groups consecutive instructions into pieces.

    A product ends a group, and an instruction with programs is a group by itself.
    """
    groups: list[list[Instruction]] = [[]]
    for instruction in instructions:
        if instruction.programs:
            groups.append([])
        groups[-1].append(instruction)
        if instruction.programs or Trait.PRODUCT in traits(instruction.eqn):
            groups.append([])
    return list(filter(None, groups))


def _piece_of(instructions: Sequence[Instruction]) -> Piece:
    """Builds a piece. Its key numbers the variables in the order of appearance."""
    numbers: dict[Var, int] = {}
    reads = []
    key: list[Hashable] = []
    for instruction in instructions:
        for v in instruction.operands:
            if v not in numbers:
                numbers[v] = len(numbers)
                reads.append(v)
        operand_numbers = tuple(numbers[v] for v in instruction.operands)
        key.append((key_of(instruction.eqn), operand_numbers))
        for v in instruction.eqn.outvars:
            numbers[v] = len(numbers)
    key += [v.aval for v in reads]
    return Piece(instructions, reads, hashable_or_id(tuple(key), instructions))
