"""The first pass: the kind of each value, which decides whether 16 bits can hold it.

What a value holds is unknown until the program runs, so this is a dataflow analysis: it
walks the program forward and derives the kind of each value from the operation that
computes it and the kinds of the operands. In `exp(tanh(x @ w + b))`, where `b` is a
parameter, the four results are

    x @ w      NARROWED   in 16 bits already
    _ + b      SUM        may be stored in 16 bits from product to product
    tanh(_)    NEAR       in float32; a sum with it may still be stored in 16 bits
    exp(_)     FLOAT32    in float32, and so is a sum with it

`Kind` defines the kinds. The result of an operation that only moves elements or chooses
among its operands has the `join` of their kinds. For other operations, if some operand
is NARROWED, SUM or NEAR, and none is FLOAT32:

- A sum is a SUM, except that NEAR plus a literal or a parameter stays NEAR.
- A multiplication by a factor of order 1, a division by a literal of at least 1/4, or
  an operation that keeps the range, such as `tanh`, is NEAR.

A value minus its own mean or divided by its own norm is NEAR as well; `normalized`
recognizes such values. In programs compiled for an H100 (not timed: see `store`), this
rule saves memory and traffic in a ResNet and in transformers with a norm after each
sum.

The pass makes two assumptions that it does not check. First, all parameters are of
order 1. Second, no value is multiplied so often that its range changes: after nine
multiplications by 4, which make a factor of 2**18, a value still counts as NEAR.
"""

import enum
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Literal, Var

from optax_lossscale._autocast.normalized import is_normalized, role_of
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
from optax_lossscale._programs.versions import AnyJaxpr
from optax_lossscale._programs.walk import (
    carry_positions,
    first_inner_operand,
    result_programs,
)


class Kind(enum.IntEnum):
    """What a value was computed from, in the order in which `join` prefers the kinds.

    The kinds up to LARGE are computed from literals, masks and parameters alone.

    Attributes:
      NUMBER: a literal whose magnitude is 0 or from 1/256 to 4, a mask, or a value
        computed from these.
      PARAMETER: a parameter, or a value computed from parameters and NUMBERs.
      LARGE: a literal whose magnitude is above 4 and at most 256, or a value computed
        with one. It may be a term of a sum but not a factor.
      NARROWED: the result of a narrowed product, possibly moved. It is in 16 bits
        already.
      SUM: a sum with a NARROWED value, or a choice between a NARROWED value and
        another, as by a `relu` or a mask. It may be stored in 16 bits from product to
        product, as in a model cast by hand.
      NEAR: a value computed from the kinds above that has about their range. It stays
        in float32 and is recomputed. The sum of a NEAR value and a SUM is a SUM.
      FLOAT32: any other value: it may have another range or need more digits.
    """

    NUMBER = enum.auto()
    PARAMETER = enum.auto()
    LARGE = enum.auto()
    NARROWED = enum.auto()
    SUM = enum.auto()
    NEAR = enum.auto()
    FLOAT32 = enum.auto()


Kinds = tuple[Kind, ...]
"""The kinds of several values, in order."""

# The kinds of order 1, by which a value may be multiplied
_FACTORS = frozenset({Kind.NUMBER, Kind.PARAMETER})
# A value of one of these kinds is NEAR once it is normalized
_NORMALIZABLE = frozenset({Kind.NARROWED, Kind.SUM, Kind.NEAR})
# If a literal within these bounds, of either sign, multiplies, divides or is added to a
# value, the result has about the range of the value. The bounds are heuristics. A
# division by the smallest divisor is a multiplication by the largest factor.
_SMALLEST_FACTOR = 2**-8
_LARGEST_FACTOR = 2**2
_SMALLEST_DIVISOR = 2**-2
_LARGEST_TERM = 2**8


@cached_by_program
def classify(jaxpr: AnyJaxpr, arguments: Kinds) -> Mapping[Var, Kind]:
    """Returns the kind of each variable of `flat(jaxpr)`, given those of arguments."""
    program = flat(jaxpr)
    kinds = dict.fromkeys(program.consts, Kind.FLOAT32)
    kinds.update(zip(program.ins, arguments, strict=True))
    roles = {}
    for eqn in program.eqns:
        operands = kinds_of(eqn.invars, kinds)
        if is_narrowed(eqn):
            results = [Kind.NARROWED]
        elif may_be_rewritten(eqn):
            results = _kinds_of_results(eqn, operands)
        else:
            kind = _kind_of_result(eqn, operands)
            are_factors = [operand in _FACTORS for operand in operands]
            role = role_of(eqn, are_factors, roles)
            if role is not None:
                roles[eqn.outvars[0]] = role
                if is_normalized(role) and kinds[role.source] in _NORMALIZABLE:
                    kind = Kind.NEAR
            results = [kind] * len(eqn.outvars)
        kinds.update(zip(eqn.outvars, results, strict=True))
    return kinds


def kinds_of(values: Sequence[Any], kinds: Mapping[Var, Kind]) -> Kinds:
    """Returns the kinds of variables and literals."""
    return tuple(
        _kind_of_literal(v) if isinstance(v, Literal) else kinds[v] for v in values
    )


def join(kinds: Iterable[Kind]) -> Kind:
    """Returns the kind of a value that may be any of several, given their kinds."""
    distinct = set(kinds)
    latest = max(distinct)
    # A NARROWED value is always stored in 16 bits, which would round the value where it
    # is a parameter, for example. A SUM is stored in 16 bits only where that pays.
    if latest == Kind.NARROWED and len(distinct) > 1:
        return Kind.SUM
    return latest


def _kind_of_result(eqn: JaxprEqn, operands: Kinds) -> Kind:
    """Returns the kind of all results of an ordinary operation, by its traits."""
    eqn_traits = traits(eqn)
    if Trait.CASTS in eqn_traits:
        source = eqn.invars[0]
        if isinstance(source, Literal):
            return operands[0]
        is_mask = dtype_in(source) == jnp.bool_
        if is_mask:
            return Kind.NUMBER
    float_kinds = []
    for v, operand in zip(eqn.invars, operands, strict=True):
        if is_inexact(v):
            float_kinds.append(operand)
    if not float_kinds or _fills_with_a_number(eqn):
        return Kind.FLOAT32
    # The result may be any operand if the operation moves or chooses. In any other
    # operation, the operand of the latest kind decides.
    kind = join(float_kinds)
    if eqn_traits & (RUNS_AS_STORED | Trait.CHOOSES):
        return kind
    if kind == Kind.FLOAT32 or not _keeps_the_range(eqn, operands):
        return Kind.FLOAT32
    if kind <= Kind.LARGE:
        return kind
    if Trait.ADDS_TWO not in eqn_traits:
        return Kind.NEAR
    # NEAR plus a literal or a parameter is still NEAR; any other sum is a SUM.
    has_constant = min(operands) <= Kind.LARGE
    if kind == Kind.NEAR and has_constant:
        return Kind.NEAR
    return Kind.SUM


def _fills_with_a_number(eqn: JaxprEqn) -> bool:
    """Whether an equation fills gaps with a number other than 0, such as -1e9.

    NaN, with which `jnp.take` fills gaps by default, does not count: 16 bits can hold
    it, just as they can hold 0.
    """
    fill_value = eqn.params.get("fill_value")
    if fill_value is None:
        return False
    return fill_value != 0 and not np.isnan(fill_value)


def _keeps_the_range(eqn: JaxprEqn, operands: Kinds) -> bool:
    """Whether the results of an equation have about the range of its operands."""
    eqn_traits = traits(eqn)
    if Trait.DIVIDES in eqn_traits:
        divisor = eqn.invars[1]
        # The divisor has no upper bound here: a literal above `_LARGEST_TERM` is
        # FLOAT32, and the caller has handled that kind.
        return isinstance(divisor, Literal) and abs(divisor.val) >= _SMALLEST_DIVISOR
    if Trait.MULTIPLIES in eqn_traits:
        return not _FACTORS.isdisjoint(operands)
    return bool(eqn_traits & (Trait.ADDS_TWO | Trait.KEEPS_RANGE))


def _kind_of_literal(literal: Literal) -> Kind:
    """Returns the kind of a literal, by its magnitude.

    A LARGE literal may be a term but not a factor: two multiplications by 200 would
    bring 2 to 80,000, and the largest number of float16 is 65,504.
    """
    dtype = dtype_in(literal)
    if dtype != FLOAT32 and not jnp.issubdtype(dtype, jnp.integer):
        return Kind.FLOAT32
    magnitude = abs(float(literal.val))
    if magnitude == 0 or _SMALLEST_FACTOR <= magnitude <= _LARGEST_FACTOR:
        return Kind.NUMBER
    if _LARGEST_FACTOR < magnitude <= _LARGEST_TERM:
        return Kind.LARGE
    return Kind.FLOAT32


# --- Equations that hold programs ---


def kinds_inside(eqn: JaxprEqn, operands: Kinds) -> Kinds:
    """Returns the kinds that an equation's operands have in the programs that it holds.

    All operands but the carry of a loop have the same kind inside as outside. The kind
    of the carry has to hold in every iteration, so it is the fixed point of the body.
    """
    inner = list(operands)
    is_over_layers = _is_over_layers(eqn, operands)
    carried = carry_positions(eqn)
    # A scan over layers carries the residual stream from layer to layer, which would be
    # a SUM without the scan as well. A scan over time steps, or a `while`, may carry a
    # running sum, which needs float32.
    for n in carried:
        is_stream = is_over_layers and operands[n] <= Kind.SUM
        inner[n] = Kind.SUM if is_stream else Kind.FLOAT32
    earlier = []
    while inner != earlier:
        earlier = list(inner)
        # If an iteration returns a carry that needs float32, every iteration has to
        # read it in float32. The carry comes first among the results.
        for results in _kinds_of_programs(eqn, tuple(inner)):
            for n, kind in zip(carried, results, strict=False):
                if kind > Kind.SUM:
                    inner[n] = Kind.FLOAT32
    return tuple(inner)


def _kinds_of_results(eqn: JaxprEqn, operands: Kinds) -> list[Kind]:
    """Returns the kind of each result of an equation that may be rewritten."""
    inner = kinds_inside(eqn, operands)
    kinds_by_program = _kinds_of_programs(eqn, inner)
    # A result may come from any branch of a `cond`, or be the initial carry of a loop.
    results = [join(kinds) for kinds in zip(*kinds_by_program, strict=True)]
    for i, n in enumerate(carry_positions(eqn)):
        results[i] = join([results[i], inner[n]])
    return results


def _kinds_of_programs(eqn: JaxprEqn, inner: Kinds) -> list[Kinds]:
    """Returns the kinds of the results of each program in an equation.

    `inner` has the kinds that the equation's operands have inside, as `kinds_inside`
    returns them.
    """
    arguments = inner[first_inner_operand(eqn) :]
    results = []
    for program in result_programs(eqn):
        kinds = classify(program, arguments)
        results.append(kinds_of(flat(program).outs, kinds))
    return results


def _is_over_layers(eqn: JaxprEqn, operands: Kinds) -> bool:
    """Whether an equation scans over layers, that is, over stacks of matrices.

    At least one of these stacks must hold parameters.
    """
    if Trait.SCANS not in traits(eqn):
        return False
    first_scanned = carry_positions(eqn).stop
    for n in range(first_scanned, len(eqn.invars)):
        # A parameter multiplied by 45, for example, is LARGE.
        is_parameter = operands[n] in (Kind.PARAMETER, Kind.LARGE)
        if is_parameter and len(shape_in(eqn.invars[n])) > 2:
            return True
    return False
