"""A program on pairs: its equations run one after the other and fill in the table.

Each equation is compiled for itself. In a compiled step, XLA fuses some of them and
keeps digits in between, so that step may be a little nearer to float32.
"""

import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import JaxprEqn, Literal, Var

from optax_lossscale._autocast.autocast import SCOPE
from optax_lossscale._diagnosis import loops
from optax_lossscale._diagnosis.equation import (
    Arrays,
    Value,
    compiled,
    in_float32,
    is_compared,
    key_of,
    value_of,
    widened,
)
from optax_lossscale._diagnosis.figures import (
    INFINITE,
    OFF,
    UNDEFINED,
    Figures,
    compare,
)
from optax_lossscale._diagnosis.table import Fault, Iterations, Origins, Row
from optax_lossscale._programs.flat import Flat, flat
from optax_lossscale._programs.lines import line_of
from optax_lossscale._programs.operations import HOLDERS
from optax_lossscale._programs.values import dtype_in, is_inexact, shape_in
from optax_lossscale._programs.versions import (
    AnyJaxpr,
    is_ref,
    name_of,
    open_jaxpr,
    scopes_of,
)
from optax_lossscale._programs.walk import programs_in

# The scopes that JAX and `autocast` add. A scope with an arrow is the formula of an
# `einsum`.
_ADDED_SCOPES = rf"{re.escape(SCOPE)}|rematted_computation|jit\(.*\)|.*->.*"

# Return their operands.
_IDENTITIES = frozenset(
    ["copy", "name", "optimization_barrier", "pvary", "reshard", "sharding_constraint"]
)

_LOOPS = {"cond": loops.cond, "scan": loops.scan}


class Run(NamedTuple):
    """What all programs of a diagnosis share.

    Attributes:
      table: the rows of all equations, in the order of the program.
      origins: where values come from.
      functions: the compiled equations, by `key_of`.
    """

    table: list[Row]
    origins: Origins
    functions: dict[Any, Any]


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
            self._steps.append((operands, _function_of(eqn, run, outer), eqn.outvars))
        # Values are freed after the last equation that reads them.
        self._frees: list[set[Var]] = []
        needed = set(self._outs)
        for operands, _, results in reversed(self._steps):
            frees = {*operands, *results} - needed
            self._frees.insert(0, frees)
            needed |= frees

    def __call__(
        self, arguments: Sequence[Value], iterations: Iterations = ()
    ) -> list[Value]:
        """Runs the program; returns its results."""
        env = {**self._constants, **dict(zip(self._ins, arguments, strict=True))}
        for step, frees in zip(self._steps, self._frees, strict=True):
            operands, function, results = step
            values = function([env[v] for v in operands], iterations)
            env.update(zip(results, values, strict=True))
            for v in frees:
                del env[v]
        return [env[v] for v in self._outs]

    def _variable(self, atom: Var | Literal) -> Var:
        """Returns a variable itself; makes a constant of a literal."""
        if isinstance(atom, Var):
            return atom
        v = Var(atom.aval)
        self._constants[v] = value_of(np.asarray(atom.val, dtype_in(atom)))
        return v


def _function_of(eqn: JaxprEqn, run: Run, outer: Row | None) -> loops.Function:
    """Makes the function that runs an equation at one place of the program."""
    if any(map(is_ref, eqn.outvars)):
        raise TypeError(
            "diagnose cannot follow values through a jax.Ref, such as the one made at "
            f"{line_of(eqn)}. Compute new arrays in the loss function instead of "
            "changing one in place"
        )
    name = name_of(eqn)
    if name in _IDENTITIES:
        return lambda operands, iterations: operands
    row = _row_of(eqn, outer)
    programs = [Program(flat(program), run, row) for program in _on_pairs(eqn)]
    if not programs:
        return _Equation(eqn, run, row)
    if name == "while":
        return loops.while_loop(eqn, programs, _Equation(eqn, run, row))
    return _LOOPS[name](eqn, programs) if name in _LOOPS else programs[0]


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
    return programs if is_call and not any(map(is_ref, first.invars)) else []


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


class _Equation:
    """An equation that computes itself on pairs, and compares its results."""

    def __init__(self, eqn: JaxprEqn, run: Run, row: Row):
        self._eqn = eqn
        self._row = row
        self._origins = run.origins
        if row.dtype is not None:
            run.table.append(row)
        key = key_of(eqn)
        if key not in run.functions:
            run.functions[key] = compiled(eqn)
        self._function = run.functions[key]

    def __call__(
        self, operands: Sequence[Value], iterations: Iterations
    ) -> list[Value]:
        """Computes the results."""
        row = self._row
        lows = [x.low for x in operands]
        low_results, true_results = self._function(lows, [x.true for x in operands])
        is_scaled = any(x.is_scaled for x in operands)
        error_before = max((x.error for x in operands), default=0.0)
        row.is_backward |= is_scaled
        self._origins.read[row].update(x.row for x in operands if x.row)
        results = []
        for n, (low, true) in enumerate(zip(low_results, true_results, strict=True)):
            if not is_inexact(low):
                results.append(Value(low, low, is_scaled=is_scaled))
                continue
            figures = compare(low, true)
            row.note(figures, error_before, iterations)
            fault = None
            if figures.wrong:
                faults = [x.fault for x in operands if x.fault]
                fault = Fault(
                    figures.wrong,
                    [x for x in faults if _leads_to(x, figures.wrong)],
                    row,
                    error_before,
                    figures.error,
                    iterations,
                    new=figures.wrong & ~_wrong_in(faults),
                )
                if fault.new:
                    self._explain(fault, figures, lows, low_results, n)
            value = Value(low, true, row, figures.error, fault, is_scaled)
            results.append(value)
        return results

    def _explain(
        self,
        fault: Fault,
        figures: Figures,
        lows: Arrays,
        low_results: Arrays,
        position: int,
    ) -> None:
        """Says in a word why a result is wrong in a way in which no operand is."""
        if fault.new & (INFINITE | UNDEFINED):
            fault.cause = "overflows"
            self._origins.faults.append(fault)
            return
        # What float32 makes of the operands as they are, right but for some digits.
        wide = [widened(x) for x in lows]
        alone = in_float32(self._eqn, lows, wide, low_results)[position]
        own = compare(low_results[position], alone)
        if not fault.new & OFF and not own.overflowed:
            return  # It computes right, from an operand that is off.
        self._origins.faults.append(fault)
        if fault.error == math.inf:
            fault.cause = "overflows"
            fault.is_inherited = not own.overflowed
        elif own.distance > figures.distance / 2:
            fault.cause = "vanishes" if figures.lost_error > 0.5 else "rounds"
        elif fault.error > 2 * fault.error_before:
            fault.cause = "cancels"
            fault.is_inherited = True
        else:
            fault.cause = "rounds"


def _wrong_in(faults: Sequence[Fault]) -> int:
    """Returns what is wrong with any of some values."""
    wrong = 0
    for fault in faults:
        wrong |= fault.wrong
    return wrong


def _leads_to(fault: Fault, wrong: int) -> bool:
    """Whether what is wrong with an operand may be what is wrong with a result."""
    makes_nan = bool(fault.wrong & INFINITE and wrong & UNDEFINED)
    return makes_nan or bool(fault.wrong & wrong)
