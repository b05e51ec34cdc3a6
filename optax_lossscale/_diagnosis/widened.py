"""A traced program, evaluated with every 16-bit float as a float32."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from optax_lossscale._arrays.placement import varying_axes
from optax_lossscale._arrays.programs import (
    bind,
    constants,
    in_dtype,
    is_program,
    mapped_axes,
    open_jaxpr,
    params_of,
    placed,
    scan_sizes,
)

FLOAT32 = jnp.dtype(jnp.float32)
HALVES = frozenset({jnp.dtype(jnp.float16), jnp.dtype(jnp.bfloat16)})

# These read or make the bits of a number, which are those of its own dtype.
_OF_BITS = {"bitcast_convert_type", "nextafter", "rng_uniform"}
_SHAPES = (jax.core.ShapedArray, jax.ShapeDtypeStruct)  # of what a foreign function returns
_SCATTERS = {
    "scatter": lax.scatter,
    "scatter-add": lax.scatter_add,
    "scatter-sub": lax.scatter_sub,
    "scatter-mul": lax.scatter_mul,
    "scatter-min": lax.scatter_min,
    "scatter-max": lax.scatter_max,
}

Records = dict[int, Any]
"""What was noted of an equation, under its number: arrays of which a larger one is more."""

Rule = Callable[[int, Any, Sequence[Any]], tuple[list[Any], Any]]
"""How to compute one equation: its results and what to note of it, or None."""


def evaluate(jaxpr: Any, args: Sequence[Any], rule: Rule | None = None) -> tuple[list, Records]:
    """The results of a program, in which every 16-bit float is held in a float32.

    A jaxpr of gradients holds the backward pass too, custom derivatives as they were traced, so
    this is what the same function would compute if it had been written in float32: numbers
    overflow, vanish and are rounded where float32's do. What is drawn at random stays the same,
    as its bits are.

    Args:
      jaxpr: the program, closed or without constants, traced in whatever dtypes.
      args: its arguments. 16-bit floats may be given as float32.
      rule: computes each equation that holds no others; None for `widely`.

    Returns:
      The results, float32 for 16-bit floats, and what the rule noted, under the numbers of
      `numbered`.
    """
    return _evaluate(jaxpr, list(map(held, args)), rule or _just_widely, 0)


def numbered(jaxpr: Any) -> Iterator[Any]:
    """The equations of a program that hold no others, in order: their numbers are their places."""
    for eqn in open_jaxpr(jaxpr).eqns:
        inner = _inner(eqn)
        if inner:
            for each in inner:
                yield from numbered(each)
        else:
            yield eqn


def widely(eqn: Any, ins: Sequence[Any]) -> list[Any]:
    """The results of an equation that holds no others, in float32."""
    if not _has_halves(eqn) or eqn.primitive.name in _OF_BITS:
        return as_traced(eqn, ins)
    try:
        outs = _computed_widely(eqn, ins)
    except (TypeError, ValueError, NotImplementedError):  # for that it has no rule
        return as_traced(eqn, ins)
    is_wide = all(
        x.dtype == held_dtype(v.aval.dtype) and x.shape == v.aval.shape
        for x, v in zip(outs, eqn.outvars, strict=True)
    )
    return outs if is_wide else as_traced(eqn, ins)


def as_traced(eqn: Any, ins: Sequence[Any]) -> list[Any]:
    """The results of an equation in the dtypes that it was traced in, held in float32."""
    ins = [
        in_dtype(v.aval.dtype, x) if _is_held(v) else x
        for x, v in zip(ins, eqn.invars, strict=True)
    ]
    return [held(x) for x in bind(eqn, ins)]


def cannot_be_widened(eqn: Any) -> bool:
    """Whether an equation computes in 16 bits whatever it is given, as a kernel does."""
    return (
        _has_halves(eqn)
        and eqn.primitive.name not in _SCATTERS
        and eqn.primitive.name != "reduce"
        and any(is_program(x) or isinstance(x, _SHAPES) for x in _params(eqn))
    )


def held(x: Any) -> Any:
    """A 16-bit float as a float32; everything else as it came."""
    return in_dtype(FLOAT32, x) if getattr(x, "dtype", None) in HALVES else x


def held_dtype(dtype: Any) -> Any:
    """The dtype in which numbers of a dtype are held."""
    return FLOAT32 if dtype in HALVES else dtype


def _just_widely(number: int, eqn: Any, ins: Sequence[Any]) -> tuple[list[Any], None]:
    return widely(eqn, ins), None


def _evaluate(jaxpr: Any, args: Sequence[Any], rule: Rule, number: int) -> tuple[list, Records]:
    """The results of a program whose first equation has a number."""
    consts = map(held, constants(jaxpr))
    jaxpr = open_jaxpr(jaxpr)
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
    read = lambda v: held(jnp.asarray(v.val)) if isinstance(v, core.Literal) else values[v]
    records: Records = {}
    for eqn in jaxpr.eqns:
        ins = [read(v) if isinstance(v, core.Literal) else values[v] for v in eqn.invars]
        if inner := _inner(eqn):
            outs, noted = _HOLDERS[eqn.primitive.name](eqn, ins, rule, number)
            records |= noted
            number += sum(map(_size, inner))
        else:
            outs, note = rule(number, eqn, ins)
            if note is not None:
                records[number] = note
            number += 1
        values.update(zip(eqn.outvars, outs, strict=True))
    return [read(v) for v in jaxpr.outvars], records


# --- one equation ---


def _computed_widely(eqn: Any, ins: Sequence[Any]) -> list[Any]:
    name, params = eqn.primitive.name, dict(eqn.params)
    if name in _SCATTERS:
        del params["update_jaxpr"], params["update_consts"]
        operand, indices, updates = ins
        return [_SCATTERS[name](operand, indices, updates, **params)]
    if name == "reduce":
        computation = lambda x, y: _evaluate(params["jaxpr"], [*x, *y], _just_widely, 0)[0]
        half = len(ins) // 2
        return lax.reduce(ins[:half], ins[half:], computation, params["dimensions"])
    if cannot_be_widened(eqn):
        return as_traced(eqn, ins)
    if name == "convert_element_type":
        return [in_dtype(held_dtype(params["new_dtype"]), ins[0])]
    if "precision" in params and not isinstance(params["precision"], (tuple, lax.Precision)):
        params["precision"] = None  # an algorithm's, of operands in 16 bits
    is_half = lambda x: isinstance(x, (np.dtype, type)) and x in HALVES
    params = {k: FLOAT32 if is_half(x) else x for k, x in params.items()}
    return bind(eqn.replace(params=params), ins)


def _is_held(v: Any) -> bool:
    """Whether a variable's numbers are held in another dtype than its own."""
    return getattr(v.aval, "dtype", None) in HALVES


def _has_halves(eqn: Any) -> bool:
    """Whether an equation computes with 16-bit floats, itself or in what it holds."""
    return any(map(_is_held, [*eqn.invars, *eqn.outvars])) or any(
        any(map(_has_halves, open_jaxpr(x).eqns)) for x in _params(eqn) if is_program(x)
    )


def _params(eqn: Any) -> list[Any]:
    is_leaf = lambda x: is_program(x) or isinstance(x, _SHAPES)
    return jax.tree.leaves(list(params_of(eqn).values()), is_leaf=is_leaf)


# --- equations that hold others ---


def _inner(eqn: Any) -> list[Any]:
    """The programs in an equation, if it is one to go into."""
    if eqn.primitive.name not in _HOLDERS:
        return []
    return [x for x in _params(eqn) if is_program(x)]


def _size(jaxpr: Any) -> int:
    return sum(1 for _ in numbered(jaxpr))


def _inlined(eqn: Any, ins: list, rule: Rule, number: int) -> tuple[list, Records]:
    """What `jit` compiles, and functions with derivatives of their own, which were taken."""
    (jaxpr,) = _inner(eqn)
    outs, records = _evaluate(jaxpr, placed(eqn.params.get("in_shardings"), ins), rule, number)
    return placed(eqn.params.get("out_shardings"), outs), records


def _remat(eqn: Any, ins: list, rule: Rule, number: int) -> tuple[list, Records]:
    (jaxpr,) = _inner(eqn)
    if eqn.params["differentiated"] and eqn.params["prevent_cse"]:
        ins = lax.optimization_barrier(ins)
    return _evaluate(jaxpr, ins, rule, number)


def _scan(eqn: Any, ins: list, rule: Rule, number: int) -> tuple[list, Records]:
    (jaxpr,), params = _inner(eqn), eqn.params
    n_consts, n_carry = scan_sizes(eqn)
    consts, carry, xs = ins[:n_consts], ins[n_consts:][:n_carry], ins[n_consts + n_carry :]

    def body(carry, xs):
        outs, records = _evaluate(jaxpr, [*consts, *carry, *xs], rule, number)
        return outs[:n_carry], (outs[n_carry:], records)

    how = {name: params[name] for name in ("length", "reverse", "unroll")}
    carry, (ys, records) = lax.scan(body, carry, xs, **how)
    return [*carry, *ys], jax.tree.map(lambda x: x.max(0, initial=0), records)


def _while(eqn: Any, ins: list, rule: Rule, number: int) -> tuple[list, Records]:
    params = eqn.params
    cond, body = params["cond_jaxpr"], params["body_jaxpr"]
    n_cond, n_body = params["cond_nconsts"], params["body_nconsts"]
    of_cond, of_body, carry = ins[:n_cond], ins[n_cond:][:n_body], ins[n_cond + n_body :]
    after = number + _size(cond)

    def step(state):
        carry, records = state
        outs, new = _evaluate(body, [*of_body, *carry], rule, after)
        return outs, jax.tree.map(jnp.maximum, records, new)

    goes_on = lambda state: _evaluate(cond, [*of_cond, *state[0]], rule, number)[0][0]
    noted = jax.eval_shape(lambda x: _evaluate(body, [*of_body, *x], rule, after)[1], carry)
    empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), noted)
    return lax.while_loop(goes_on, step, (carry, empty))


def _cond(eqn: Any, ins: list, rule: Rule, number: int) -> tuple[list, Records]:
    index, *ins = ins
    branches = eqn.params["branches"]
    starts = [number + sum(map(_size, branches[:i])) for i in range(len(branches))]
    of = lambda branch, start: lambda *ins: _evaluate(branch, ins, rule, start)
    fs = list(map(of, branches, starts))
    noted: Records = {}
    for f in fs:
        noted |= jax.eval_shape(f, *ins)[1]
    empty = {n: jnp.zeros(x.shape, x.dtype) for n, x in noted.items()}

    def filled(f):
        def branch(*ins):
            outs, records = f(*ins)
            return outs, empty | records

        return branch

    return lax.switch(index, list(map(filled, fs)), *ins)


def _shard_map(eqn: Any, ins: list, rule: Rule, number: int) -> tuple[list, Records]:
    (jaxpr,), params = _inner(eqn), eqn.params
    axes = mapped_axes(eqn)

    def largest(x):
        along = tuple(varying_axes(x) if params["check_vma"] else axes)
        return lax.pmax(x, along) if along else x

    def of_each(*ins):
        outs, records = _evaluate(jaxpr, ins, rule, number)
        return outs, jax.tree.map(largest, records)

    mapped = jax.shard_map(
        of_each,
        mesh=params["mesh"],
        in_specs=tuple(params["in_specs"]),
        out_specs=(list(params["out_specs"]), jax.P()),
        axis_names=set(axes),
        check_vma=params["check_vma"],
    )
    return mapped(*ins)


_HOLDERS = {
    "jit": _inlined,
    "pjit": _inlined,
    "closed_call": _inlined,
    "core_call": _inlined,
    "eval_jaxpr": _inlined,
    "custom_jvp_call": _inlined,
    "custom_vjp_call": _inlined,
    "checkpoint": _remat,
    "remat": _remat,
    "remat2": _remat,
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "shard_map": _shard_map,
}
