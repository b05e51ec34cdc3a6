"""Which values are kept in 16 bits between the products, and which need float32."""

import enum
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from optax_lossscale._arrays.programs import (
    asks_for_precision,
    dtype_of,
    is_float,
    is_product,
    open_jaxpr,
    programs_in,
    scan_sizes,
)
from optax_lossscale._autocast.flat import Flat, Step, flat

FLOAT32 = jnp.dtype(jnp.float32)


class Kind(enum.IntEnum):
    """What a value is, from what widens nothing to what widens all it meets."""

    NUMBER = 0
    """A number in the program that 16 bits hold, or a mask."""
    PARAMETER = 1
    """A parameter, or the like: float32 itself, and in 16 bits what is made of it and those."""
    NARROW = 2
    """What a product gave, and what was made of it without leaving its range: 16 bits."""
    WIDE = 3
    """What may have a larger range or need more digits: float32."""


# Only move numbers: on an array of 16 bits these run in 16 bits.
MOVES = {
    "copy",
    "copy_p",
    "dynamic_slice",
    "expand_dims",
    "name",
    "optimization_barrier",
    "reshape",
    "reshard",
    "rev",
    "sharding_constraint",
    "slice",
    "split",
    "squeeze",
    "stop_gradient",
    "transpose",
}
# Between devices likewise, where the bytes count.
COMMUNICATES = {
    "all_gather",
    "all_gather_invariant",
    "all_gather_reduced",
    "all_to_all",
    "pmax",
    "pmin",
    "ppermute",
    "psum",
    "psum_invariant",
    "reduce_scatter",
    "unreduced_psum",
    "unreduced_reduce_scatter",
}
# Run in float32, as all that is no product. Their results have about the range of what they take,
# so they may be kept in 16 bits.
STAYS_IN_RANGE = {
    "abs",
    "add",
    "add_any",
    "broadcast_in_dim",
    "ceil",
    "clamp",
    "concatenate",
    "convert_element_type",
    "cummax",
    "cummin",
    "div",
    "dynamic_update_slice",
    "erf",
    "floor",
    "gather",
    "logistic",
    "max",
    "min",
    "mul",
    "neg",
    "pad",
    "pcast",
    "pvary",
    "reduce_max",
    "reduce_min",
    "reduce_window_max",
    "reduce_window_min",
    "round",
    "scatter",
    "select_n",
    "sign",
    "sort",
    "sub",
    "tanh",
    "tile",
    "top_k",
}
_FOLLOWS = MOVES | COMMUNICATES | STAYS_IN_RANGE
# Give no other numbers than they take; what else is made of numbers 16 bits may not hold.
_KEEPS_NUMBERS = MOVES | {
    "broadcast_in_dim",
    "concatenate",
    "convert_element_type",
    "pcast",
    "pvary",
}


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


def kinds_carried(eqn: Any, operands: Sequence[Kind], low: np.dtype) -> list[Kind]:
    """Those of what a scan carries.

    Where it runs over layers, so that each round has parameters of its own, it carries what goes
    from layer to layer, which is kept as it is without a scan. Over steps of time it carries what
    may be a running sum: float32.
    """
    n_consts, n_carry = scan_sizes(eqn)
    carried = list(operands[n_consts:][:n_carry])
    if Kind.PARAMETER not in operands[n_consts + n_carry :]:
        return [Kind.WIDE] * n_carry
    carried = [Kind.WIDE if k == Kind.NUMBER else max(k, Kind.NARROW) for k in carried]
    while True:
        given = [*operands[:n_consts], *carried, *operands[n_consts + n_carry :]]
        after = kinds_of_results(eqn.params["jaxpr"], given, low)[:n_carry]
        wider = list(map(max, carried, after))
        if wider == carried:
            return carried
        carried = wider


def follows(step: Step, low: np.dtype) -> bool:
    """Whether the results of this are kept in 16 bits if its operands are."""
    return all(k < Kind.WIDE for k in _results(step, [Kind.NARROW] * len(step.ins), low))


def is_lowered(eqn: Any) -> bool:
    """Whether this is a product to compute in 16 bits."""
    return (
        is_product(eqn)
        and not asks_for_precision(eqn)
        and all(v.aval.dtype == FLOAT32 for v in eqn.invars[:2])
        and eqn.outvars[0].aval.dtype == FLOAT32
    )


def has_products(eqn: Any) -> bool:
    """Whether an equation holds products to compute in 16 bits.

    A loop that waits for a number to converge holds none: in 16 bits it might wait for ever. Nor
    does a custom derivative that asks what is differentiated, as others would be asked.
    """
    if eqn.params.get("symbolic_zeros") or (eqn.primitive.name == "while" and _waits(eqn)):
        return False
    return any(
        is_lowered(inner) or has_products(inner)
        for program in programs_in(eqn)
        for inner in open_jaxpr(program).eqns
    )


def _waits(loop: Any) -> bool:
    """Whether a `while` goes on by anything but a count."""
    condition = open_jaxpr(loop.params["cond_jaxpr"])
    read = {v for inner in condition.eqns for v in inner.invars if not isinstance(v, Literal)}
    read.update(v for v in condition.outvars if not isinstance(v, Literal))
    is_count = lambda v: jnp.issubdtype(dtype_of(v.aval), jnp.integer)
    return not all(is_count(v) for v in condition.invars if v in read)


def _results(step: Step, operands: Sequence[Kind], low: np.dtype) -> list[Kind]:
    eqn, name = step.eqn, step.name
    wide = [Kind.WIDE] * len(step.outs)
    if is_lowered(eqn):
        return [Kind.NARROW]
    if name in _HOLDERS:
        return _HOLDERS[name](eqn, operands, low)
    if name == "convert_element_type" and eqn.invars[0].aval.dtype == bool:
        return [Kind.NUMBER]
    of_floats = [k for v, k in zip(eqn.invars, operands, strict=True) if is_float(v)]
    if name not in _FOLLOWS or not of_floats:
        return wide
    if any(v.aval.dtype != FLOAT32 for v in filter(is_float, (*eqn.invars, *eqn.outvars))):
        return wide
    if name == "mul" and step.ins[0] == step.ins[1]:  # a square has twice the range
        return wide
    if name == "div" and operands[1] != Kind.NUMBER:
        return wide
    widest = max(of_floats)
    if widest == Kind.NUMBER and name not in _KEEPS_NUMBERS:
        return wide
    if widest == Kind.PARAMETER and name == "gather":  # an embedding: as a product with its rows
        return [Kind.NARROW]
    return [widest] * len(step.outs)


def _fits(number: Literal, low: np.dtype) -> bool:
    """Whether 16 bits hold a number without making it 0 or infinite, or losing its digits."""
    if dtype_of(number.aval) != FLOAT32:
        return False
    size, info = np.abs(np.asarray(number.val)), jnp.finfo(low)
    return bool(((size == 0) | ((size >= float(info.tiny)) & (size <= float(info.max)))).all())


# --- equations that hold programs ---


def _of_its_results(eqn: Any, operands: Sequence[Kind], low: np.dtype) -> list[Kind]:
    (program,) = programs_in(eqn)[:1]
    return kinds_of_results(program, operands, low)


def _of_a_scan(eqn: Any, operands: Sequence[Kind], low: np.dtype) -> list[Kind]:
    n_consts, n_carry = scan_sizes(eqn)
    if not has_products(eqn):
        return [Kind.WIDE] * len(eqn.outvars)
    carried = kinds_carried(eqn, operands, low)
    given = [*operands[:n_consts], *carried, *operands[n_consts + n_carry :]]
    stacked = kinds_of_results(eqn.params["jaxpr"], given, low)[n_carry:]
    return [*carried, *stacked]


def _of_a_cond(eqn: Any, operands: Sequence[Kind], low: np.dtype) -> list[Kind]:
    branches = [kinds_of_results(b, operands[1:], low) for b in eqn.params["branches"]]
    return [max(kinds) for kinds in zip(*branches, strict=True)]


_HOLDERS = {
    "checkpoint": _of_its_results,
    "cond": _of_a_cond,
    "custom_jvp_call": _of_its_results,
    "custom_vjp_call": _of_its_results,
    "jit": _of_its_results,
    "pjit": _of_its_results,
    "remat": _of_its_results,
    "remat2": _of_its_results,
    "scan": _of_a_scan,
    "shard_map": _of_its_results,
}
