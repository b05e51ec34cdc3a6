"""Decides what the backward pass keeps: the second of `autocast`'s two passes.

A value is stored, or else computed again by whoever reads it. This changes no number,
and the pass knows nothing of 16 bits: it serves any program.

Stored are

- the results of an equation that is not cheap, such as a product, and
- a cheap value that several equations, or an equation and the results, depend on,
  unless it takes at least as many bytes as the stored values that it is computed from.

Between the stored values and a reader lie the equations of the reader's *cone*. A cone
that computes floats runs under `jax.checkpoint`. So for the backward pass it keeps the
stored values that it reads, a few reductions (see `_policy`), and nothing else.
"""

import math
from collections import ChainMap
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn, Literal, Var
from jax.extend.source_info_util import NameStack

from optax_lossscale._programs.cached import cached_by_program
from optax_lossscale._programs.enter import Function, enter, is_entered, traced_once
from optax_lossscale._programs.flat import flat
from optax_lossscale._programs.lines import at_line_of
from optax_lossscale._programs.operations import (
    CHEAP,
    HOLDERS,
    REARRANGES,
    REDUCES,
)
from optax_lossscale._programs.products import holds_product, is_product
from optax_lossscale._programs.values import (
    dtype_in,
    is_inexact,
    lengths_of,
    size_of,
    variables,
)
from optax_lossscale._programs.versions import AnyJaxpr, bind, name_of, open_jaxpr
from optax_lossscale._programs.walk import (
    has_shardings,
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
    # A `dot_general` that is no product multiplies each element once.
    if name_of(eqn) not in CHEAP | {"dot_general"} or eqn.effects:
        return False
    if name_of(eqn) in HOLDERS:
        return all(map(_is_cheap_program, programs_in(eqn)))
    return not is_product(eqn)


@cached_by_program
def _is_cheap_program(program: AnyJaxpr) -> bool:
    return all(map(is_cheap, open_jaxpr(program).eqns))


def stored_in(eqns: Sequence[JaxprEqn], outs: Iterable[Any]) -> set[Var]:
    """Returns the values of a program with results `outs` that are stored."""
    sources = sources_of_large(eqns)
    stored: set[Var] = set()
    # Which equations, by position, depend on each value through values that are not
    # stored, and whether the results do
    readers: dict[Var, set[int | str]] = {v: {"results"} for v in variables(outs)}
    for n, eqn in reversed(list(enumerate(eqns))):
        of_eqn: set[int | str] = set()
        of_eqn.update(*(readers.get(v, ()) for v in eqn.outvars))
        is_large = sources.keys() >= set(eqn.outvars)
        is_shared = len(of_eqn) > 1
        if not is_cheap(eqn) or (is_shared and not is_large):
            stored.update(eqn.outvars)
            of_eqn = {n}
        for v in variables(eqn.invars):
            readers.setdefault(v, set()).update(of_eqn)
    return stored


def sources_of_large(eqns: Iterable[JaxprEqn]) -> dict[Var, set[Var]]:
    """Returns the values that take as many bytes as their sources, or more, with these.

    The sources of a cheap value are those of its operands. But an operand that takes
    fewer bytes than its sources is a source itself, and so is one that is not cheap.
    """
    sources: dict[Var, set[Var]] = {}
    for eqn in eqns:
        if not is_cheap(eqn):
            continue
        of_eqn: set[Var] = set()
        of_eqn.update(*(sources.get(v, {v}) for v in variables(eqn.invars)))
        if _count_bytes(of_eqn) <= _count_bytes(eqn.outvars):
            sources.update(dict.fromkeys(eqn.outvars, of_eqn))
    return sources


def with_small_names(eqns: Sequence[JaxprEqn]) -> list[JaxprEqn]:
    """Moves each name from a value to its sources, if these take fewer bytes.

    A policy of `jax.checkpoint` saves what has a name. If it is a product plus a bias
    in float32, what is saved is then the product in 16 bits.
    """
    if "name" not in map(name_of, eqns):
        return list(eqns)
    sources = sources_of_large(eqns)
    producers = producers_of(eqns)
    moved = []
    for eqn in eqns:
        named = variables(eqn.invars) if name_of(eqn) == "name" else []
        of_named = [sources.get(v, {v}) for v in named]
        if not named or _count_bytes(*of_named) == _count_bytes(named):
            moved.append(eqn)
            continue
        new = {v: v for v in of_named[0]}
        for v in new.keys() & producers.keys():
            new[v] = Var(v.aval)
            moved.append(eqn.replace(invars=[v], outvars=[new[v]]))
        for cheap in cone_of(named, new, producers).eqns:
            invars = [v if isinstance(v, Literal) else new[v] for v in cheap.invars]
            for v in cheap.outvars:
                new[v] = eqn.outvars[0] if v in named else Var(v.aval)
            outvars = [new[v] for v in cheap.outvars]
            moved.append(cheap.replace(invars=invars, outvars=outvars))
    return moved


def _count_bytes(values: Iterable[Var]) -> int:
    return sum(size_of(v.aval) * getattr(dtype_in(v), "itemsize", 8) for v in values)


# --- The program as a function ---

Producers = Mapping[Var, tuple[int, JaxprEqn]]
"""The equation that computes each value, and its position in the program."""


class _Cone(NamedTuple):
    """Cheap equations, as a function from a list of arrays to a list of arrays.

    Attributes:
      eqns: the equations, in the order of the program.
      inputs: the stored values that they read.
      targets: the values that are computed.
    """

    eqns: list[JaxprEqn]
    inputs: list[Var]
    targets: list[Var]

    def __call__(self, arrays: Sequence[Any]) -> list[Any]:
        values = dict(zip(self.inputs, arrays, strict=True))
        for eqn in self.eqns:
            operands = _read(eqn.invars, values)
            with at_line_of(eqn):
                values.update(zip(eqn.outvars, bind(eqn, operands), strict=True))
        return _read(self.targets, values)

    def without_scopes(self) -> "_Cone":
        """Returns the cone without the names of the layers that its equations are in."""
        no_scope = NameStack()
        eqns = [
            eqn.replace(source_info=eqn.source_info.replace(name_stack=no_scope))
            for eqn in self.eqns
        ]
        return self._replace(eqns=eqns)

    def key(self) -> tuple[Any, ...]:
        """Returns what is equal for cones that compute the same, by the same lines.

        It may not be hashable, because it holds the parameters of the operations.
        """
        values = [*self.inputs, *(v for eqn in self.eqns for v in eqn.outvars)]
        position = {v: n for n, v in enumerate(values)}

        def key_of(v):
            if isinstance(v, Literal):
                return v.aval, np.asarray(v.val).tobytes()  # tells 0.0 from -0.0
            return position[v]

        return (
            tuple(v.aval for v in self.inputs),
            tuple(map(key_of, self.targets)),
            *(
                (
                    eqn.primitive,
                    tuple(eqn.params.items()),
                    eqn.ctx,
                    eqn.source_info.traceback,
                    tuple(map(key_of, eqn.invars)),
                )
                for eqn in self.eqns
            ),
        )


def producers_of(eqns: Iterable[JaxprEqn]) -> Producers:
    """Returns the producer of each value."""
    return {v: (n, eqn) for n, eqn in enumerate(eqns) for v in eqn.outvars}


def cone_of(targets: list[Var], values: Collection[Var], producers: Producers) -> _Cone:
    """Returns the equations between stored `values` and others, the `targets`."""
    eqns: dict[int, JaxprEqn] = {}
    inputs: dict[Var, None] = {}
    unvisited = list(targets)
    while unvisited:
        v = unvisited.pop()
        if v in values:
            inputs[v] = None
            continue
        position, eqn = producers[v]
        if position not in eqns:
            eqns[position] = eqn
            unvisited += variables(eqn.invars)
    return _Cone([eqns[n] for n in sorted(eqns)], list(inputs), targets)


def _read(atoms: Iterable[Any], values: Mapping[Var, Any]) -> list[Any]:
    return [v.val if isinstance(v, Literal) else values[v] for v in atoms]


class _Recompute:
    """Runs programs whose backward pass computes cheap values again.

    JAX caches the trace of a function by the function's identity. To trace a program
    once that many call, this object makes one function of it.
    """

    def __init__(self, prevent_cse: bool):
        self._prevent_cse = prevent_cse
        self._functions: dict[int, Function] = {}
        self._cones: dict[Hashable, Function] = {}

    def function(self, program: AnyJaxpr) -> Function:
        """Returns a program as a function of its arguments."""
        _, ins, outs, consts = flat(program)
        eqns = with_small_names(flat(program).eqns)
        stored = stored_in(eqns, outs)
        producers = producers_of(eqns)

        def run(args):
            values = dict(consts)
            values.update(zip(ins, args, strict=True))

            def read(atoms):  # and computes those that are not stored
                missing = [v for v in variables(atoms) if v not in values]
                computed = self._compute(
                    list(dict.fromkeys(missing)), values, producers
                )
                return _read(atoms, ChainMap(computed, values))

            for eqn in eqns:
                if not is_cheap(eqn):
                    results = self._results(eqn, read(eqn.invars))
                    values.update(zip(eqn.outvars, results, strict=True))
                elif not stored.isdisjoint(eqn.outvars):
                    cone = cone_of(eqn.outvars, values, producers)
                    results = read(eqn.outvars)
                    if _rounds(cone):
                        with at_line_of(eqn):
                            results = lax.optimization_barrier(results)
                    values.update(zip(eqn.outvars, results, strict=True))
            return read(outs)

        return run

    def _results(self, eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
        """Computes the results of an equation that is not cheap."""
        programs = result_programs(eqn)
        enters = is_entered(eqn) and name_of(eqn) != "while" and not has_shardings(eqn)
        with at_line_of(eqn):
            if not enters or not any(map(holds_product, programs)):
                return bind(eqn, operands)
            of_program = _as_it_is if name_of(eqn) == "remat2" else self.function
            functions = []
            for program in programs:
                if id(program) not in self._functions:
                    function = traced_once(eqn, of_program(program))
                    self._functions[id(program)] = function
                functions.append(self._functions[id(program)])
            with eqn.ctx.manager:
                return enter(eqn, operands, functions)

    def _compute(
        self, targets: list[Var], values: Mapping[Var, Any], producers: Producers
    ) -> dict[Var, Any]:
        """Computes values from stored ones, under a checkpoint if that is worth it."""
        checkpointed = []
        plain = []
        for v in targets:
            is_worth_it = _is_worth_recomputing(cone_of([v], values, producers).eqns)
            (checkpointed if is_worth_it else plain).append(v)
        cone = cone_of(plain, values, producers)
        results = dict(zip(plain, cone(_read(cone.inputs, values)), strict=True))
        if checkpointed:
            cone = cone_of(checkpointed, values, producers)
            with at_line_of(cone.eqns[-1]):
                arrays = self._checkpointed(cone)(_read(cone.inputs, values))
            results.update(zip(checkpointed, arrays, strict=True))
        return results

    def _checkpointed(self, cone: _Cone) -> Function:
        """Returns a cone under a checkpoint, which JAX traces once for layers alike.

        As a fused kernel, it is in the scope of its last equation alone.
        """
        cone = cone.without_scopes()
        key: Hashable = cone.key()
        try:
            hash(key)
        except TypeError:
            key = id(cone)  # which the checkpoint keeps alive
        if key not in self._cones:
            self._cones[key] = jax.checkpoint(
                cone.__call__, prevent_cse=self._prevent_cse, policy=_policy(cone)
            )
        return self._cones[key]


def _as_it_is(program: AnyJaxpr) -> Function:
    """Returns a program in a `jax.checkpoint` of the user, with its names moved."""
    eqns, ins, outs, consts = flat(program)
    cone = _Cone(with_small_names(eqns), [*consts, *ins], outs)
    return lambda args: cone([*consts.values(), *args])


def _rounds(cone: _Cone) -> bool:
    """Whether a barrier is to follow a cone whose result is stored.

    Else XLA would leave out a rounding for those who cast the value back, and store it
    in float32 as well.
    """
    is_cast = name_of(cone.eqns[-1]) == "convert_element_type"
    return is_cast and _is_worth_recomputing(cone.eqns)


def _is_worth_recomputing(eqns: Iterable[JaxprEqn]) -> bool:
    """Whether equations compute floats, in about one pass over memory.

    What is only rearranged, such as a weight that is cast, gains nothing, and a loop
    would cast it in each iteration. And each level of an associative scan, which pads
    between elements, is a pass of its own.
    """
    pads = [eqn.params.get("padding_config", ()) for eqn in eqns]
    if any(interior for config in pads for _, _, interior in config):
        return False
    return any(
        name_of(eqn) not in REARRANGES and any(map(is_inexact, eqn.outvars))
        for eqn in eqns
    )


def _policy(cone: _Cone) -> Callable[..., bool] | None:
    """Returns the policy by which a cone keeps reductions; None if it has none to keep.

    A reduction of many terms to few is kept, since to compute it again is another pass
    over memory. An exception are sums over rows, such as of a softmax, if the cone also
    returns an array as large as what they sum: the kernel that reads the rows sums them.
    """
    largest = max(size_of(v.aval) for v in cone.targets)

    def is_kept(primitive, *avals, **params):
        if primitive.name not in REDUCES:
            return False
        # JAX cannot save complex numbers by a policy.
        if not jnp.issubdtype(dtype_in(avals[0]), jnp.floating):
            return False
        lengths = lengths_of(avals[0])
        n_terms = math.prod(lengths[axis] for axis in params["axes"])
        is_over_rows = params["axes"] == (len(lengths) - 1,)
        is_fused = is_over_rows and largest >= math.prod(lengths)
        return n_terms >= _FEWEST_TERMS and not is_fused

    for eqn in cone.eqns:
        avals = [v.aval for v in eqn.invars]
        if is_kept(eqn.primitive, *avals, **eqn.params):
            return is_kept
    return None
