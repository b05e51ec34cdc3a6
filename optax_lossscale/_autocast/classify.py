"""The first pass: the kind of each value, which says whether 16 bits can hold it.

The pass goes forward. The kind of a value follows from what it is computed from, not
from its numbers, which are not known yet:

- The result of a product is in 16 bits already: a PRODUCT.
- A sum with a PRODUCT is a SUM, and so is a choice between a PRODUCT and another
  number, as by `relu` or a mask. It may be stored in 16 bits from product to product,
  as in a model cast by hand.
- A value computed from these in about their range is NEAR. It stays in float32, and is
  recomputed. Multiplications are not counted: after nine by 4, a factor of 2**18, the
  value is still NEAR. Parameters are taken to have about the size 1, whatever their
  numbers are.
- Every other value may have another range or need more digits: FLOAT32.

In `exp(tanh(x @ w + b))`, where `b` is a parameter, the four results have the kinds
PRODUCT, SUM, NEAR and FLOAT32. What only moves numbers, or chooses between some, has
the `join` of the kinds of its operands. Among the kinds from PRODUCT to NEAR, a sum is
a SUM, except that NEAR plus a literal or a parameter stays NEAR; a multiplication by a
factor of about the size 1, or a division by a literal, is NEAR, as is `tanh`. A value
minus its own mean, or over its own norm, is NEAR as well, as `normalized` finds out:
this saves memory and bytes in a ResNet, and in transformers with a norm after each sum.
"""

import enum
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Literal, Var

from optax_lossscale._autocast.normalized import Role, is_normalized, role_of
from optax_lossscale._autocast.products import is_narrowed, may_be_rewritten
from optax_lossscale._programs.cached import cached_by_program
from optax_lossscale._programs.flat import flat
from optax_lossscale._programs.operations import RUNS_AS_STORED, Trait, traits
from optax_lossscale._programs.values import (
    FLOAT32,
    dtype_in,
    is_inexact,
    shape_in,
)
from optax_lossscale._programs.walk import carried_by, first_inside, result_programs


class Kind(enum.IntEnum):
    """What a value is made of; the later kinds need more range, or more digits."""

    NUMBER = enum.auto()
    """A literal that is 0 or of a size from 1/256 to 4, a mask, or made from these."""
    PARAMETER = enum.auto()
    """A parameter, or made from parameters and NUMBERs."""
    LARGE = enum.auto()
    """A literal of a size from 4 to 256, or made with one.

    It may be added, but is no factor.
    """
    PRODUCT = enum.auto()
    """The result of a product, perhaps moved: it has 16 bits already."""
    SUM = enum.auto()
    """A sum with a PRODUCT, or a choice between one and another number.

    It may be stored in 16 bits from product to product.
    """
    NEAR = enum.auto()
    """Made from the kinds above, in about their range; added to a SUM, it gives one."""
    FLOAT32 = enum.auto()
    """Anything that may have another range or need more digits."""


Kinds = Sequence[Kind]
"""The kinds of several values, in order."""

_FACTORS = frozenset({Kind.NUMBER, Kind.PARAMETER})  # they leave a range as it is
_CONSTANTS = _FACTORS | {Kind.LARGE}
_IN_RANGE = frozenset({Kind.PRODUCT, Kind.SUM, Kind.NEAR})
# Bounds for the sizes of literals that about keep the range of what they multiply,
# divide, or are added to
_SMALLEST_FACTOR = 2**-8
_LARGEST_FACTOR = 2**2
_SMALLEST_DIVISOR = 2**-2
_LARGEST_TERM = 2**8


@cached_by_program
def classify(jaxpr: Any, arguments: tuple[Kind, ...]) -> Mapping[Var, Kind]:
    """The kind of each variable of `flat(jaxpr)`, given those of its arguments."""
    program = flat(jaxpr)
    kinds = dict.fromkeys(program.consts, Kind.FLOAT32)
    kinds |= zip(program.ins, arguments, strict=True)
    roles: dict[Var, Role] = {}
    for eqn in program.eqns:
        operands = kinds_of(eqn.invars, kinds)
        if is_narrowed(eqn):
            results = [Kind.PRODUCT]
        elif may_be_rewritten(eqn):
            results = _kinds_of_results(eqn, operands)
        else:
            results = [_kind_of_result(eqn, operands)] * len(eqn.outvars)
            role = role_of(eqn, [kind in _FACTORS for kind in operands], roles)
            if role is not None:
                roles[eqn.outvars[0]] = role
                if is_normalized(role) and kinds[role.of] in _IN_RANGE:
                    results = [Kind.NEAR]
        kinds |= zip(eqn.outvars, results, strict=True)
    return kinds


def kinds_of(values: Sequence[Any], kinds: Mapping[Var, Kind]) -> Kinds:
    """The kinds of variables and literals."""
    return [_kind_of_literal(v) if isinstance(v, Literal) else kinds[v] for v in values]


def join(kinds: Iterable[Kind]) -> Kind:
    """The kind of a value that may come from values of any of these kinds."""
    different = set(kinds)
    latest = max(different)
    # What may be a PRODUCT or a parameter would round the parameter if it was stored in
    # 16 bits. So it is a SUM, which is stored in 16 bits only where that pays.
    is_mixed = latest == Kind.PRODUCT and len(different) > 1
    return Kind.SUM if is_mixed else latest


def _kind_of_result(eqn: JaxprEqn, operands: Kinds) -> Kind:
    """The kind of the results of an equation, neither a product nor to be rewritten."""
    its_traits = traits(eqn)
    if Trait.CASTS in its_traits:
        source = eqn.invars[0]
        if isinstance(source, Literal):
            return operands[0]
        is_mask = dtype_in(source) == jnp.bool_
        if is_mask:
            return Kind.NUMBER
    pairs = zip(eqn.invars, operands, strict=True)
    of_floats = [kind for v, kind in pairs if is_inexact(v)]
    if not of_floats or _fills_with_a_number(eqn):
        return Kind.FLOAT32
    kind = join(of_floats)
    if its_traits & (RUNS_AS_STORED | Trait.CHOOSES):
        return kind
    if kind == Kind.FLOAT32 or not _keeps_the_range(eqn, operands):
        return Kind.FLOAT32
    if kind in _CONSTANTS:
        return kind
    if Trait.ADDS_TWO not in its_traits:
        return Kind.NEAR
    # NEAR plus a constant or a parameter is still NEAR; any other sum is a SUM.
    has_constant = not _CONSTANTS.isdisjoint(operands)
    return kind if kind == Kind.NEAR and has_constant else Kind.SUM


def _fills_with_a_number(eqn: JaxprEqn) -> bool:
    """Whether gaps are filled with a number, which may have any size, as -1e9 has.

    By default `jnp.take` fills them with NaN, which 16 bits hold, as they hold 0.
    """
    filling = eqn.params.get("fill_value")
    return filling is not None and filling != 0 and not np.isnan(filling)


def _keeps_the_range(eqn: JaxprEqn, operands: Kinds) -> bool:
    """Whether the results of an operation have about the range of its operands."""
    its_traits = traits(eqn)
    if Trait.DIVIDES in its_traits:
        divisor = eqn.invars[1]
        # The caller has left out a literal above `_LARGEST_TERM`: it is FLOAT32.
        return isinstance(divisor, Literal) and abs(divisor.val) >= _SMALLEST_DIVISOR
    if Trait.MULTIPLIES in its_traits:
        return not _FACTORS.isdisjoint(operands)
    return bool(its_traits & (Trait.ADDS_TWO | Trait.NEAR))


def _kind_of_literal(literal: Literal) -> Kind:
    """The kind of a literal, by its size.

    One that is LARGE may be added, but is no factor: two multiplications by 200 would
    bring 2 beyond the range of float16.
    """
    dtype = dtype_in(literal)
    if dtype != FLOAT32 and not jnp.issubdtype(dtype, jnp.integer):
        return Kind.FLOAT32
    size = abs(float(literal.val))
    if size == 0 or _SMALLEST_FACTOR <= size <= _LARGEST_FACTOR:
        return Kind.NUMBER
    is_term = _LARGEST_FACTOR < size <= _LARGEST_TERM
    return Kind.LARGE if is_term else Kind.FLOAT32


# --- equations that hold programs ---


def kinds_inside(eqn: JaxprEqn, operands: Kinds) -> list[Kind]:
    """The kinds that the operands of an equation have inside of it.

    They are those outside, except for the carry of a loop, whose kind has to hold in
    every round.
    """
    # A scan over layers carries the stream that goes from layer to layer, which would
    # be a SUM without the scan, too. A scan over time steps, or a `while`, may carry a
    # running sum, which needs float32.
    inside = list(operands)
    is_over_layers = _is_over_layers(eqn, operands)
    carried = carried_by(eqn)
    for n in carried:
        is_stream = is_over_layers and operands[n] <= Kind.SUM
        inside[n] = Kind.SUM if is_stream else Kind.FLOAT32
    earlier: Kinds = []
    while inside != earlier:
        earlier = list(inside)
        # What one round leaves in float32 is carried in float32 from the first one on.
        # The carry is first among the results of a round.
        for results in _kinds_of_programs(eqn, inside):
            for n, kind in zip(carried, results, strict=False):
                if kind > Kind.SUM:
                    inside[n] = Kind.FLOAT32
    return inside


def _kinds_of_results(eqn: JaxprEqn, operands: Kinds) -> list[Kind]:
    """The kind of each result of an equation that may be rewritten."""
    inside = kinds_inside(eqn, operands)
    # Each result may come from any of the programs, or be the initial carry of a loop.
    of_programs = _kinds_of_programs(eqn, inside)
    results = [join(kinds) for kinds in zip(*of_programs, strict=True)]
    for j, n in enumerate(carried_by(eqn)):
        results[j] = join([results[j], inside[n]])
    return results


def _kinds_of_programs(eqn: JaxprEqn, operands: Kinds) -> list[Kinds]:
    """For each program in an equation, the kinds of its results."""
    inside = tuple(operands[first_inside(eqn) :])
    return [
        kinds_of(flat(program).outs, classify(program, inside))
        for program in result_programs(eqn)
    ]


def _is_over_layers(eqn: JaxprEqn, operands: Kinds) -> bool:
    """Whether an equation scans over layers, each with matrices of parameters."""
    if Trait.SCANS not in traits(eqn):
        return False
    first_scanned = carried_by(eqn).stop
    scanned = zip(eqn.invars[first_scanned:], operands[first_scanned:], strict=True)
    of_parameters = (Kind.PARAMETER, Kind.LARGE)  # such as a parameter times 45
    return any(kind in of_parameters and len(shape_in(v)) > 2 for v, kind in scanned)
