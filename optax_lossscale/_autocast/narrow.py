"""Decides what is computed in 16 bits: the first of `autocast`'s two passes.

Three rules:

1. A product takes and gives 16 bits. Everything else is computed in the dtype in which
   it was traced.
2. Rounding commutes with moving and sending. What goes to products alone is sent in 16
   bits, and what is in 16 bits is moved in 16 bits.
3. A residual sum reads what the product reads. A value that depends on a product, and
   that products read and besides only sums, is rounded once for all of them.

The third rule gives up digits and no range, since the product would round the value
anyway. It asks who reads a value, and finds readers inside of `jit`, `scan`, `cond` and
the like as well, so what is rounded does not depend on how a layer is wrapped. Only
what a loop carries is never rounded: small steps would be lost.

`narrow` runs a program equation by equation. Each value is there in the dtype in which
it was traced, in 16 bits, or both; each cast is an equation of the result.
"""

import itertools
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import JaxprEqn, Literal, Var

from optax_lossscale._arrays.contexts import AUTOCAST_DTYPE
from optax_lossscale._autocast.derivatives import custom_jvp, custom_vjp
from optax_lossscale._autocast.products import (
    has_narrowed,
    is_narrowed,
    may_have_narrowed,
)
from optax_lossscale._programs.cached import cached_by_program
from optax_lossscale._programs.enter import Arrays, Function, enter, traced_once
from optax_lossscale._programs.flat import flat
from optax_lossscale._programs.lines import at_line_of
from optax_lossscale._programs.operations import MOVES, SENDS, SPREADS, SUMS
from optax_lossscale._programs.values import (
    Atom,
    astype,
    astypes,
    dtype_in,
    dtypes_in,
    variables,
)
from optax_lossscale._programs.versions import AnyJaxpr, bind, name_of, open_jaxpr
from optax_lossscale._programs.walk import (
    carry_positions,
    first_inner_operand,
    result_programs,
)

Readers = frozenset[str]
"""Who reads a value: products, sums or others, directly or after moves."""

NONE = frozenset()
PRODUCT = frozenset(["product"])
SUM = frozenset(["sum"])
OTHER = frozenset(["other"])


def narrow(program: AnyJaxpr, low: np.dtype) -> Function:
    """Returns a program as a function of its arguments, with its products in 16 bits.

    Args:
      program: the program, traced in float32.
      low: float16 or bfloat16.

    Returns:
      A function from a list of arrays to the list of the program's results, in the
      dtypes in which they were traced. An array of dtype `low` may stand for a float32
      argument.
    """
    jaxpr = open_jaxpr(program)
    of_results = (OTHER,) * len(jaxpr.outvars)
    of_arguments = (False,) * len(jaxpr.invars)
    function = _Narrow(low).function(program, of_results, of_arguments)
    return lambda args: astypes(function(args), dtypes_in(jaxpr.outvars))


# --- What is known of values before anything runs ---


@cached_by_program
def readers_in(
    program: AnyJaxpr, of_results: tuple[Readers, ...]
) -> dict[Var, Readers]:
    """Returns the readers of each value of a flat program that anything reads.

    Args:
      program: the program.
      of_results: the readers of each of its results.
    """
    readers: dict[Var, Readers] = {}

    def add(values, readers_of_values):
        for v, new in zip(values, readers_of_values, strict=True):
            if isinstance(v, Var):
                readers[v] = readers.get(v, NONE) | new

    add(flat(program).outs, of_results)
    for eqn in reversed(flat(program).eqns):
        after = [readers.get(v, NONE) for v in eqn.outvars]
        add(eqn.invars, _readers_of_operands(eqn, after))
    return readers


def _readers_of_operands(eqn: JaxprEqn, after: list[Readers]) -> list[Readers]:
    """Returns the readers of an equation's operands, from those of its results."""
    name = name_of(eqn)
    if is_narrowed(eqn):
        return [PRODUCT] * 2 + [OTHER] * (len(eqn.invars) - 2)
    if may_have_narrowed(eqn):
        return [OTHER] * first_inner_operand(eqn) + _readers_inside(eqn, after)
    if name == "optimization_barrier":
        return after
    if name in MOVES | SENDS:
        return [NONE.union(*after)] + [OTHER] * (len(eqn.invars) - 1)
    if name in SUMS:
        return [SUM] * len(eqn.invars)
    return [OTHER] * len(eqn.invars)


def _readers_inside(eqn: JaxprEqn, after: Sequence[Readers]) -> list[Readers]:
    """Returns the readers, inside of an equation, of the arguments of its programs."""
    inside: list[Readers] = []
    for program in result_programs(eqn):
        readers = readers_in(program, _readers_of_inner_results(eqn, after))
        of_program = [readers.get(v, NONE) for v in open_jaxpr(program).invars]
        inside = [a | b for a, b in zip(inside or of_program, of_program, strict=True)]
    first_inner = first_inner_operand(eqn)
    for n in carry_positions(eqn):
        inside[n - first_inner] = OTHER
    return inside


def _readers_of_inner_results(
    eqn: JaxprEqn, after: Sequence[Readers]
) -> tuple[Readers, ...]:
    """Returns the readers of the results of the programs in an equation."""
    n_carry = len(carry_positions(eqn))
    return (*[OTHER] * n_carry, *after[n_carry:])


@cached_by_program
def active_in(program: AnyJaxpr, of_arguments: tuple[bool, ...]) -> frozenset[Var]:
    """Returns the values of a flat program that depend on a product.

    Args:
      program: the program.
      of_arguments: whether each of its arguments depends on a product outside.
    """
    active = set(itertools.compress(flat(program).ins, of_arguments))
    for eqn in flat(program).eqns:
        active.update(itertools.compress(eqn.outvars, _are_active(eqn, active)))
    return frozenset(active)


def _are_active(eqn: JaxprEqn, active: Collection[Var]) -> list[bool]:
    """Returns whether each result of an equation depends on a product."""
    if is_narrowed(eqn):
        return [True]
    if has_narrowed(eqn):
        return _results_active(eqn, _arguments_active(eqn, active))
    reads_active = any(v in active for v in variables(eqn.invars))
    return [reads_active] * len(eqn.outvars)


def _arguments_active(eqn: JaxprEqn, active: Collection[Var]) -> tuple[bool, ...]:
    """Returns whether the arguments of an equation's programs depend on a product.

    What a loop carries depends on all that it carried in the iteration before.
    """
    first_inner = first_inner_operand(eqn)
    flags = [isinstance(v, Var) and v in active for v in eqn.invars[first_inner:]]
    carried = carry_positions(eqn)
    for _ in carried:  # at least one more is found in each round, or all are
        results = _results_active(eqn, tuple(flags))
        for n, is_active in zip(carried, results, strict=False):
            flags[n - first_inner] |= is_active
    return tuple(flags)


def _results_active(eqn: JaxprEqn, of_arguments: tuple[bool, ...]) -> list[bool]:
    results = [False] * len(eqn.outvars)
    for program in result_programs(eqn):
        active = active_in(program, of_arguments)
        for n, v in enumerate(flat(program).outs):
            results[n] |= isinstance(v, Var) and v in active
    return results


# --- The program as a function ---


class _Values:
    """The values of a program that runs, and their casts.

    All who read a value in one dtype share a cast, so cotangents are summed in it.
    """

    def __init__(self, low: np.dtype, rounded_at_once: Collection[Var]):
        self._low = low
        self._rounded_at_once = rounded_at_once
        self._stored: dict[Var, Any] = {}
        self._casts: dict[tuple[Var, Any], Any] = {}

    def put(self, variables: Iterable[Var], arrays: Iterable[Any]) -> None:
        """Adds values, in the dtypes in which they were traced or in 16 bits."""
        for v, x in zip(variables, arrays, strict=True):
            is_rounded = v in self._rounded_at_once
            self._stored[v] = astype(x, self._low) if is_rounded else x

    def stored(self, atoms: Iterable[Atom]) -> list[Any]:
        """Returns values as they were put."""
        return [v.val if isinstance(v, Literal) else self._stored[v] for v in atoms]

    def traced(self, atoms: Iterable[Atom]) -> list[Any]:
        """Returns values in the dtypes in which they were traced."""
        return [self._cast(v, dtype_in(v)) for v in atoms]

    def rounded(self, atoms: Iterable[Atom]) -> list[Any]:
        """Returns values in 16 bits."""
        return [self._cast(v, self._low) for v in atoms]

    def _cast(self, v: Atom, dtype: Any) -> Any:
        if isinstance(v, Literal):
            return astype(v.val, dtype)
        if (v, dtype) not in self._casts:
            self._casts[v, dtype] = astype(self._stored[v], dtype)
        return self._casts[v, dtype]


class _Narrow:
    """Runs programs with their products in 16 bits.

    JAX caches the trace of a function by the function's identity. To trace a program
    once that many call, this object makes one function of it.

    Attributes:
      low: float16 or bfloat16.
    """

    def __init__(self, low: np.dtype):
        self.low = low
        self._functions: dict[Hashable, Function] = {}

    def function(
        self,
        program: AnyJaxpr,
        of_results: tuple[Readers, ...],
        of_arguments: tuple[bool, ...],
    ) -> Function:
        """Returns a program as a function that gives values as they are stored.

        Args:
          program: the program.
          of_results: the readers of each result.
          of_arguments: whether each argument depends on a product.
        """
        eqns, ins, outs, consts = flat(program)
        readers = readers_in(program, of_results)
        active = active_in(program, of_arguments)
        # Whoever passes an argument has rounded it already, if it is to be.
        rounded = {
            v
            for v in active.intersection(readers).difference(ins)
            if PRODUCT <= readers[v] <= PRODUCT | SUM
        }

        def run(args):
            values = _Values(self.low, rounded)
            values.put(consts, consts.values())
            values.put(ins, args)
            for eqn in eqns:
                of_eqn = [readers.get(v, NONE) for v in eqn.outvars]
                with at_line_of(eqn):
                    results = self._results(eqn, values, of_eqn, active)
                    values.put(eqn.outvars, results)
            return values.stored(outs)

        return run

    def _results(
        self,
        eqn: JaxprEqn,
        values: _Values,
        readers: Sequence[Readers],
        active: Collection[Var],
    ) -> list[Any]:
        """Computes the results of an equation, which have these `readers`."""
        name = name_of(eqn)
        operands = eqn.invars
        if is_narrowed(eqn):
            others = values.traced(operands[2:])
            return _product(eqn, [*values.rounded(operands[:2]), *others])
        if has_narrowed(eqn):
            with eqn.ctx.manager:
                return self._enter(eqn, values, readers, active)
        if name == "optimization_barrier":
            return bind(eqn, values.stored(operands))
        if name in MOVES | SENDS:
            to_products = name in SENDS and readers == [PRODUCT]
            first = operands[:1]
            moved = values.rounded(first) if to_products else values.stored(first)
            if name in SPREADS and dtypes_in(moved) == [self.low]:
                return _spread(eqn, values.traced(operands), self.low)
            return bind(eqn, moved + values.traced(operands[1:]))
        return bind(eqn, values.traced(operands))

    def _enter(
        self,
        eqn: JaxprEqn,
        values: _Values,
        readers: Sequence[Readers],
        active: Collection[Var],
    ) -> list[Any]:
        """Runs an equation with the products in its programs in 16 bits."""
        of_results = _readers_of_inner_results(eqn, readers)
        of_arguments = _arguments_active(eqn, active)
        functions = []
        for program in result_programs(eqn):
            key = id(program), of_results, of_arguments
            if key not in self._functions:
                function = self.function(program, of_results, of_arguments)
                self._functions[key] = traced_once(eqn, function)
            functions.append(self._functions[key])
        carried = carry_positions(eqn)
        operands = []
        for n, v in enumerate(eqn.invars):
            is_inside = n >= first_inner_operand(eqn) and n not in carried
            operands += values.stored([v]) if is_inside else values.traced([v])
        if name_of(eqn) in ("custom_jvp_call", "custom_vjp_call"):
            return self._with_rule(eqn, operands, *functions)
        return enter(eqn, operands, functions)

    def _with_rule(
        self, eqn: JaxprEqn, operands: Arrays, function: Function
    ) -> list[Any]:
        """Runs a function with a custom derivative.

        `function` gives its results, and `original`, as the user wrote it, the rule.
        """
        dtypes = dtypes_in(jax.eval_shape(function, operands))

        def original(*operands):
            traced = astypes(operands, dtypes_in(eqn.invars))
            return astypes(bind(eqn, traced), dtypes)

        is_jvp = name_of(eqn) == "custom_jvp_call"
        run = custom_jvp if is_jvp else custom_vjp
        return run(function, original, operands, self._of_function)

    def _of_function(self, fun: Callable[..., Any]) -> Callable[..., Any]:
        """Makes a function of arrays compute its products in 16 bits."""

        def narrowed(*args):
            with AUTOCAST_DTYPE(self.low):
                trace = jax.make_jaxpr(fun, return_shape=True)
                program, shapes = trace(*args)
            results = narrow(program, self.low)(jax.tree.leaves(args))
            return jax.tree.unflatten(jax.tree.structure(shapes), results)

        return narrowed


def _product(eqn: JaxprEqn, operands: Arrays) -> list[Any]:
    """Computes a product in the dtype of its operands.

    The precision of the equation was meant for float32 operands, so it is dropped.
    """
    params = {
        **eqn.params,
        "precision": None,
        "preferred_element_type": dtype_in(operands[0]),
    }
    return bind(eqn.replace(params=params), operands)


def _spread(eqn: JaxprEqn, operands: Arrays, low: np.dtype) -> list[Any]:
    """Spreads a float32 array over devices in 16 bits and its tangent in float32.

    The cotangent is then summed over the devices in float32.
    """

    @jax.custom_jvp
    def spread(x):
        return bind(eqn, [astype(x, low)])

    @spread.defjvp
    def spread_jvp(primals, tangents):
        low_tangents = [astype(tangent, low) for tangent in bind(eqn, tangents)]
        return spread(*primals), low_tangents

    return spread(*operands)
