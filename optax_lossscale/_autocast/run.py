"""Runs a program as its plan says."""

import collections
import functools
import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name, checkpoint_policies

from optax_lossscale._arrays.contexts import AUTOCAST_DTYPE
from optax_lossscale._autocast.alike import common
from optax_lossscale._autocast.classify import Kind
from optax_lossscale._autocast.derivatives import custom_jvp, custom_vjp
from optax_lossscale._autocast.facts import Casting
from optax_lossscale._autocast.flat import Step
from optax_lossscale._autocast.outer import outer_product
from optax_lossscale._autocast.partition import Region
from optax_lossscale._autocast.plan import Plan, plan_for
from optax_lossscale._autocast.products import SCOPE, is_narrowed, is_outer_product
from optax_lossscale._autocast.uses import Use
from optax_lossscale._programs.enter import Callee, enter
from optax_lossscale._programs.operations import Is, traits
from optax_lossscale._programs.values import (
    dtype_in,
    dtypes_in,
    in_dtype,
    in_dtypes,
)
from optax_lossscale._programs.versions import bind

_KEEPS = checkpoint_policies.save_only_these_names(SCOPE)

CalleesOf = Callable[[Step], list[Callee]]
"""How to run each of the programs that a step holds."""

Islands = dict[Hashable, Callable[[list[Any]], list[Any]]]
"""What computes islands that are recomputed, by what those that are alike have in common."""


def run(plan: Plan, args: Sequence[Any]) -> list[Any]:
    """The results of a program for arguments in the dtypes that its plan takes."""
    shared = _shared(plan)
    traced: dict[int, Callee] = {}  # by the `id` of the plan
    islands: Islands = {}

    def callees_of(step: Step) -> list[Callee]:
        name = step.eqn.params.get("name", step.name)
        return [callee(inner, name) for inner in step.plans]

    def callee(plan: Plan, name: str) -> Callee:
        if id(plan) not in shared:
            return _by_plan(plan, callees_of, islands)
        if id(plan) not in traced:
            traced[id(plan)] = _traced_once(_by_plan(plan, callees_of, islands), name)
        return traced[id(plan)]

    return callee(plan, "").call(args)


def _shared(plan: Plan) -> set[int]:
    """The plans in a plan, by `id`, that several steps have: for a program that JAX shares."""
    uses = collections.Counter[int]()
    unread = [plan]
    while unread:
        for region in unread.pop().regions:
            for inner in itertools.chain(*(step.plans for step in region.steps)):
                uses[id(inner)] += 1
                if uses[id(inner)] == 1:
                    unread.append(inner)
    return {i for i, n in uses.items() if n > 1}


def _traced_once(callee: Callee, name: str) -> Callee:
    """A program that is called wherever it is run, and not copied."""

    def results(args):
        return callee.call(args)

    results.__name__ = name
    jitted = jax.jit(results)
    return callee._replace(call=lambda args: jitted(list(args)))


def _by_plan(plan: Plan, callees_of: CalleesOf, islands: Islands) -> Callee:
    """How to run a program as a plan says."""
    program = plan.program

    def call(args):
        values = dict(program.consts) | dict(zip(program.ins, args, strict=True))
        for i, literal in program.literals.items():
            values[i] = literal.val
        for region in plan.regions:
            operands = [values[i] for i in region.reads]
            stored = _stored(region, operands, plan, callees_of, islands)
            values |= zip(region.stores, stored, strict=True)
        return in_dtypes(plan.gives, [values[i] for i in program.outs])

    return Callee(plan.takes, plan.gives, call)


def _stored(
    region: Region,
    operands: list[Any],
    plan: Plan,
    callees_of: CalleesOf,
    islands: Islands,
) -> list[Any]:
    """What a region stores; recomputed in the backward pass, if it says so."""

    def computed(operands):
        return _computed(region, operands, plan, callees_of)

    if not region.is_recomputed:
        return computed(operands)
    function = computed
    alike = common(region, plan.program)
    if alike is not None:
        # JAX knows by the function that it has traced and differentiated it before.
        function = islands.setdefault((alike, plan.casting), computed)
    recomputed = jax.checkpoint(
        function,
        prevent_cse=plan.casting.prevent_cse,
        policy=_KEEPS if region.kept else None,  # a policy takes longer to trace
    )
    return recomputed(operands)


def _computed(
    region: Region, operands: list[Any], plan: Plan, callees_of: CalleesOf
) -> list[Any]:
    """What a region stores, from what it reads."""
    values = dict(zip(region.reads, operands, strict=True))
    literals = plan.program.literals

    # So that its gradients are summed in the dtype in which it is read
    @functools.cache
    def cast(i, dtype):
        return in_dtype(dtype, literals[i].val if i in literals else values[i])

    stored: dict[int, Any] = {}
    for step in region.steps:
        with step.at_its_line():
            taken = list(map(cast, step.ins, step.takes))
            results = _results(step, taken, plan.casting, callees_of)
            results = in_dtypes(step.gives, results)
            if not region.kept.isdisjoint(step.outs):
                results = [checkpoint_name(x, SCOPE) for x in results]
            values |= zip(step.outs, results, strict=True)
            for i in step.outs:
                if i in region.stores:
                    stored[i] = cast(i, region.stores[i])
    return [stored[i] for i in region.stores]


def _results(
    step: Step, operands: list[Any], casting: Casting, callees_of: CalleesOf
) -> list[Any]:
    """The results of a step."""
    eqn = step.eqn
    if is_narrowed(eqn):
        return _product(eqn, operands)
    callees = callees_of(step)
    rewritten = functools.partial(_rewritten, casting._replace(keeps=False))
    with eqn.ctx.manager:
        if is_outer_product(eqn):
            return [outer_product(eqn, *operands)]
        if Is.VJP in traits(eqn) and callees:
            return custom_vjp(step, operands, callees, rewritten)
        if Is.JVP in traits(eqn) and callees:
            return custom_jvp(step, operands, callees, rewritten)
        if callees:
            return enter(eqn, operands, callees)
        if Is.SPREADS in traits(eqn) and casting.dtype in step.gives:
            return _spread(step, operands)
    return bind(eqn, operands)


def _spread(step: Step, operands: list[Any]) -> list[Any]:
    """What is sent to many devices in 16 bits; the backward pass sums over them in float32."""

    @jax.custom_jvp
    def spread(*operands):
        return bind(step.eqn, in_dtypes(step.gives, operands))

    @spread.defjvp
    def tangents_of_spread(primals, tangents):
        wide = bind(step.eqn, tangents)
        return spread(*primals), in_dtypes(step.gives, wide)

    return spread(*operands)


def _rewritten(
    casting: Casting,
    fun: Callable[..., Any],
    args: Any,
    kinds: Sequence[Kind],
    uses: Sequence[Use],
    rest: Use,
) -> tuple[Any, list[Any]]:
    """The results of a function of arguments in the original's dtypes, rewritten; their dtypes."""
    with AUTOCAST_DTYPE(casting.dtype):
        jaxpr, shape = jax.make_jaxpr(fun, return_shape=True)(*args)
    arrays = jax.tree.leaves(args)
    plan = plan_for(jaxpr, arrays, kinds, casting, uses, rest)
    leaves, structure = jax.tree.flatten(shape)
    return jax.tree.unflatten(structure, run(plan, arrays)), dtypes_in(leaves)


def _product(eqn: Any, operands: Sequence[Any]) -> list[Any]:
    """A matrix product or convolution that takes and gives 16 bits."""
    params = eqn.params | {"precision": None}
    if params.get("preferred_element_type") is not None:
        params["preferred_element_type"] = dtype_in(operands[0])
    return bind(eqn.replace(params=params), operands)
