"""An equation on pairs: computed as the program does, and in float32.

For `y = x.astype(float16) * 3`, with `x` in float32, the pairs are

              low                    true
    x         0.1                    0.1
    the cast  0.09998 in float16     0.1 in float32
    y         0.2998 in float16      0.3 in float32

What jumps follows the program: integers and booleans, the order of a sort, the numbers
to which `round` goes. The two values of a pair thus differ by what 16 bits make of
numbers, and by nothing else.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

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

Function = Callable[[Arrays, Arrays], tuple[Arrays, Arrays]]
"""An equation on pairs, from low and true operands to low and true results."""

# A second run chooses other signs or pivots, or takes no float32.
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

# On CPUs, a single operation compiles in half the time if little is optimized.
_QUICKLY = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_parallel_codegen_split_count": 1,
}


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
    leaves = jax.tree.leaves(list(params_of(eqn).values()))
    return _is_scatter(eqn) or not any(map(is_program, leaves))


def key_of(eqn: JaxprEqn) -> Any:
    """Returns a key that is equal for equations that do the same to other operands."""
    params = tuple(sorted(eqn.params.items()))
    key = (eqn.primitive, params, eqn.ctx, *dtypes_in(eqn.invars))
    try:
        hash(key)
    except TypeError:
        return eqn
    return key


def compiled(eqn: JaxprEqn) -> Function:
    """Compiles an equation on pairs."""
    if not is_compared(eqn):
        return _as_it_is(eqn)
    true_results = _TRUE_RESULTS.get(name_of(eqn), _in_float32)

    def on_pairs(lows, trues):
        low_results = bind(eqn, lows)
        if not any(map(is_inexact, [*eqn.invars, *eqn.outvars])):
            return low_results, low_results
        results = []
        computed = true_results(eqn, lows, trues, low_results)
        for low, true in zip(low_results, computed, strict=True):
            results.append(true if is_inexact(low) else low)
        return low_results, results

    is_on_cpu = jax.default_backend() == "cpu"
    return jax.jit(on_pairs, compiler_options=_QUICKLY if is_on_cpu else None)


def computed_alone(eqn: JaxprEqn, lows: Arrays, low_results: Arrays) -> Arrays:
    """Returns what float32 makes of the low operands: right but for these."""
    true_results = _TRUE_RESULTS.get(name_of(eqn), _in_float32)
    return true_results(eqn, lows, [widened(x) for x in lows], low_results)


def _as_it_is(eqn: JaxprEqn) -> Function:
    function = jax.jit(lambda lows: bind(eqn, lows))

    def on_pairs(lows, trues):
        # A `shard_map` takes and gives arrays on several devices.
        results = jax.device_get(function(jax.device_get(lows)))
        return results, [widened(x) for x in results]

    return on_pairs


# --- Functions of an equation, the operands of both kinds, and the low results ---


def _in_float32(
    eqn: JaxprEqn, lows: Arrays, trues: Arrays, low_results: Arrays
) -> Arrays:
    """Applies an equation as if the program had been written in float32."""
    params = dict(eqn.params)
    for name, value in params.items():
        if isinstance(value, np.dtype) and is_narrow_dtype(value):
            params[name] = FLOAT32
    if "precision" in params:
        params["precision"] = (lax.Precision.HIGHEST, lax.Precision.HIGHEST)
    if not _is_scatter(eqn):
        return bind(eqn.replace(params=params), trues)
    # The function of `lax` traces the program in a scatter again, in float32.
    del params["update_jaxpr"], params["update_consts"]
    scatter = getattr(lax, name_of(eqn).replace("-", "_"))
    return [scatter(*trues, **params)]


def _is_scatter(eqn: JaxprEqn) -> bool:
    return "update_jaxpr" in eqn.params


def _following(
    eqn: JaxprEqn, lows: Arrays, trues: Arrays, low_results: Arrays
) -> Arrays:
    """Follows what jumps from one number to the next, or reads bits of a float16."""
    return [widened(x) for x in low_results]


def _sign(eqn: JaxprEqn, lows: Arrays, trues: Arrays, low_results: Arrays) -> Arrays:
    """Follows the sign of the low operand; the sign of a zero is none."""
    (low,) = low_results
    return [jnp.where(low == 0, jnp.sign(trues[0]), widened(low))]


def _rounded(eqn: JaxprEqn, lows: Arrays, trues: Arrays, low_results: Arrays) -> Arrays:
    """Rounds to fewer digits what float32 does not hold in fewer."""
    if is_narrow_dtype(dtype_in(lows[0])):
        return trues
    return bind(eqn, trues)


def _sorted(eqn: JaxprEqn, lows: Arrays, trues: Arrays, low_results: Arrays) -> Arrays:
    """Sorts in the order of the low operands."""
    axis = eqn.params["dimension"]
    positions = lax.broadcasted_iota(np.int32, np.shape(lows[0]), axis)
    *_, order = lax.sort([*lows, positions], **eqn.params)
    return [jnp.take_along_axis(x, order, axis) for x in trues]


def _largest(eqn: JaxprEqn, lows: Arrays, trues: Arrays, low_results: Arrays) -> Arrays:
    """Takes the elements that are the largest of the low operand."""
    _, indices = low_results
    axis = eqn.params.get("axis", -1)  # since jax 0.9
    return [jnp.take_along_axis(trues[0], indices, axis), indices]


def _selected(
    eqn: JaxprEqn, lows: Arrays, trues: Arrays, low_results: Arrays
) -> Arrays:
    """Selects, as the gradient of a maximum, where the low operand has it."""
    return _in_float32(eqn, lows, [trues[0], widened(lows[1])], low_results)


_TRUE_RESULTS = {
    **dict.fromkeys(
        ["bitcast_convert_type", "ceil", "floor", "nextafter", "round"], _following
    ),
    "reduce_precision": _rounded,
    "select_and_gather_add": _selected,
    "select_and_scatter_add": _selected,
    "sign": _sign,
    "sort": _sorted,
    "top_k": _largest,
}
