"""Which values are kept in 16 bits between the products, and which need float32."""

import enum
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from optax_lossscale._autocast.flat import Flat, Instruction, flat
from optax_lossscale._autocast.products import holds_products, is_narrowed
from optax_lossscale._programs.operations import NORMALIZES, Is, traits_of
from optax_lossscale._programs.remembered import remembered
from optax_lossscale._programs.run import is_entered
from optax_lossscale._programs.values import FLOAT32, dtype_in, is_float
from optax_lossscale._programs.walk import arguments_of, carried_by, programs_in

_IN_MEANS = Is.MOVES | Is.SENDS | Is.CHOOSES | Is.ADDS_TWO | Is.NEAR


class Kind(enum.IntEnum):
    """What a value is, from what widens nothing to what widens everything it meets."""

    NUMBER = 0
    """A literal of about 1, or 0, or a mask."""
    PARAMETER = 1
    """A parameter, made from parameters alone, or another literal that 16 bits hold."""
    ROWS = 2
    """Rows of a parameter, as from an embedding: kept in 16 bits where they are added to."""
    SUM = 3
    """The result of a product, or a sum with one: kept in 16 bits."""
    NEAR = 4
    """Made from these, in about their range: recomputed; added to a SUM, it gives a SUM."""
    NORMALIZED = 5
    """A NEAR that has about the size 1, and that a gain may multiply."""
    SCALED = 6
    """These, multiplied by a parameter: added to one another, they may be large or small."""
    FLOAT32 = 7
    """Anything that may have another range or need more digits."""


def kinds(program: Flat, given: Sequence[Kind], low: np.dtype) -> dict[int, Kind]:
    """The kind of each value of a program."""
    known = dict.fromkeys(program.consts, Kind.FLOAT32)
    known |= {i: _of_number(number, low) for i, number in program.literals.items()}
    known |= zip(program.ins, given, strict=True)
    # For each value made from a sum of many numbers: their shape, and the operations since.
    made_of: dict[int, frozenset[Any]] = {}
    for step in program.steps:
        traits, results = traits_of(step.name), _results(step, [known[i] for i in step.ins], low)
        sums = [made_of[i] for i in step.ins if i in made_of]
        if _is_normalized(step, known, made_of):
            results = [Kind.NORMALIZED]
        elif sums and (traits & _IN_MEANS or step.name in NORMALIZES.values()):
            made_of |= dict.fromkeys(step.outs, sums[0] | {step.name})
        elif Is.ADDS_MANY in traits:
            made_of |= dict.fromkeys(step.outs, frozenset({program.types[step.ins[0]].shape}))
        known.update(zip(step.outs, results, strict=True))
    return known


def kinds_at(
    eqn: Any, operands: Sequence[Kind], low: np.dtype
) -> tuple[Sequence[Kind], Sequence[Kind]]:
    """The kinds of operands inside of an equation that is entered, and those of its results."""
    inside, carried = _kinds_inside(eqn, operands, low), carried_by(eqn)
    name = eqn.primitive.name
    if name == "while" or (name == "scan" and not holds_products(eqn)):
        return inside, [Kind.FLOAT32] * len(eqn.outvars)
    of = lambda program, given: _kinds_of_results(program, tuple(inside[n] for n in given), low)
    results = zip(*(of(*each) for each in arguments_of(eqn)), strict=True)
    return inside, [*(inside[n] for n in carried), *list(map(max, results))[len(carried) :]]


@remembered
def _kinds_of_results(jaxpr: Any, given: tuple[Kind, ...], low: np.dtype) -> list[Kind]:
    program = flat(jaxpr)
    known = kinds(program, given, low)
    return [known[i] for i in program.outs]


def _kinds_inside(eqn: Any, operands: Sequence[Kind], low: np.dtype) -> list[Kind]:
    """The kinds of operands inside of an equation; those that a loop carries, in every round."""
    # If a scan runs over layers, so that each round multiplies by a matrix of its own, it carries
    # what goes from layer to layer, which is kept as it is without a scan. Over time steps it
    # carries what may be a running sum, in float32, and so does a `while`. Over layers, a carry
    # that no product reads stays in float32, too.
    inside, carried = list(operands), carried_by(eqn)
    for i in carried:
        inside[i] = Kind.FLOAT32
    if eqn.primitive.name != "scan":
        return inside
    (program,) = programs_in(eqn)
    matrices = _multiplied(program, Is.MOVES | Is.CASTS)
    own = range(carried.stop, len(operands))
    if not any(matrices[i] and operands[i] == Kind.PARAMETER for i in own):
        return inside
    multiplied, streams = _multiplied(program), (Kind.PARAMETER, Kind.ROWS, Kind.SUM)
    kept = {i for i in carried if multiplied[i] and operands[i] in streams}
    while True:
        given = [Kind.SUM if i in kept else kind for i, kind in enumerate(inside)]
        after = dict(zip(carried, _kinds_of_results(program, tuple(given), low), strict=False))
        if all(after[i] <= Kind.SUM for i in kept):
            return given
        kept = {i for i in kept if after[i] <= Kind.SUM}


@remembered
def _multiplied(jaxpr: Any, between: Is | None = None) -> list[bool]:
    """Which arguments become an operand of a product, by way of `between` operations alone."""
    program = flat(jaxpr)
    found: set[int] = set()
    for step in reversed(program.steps):
        if not found.isdisjoint(step.outs) and (not between or traits_of(step.name) & between):
            found.update(step.ins)
        if is_narrowed(step.eqn):
            found.update(step.ins[:2])
        for inner, given in arguments_of(step.eqn):
            pairs = zip(given, _multiplied(inner, between), strict=False)
            found.update(step.ins[n] for n, multiplied in pairs if multiplied)
    return [i in found for i in program.ins]


def _results(step: Instruction, operands: Sequence[Kind], low: np.dtype) -> Sequence[Kind]:
    eqn, name = step.eqn, step.name
    if is_narrowed(eqn):
        return [Kind.SUM]
    if is_entered(eqn):
        return kinds_at(eqn, operands, low)[1]
    if name == "convert_element_type" and dtype_in(eqn.invars[0]) == jnp.bool_:
        return [Kind.NUMBER]
    of_floats = [k for v, k in zip(eqn.invars, operands, strict=True) if is_float(v)]
    floats = filter(is_float, (*eqn.invars, *eqn.outvars))
    is_all_float32 = all(dtype_in(v) == FLOAT32 for v in floats)
    kind = _of_operation(step, operands, max(of_floats), low) if of_floats else Kind.FLOAT32
    return [kind if is_all_float32 else Kind.FLOAT32] * len(step.outs)


def _of_operation(
    step: Instruction, operands: Sequence[Kind], widest: Kind, low: np.dtype
) -> Kind:
    """The kind of an operation on float32 operands."""
    name, traits = step.name, traits_of(step.name)
    if traits & (Is.MOVES | Is.SENDS | Is.CHOOSES):
        is_lookup = name == "gather" and widest == Kind.PARAMETER
        return Kind.ROWS if is_lookup else widest
    if not traits & (Is.ADDS_TWO | Is.NEAR) or widest in (Kind.NUMBER, Kind.FLOAT32):
        return Kind.FLOAT32
    if Is.ADDS_TWO in traits:
        # With a constant or a parameter added, what is recomputed stays so.
        is_near = Kind.SUM in operands or Kind.NEAR <= min(operands) < Kind.SCALED
        return Kind.SUM if is_near else widest
    if name == "div" and operands[1] != Kind.NUMBER:
        return Kind.FLOAT32
    if widest < Kind.SUM:  # saturating parameters does not give a parameter
        return Kind.FLOAT32 if Is.SATURATES in traits else widest
    if name == "mul" and low != jnp.bfloat16 and min(operands) > Kind.NUMBER:
        if min(operands) >= Kind.SUM:
            return Kind.FLOAT32
        return Kind.NEAR if widest == Kind.NORMALIZED else Kind.SCALED
    return Kind.NEAR if Is.SATURATES in traits else max(widest, Kind.NEAR)


def _is_normalized(
    step: Instruction, known: Mapping[int, Kind], made_of: Mapping[int, frozenset[Any]]
) -> bool:
    """Whether this subtracts the mean of as many numbers, or divides by the norm of as many."""
    if step.name not in NORMALIZES:
        return False
    value, by = step.ins if step.name != "mul" else sorted(step.ins, key=known.__getitem__)
    is_near = Kind.SUM <= known[value] < Kind.FLOAT32 == known[by]
    shape = step.eqn.outvars[0].aval.shape
    return is_near and made_of.get(by, set()) >= {NORMALIZES[step.name], shape}


def _of_number(number: Literal, low: np.dtype) -> Kind:
    """A `NUMBER` if it is 0 or about 1, a `PARAMETER` if normal in 16 bits; else `FLOAT32`."""
    if dtype_in(number) != FLOAT32:
        return Kind.FLOAT32
    size, info = np.abs(np.asarray(number.val)), jnp.finfo(low)
    fits = (size == 0) | ((size >= float(info.tiny)) & (size <= float(info.max)))
    if ((size == 0) | ((size >= 2**-8) & (size <= 2**8))).all():
        return Kind.NUMBER
    return Kind.PARAMETER if fits.all() else Kind.FLOAT32
