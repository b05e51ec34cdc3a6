"""Runs a program on pairs, one equation after the other, and fills in the table.

Equations run one by one, each compiled for itself: in a compiled step, XLA fuses some
of them and keeps digits in between. Python runs loops and branches, so each iteration
is looked at, and the numbers of the worst one stay. Which branch runs and when a loop
ends is decided by the values as the program computes them.
"""

import functools
import math
import operator
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Literal, Var

from optax_lossscale._autocast.autocast import SCOPE
from optax_lossscale._diagnosis.equation import (
    compiled,
    computed_alone,
    is_compared,
    key_of,
    widened,
)
from optax_lossscale._diagnosis.table import (
    INFINITE,
    OFF,
    UNDEFINED,
    Fault,
    Figures,
    Origins,
    Row,
    compare,
)
from optax_lossscale._programs.flat import Flat, flat
from optax_lossscale._programs.lines import line_of
from optax_lossscale._programs.operations import HOLDERS
from optax_lossscale._programs.values import Array, dtype_in, is_inexact, shape_in
from optax_lossscale._programs.versions import (
    AnyJaxpr,
    is_ref,
    name_of,
    open_jaxpr,
    scopes_of,
)
from optax_lossscale._programs.walk import (
    carry_positions,
    first_inner_operand,
    programs_in,
)

MOST_ITERATIONS = 1000
"""How many iterations of a `while` are compared; the others run as they are."""

# The scopes that JAX and `autocast` add. A scope with an arrow is the formula of an
# `einsum`.
_ADDED_SCOPES = rf"{re.escape(SCOPE)}|rematted_computation|jit\(.*\)|.*->.*"

_IDENTITIES = frozenset(
    ["copy", "name", "optimization_barrier", "pvary", "reshard", "sharding_constraint"]
)
"""Return their operands, each its own."""


class Value(NamedTuple):
    """A value of the program.

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
    kinds = compare(x, true).faults if is_inexact(x) else 0
    fault = Fault(kinds) if kinds else None
    return Value(x, true, row, fault=fault, is_scaled=is_scaled)


class Run(NamedTuple):
    """What all programs of a diagnosis share.

    Attributes:
      table: a row for each equation, in the order of the program.
      origins: which rows made the operands of which.
      functions: the compiled equations.
    """

    table: list[Row]
    origins: Origins
    functions: dict[Any, Any]


Iterations = tuple[int, ...]
"""The iteration of each loop around a program, the outermost first."""


class Program:
    """A program at one place of the whole, with a row for each of its equations."""

    def __init__(self, program: Flat, run: Run, outer: Row | None = None):
        """Prepares a program.

        Args:
          program: the program.
          run: gets the rows of its equations.
          outer: the row of the equation that holds it, if one does.
        """
        self._ins = program.ins
        self._constants = {v: value_of(x) for v, x in program.consts.items()}
        self._outs = [self._variable(atom) for atom in program.outs]
        self._steps = []
        for eqn in program.eqns:
            operands = [self._variable(atom) for atom in eqn.invars]
            self._steps.append(Step(eqn, operands, run, outer))
        needed = set(self._outs)
        for step in reversed(self._steps):
            step.frees = {*step.operands, *step.eqn.outvars} - needed
            needed |= step.frees

    def __call__(
        self, arguments: Sequence[Value], iterations: Iterations = ()
    ) -> list[Value]:
        """Runs the program; returns its results."""
        env = {**self._constants, **dict(zip(self._ins, arguments, strict=True))}
        for step in self._steps:
            operands = [env[v] for v in step.operands]
            results = step(operands, iterations)
            env.update(zip(step.eqn.outvars, results, strict=True))
            for v in step.frees:
                del env[v]
        return [env[v] for v in self._outs]

    def _variable(self, atom: Var | Literal) -> Var:
        """Returns a variable itself; makes a constant of a literal."""
        if isinstance(atom, Var):
            return atom
        v = Var(atom.aval)
        self._constants[v] = value_of(np.asarray(atom.val, dtype_in(atom)))
        return v


class Step:
    """An equation at one place of a program, prepared for all of its iterations.

    Attributes:
      eqn: the equation.
      operands: the variables that it reads; some are constants, made of literals.
      frees: the variables that are not read after it.
    """

    def __init__(self, eqn: JaxprEqn, operands: list[Var], run: Run, outer: Row | None):
        if any(map(is_ref, eqn.outvars)):
            raise TypeError(
                "diagnose cannot follow values through a jax.Ref, such as the one "
                f"made at {line_of(eqn)}. Compute new arrays in the loss function "
                "instead of changing one in place"
            )
        self.eqn = eqn
        self.operands = operands
        self.frees: set[Var] = set()
        self._origins = run.origins
        self._row = _row_of(eqn, outer)
        self._function = self._function_of(run)

    def __call__(
        self, operands: Sequence[Value], iterations: Iterations
    ) -> Sequence[Value]:
        """Computes the results of the equation."""
        return self._function(operands, iterations)

    def _function_of(self, run: Run) -> Callable[..., Sequence[Value]]:
        eqn = self.eqn
        name = name_of(eqn)
        if name in _IDENTITIES:
            return lambda operands, iterations: operands
        programs = [
            Program(flat(program), run, self._row) for program in _on_pairs(eqn)
        ]
        if programs and name in _LOOPS:
            return _LOOPS[name](eqn, programs)
        if programs:
            return programs[0]
        if any(map(is_inexact, eqn.outvars)):
            run.table.append(self._row)
        key = key_of(eqn)
        if key not in run.functions:
            run.functions[key] = compiled(eqn)
        self._compiled = run.functions[key]
        return self._compute

    def _compute(
        self, operands: Sequence[Value], iterations: Iterations
    ) -> list[Value]:
        """Computes the equation itself and compares its results."""
        lows = [x.low for x in operands]
        low_results, true_results = self._compiled(lows, [x.true for x in operands])
        is_scaled = any(x.is_scaled for x in operands)
        self._row.is_backward |= is_scaled
        self._origins.read[self._row].update(x.row for x in operands if x.row)
        results = []
        for n, low in enumerate(low_results):
            if not is_inexact(low):
                results.append(Value(low, low, is_scaled=is_scaled))
                continue
            true = true_results[n]
            figures = compare(low, true)
            error_before = max((x.error for x in operands), default=0.0)
            self._row.note(figures, error_before, iterations)
            fault = None
            if figures.faults:
                before = [x.fault for x in operands if x.fault]
                fault = Fault(
                    figures.faults,
                    self._row,
                    figures.error,
                    error_before,
                    iterations,
                    before=[x for x in before if _leads_to(x.kinds, figures.faults)],
                )
                if _is_new(fault, before):
                    self._explain(fault, figures, lows, low_results, n)
                    self._origins.faults.append(fault)
            results.append(Value(low, true, self._row, figures.error, fault, is_scaled))
        return results

    def _explain(
        self,
        fault: Fault,
        figures: Figures,
        lows: Sequence[Array],
        low_results: Sequence[Array],
        position: int,
    ) -> None:
        """Says in a word why a result is wrong though its operands are right."""
        fault.cause = "overflows"
        if fault.kinds != OFF:
            return
        alone = computed_alone(self.eqn, lows, low_results)[position]
        own = compare(low_results[position], alone)
        if fault.error == math.inf:
            fault.is_inherited = own.error < math.inf
        elif own.distance > figures.distance / 2:
            fault.cause = "vanishes" if figures.lost_error > 0.5 else "rounds"
        elif fault.error > 2 * fault.error_before:
            fault.cause = "cancels"
            fault.is_inherited = True
        else:
            fault.cause = "rounds"


def _leads_to(kinds: int, result: int) -> bool:
    """Whether what is wrong with an operand may be what is wrong with a result."""
    return bool(kinds & result) or (kinds == INFINITE and result & UNDEFINED != 0)


def _is_new(fault: Fault, before: Sequence[Fault]) -> bool:
    """Whether something is wrong with a value that is not wrong with an operand."""
    new = fault.kinds
    for x in before:
        new &= ~x.kinds
    return new != 0


def _row_of(eqn: JaxprEqn, outer: Row | None) -> Row:
    """Makes the row of an equation, with the line and layer of the one around it.

    Its layer is JAX's name stack without what JAX and `autocast` add. For example,
    `transpose(jvp(ols.autocast))/jvp(block_3)` becomes `block_3`.
    """
    scopes = [outer.layer] if outer and outer.layer else []
    for scope in scopes_of(eqn):
        if not re.fullmatch(_ADDED_SCOPES, scope):
            scopes.append(scope)
    dtypes = [dtype_in(v) for v in eqn.outvars if is_inexact(v)]
    return Row(
        line=line_of(eqn, outer.line if outer else ""),
        layer="/".join(scopes),
        operation=name_of(eqn),
        dtype=dtypes[0] if dtypes else None,
        is_compared=is_compared(eqn),
    )


def _on_pairs(eqn: JaxprEqn) -> Sequence[AnyJaxpr]:
    """Returns the programs in an equation that run on pairs.

    These are those of loops, of branches, and of calls that pass on all operands. A
    `while` with a condition for each example of a `vmap` runs as it is.
    """
    name = name_of(eqn)
    has_floats = any(map(is_inexact, [*eqn.invars, *eqn.outvars]))
    if name not in HOLDERS or name == "shard_map" or not has_floats:
        return []
    programs = programs_in(eqn)
    first = open_jaxpr(programs[0])
    if name == "cond":
        return programs
    if name == "scan":
        return programs if eqn.params["length"] else []
    if name == "while":
        return [] if shape_in(first.outvars[0]) else programs
    is_call = len(first.invars) == len(eqn.invars)
    return [] if not is_call or any(map(is_ref, first.invars)) else programs


# --- Loops and branches: functions of an equation and of the programs in it ---


def _cond(eqn: JaxprEqn, branches: Sequence[Program]) -> Callable[..., list[Value]]:
    def run(operands, iterations):
        index, *operands = operands
        number = int(np.clip(index.low, 0, len(branches) - 1))
        return branches[number](operands, iterations)

    return run


def _scan(eqn: JaxprEqn, programs: Sequence[Program]) -> Callable[..., list[Value]]:
    (body,) = programs
    carried = carry_positions(eqn)
    length = eqn.params["length"]
    order = range(length)[::-1] if eqn.params["reverse"] else range(length)

    def run(operands, iterations):
        constants = operands[: carried.start]
        carry = operands[carried.start : carried.stop]
        stacks = [_slices(x) for x in operands[carried.stop :]]
        rows: list[Any] = [None] * length
        for n in order:
            arguments = [*constants, *carry, *(slices[n] for slices in stacks)]
            results = body(arguments, (*iterations, n))
            carry = results[: len(carried)]
            rows[n] = results[len(carried) :]
        return [*carry, *map(_stacked, zip(*rows, strict=True))]

    return run


def _while(eqn: JaxprEqn, programs: Sequence[Program]) -> Callable[..., list[Value]]:
    condition, body = programs
    as_it_is = compiled(eqn)
    n_condition = first_inner_operand(eqn)
    n_constants = carry_positions(eqn).start

    def run(operands, iterations):
        carry = operands[n_constants:]
        for n in range(MOST_ITERATIONS):
            (goes_on,) = condition([*operands[:n_condition], *carry], (*iterations, n))
            if not goes_on.low:
                return carry
            arguments = [*operands[n_condition:n_constants], *carry]
            carry = body(arguments, (*iterations, n))
        lows = [x.low for x in (*operands[:n_constants], *carry)]
        pairs = zip(*as_it_is(lows, lows), strict=True)
        return [
            x._replace(low=low, true=true)
            for x, (low, true) in zip(carry, pairs, strict=True)
        ]

    return run


_LOOPS = {"cond": _cond, "scan": _scan, "while": _while}


def _slices(stack: Value) -> Sequence[Value]:
    """Returns the values that a loop reads one after the other."""
    if stack.slices:
        return stack.slices
    low = _on_host(stack.low)
    true = _on_host(stack.true)
    return [stack._replace(low=low[n], true=true[n]) for n in range(len(low))]


def _stacked(slices: Sequence[Value]) -> Value:
    """Stacks the values of all iterations, and keeps them."""
    faults = [x.fault for x in slices if x.fault]
    kinds = functools.reduce(operator.or_, (x.kinds for x in faults), 0)
    return Value(
        low=_stack([x.low for x in slices]),
        true=_stack([x.true for x in slices]),
        row=slices[-1].row,
        error=max(x.error for x in slices),
        fault=Fault(kinds, before=faults) if faults else None,
        is_scaled=any(x.is_scaled for x in slices),
        slices=slices,
    )


def _on_host(x: Array) -> Array:
    """Copies an array to the host, unless it holds random keys."""
    return np.asarray(x) if isinstance(x.dtype, np.dtype) else x


def _stack(arrays: Sequence[Array]) -> Array:
    xp = np if isinstance(arrays[0].dtype, np.dtype) else jnp
    return xp.stack(arrays)
