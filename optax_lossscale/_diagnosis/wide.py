"""An equation as it would be if the program had been written in wider floats.

`in_wide(eqn, ins, FLOAT32)` applies an equation of the program to operands that are
float32 where the program's are narrower; with `FLOAT64`, to wider ones still. Products
then have all the digits of the wider dtype. Most operations accept wider operands, if
parameters that name a narrower dtype, as a cast has, name the wider one. An equation
that is *fixed*, such as a kernel, runs in the dtypes that it was traced in, whatever it
is given.
"""

import functools
import itertools
from collections.abc import Sequence

import jax
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from optax_lossscale._diagnosis.equations import equations
from optax_lossscale._programs.operations import TABLE, Trait, traits
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
from optax_lossscale._programs.walk import carried_by

# On some devices, a product of float32 has fewer digits by default than float32 has.
_ALL_DIGITS = (lax.Precision.HIGHEST, lax.Precision.HIGHEST)


@functools.cache
def wide_dtype(dtype: np.dtype, wide: np.dtype | None) -> np.dtype:
    """The dtype that stands for another one in a program of wide floats.

    That is `wide` for a narrower float, and complex128 for complex64 if `wide` is
    float64. All other dtypes stay as they are, and every one does if `wide` is None.
    """
    if wide is None or not is_inexact_dtype(dtype):
        return dtype
    return wide if is_narrow_dtype(dtype) else np.promote_types(dtype, wide)


def widened(x: Array, wide: np.dtype | None) -> Array:
    """The same numbers, in `wide` if their dtype was narrower."""
    return astype(x, wide_dtype(dtype_in(x), wide))


def in_wide(eqn: JaxprEqn, ins: Sequence[Array], wide: np.dtype | None) -> list[Array]:
    """The results of an equation for wide operands, or as it is if `wide` is None."""
    if wide is None:
        return _applied(eqn, ins)
    if runs_no_iterations(eqn):
        carried = carried_by(eqn)
        carry = ins[carried.start : carried.stop]
        stacks = _as_traced(eqn, ins, wide)[len(carry) :]
        return [*carry, *stacks]
    if _is_fixed(eqn) or Trait.OF_BITS in traits(eqn):
        return _as_traced(eqn, ins, wide)
    return _rewritten(eqn, ins, wide)


def stays_narrow(eqn: JaxprEqn) -> bool:
    """Whether an equation computes in 16 bits or fewer, although it is given wide floats.

    One that reads or makes the bits of a number does not count: it is meant to, as the
    bits of a random number differ in another dtype.
    """
    if not _is_fixed(eqn) or runs_no_iterations(eqn):
        return False
    inside = itertools.chain.from_iterable(map(equations, _programs_held(eqn)))
    return any(
        is_narrow_dtype(dtype_in(v))
        for equation in (eqn, *inside)
        for v in (*equation.invars, *equation.outvars)
    )


def _is_fixed(eqn: JaxprEqn) -> bool:
    """Whether an equation runs only in the dtypes that it was traced in, or may do so.

    So may one that holds a program, as that was traced in its dtypes; except for
    scatters, whose function traces their program anew.
    """
    is_unknown = name_of(eqn) not in TABLE
    if is_unknown or Trait.OPAQUE in traits(eqn):
        return True
    return bool(_programs_held(eqn)) and not _is_scatter(eqn)


def _programs_held(eqn: JaxprEqn) -> list[Jaxpr | ClosedJaxpr]:
    """The programs in the parameters of an equation, whether it runs them or not."""
    leaves = jax.tree.leaves(list(params_of(eqn).values()))
    return list(filter(is_program, leaves))


def runs_no_iterations(eqn: JaxprEqn) -> bool:
    """Whether an equation is a loop over no rows, which returns the state it is given."""
    return Trait.SCANS in traits(eqn) and eqn.params["length"] == 0


def _is_scatter(eqn: JaxprEqn) -> bool:
    """Whether an equation holds the program by which it joins numbers, as scatters do."""
    return "update_jaxpr" in eqn.params


def _applied(eqn: JaxprEqn, ins: Sequence[Array]) -> list[Array]:
    """Applies an equation to arrays that may differ along all axes of the mesh.

    `devices` runs a `shard_map` without `check_vma`, so that there is no `pvary` or
    `psum_invariant`.
    """
    if Trait.VARIES not in traits(eqn):
        return bind(eqn, ins)
    if Trait.ADDS_MANY in traits(eqn):
        return [lax.psum(x, eqn.params["axes"]) for x in ins]
    return list(ins)


def _as_traced(
    eqn: JaxprEqn, ins: Sequence[Array], wide: np.dtype | None
) -> list[Array]:
    """The results in the equation's own dtypes, to which operands are cast, widened."""
    results = _applied(eqn, astypes(ins, dtypes_in(eqn.invars)))
    return [widened(x, wide) for x in results]


def _rewritten(
    eqn: JaxprEqn, ins: Sequence[Array], wide: np.dtype | None
) -> list[Array]:
    """The results of an equation whose parameters name `wide` for narrower dtypes."""
    params = dict(eqn.params)
    # What rounds to the bits of a narrower dtype rounds nothing in the wide program.
    is_rounding = "mantissa_bits" in params
    if is_rounding and is_narrow_dtype(dtype_in(eqn.invars[0])):
        return list(ins)
    if "precision" in params:
        params["precision"] = _ALL_DIGITS
    for key, value in params.items():
        if isinstance(value, np.dtype):
            params[key] = wide_dtype(value, wide)
    if not _is_scatter(eqn):
        return _applied(eqn.replace(params=params), ins)
    # Its function traces the program that it holds anew.
    del params["update_jaxpr"], params["update_consts"]
    function = getattr(lax, name_of(eqn).replace("-", "_"))
    return [function(*ins, **params)]
