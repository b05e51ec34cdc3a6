"""An equation on pairs: computed as the program does, and in float32.

For `y = x.astype(float16) * 3`, with `x` in float32, the pairs are

              low                    true
    x         0.1                    0.1
    the cast  0.09998 in float16     0.1 in float32
    y         0.2998 in float16      0.3 in float32

What jumps follows the program: integers and booleans, the order of a sort, the number
to which `round` goes. The two values of a pair thus differ by what 16 bits make of
numbers, and by nothing else.
"""

import contextlib
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from optax_lossscale._diagnosis.figures import compare
from optax_lossscale._diagnosis.table import Fault, Row
from optax_lossscale._programs.operations import OPAQUE
from optax_lossscale._programs.values import (
    FLOAT32,
    Array,
    astype,
    dtype_in,
    dtypes_in,
    is_inexact,
    is_narrow_dtype,
)
from optax_lossscale._programs.versions import bind, is_program, name_of, params_of

Arrays = Sequence[Array]

# Another run of them chooses other signs or pivots, or they take no float32.
_NOT_COMPARED = OPAQUE | {
    "approx_top_k",
    "eig",
    "eigh",
    "geqp3",
    "geqrf",
    "hessenberg",
    "lu",
    "qr",
    "scaled_dot",
    "scaled_matmul_wrapper",
    "schur",
    "svd",
    "tridiagonal",
}

# On CPUs, a single operation compiles in a fourth of the time if little is optimized.
_QUICKLY = {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}


class Value(NamedTuple):
    """A value of the program, as a pair.

    Attributes:
      low: as the program computes it.
      true: in float32 or wider; of integers and booleans, `low` itself.
      row: the row of the equation that computed it, or of the parameter that it is.
      error: its relative error.
      fault: what is wrong with it; None if it is right.
      is_scaled: whether it depends on the loss scale.
      slices: the values that a loop stacked, if it is such a stack.
    """

    low: Array
    true: Array
    row: Row | None = None
    error: float = 0.0
    fault: Fault | None = None
    is_scaled: bool = False
    slices: "Sequence[Value]" = ()


def value_of(x: Array, row: Row | None = None, is_scaled: bool = False) -> Value:
    """Pairs an argument or a constant with itself."""
    true = widened(x)
    wrong = compare(x, true).wrong if is_inexact(x) else 0
    fault = Fault(wrong) if wrong else None
    return Value(x, true, row, fault=fault, is_scaled=is_scaled)


def widened(x: Array) -> Array:
    """Casts floats of 16 bits or fewer to float32."""
    return astype(x, FLOAT32) if is_narrow_dtype(dtype_in(x)) else x


def is_compared(eqn: JaxprEqn) -> bool:
    """Whether an equation can be computed in float32, too.

    No kernel, callback or decomposition can, and no equation that holds a program,
    other than a scatter.
    """
    if eqn.effects or name_of(eqn) in _NOT_COMPARED:
        return False
    parameters = jax.tree.leaves(list(params_of(eqn).values()))
    return _is_scatter(eqn) or not any(map(is_program, parameters))


def key_of(eqn: JaxprEqn) -> Hashable:
    """Returns a key that is equal for equations that do the same to other operands."""
    params = tuple(sorted(eqn.params.items()))
    key = (eqn.primitive, params, eqn.ctx, *dtypes_in(eqn.invars))
    try:
        hash(key)
    except TypeError:
        return eqn
    return key


def compiled(eqn: JaxprEqn) -> Callable[[Arrays, Arrays], tuple[Arrays, Arrays]]:
    """Compiles an equation into a function of its low and of its true operands."""
    if not is_compared(eqn):
        return _as_it_is(eqn)

    def on_pairs(lows, trues):
        results = bind(eqn, lows)
        if not any(map(is_inexact, [*eqn.invars, *eqn.outvars])):
            return results, results
        pairs = zip(results, in_float32(eqn, lows, trues, results), strict=True)
        return results, [true if is_inexact(low) else low for low, true in pairs]

    return jax.jit(on_pairs, compiler_options=_known_options())


@functools.cache
def _known_options() -> dict[str, Any]:
    """Returns the options with which this version of XLA compiles quickly on a CPU."""
    known = {}
    for name, value in _QUICKLY.items() if jax.default_backend() == "cpu" else ():
        option = {name: value}
        # XLA does not list its options, and drops some.
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            jax.jit(lambda: 0.0, compiler_options=option).lower().compile()
            known |= option
    return known


def _as_it_is(eqn: JaxprEqn) -> Callable[[Arrays, Arrays], tuple[Arrays, Arrays]]:
    function = jax.jit(lambda lows: bind(eqn, lows))

    def on_pairs(lows, trues):
        # A `shard_map` takes and gives arrays on several devices.
        results = jax.device_get(function(jax.device_get(lows)))
        return results, [widened(x) for x in results]

    return on_pairs


class _Call(NamedTuple):
    """An equation with its operands, and its results as the program computes them."""

    eqn: JaxprEqn
    lows: Arrays
    trues: Arrays
    results: Arrays


def in_float32(
    eqn: JaxprEqn, lows: Arrays, trues: Arrays, results: Arrays
) -> list[Array]:
    """Computes an equation in float32.

    Args:
      eqn: an equation for which `is_compared` is true.
      lows: the operands as the program computes them.
      trues: the operands in float32.
      results: the results as the program computes them.
    """
    apply = _RULES.get(name_of(eqn), _rewritten)
    return apply(_Call(eqn, lows, trues, results))


def _rewritten(call: _Call) -> list[Array]:
    """Applies an equation as if the program had been written in float32."""
    eqn = call.eqn
    params = dict(eqn.params)
    for name, value in params.items():
        if isinstance(value, np.dtype) and is_narrow_dtype(value):
            params[name] = FLOAT32
    if "precision" in params:
        params["precision"] = (lax.Precision.HIGHEST, lax.Precision.HIGHEST)
    if not _is_scatter(eqn):
        return bind(eqn.replace(params=params), call.trues)
    # The function of `lax` traces the program in a scatter again, in float32.
    del params["update_jaxpr"], params["update_consts"]
    scatter = getattr(lax, name_of(eqn).replace("-", "_"))
    return [scatter(*call.trues, **params)]


def _is_scatter(eqn: JaxprEqn) -> bool:
    return "update_jaxpr" in eqn.params


def _followed(call: _Call) -> list[Array]:
    """Follows what jumps from one number to the next, or reads bits of a float16."""
    return [widened(x) for x in call.results]


def _sign(call: _Call) -> list[Array]:
    """Follows the sign of the low operand, unless that has vanished."""
    (sign,) = call.results
    return [jnp.where(sign == 0, jnp.sign(call.trues[0]), widened(sign))]


def _rounded(call: _Call) -> list[Array]:
    """Rounds to fewer digits only what float32 has in fewer."""
    is_narrow = is_narrow_dtype(dtype_in(call.lows[0]))
    return list(call.trues) if is_narrow else bind(call.eqn, call.trues)


def _sorted(call: _Call) -> list[Array]:
    """Sorts in the order of the low operands."""
    params = call.eqn.params
    axis = params["dimension"]
    positions = lax.broadcasted_iota(np.int32, call.lows[0].shape, axis)
    operands = tuple(map(jnp.asarray, (*call.lows, positions)))
    *_, order = lax.sort(operands, **params)
    return [jnp.take_along_axis(x, order, axis) for x in call.trues]


def _largest(call: _Call) -> list[Array]:
    """Takes the elements that are the largest of the low operand."""
    _, indices = call.results
    axis = call.eqn.params.get("axis", -1)
    return [jnp.take_along_axis(call.trues[0], indices, axis), indices]


def _selected(call: _Call) -> list[Array]:
    """Selects, as the gradient of a maximum does, where the low operand has it."""
    return _rewritten(call._replace(trues=[call.trues[0], widened(call.lows[1])]))


_RULES = {
    "bitcast_convert_type": _followed,
    "ceil": _followed,
    "floor": _followed,
    "reduce_precision": _rounded,
    "round": _followed,
    "select_and_gather_add": _selected,
    "select_and_scatter_add": _selected,
    "sign": _sign,
    "sort": _sorted,
    "top_k": _largest,
}
