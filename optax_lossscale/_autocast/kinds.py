"""Which values are kept in 16 bits between the products, and which need float32."""

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from optax_lossscale._autocast.flat import Flat, Instruction
from optax_lossscale._autocast.products import is_narrowed, is_rewritten
from optax_lossscale._programs.operations import TABLE, Is, operation, traits_of
from optax_lossscale._programs.values import FLOAT32, dtype_in, is_float

_IN_MEANS = Is.MOVES | Is.SENDS | Is.CHOOSES | Is.ADDS_TWO | Is.NEAR
_STATISTICS = {row.by for row in TABLE.values()} - {""}


class Kind(enum.IntEnum):
    """What a value is, from what widens nothing to what widens everything it meets."""

    EXACT = 0
    """A literal of about 1 that 16 bits hold exactly, or 0, or a mask."""
    NUMBER = 1
    """Another literal of about 1."""
    PARAMETER = 2
    """A parameter, made from parameters alone, or another literal that 16 bits hold."""
    ROWS = 3
    """Rows of a parameter, as from an embedding: kept in 16 bits where they are added to."""
    PRODUCT = 4
    """The result of a product, perhaps moved: it has 16 bits already."""
    SUM = 5
    """A sum with the result of a product: kept in 16 bits from product to product."""
    NEAR = 6
    """Made from these, in about their range: recomputed; added to a SUM, it gives a SUM."""
    NORMALIZED = 7
    """A NEAR that has about the size 1, and that a gain may multiply."""
    SCALED = 8
    """These, multiplied by a parameter: added to one another, they may be large or small."""
    FLOAT32 = 9
    """Anything that may have another range or need more digits."""


ResultsOf = Callable[[Any, Sequence["Kind"]], Sequence["Kind"]]
"""Gives the kinds of the results of an equation that is entered, from those of its operands."""


def kinds(
    program: Flat, given: Sequence[Kind], low: np.dtype, results_of: ResultsOf
) -> dict[int, Kind]:
    """The kind of each value of a program; `results_of` gives those of what is entered."""
    known = dict.fromkeys(program.consts, Kind.FLOAT32)
    known |= {i: _of_number(number, low) for i, number in program.literals.items()}
    known |= zip(program.ins, given, strict=True)
    # For each value made from a sum of many numbers: their shape, and the operations since.
    made_of: dict[int, frozenset[Any]] = {}
    for step in program.steps:
        traits = traits_of(step.name)
        results = _results(step, [known[i] for i in step.ins], low, results_of)
        sums = [made_of[i] for i in step.ins if i in made_of]
        if _is_normalized(step, known, made_of):
            results = [Kind.NORMALIZED]
        elif sums and (traits & _IN_MEANS or step.name in _STATISTICS):
            made_of |= dict.fromkeys(step.outs, sums[0] | {step.name})
        elif Is.ADDS_MANY in traits:
            made_of |= dict.fromkeys(step.outs, frozenset({program.types[step.ins[0]].shape}))
        known.update(zip(step.outs, results, strict=True))
    return known


def widest(among: Iterable[Kind]) -> Kind:
    """The kind of what may be any of these."""
    among = list(among)
    kind = max(among)
    is_exact = all(k in (Kind.EXACT, Kind.PRODUCT) for k in among)
    return Kind.SUM if kind == Kind.PRODUCT and not is_exact else kind


def _results(
    step: Instruction, operands: Sequence[Kind], low: np.dtype, results_of: ResultsOf
) -> Sequence[Kind]:
    eqn, name = step.eqn, step.name
    if is_narrowed(eqn):
        return [Kind.PRODUCT]
    if is_rewritten(eqn):
        return results_of(eqn, operands)
    if Is.CASTS in traits_of(name) and dtype_in(eqn.invars[0]) == jnp.bool_:
        return [Kind.EXACT]
    of_floats = [k for v, k in zip(eqn.invars, operands, strict=True) if is_float(v)]
    floats = filter(is_float, (*eqn.invars, *eqn.outvars))
    is_all_float32 = all(dtype_in(v) == FLOAT32 for v in floats)
    kind = _of_operation(step, operands, widest(of_floats), low) if of_floats else Kind.FLOAT32
    return [kind if is_all_float32 else Kind.FLOAT32] * len(step.outs)


def _of_operation(step: Instruction, operands: Sequence[Kind], wide: Kind, low: np.dtype) -> Kind:
    """The kind of an operation on float32 operands."""
    traits = traits_of(step.name)
    if traits & (Is.MOVES | Is.SENDS | Is.CHOOSES):
        if Is.PICKS in traits and wide == Kind.PARAMETER:
            return Kind.ROWS
        is_sum = Is.ADDS_MANY in traits and wide == Kind.PRODUCT  # over devices
        return Kind.SUM if is_sum else wide
    if not traits & (Is.ADDS_TWO | Is.NEAR) or wide <= Kind.NUMBER or wide == Kind.FLOAT32:
        return Kind.FLOAT32
    if Is.ADDS_TWO in traits:
        # With a constant or a parameter added, what is recomputed stays so.
        is_with_product = Kind.PRODUCT in operands or Kind.SUM in operands
        is_near = is_with_product or Kind.NEAR <= min(operands) < Kind.SCALED
        return Kind.SUM if is_near else wide
    if Is.DIVIDES in traits and operands[1] > Kind.NUMBER:
        return Kind.FLOAT32
    if wide < Kind.PRODUCT:  # saturating parameters does not give a parameter
        return Kind.FLOAT32 if Is.SATURATES in traits else wide
    if Is.MULTIPLIES in traits and low != jnp.bfloat16 and min(operands) > Kind.NUMBER:
        if min(operands) >= Kind.PRODUCT:
            return Kind.FLOAT32
        return Kind.NEAR if wide == Kind.NORMALIZED else Kind.SCALED
    return Kind.NEAR if Is.SATURATES in traits else max(wide, Kind.NEAR)


def _is_normalized(
    step: Instruction, known: Mapping[int, Kind], made_of: Mapping[int, frozenset[Any]]
) -> bool:
    """Whether this subtracts the mean of as many numbers, or divides by the norm of as many."""
    made_by = operation(step.eqn).by
    if not made_by:
        return False
    is_product = Is.MULTIPLIES in traits_of(step.name)
    value, by = sorted(step.ins, key=known.__getitem__) if is_product else step.ins
    is_near = Kind.PRODUCT <= known[value] < Kind.FLOAT32 == known[by]
    shape = step.eqn.outvars[0].aval.shape
    return is_near and made_of.get(by, set()) >= {made_by, shape}


def _of_number(number: Literal, low: np.dtype) -> Kind:
    """The kind of a literal: by whether it is 0 or about 1, and 16 bits hold it."""
    if dtype_in(number) != FLOAT32:
        return Kind.FLOAT32
    size, info = np.abs(np.asarray(number.val)), jnp.finfo(low)
    fits = (size == 0) | ((size >= float(info.tiny)) & (size <= float(info.max)))
    if ((size == 0) | ((size >= 2**-8) & (size <= 2**8))).all():
        return Kind.EXACT if (np.asarray(number.val, low) == number.val).all() else Kind.NUMBER
    return Kind.PARAMETER if fits.all() else Kind.FLOAT32
