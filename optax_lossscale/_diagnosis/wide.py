"""Applies an equation as if the program had been written in wider floats.

`in_wide(eqn, operands, FLOAT32)` applies an equation of a float16 program to float32
operands, and with `FLOAT64`, to float64 operands. Most operations accept wider operands
if each parameter that names a narrow dtype is changed to name the wide one:
`x.astype(bfloat16)` becomes a cast to float32, which rounds nothing. Matrix products
and convolutions use all digits of the wide dtype.

Some equations, such as kernels, can only run in the dtypes in which they were traced.
Their operands are cast to those dtypes, and their results are widened. The rounding
errors of such an equation itself are then in the reference as well and are not found.
"""

import functools
from collections.abc import Sequence

import jax
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from optax_lossscale._diagnosis.equations import equations
from optax_lossscale._diagnosis.old_operations import TABLE, Trait, traits
from optax_lossscale._diagnosis.old_walk import carry_positions
from optax_lossscale._programs.values import (
    Array,
    astype,
    astypes,
    dtype_in,
    dtypes_in,
    is_inexact_dtype,
    is_narrow_dtype,
)
from optax_lossscale._programs.versions import bind, is_program, name_of, params_of

# The precision of products in the reference. By default, some devices multiply float32
# matrices with fewer digits than float32 has.
_ALL_DIGITS = (lax.Precision.HIGHEST, lax.Precision.HIGHEST)


@functools.cache
def wide_dtype(dtype: np.dtype, wide: np.dtype | None) -> np.dtype:
    """Returns the dtype that replaces `dtype` in a program of wide floats.

    Floats that are narrower than `wide` become `wide`, and complex64 becomes complex128
    if `wide` is float64. Every other dtype stays. If `wide` is None, all dtypes stay.
    """
    if wide is None or not is_inexact_dtype(dtype):
        return dtype
    return wide if is_narrow_dtype(dtype) else np.promote_types(dtype, wide)


def widened(x: Array, wide: np.dtype) -> Array:
    """Casts an array to `wide` if its dtype is narrower."""
    return astype(x, wide_dtype(dtype_in(x), wide))


def in_wide(
    eqn: JaxprEqn, operands: Sequence[Array], wide: np.dtype | None
) -> list[Array]:
    """Applies an equation to wide operands; returns wide results.

    Args:
      eqn: the equation.
      operands: arrays, with the floats in `wide` or wider.
      wide: the dtype to compute in. If it is None, the equation runs as it was traced,
        on operands in its own dtypes.
    """
    if wide is None:
        return _apply(eqn, operands)
    if runs_no_iterations(eqn):
        # The carry is returned as it is. Running the equation as traced would round it.
        carried = carry_positions(eqn)
        carry = operands[carried.start : carried.stop]
        results = _apply_as_traced(eqn, operands, wide)
        empty_stacks = results[len(carry) :]
        return [*carry, *empty_stacks]
    # An operation on the bits of a float means nothing on the bits of another dtype.
    if _has_fixed_dtypes(eqn) or Trait.OF_BITS in traits(eqn):
        return _apply_as_traced(eqn, operands, wide)
    return _apply_rewritten(eqn, operands, wide)


def stays_narrow(eqn: JaxprEqn) -> bool:
    """Whether an equation computes in 16 bits or fewer even in the wide program.

    A report lists such an equation as not compared. An operation on bits also runs as
    traced, but does not count, because its reference must have the same bits, such as
    those of a random number.
    """
    if not _has_fixed_dtypes(eqn) or runs_no_iterations(eqn):
        return False
    eqns = [eqn]
    for program in _programs_held(eqn):
        eqns += equations(program)
    for inner in eqns:
        dtypes = dtypes_in([*inner.invars, *inner.outvars])
        if any(map(is_narrow_dtype, dtypes)):
            return True
    return False


def runs_no_iterations(eqn: JaxprEqn) -> bool:
    """Whether an equation is a `scan` of length 0, which returns its initial carry."""
    return Trait.SCANS in traits(eqn) and eqn.params["length"] == 0


def _has_fixed_dtypes(eqn: JaxprEqn) -> bool:
    """Whether an equation can only run in the dtypes in which it was traced.

    This is true of an operation that is not in the table of `operations.py`, of a
    kernel or a callback, and of an equation that holds a program, because the dtypes of
    the program are fixed. A scatter is an exception: the `lax` function that applies it
    traces the program in it anew.
    """
    is_unknown = name_of(eqn) not in TABLE
    if is_unknown or Trait.OPAQUE in traits(eqn):
        return True
    return bool(_programs_held(eqn)) and not _is_scatter(eqn)


def _programs_held(eqn: JaxprEqn) -> list[Jaxpr | ClosedJaxpr]:
    """Lists all programs in an equation's parameters, even those it does not run."""
    leaves = jax.tree.leaves(list(params_of(eqn).values()))
    return list(filter(is_program, leaves))


def _is_scatter(eqn: JaxprEqn) -> bool:
    """Whether an equation is a scatter.

    A scatter holds a program that combines an old element with a new one, for example
    by adding them.
    """
    return "update_jaxpr" in eqn.params


def _apply(eqn: JaxprEqn, operands: Sequence[Array]) -> list[Array]:
    """Applies an equation to arrays that may vary over every axis of the mesh.

    The module `devices` runs each `shard_map` with `check_vma=False`. JAX then does not
    track the axes over which an array varies, so `pvary` does nothing here, and
    `psum_invariant` is a plain `psum`.
    """
    if Trait.VARIES not in traits(eqn):
        return bind(eqn, operands)
    if Trait.ADDS_MANY in traits(eqn):
        return [lax.psum(x, eqn.params["axes"]) for x in operands]
    return list(operands)


def _apply_as_traced(
    eqn: JaxprEqn, operands: Sequence[Array], wide: np.dtype
) -> list[Array]:
    """Applies an equation in its own dtypes and widens the results."""
    in_own_dtypes = astypes(operands, dtypes_in(eqn.invars))
    results = _apply(eqn, in_own_dtypes)
    return [widened(x, wide) for x in results]


def _apply_rewritten(
    eqn: JaxprEqn, operands: Sequence[Array], wide: np.dtype
) -> list[Array]:
    """Applies an equation with wide dtypes in place of the narrow ones it names."""
    params = dict(eqn.params)
    # In wide floats, `reduce_precision` of a narrow value rounds nothing, like a cast.
    is_rounding = "mantissa_bits" in params
    if is_rounding and is_narrow_dtype(dtype_in(eqn.invars[0])):
        return list(operands)
    if "precision" in params:
        params["precision"] = _ALL_DIGITS
    for name, value in params.items():
        if isinstance(value, np.dtype):
            params[name] = wide_dtype(value, wide)
    if not _is_scatter(eqn):
        return _apply(eqn.replace(params=params), operands)
    # `lax.scatter_add` and the like trace the held program anew, here in wide floats.
    del params["update_jaxpr"], params["update_consts"]
    function = getattr(lax, name_of(eqn).replace("-", "_"))
    return [function(*operands, **params)]
