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
    name_of,
    open_jaxpr,
    programs_in,
    scan_sizes,
)
from optax_lossscale._autocast.flat import INLINED, Flat, Step, flat

FLOAT32 = jnp.dtype(jnp.float32)


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
    """Made of these, in about their range: computed anew, and its sum with them is one of them."""
    WIDE = 5
    """What may have another range or need more digits: float32."""


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
    "unstack",
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
# Run in float32, as all that is no product, but give no other numbers than they take. (Not in 16
# bits, as their derivatives are sums.)
CHOOSES = {
    "abs",
    "broadcast_in_dim",
    "clamp",
    "concatenate",
    "convert_element_type",
    "cummax",
    "cummin",
    "dynamic_update_slice",
    "gather",
    "max",
    "min",
    "neg",
    "pad",
    "pcast",
    "pvary",
    "reduce_max",
    "reduce_min",
    "reduce_window_max",
    "reduce_window_min",
    "scatter",
    "select_n",
    "sort",
    "stack",
    "tile",
    "top_k",
}
SUMS_OF_TWO = {"add", "add_any", "sub"}
# Their results have about the range of what they take.
STAYS_NEAR = {"ceil", "div", "erf", "floor", "logistic", "mul", "round", "sign", "tanh"}
# Of parameters alone, these make no parameter.
_BOUNDED = {"erf", "logistic", "tanh"}


# What `holders` has a function for.
REWRITTEN = {
    "checkpoint",
    "cond",
    "custom_jvp_call",
    "custom_vjp_call",
    "jit",
    "pjit",
    "remat",
    "remat2",
    "scan",
    "shard_map",
    "while",
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


def kinds_of_equation(eqn: Any, operands: Sequence[Kind], low: np.dtype) -> list[Kind]:
    """Those of the results of an equation that holds programs."""
    return _HOLDERS[eqn.primitive.name](eqn, operands, low)


def kept_dtype(traced: Any, kind: Kind, low: np.dtype) -> Any:
    """The dtype in which a value goes in and out of programs, of that in which it was traced."""
    return low if kind == Kind.SUM and traced == FLOAT32 else traced


def kinds_carried(eqn: Any, operands: Sequence[Kind], low: np.dtype) -> list[Kind]:
    """Those of what a scan carries.

    Where it runs over layers, so that each round multiplies by a matrix of its own, it carries
    what goes from layer to layer, which is kept as it is without a scan. Over steps of time it
    carries what may be a running sum: float32.
    """
    n_consts, n_carry = scan_sizes(eqn)
    consts, carried = operands[:n_consts], operands[n_consts:][:n_carry]
    of_rounds = operands[n_consts + n_carry :]
    own = [n_consts + n_carry + i for i, k in enumerate(of_rounds) if k == Kind.PARAMETER]
    if not _multiplies_by(eqn.params["jaxpr"], own):
        return [Kind.WIDE] * n_carry
    is_stream = lambda k: k in (Kind.PARAMETER, Kind.ROWS, Kind.SUM)
    carried = [Kind.SUM if is_stream(k) else Kind.WIDE for k in carried]
    while True:
        given = [*consts, *carried, *of_rounds]
        after = kinds_of_results(eqn.params["jaxpr"], given, low)[:n_carry]
        widened = [Kind.WIDE if k > Kind.SUM else c for c, k in zip(carried, after, strict=True)]
        if widened == carried:
            return carried
        carried = widened


def _multiplies_by(jaxpr: Any, arguments: Sequence[int]) -> bool:
    """Whether a program has a product with one of these arguments as an operand."""
    program = flat(jaxpr)
    matrices = {program.ins[i] for i in arguments}
    for step in program.steps:
        if is_lowered(step.eqn):
            if not matrices.isdisjoint(i for i in step.ins[:2] if not isinstance(i, Literal)):
                return True
        elif step.name in MOVES | {"convert_element_type"} and not matrices.isdisjoint(step.reads):
            matrices.update(step.outs)
        for inner in programs_in(step.eqn):
            n = len(open_jaxpr(inner).invars)  # the first operand of a cond is not one of them
            last = step.ins[len(step.ins) - n :]
            held = [i for i, x in enumerate(last) if not isinstance(x, Literal) and x in matrices]
            if held and _multiplies_by(inner, held):
                return True
    return False


def is_lowered(eqn: Any) -> bool:
    """Whether this is a product to compute in 16 bits."""
    return is_product(eqn) and not asks_for_precision(eqn) and _multiplies_float32(eqn)


def is_outer_product(eqn: Any) -> bool:
    """Whether this multiplies as `dot_general` does and sums nothing, where that may change.

    It is no product, but its derivatives, made of a `dot_general`, would be: in float32.
    """
    if eqn.primitive.name != "dot_general" or asks_for_precision(eqn):
        return False
    (contracted, _), _ = eqn.params["dimension_numbers"]
    if contracted or eqn.params.get("out_sharding") is not None:
        return False
    return _multiplies_float32(eqn)


def _multiplies_float32(eqn: Any) -> bool:
    """Whether this is a float32 product, of float32 or with integers that 16 bits hold."""
    operands = {v.aval.dtype for v in eqn.invars[:2]}
    is_float32 = FLOAT32 in operands and eqn.outvars[0].aval.dtype == FLOAT32
    return is_float32 and all(d == FLOAT32 or _is_8_bit_integer(d) for d in operands)


def _is_8_bit_integer(dtype: Any) -> bool:
    """Whether 16 bits hold all numbers of a dtype: integers of 8 bits and fewer, and masks."""
    return dtype == jnp.bool_ or (
        jnp.issubdtype(dtype, jnp.integer) and jnp.iinfo(dtype).bits <= 8
    )


def has_products(eqn: Any) -> bool:
    """Whether an equation holds products to compute in 16 bits, or what has such derivatives."""
    return _holds_products(eqn) and not _why(eqn)


def why_left(eqn: Any) -> str:
    """What an equation is, or holds, whose products stay in float32; else nothing.

    A loop that waits for a number to converge might wait for ever in 16 bits. A derivative that
    asks what is differentiated would be asked by others. Integers may be larger than what 16 bits
    hold.
    """
    if is_product(eqn):
        dtypes = {v.aval.dtype for v in eqn.invars[:2]}
        integers = [d for d in dtypes if jnp.issubdtype(d, jnp.integer)]
        is_left = FLOAT32 in dtypes and not is_lowered(eqn) and not asks_for_precision(eqn)
        return f"a product with {integers[0]}" if is_left and integers else ""
    inside = [e for program in programs_in(eqn) for e in open_jaxpr(program).eqns]
    why = _why(eqn)
    if why and any(map(_has_or_is_product, inside)):
        return why
    return next(filter(None, map(why_left, inside)), "")


def _has_or_is_product(eqn: Any) -> bool:
    """Whether this is a product that would be one in 16 bits, or holds any, wherever."""
    inside = (e for program in programs_in(eqn) for e in open_jaxpr(program).eqns)
    return is_lowered(eqn) or is_outer_product(eqn) or any(map(_has_or_is_product, inside))


def _why(eqn: Any) -> str:
    """Why the products in an equation would stay, if it holds any."""
    name = name_of(eqn)
    if name not in REWRITTEN | INLINED:
        return f"a {name}"
    if eqn.params.get("symbolic_zeros"):
        return "a derivative with symbolic zeros"
    return "a loop that waits for a number" if name == "while" and _waits(eqn) else ""


def _holds_products(eqn: Any) -> bool:
    inside = (inner for program in programs_in(eqn) for inner in open_jaxpr(program).eqns)
    return any(is_lowered(e) or is_outer_product(e) or has_products(e) for e in inside)


def _waits(loop: Any) -> bool:
    """Whether a `while` goes on by anything but a count."""
    condition = open_jaxpr(loop.params["cond_jaxpr"])
    read = {v for inner in condition.eqns for v in inner.invars if not isinstance(v, Literal)}
    read.update(v for v in condition.outvars if not isinstance(v, Literal))
    is_count = lambda v: jnp.issubdtype(dtype_of(v.aval), jnp.integer)
    return not all(is_count(v) for v in condition.invars if v in read)


def _results(step: Step, operands: Sequence[Kind], low: np.dtype) -> list[Kind]:
    eqn, name = step.eqn, step.name
    if is_lowered(eqn):
        return [Kind.SUM]
    if name in _HOLDERS:
        return kinds_of_equation(eqn, operands, low)
    if name == "convert_element_type" and eqn.invars[0].aval.dtype == bool:
        return [Kind.NUMBER]
    of_floats = [k for v, k in zip(eqn.invars, operands, strict=True) if is_float(v)]
    floats = filter(is_float, (*eqn.invars, *eqn.outvars))
    is_all_float32 = all(v.aval.dtype == FLOAT32 for v in floats)
    kind = _of_operation(step, operands, max(of_floats), low) if of_floats else Kind.WIDE
    return [kind if is_all_float32 else Kind.WIDE] * len(step.outs)


def _of_operation(step: Step, operands: Sequence[Kind], widest: Kind, low: np.dtype) -> Kind:
    """Of float32 operands."""
    name = step.name
    if name in MOVES | COMMUNICATES | CHOOSES:
        is_lookup = name == "gather" and widest == Kind.PARAMETER
        return Kind.ROWS if is_lookup else widest
    if name not in SUMS_OF_TWO | STAYS_NEAR or widest in (Kind.NUMBER, Kind.WIDE):
        return Kind.WIDE
    if name in SUMS_OF_TWO:
        return min(widest, Kind.SUM)
    if name == "div" and operands[1] != Kind.NUMBER:
        return Kind.WIDE
    # What bfloat16 does not hold float32 does not.
    if name == "mul" and low != jnp.bfloat16 and min(operands) >= Kind.SUM:
        return Kind.WIDE
    if widest < Kind.SUM:
        return Kind.WIDE if name in _BOUNDED else widest
    return Kind.NEAR


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
