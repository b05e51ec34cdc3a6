"""Decides what the backward pass keeps: the second of `autocast`'s two passes.

A value is stored, or else computed again by whoever reads it. This changes no number,
and the pass knows nothing of 16 bits: it serves any program.

Stored are

- the results of an equation that is not cheap, such as a product, and
- a cheap value that several equations or results depend on, unless it takes at least
  as many bytes as the stored values that it is computed from.

Between the stored values and a reader lie the equations of the reader's *cone*. A cone
runs under `jax.checkpoint`, so for the backward pass it keeps the stored values that it
reads, and a few reductions (see `_keeps`), and nothing else.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import JaxprEqn, Literal, Var

from optax_lossscale._programs.cached import cached_by_program
from optax_lossscale._programs.enter import Function, enter, is_entered, traced_once
from optax_lossscale._programs.flat import flat
from optax_lossscale._programs.lines import at_line_of
from optax_lossscale._programs.operations import CHEAP, REARRANGES, REDUCES
from optax_lossscale._programs.products import holds_product, is_product
from optax_lossscale._programs.values import is_inexact, size_of, variables
from optax_lossscale._programs.versions import AnyJaxpr, bind, name_of, open_jaxpr
from optax_lossscale._programs.walk import (
    has_shardings,
    producers_in,
    programs_in,
    result_programs,
)

# A reduction of fewer terms is computed again. A heuristic, which bounds the memory:
# what is kept takes at most 1/32 of what it was computed from.
_FEWEST_TERMS = 32


def recompute(program: AnyJaxpr, prevent_cse: bool) -> Function:
    """Returns a program as a function that keeps less for its backward pass.

    Args:
      program: the program.
      prevent_cse: whether a barrier keeps the compiler from merging what is computed
        again with the forward pass, as in `jax.checkpoint`.
    """
    return _Recompute(prevent_cse).function(program)


# --- What is stored ---


def is_cheap(eqn: JaxprEqn) -> bool:
    """Whether an equation, and all in it, takes one pass over memory at most."""
    if eqn.effects or is_product(eqn):
        return False
    # A `dot_general` that is no product multiplies each element once.
    if name_of(eqn) not in CHEAP | {"dot_general"}:
        return False
    return all(map(_is_cheap_program, programs_in(eqn)))


@cached_by_program
def _is_cheap_program(program: AnyJaxpr) -> bool:
    return all(map(is_cheap, open_jaxpr(program).eqns))


@cached_by_program
def stored_in(program: AnyJaxpr) -> frozenset[Var]:
    """Returns the values of a flat program that are stored."""
    eqns, _, outs, _ = flat(program)
    is_larger = _take_more_bytes_than_sources(eqns)
    stored: set[Var] = set()
    # The equations, by position, and the results that depend on each value through
    # values that are not stored
    readers: dict[Var, set[int | str]] = {v: {"results"} for v in variables(outs)}
    for n, eqn in reversed(list(enumerate(eqns))):
        of_eqn: set[int | str] = set()
        of_eqn.update(*(readers.get(v, ()) for v in eqn.outvars))
        is_repeated = is_cheap(eqn) and (len(of_eqn) < 2 or is_larger.issuperset(eqn.outvars))
        if not is_repeated:
            stored.update(eqn.outvars)
            of_eqn = {n}
        for v in variables(eqn.invars):
            readers.setdefault(v, set()).update(of_eqn)
    return frozenset(stored)


def _take_more_bytes_than_sources(eqns: Sequence[JaxprEqn]) -> set[Var]:
    """Returns values that take as many bytes as what they are computed from, or more.

    A cheap value is computed from stored values, which are its sources. They are those
    of its operands, until these take more bytes than it does: then it is a source.
    """
    sources: dict[Var, set[Var]] = {}
    for eqn in eqns:
        # The rows that are looked up in a table are a small part of it.
        if not is_cheap(eqn) or name_of(eqn) == "gather":
            continue
        of_eqn: set[Var] = set()
        of_eqn.update(*(sources.get(v, {v}) for v in variables(eqn.invars)))
        if _count_bytes(of_eqn) <= _count_bytes(eqn.outvars):
            sources.update(dict.fromkeys(eqn.outvars, of_eqn))
    return set(sources)


def _count_bytes(values: Iterable[Var]) -> int:
    return sum(size_of(v.aval) * getattr(v.aval.dtype, "itemsize", 8) for v in values)


# --- The program as a function ---


class _Recompute:
    """Runs programs whose backward pass computes cheap values again.

    JAX caches the trace of a function by the function's identity. To trace a program
    once that many call, this object makes one function of it.
    """

    def __init__(self, prevent_cse: bool):
        self._prevent_cse = prevent_cse
        self._functions: dict[int, Function] = {}

    def function(self, program: AnyJaxpr) -> Function:
        """Returns a program as a function of its arguments."""
        eqns, ins, outs, consts = flat(program)
        stored = stored_in(program)
        producers = producers_in(eqns)

        def run(args):
            values = dict(consts)
            values.update(zip(ins, args, strict=True))

            def read(atoms):
                missing = [v for v in variables(atoms) if v not in values]
                computed = self._compute(dict.fromkeys(missing), values, producers)
                known = values | computed
                return [v.val if isinstance(v, Literal) else known[v] for v in atoms]

            for eqn in eqns:
                if is_cheap(eqn):
                    results = read([v for v in eqn.outvars if v in stored])
                else:
                    results = self._results(eqn, read(eqn.invars))
                values.update(zip(eqn.outvars, results))
            return read(outs)

        return run

    def _results(self, eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
        """Computes the results of an equation that is not cheap."""
        with at_line_of(eqn):
            if not _is_looked_into(eqn):
                return bind(eqn, operands)
            functions = []
            for program in result_programs(eqn):
                if id(program) not in self._functions:
                    function = traced_once(eqn, self.function(program))
                    self._functions[id(program)] = function
                functions.append(self._functions[id(program)])
            with eqn.ctx.manager:
                return enter(eqn, operands, functions)

    def _compute(
        self,
        targets: Collection[Var],
        values: Mapping[Var, Any],
        producers: Mapping[Var, JaxprEqn],
    ) -> dict[Var, Any]:
        """Computes values from stored ones, all together."""
        if not targets:
            return {}
        cone, inputs = _cone(targets, values, producers)

        def function(arrays):
            local = dict(zip(inputs, arrays, strict=True))
            for eqn in cone:
                operands = [
                    v.val if isinstance(v, Literal) else local[v] for v in eqn.invars
                ]
                with at_line_of(eqn):
                    local.update(zip(eqn.outvars, bind(eqn, operands), strict=True))
            return [local[v] for v in targets]

        if any(map(_computes_floats, cone)):
            function = jax.checkpoint(
                function, prevent_cse=self._prevent_cse, policy=_policy(cone, targets)
            )
        arrays = function([values[v] for v in inputs])
        return dict(zip(targets, arrays, strict=True))


def _cone(
    targets: Iterable[Var],
    values: Collection[Var],
    producers: Mapping[Var, JaxprEqn],
) -> tuple[list[JaxprEqn], list[Var]]:
    """Returns the equations between stored values and others, and these stored values.

    Args:
      targets: what is to be computed.
      values: what is stored.
      producers: the producers of all values, in the order of the program.
    """
    needed: dict[Var, None] = {}
    unvisited = list(targets)
    while unvisited:
        v = unvisited.pop()
        if v in needed:
            continue
        needed[v] = None
        if v not in values:
            unvisited += variables(producers[v].invars)
    inputs = [v for v in needed if v in values]
    cone = {id(eqn): eqn for v, eqn in producers.items() if v in needed and v not in values}
    return list(cone.values()), inputs


def _is_looked_into(eqn: JaxprEqn) -> bool:
    """Whether the backward pass through the programs in an equation is ours to decide.

    A `jax.checkpoint` is the user's, and a `while` has no backward pass.
    """
    if not is_entered(eqn) or name_of(eqn) in ("remat2", "while") or has_shardings(eqn):
        return False
    return any(map(holds_product, programs_in(eqn)))


def _computes_floats(eqn: JaxprEqn) -> bool:
    """Whether an equation computes floats, instead of only rearranging them."""
    return name_of(eqn) not in REARRANGES and any(map(is_inexact, eqn.outvars))


def _policy(
    cone: Iterable[JaxprEqn], targets: Iterable[Var]
) -> Callable[..., bool] | None:
    """Returns the policy by which a cone keeps reductions; None if it has none to keep.

    A reduction of many terms to few is kept, since to compute it again is another pass
    over memory. An exception are sums over rows, such as of a softmax, if the cone also
    returns an array as large as what they sum: the kernel that reads the rows sums them.
    """
    largest = max(size_of(v.aval) for v in targets)

    def is_kept(primitive, *avals, **params):
        if primitive.name not in REDUCES:
            return False
        operand = avals[0]
        n_terms = math.prod(operand.shape[axis] for axis in params["axes"])
        is_over_rows = params["axes"] == (operand.ndim - 1,)
        is_fused = is_over_rows and largest >= size_of(operand)
        return n_terms >= _FEWEST_TERMS and not is_fused

    for eqn in cone:
        avals = [v.aval for v in eqn.invars]
        if is_kept(eqn.primitive, *avals, **eqn.params):
            return is_kept
    return None
