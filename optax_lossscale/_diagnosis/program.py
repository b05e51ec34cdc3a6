"""Divides a traced program into pieces, each of which is compiled or run by Python.

An *instruction* is an equation that is prepared once for all runs. For example, it
holds the equation's source line and the variables that can be freed after it. A
*piece* is a sequence of consecutive instructions that are compiled as one function. A
piece ends after each product:

    relu(relu(x @ v) @ w) @ u    becomes    x @ v  |  relu, @ w  |  relu, @ u

Equal layers thus become equal pieces, which share one compiled function. A loop, branch
or `shard_map` with floats is a piece by itself, which Python runs. The programs in it
are divided in turn.
"""

import math
import re
from collections.abc import Collection, Container, Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from optax_lossscale._autocast.autocast import SCOPE
from optax_lossscale._diagnosis.equations import is_one_to_one, keeps_numbers
from optax_lossscale._diagnosis.notes import Origin
from optax_lossscale._diagnosis.old_flat import all_flat
from optax_lossscale._diagnosis.old_keys import hashable_or_id, key_of
from optax_lossscale._diagnosis.old_operations import Trait, traits
from optax_lossscale._diagnosis.old_walk import programs_in
from optax_lossscale._diagnosis.old_work import count_terms
from optax_lossscale._diagnosis.wide import runs_no_iterations, stays_narrow
from optax_lossscale._programs.lines import line_of
from optax_lossscale._programs.values import (
    Array,
    Atom,
    dtype_in,
    is_inexact,
    is_narrow_dtype,
)
from optax_lossscale._programs.versions import is_transposed, name_of, scopes_of

# The equations whose programs Python runs, if they compute with floats.
_RUN_IN_PYTHON = Trait.SCANS | Trait.WHILE | Trait.BRANCHES | Trait.MAPS

# The scopes that JAX and `autocast` add. A scope with an arrow is the formula of an
# `einsum`.
_ADDED_SCOPES = rf"{re.escape(SCOPE)}|rematted_computation|jit\(.*\)|.*->.*"


class Instruction(NamedTuple):
    """An equation, prepared once for all runs.

    Attributes:
      eqn: the equation.
      operands: its operands. Each literal is replaced with a new variable, and its
        value becomes a constant of the program, so that pieces that differ only in
        literals are equal.
      origin: the operation, source line and scope of the equation.
      programs: the programs of a loop, branch or `shard_map` that Python runs; empty
        for any other equation.
      noted: the positions of the results that get a note of their own. Any other
        result, such as a transpose, shares the note of its first operand that has one.
      frees: its operands and results that no later instruction reads.
    """

    eqn: JaxprEqn
    operands: Sequence[Var]
    origin: Origin
    programs: Sequence["Program"]
    noted: Container[int]
    frees: Collection[Var]

    def operands_of(self, position: int) -> Sequence[Var]:
        """Returns the operands that the result in this position depends on."""
        return [self.operands[position]] if is_one_to_one(self.eqn) else self.operands


class Piece(NamedTuple):
    """Consecutive instructions that are compiled together, or one that Python runs.

    Attributes:
      instructions: the instructions, in order.
      reads: the variables that it reads but does not compute itself.
      key: the key of its compiled function. If two pieces have equal keys, they compute
        the same function of `reads`.
    """

    instructions: Sequence[Instruction]
    reads: Sequence[Var]
    key: Hashable


class Program(NamedTuple):
    """A jaxpr without calls, divided into pieces. No variable is assigned twice.

    Attributes:
      invars: the variables of its arguments.
      outvars: the variables of its results.
      constants: the arrays of its constants and literals.
      pieces: the pieces, in order.
    """

    invars: Sequence[Var]
    outvars: Sequence[Var]
    constants: Mapping[Var, Array]
    pieces: Sequence[Piece]


def program_of(jaxpr: ClosedJaxpr | Jaxpr, outer: Origin) -> Program:
    """Inlines the calls of a jaxpr and divides it into pieces.

    Args:
      jaxpr: the jaxpr.
      outer: the origin of the equation that holds the jaxpr, or `Origin()` if none
        does.
    """
    flat = all_flat(jaxpr)
    constants = {v: jax.device_get(x) for v, x in flat.consts.items()}

    def variable_for(atom: Atom) -> Var:
        """Returns a variable itself; makes a literal a constant with a new variable."""
        if not isinstance(atom, Literal):
            return atom
        v = Var(atom.aval)
        constants[v] = np.asarray(atom.val, dtype_in(atom))
        return v

    outvars = list(map(variable_for, flat.outs))
    instructions = []
    read_later = set(outvars)
    # From the end, the first equation that reads a variable is the last to read it.
    for eqn in reversed(flat.eqns):
        operands = list(map(variable_for, eqn.invars))
        frees = {*operands, *eqn.outvars} - read_later
        read_later |= frees
        instructions.append(_instruction(eqn, operands, frees, outer))
    instructions.reverse()
    pieces = list(map(_piece_of, _grouped(instructions)))
    return Program(flat.ins, outvars, constants, pieces)


def _instruction(
    eqn: JaxprEqn, operands: Sequence[Var], frees: Collection[Var], outer: Origin
) -> Instruction:
    """Builds the instruction of an equation and divides the programs in it."""
    origin = _origin_of(eqn, outer)
    programs = [program_of(inner, origin) for inner in _jaxprs_for_python(eqn)]
    return Instruction(
        eqn=eqn,
        operands=operands,
        origin=origin,
        programs=programs,
        noted=_noted_positions(eqn),
        frees=frees,
    )


def _jaxprs_for_python(eqn: JaxprEqn) -> Sequence[ClosedJaxpr | Jaxpr]:
    """Lists the jaxprs of a loop, branch or `shard_map` that computes with floats.

    For any other equation, the list is empty. A loop, branch or `shard_map` without
    floats has no errors to note, so it is compiled like any other equation.
    """
    if not traits(eqn) & _RUN_IN_PYTHON or runs_no_iterations(eqn):
        return ()
    involves_floats = any(map(is_inexact, (*eqn.invars, *eqn.outvars)))
    return programs_in(eqn) if involves_floats else ()


def _noted_positions(eqn: JaxprEqn) -> Container[int]:
    """Returns the positions of the results that get a note of their own.

    These are floats that are computed, and choices that depend on floats. A slice gets
    a note, too, although it computes nothing, because it may lack the largest elements.
    """
    if keeps_numbers(eqn) and Trait.SELECTS not in traits(eqn):
        return ()
    if any(map(is_inexact, eqn.invars)):
        return range(len(eqn.outvars))
    return [n for n, v in enumerate(eqn.outvars) if is_inexact(v)]


def _origin_of(eqn: JaxprEqn, outer: Origin) -> Origin:
    """Builds the origin of an equation.

    Its scope is JAX's name stack without what JAX and `autocast` add. For example,
    `transpose(jvp(ols.autocast))/jvp(block_3)` becomes `block_3`.
    """
    scopes = [outer.scope] if outer.scope else []
    for scope in scopes_of(eqn):
        if not re.fullmatch(_ADDED_SCOPES, scope):
            scopes.append(scope)
    return Origin(
        primitive=name_of(eqn),
        source=line_of(eqn, outer.source),
        scope="/".join(scopes),
        is_derivative=outer.is_derivative or is_transposed(eqn),
        terms=count_terms(eqn),
        stays_narrow=stays_narrow(eqn),
        has_lost_constant=_has_lost_constant(eqn),
    )


def _has_lost_constant(eqn: JaxprEqn) -> bool:
    """Whether an equation adds 0 or an infinity in 16 bits, or multiplies by infinity.

    Hardly anybody writes `x + 0`, so the constant may have been another one: float16
    rounds 1e-8 to 0, and -1e9 to minus infinity. The jaxpr holds only the rounded
    constant.
    """
    adds = Trait.ADDS_TWO in traits(eqn)
    if not adds and Trait.MULTIPLIES not in traits(eqn):
        return False
    literals = [v for v in eqn.invars if isinstance(v, Literal)]
    constants = [float(v.val) for v in literals if is_narrow_dtype(dtype_in(v))]
    return any(map(math.isinf, constants)) or (adds and 0 in constants)


def _grouped(instructions: Iterable[Instruction]) -> list[list[Instruction]]:
    """Groups consecutive instructions: each group becomes a piece.

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
    """Builds a piece from a group of instructions.

    In its key, the variables are numbered in the order of appearance, so that two
    pieces may have equal keys although their variables differ.
    """
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
