"""Which values are kept in 16 bits between the products, and which need float32."""

import enum
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from optax_lossscale._autocast.flat import Flat, Instruction, flat
from optax_lossscale._autocast.products import holds_products, is_narrowed
from optax_lossscale._programs.operations import Is, traits_of
from optax_lossscale._programs.run import is_called_anew
from optax_lossscale._programs.values import FLOAT32, dtype_in, is_float
from optax_lossscale._programs.versions import scan_sizes
from optax_lossscale._programs.walk import arguments_of, programs_in


class Kind(enum.IntEnum):
    """What a value is, from what widens nothing to what widens all it meets."""

    NUMBER = 0
    """A number in the program that 16 bits hold, or a mask."""
    PARAMETER = 1
    """A parameter, or what is made of parameters alone."""
    ROWS = 2
    """Rows of a parameter, as an embedding gives them: kept in 16 bits where they are added to."""
    SUM = 3
    """What a product gave, or a sum with such: kept in 16 bits."""
    NEAR = 4
    """Made of these, in about their range: computed anew; added to a SUM, it gives a SUM."""
    WIDE = 5
    """What may have another range or need more digits: float32."""


def kinds(program: Flat, given: Sequence[Kind], low: np.dtype) -> dict[int, Kind]:
    """The kind of each value of a program."""
    known = dict.fromkeys(program.consts, Kind.WIDE) | dict(zip(program.ins, given, strict=True))
    for step in program.steps:
        operands = [kind_of(i, known, low) for i in step.ins]
        known.update(zip(step.outs, _results(step, operands, low), strict=True))
    return known


def kind_of(i: int | Literal, known: Mapping[int, Kind], low: np.dtype) -> Kind:
    """The kind of a value or of a number in the program."""
    if not isinstance(i, Literal):
        return known[i]
    return Kind.NUMBER if _fits(i, low) else Kind.WIDE


def kinds_of_results(jaxpr: Any, given: Sequence[Kind], low: np.dtype) -> list[Kind]:
    """Those of a program's results."""
    program = flat(jaxpr)
    known = kinds(program, given, low)
    return [kind_of(i, known, low) for i in program.outs]


def kinds_of_equation(eqn: Any, operands: Sequence[Kind], low: np.dtype) -> list[Kind]:
    """Those of the results of an equation that is called anew."""
    if eqn.primitive.name == "while":
        return [Kind.WIDE] * len(eqn.outvars)
    if eqn.primitive.name == "cond":
        branches = [kinds_of_results(b, operands[1:], low) for b in programs_in(eqn)]
        return [max(kinds) for kinds in zip(*branches, strict=True)]
    (program,) = programs_in(eqn)
    if eqn.primitive.name != "scan":
        return kinds_of_results(program, operands, low)
    if not holds_products(eqn):
        return [Kind.WIDE] * len(eqn.outvars)
    n_consts, n_carry = scan_sizes(eqn)
    carried = kinds_carried(eqn, operands, low)
    given = [*operands[:n_consts], *carried, *operands[n_consts + n_carry :]]
    return [*carried, *kinds_of_results(program, given, low)[n_carry:]]


def kept_dtype(traced: Any, kind: Kind, low: np.dtype) -> Any:
    """The dtype in which a value goes in and out of programs, of that in which it was traced."""
    return low if kind == Kind.SUM and traced == FLOAT32 else traced


def kinds_carried(eqn: Any, operands: Sequence[Kind], low: np.dtype) -> list[Kind]:
    """Those of what a scan carries.

    Where it runs over layers, so that each round multiplies by a matrix of its own, it carries
    what goes from layer to layer, which is kept as it is without a scan. Over steps of time it
    carries what may be a running sum: float32. Over layers, a carry that
    no product reads stays float32, too.
    """
    n_consts, n_carry = scan_sizes(eqn)
    consts, carried = operands[:n_consts], operands[n_consts:][:n_carry]
    of_rounds = operands[n_consts + n_carry :]
    matrices = _multiplied(eqn.params["jaxpr"], Is.MOVES | Is.CASTS)
    own = zip(of_rounds, matrices[n_consts + n_carry :], strict=True)
    if not any(multiplied and k == Kind.PARAMETER for k, multiplied in own):
        return [Kind.WIDE] * n_carry
    read = _multiplied(eqn.params["jaxpr"])[n_consts:][:n_carry]
    streams = (Kind.PARAMETER, Kind.ROWS, Kind.SUM)
    carried = [
        Kind.SUM if multiplied and k in streams else Kind.WIDE
        for k, multiplied in zip(carried, read, strict=True)
    ]
    while True:
        given = [*consts, *carried, *of_rounds]
        after = kinds_of_results(eqn.params["jaxpr"], given, low)[:n_carry]
        widened = [Kind.WIDE if k > Kind.SUM else c for c, k in zip(carried, after, strict=True)]
        if widened == carried:
            return carried
        carried = widened


def _multiplied(jaxpr: Any, between: Is | None = None) -> list[bool]:
    """Which arguments of a program are multiplied: operands of a product, or what becomes one.

    Args:
      jaxpr: the program.
      between: what an operation has to be that comes between; None for any.
    """
    program = flat(jaxpr)
    found: set[int] = set()
    for step in reversed(program.steps):
        ins = list(step.ins[:2]) if is_narrowed(step.eqn) else []
        if not found.isdisjoint(step.outs) and (not between or traits_of(step.name) & between):
            ins += step.ins
        for inner, given in arguments_of(step.eqn):
            pairs = zip(given, _multiplied(inner, between), strict=False)
            ins += [step.ins[n] for n, multiplied in pairs if multiplied]
        found.update(i for i in ins if not isinstance(i, Literal))
    return [i in found for i in program.ins]


def _results(step: Instruction, operands: Sequence[Kind], low: np.dtype) -> list[Kind]:
    eqn, name = step.eqn, step.name
    if is_narrowed(eqn):
        return [Kind.SUM]
    if is_called_anew(eqn):
        return kinds_of_equation(eqn, operands, low)
    if name == "convert_element_type" and dtype_in(eqn.invars[0]) == jnp.bool_:
        return [Kind.NUMBER]
    of_floats = [k for v, k in zip(eqn.invars, operands, strict=True) if is_float(v)]
    floats = filter(is_float, (*eqn.invars, *eqn.outvars))
    is_all_float32 = all(dtype_in(v) == FLOAT32 for v in floats)
    kind = _of_operation(step, operands, max(of_floats), low) if of_floats else Kind.WIDE
    return [kind if is_all_float32 else Kind.WIDE] * len(step.outs)


def _of_operation(
    step: Instruction, operands: Sequence[Kind], widest: Kind, low: np.dtype
) -> Kind:
    """Of float32 operands."""
    name, traits = step.name, traits_of(step.name)
    if traits & (Is.MOVES | Is.SENDS | Is.CHOOSES):
        is_lookup = name == "gather" and widest == Kind.PARAMETER
        return Kind.ROWS if is_lookup else widest
    if not traits & (Is.ADDS_TWO | Is.NEAR) or widest in (Kind.NUMBER, Kind.WIDE):
        return Kind.WIDE
    if Is.ADDS_TWO in traits:
        return min(widest, Kind.SUM)
    if name == "div" and operands[1] != Kind.NUMBER:
        return Kind.WIDE
    # bfloat16 has the range of float32.
    if name == "mul" and low != jnp.bfloat16 and min(operands) >= Kind.SUM:
        return Kind.WIDE
    if widest < Kind.SUM:  # of parameters alone, what saturates makes no parameter
        return Kind.WIDE if Is.SATURATES in traits else widest
    return Kind.NEAR


def _fits(number: Literal, low: np.dtype) -> bool:
    """Whether a number is 0, or of normal size, in 16 bits."""
    if dtype_in(number) != FLOAT32:
        return False
    size, info = np.abs(np.asarray(number.val)), jnp.finfo(low)
    return bool(((size == 0) | ((size >= float(info.tiny)) & (size <= float(info.max)))).all())
