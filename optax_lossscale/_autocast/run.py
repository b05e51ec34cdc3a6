"""Runs a program as its plan says."""

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name, checkpoint_policies

from optax_lossscale._arrays.contexts import AUTOCAST_DTYPE
from optax_lossscale._autocast.alike import in_common
from optax_lossscale._autocast.classify import Kind
from optax_lossscale._autocast.derivatives import custom_jvp, custom_vjp
from optax_lossscale._autocast.facts import Casting
from optax_lossscale._autocast.flat import Step
from optax_lossscale._autocast.outer import outer_product
from optax_lossscale._autocast.partition import Region
from optax_lossscale._autocast.plan import Plan, plan_for
from optax_lossscale._autocast.products import SCOPE, is_narrowed, is_outer_product
from optax_lossscale._programs.enter import Arrays, Callee, enter
from optax_lossscale._programs.operations import Is, traits
from optax_lossscale._programs.values import dtype_in, dtypes_in, in_dtype, in_dtypes
from optax_lossscale._programs.versions import bind

_KEEPS = checkpoint_policies.save_only_these_names(SCOPE)

Traced = dict[Hashable, Callable[[Arrays], list[Any]]]
"""What JAX traces and differentiates once, which it knows by the function, wherever it is run.

That is programs, by the `id` of their plan, and islands that are recomputed, by what
those that are alike have in common.
"""


def run(plan: Plan, args: Arrays) -> list[Any]:
    """The results of a program for arguments in the dtypes that its plan takes."""
    return _results_of(plan, args, {})


def _results_of(plan: Plan, args: Arrays, traced: Traced) -> list[Any]:
    """The results of a program that is run region by region."""
    program = plan.program
    values = dict(program.consts) | dict(zip(program.ins, args, strict=True))
    for i, literal in program.literals.items():
        values[i] = literal.val
    for region in plan.regions:
        operands = [values[i] for i in region.reads]
        stored = _stored(region, plan, traced)(operands)
        values |= zip(region.stores, stored, strict=True)
    return in_dtypes(plan.gives, [values[i] for i in program.outs])


def _callee(plan: Plan, name: str, traced: Traced) -> Callee:
    """How to run a program that a step holds."""

    def results(args):
        return _results_of(plan, args, traced)

    results.__name__ = name
    call = traced.setdefault(id(plan), jax.jit(results))
    return Callee(plan.takes, plan.gives, call)


def _stored(region: Region, plan: Plan, traced: Traced) -> Callable[[Arrays], Any]:
    """What computes what a region stores; recomputed in the backward pass, if it says so."""

    def computed(operands):
        return _computed(region, operands, plan, traced)

    if not region.is_recomputed:
        return computed
    recomputed = jax.checkpoint(
        computed,
        prevent_cse=plan.casting.prevent_cse,
        policy=_KEEPS if region.kept else None,  # a policy takes longer to trace
    )
    return traced.setdefault(in_common(region, plan), recomputed)


def _computed(
    region: Region, operands: Arrays, plan: Plan, traced: Traced
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
            results = _results(step, taken, plan.casting, traced)
            results = in_dtypes(step.gives, results)
            if not region.kept.isdisjoint(step.outs):
                results = [checkpoint_name(x, SCOPE) for x in results]
            values |= zip(step.outs, results, strict=True)
            for i in step.outs:
                if i in region.stores:
                    stored[i] = cast(i, region.stores[i])
    return [stored[i] for i in region.stores]


def _results(
    step: Step, operands: list[Any], casting: Casting, traced: Traced
) -> list[Any]:
    """The results of a step."""
    eqn = step.eqn
    if is_narrowed(eqn):
        return _product(eqn, operands)
    name = eqn.params.get("name", step.name)
    callees = [_callee(plan, name, traced) for plan in step.plans]
    rewrite = functools.partial(_rewrite, casting._replace(keeps=False))
    with eqn.ctx.manager:
        if is_outer_product(eqn):
            return [outer_product(eqn, *operands)]
        if Is.VJP in traits(eqn) and callees:
            return custom_vjp(eqn, operands, callees[0], rewrite)
        if Is.JVP in traits(eqn) and callees:
            return custom_jvp(eqn, operands, callees[0], rewrite)
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


def _rewrite(casting: Casting, fun: Callable[..., Any]) -> Callable[..., Any]:
    """A function that computes products in 16 bits, of and to arrays in the original's dtypes."""

    def of_arrays(*args):
        with AUTOCAST_DTYPE(casting.dtype):
            jaxpr, types = jax.make_jaxpr(fun, return_shape=True)(*args)
        arrays = jax.tree.leaves(args)
        plan = plan_for(jaxpr, arrays, [Kind.FLOAT32] * len(arrays), casting)
        leaves, structure = jax.tree.flatten(types)
        results = in_dtypes(dtypes_in(leaves), run(plan, arrays))
        return jax.tree.unflatten(structure, results)

    return of_arrays


def _product(eqn: Any, operands: Sequence[Any]) -> list[Any]:
    """A matrix product or convolution that takes and gives 16 bits."""
    params = eqn.params | {"precision": None}
    if params.get("preferred_element_type") is not None:
        params["preferred_element_type"] = dtype_in(operands[0])
    return bind(eqn.replace(params=params), operands)
