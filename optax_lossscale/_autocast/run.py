"""Run a program by its plan, region by region.

Each region is a function from the values that it reads to those that it stores. A
region that is recomputed is wrapped in `jax.checkpoint`, so that JAX keeps its operands
as residuals, and nothing else but the reductions that it keeps by name. A step that
holds programs runs each of them by its own plan, in the same way.
"""

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
from optax_lossscale._autocast.flat import TypedStep
from optax_lossscale._autocast.outer import outer_product
from optax_lossscale._autocast.plan import Plan, plan_for
from optax_lossscale._autocast.products import SCOPE, is_narrowed, is_outer_product
from optax_lossscale._autocast.store import Region
from optax_lossscale._programs.enter import Arrays, Callee, enter
from optax_lossscale._programs.operations import Is, traits
from optax_lossscale._programs.values import dtype_in, dtypes_in, in_dtype, in_dtypes
from optax_lossscale._programs.versions import bind

# The policy of regions that keep reductions: `_computed` gives these the name.
_KEEPS = checkpoint_policies.save_only_these_names(SCOPE)

Functions = dict[Hashable, Callable[[Arrays], list[Any]]]
"""Functions that run in several places, and that JAX traces and differentiates once.

JAX finds an earlier trace by the function, so that each place has to run the same one.
Those of inner programs are found by their plan, and those of islands that are
recomputed by what islands that compute the same have in common.
"""


def run(plan: Plan, args: Arrays) -> list[Any]:
    """The results of a program for arguments in the dtypes that its plan takes."""
    return _results_of(plan, args, {})


def _results_of(plan: Plan, args: Arrays, functions: Functions) -> list[Any]:
    """Runs each region of a program, and returns the program's results."""
    program = plan.program
    values = dict(program.consts) | dict(zip(program.ins, args, strict=True))
    for i, literal in program.literals.items():
        values[i] = literal.val
    for region in plan.regions:
        operands = [values[i] for i in region.reads]
        stored = _stored(region, plan, functions)(operands)
        values |= zip(region.stores, stored, strict=True)
    return in_dtypes(plan.gives, [values[i] for i in program.outs])


def _callee(plan: Plan, step: TypedStep, functions: Functions) -> Callee:
    """A program that a step holds, to be run by its plan: traced once, as a `jit`.

    It stays a call only where the step was one. Elsewhere JAX puts it in its place: as
    a call, the body of a scan over layers moves 1.05 of the bytes.
    """

    def results(args):
        return _results_of(plan, args, functions)

    results.__name__ = step.eqn.params.get("name", step.name)  # for profiles
    is_call = Is.INLINED in traits(step.eqn)
    call = functions.setdefault(plan, jax.jit(results, inline=not is_call))
    return Callee(plan.takes, plan.gives, call)


def _stored(
    region: Region, plan: Plan, functions: Functions
) -> Callable[[Arrays], Any]:
    """The function from what a region reads to what it stores."""

    def computed(operands):
        return _computed(region, operands, plan, functions)

    if not region.is_recomputed:
        return computed
    recomputed = jax.checkpoint(
        computed,
        prevent_cse=plan.casting.prevent_cse,
        policy=_KEEPS if region.kept else None,  # a policy takes longer to trace
    )
    return functions.setdefault(in_common(region, plan), recomputed)


def _computed(
    region: Region, operands: Arrays, plan: Plan, functions: Functions
) -> list[Any]:
    """Runs the steps of a region, and returns the values that it stores."""
    values = dict(zip(region.reads, operands, strict=True))
    literals = plan.program.literals

    # Steps that read a value in one dtype share one cast. So its cotangents are summed
    # in that dtype, before the transpose of the cast rounds the sum.
    @functools.cache
    def cast(i, dtype):
        return in_dtype(dtype, literals[i].val if i in literals else values[i])

    for step in region.steps:
        with step.at_its_line():
            taken = list(map(cast, step.ins, step.takes))
            results = _results(step, taken, plan.casting, functions)
            results = in_dtypes(step.gives, results)
            if not region.kept.isdisjoint(step.outs):
                results = [checkpoint_name(x, SCOPE) for x in results]
            values |= zip(step.outs, results, strict=True)
            for i in region.stores:
                if i in step.outs:
                    cast(i, region.stores[i])  # here, so that profiles show this line
    return list(map(cast, region.stores, region.stores.values()))


def _results(
    step: TypedStep, operands: list[Any], casting: Casting, functions: Functions
) -> list[Any]:
    """The results of a step, from operands in the dtypes that it takes."""
    eqn = step.eqn
    if is_narrowed(eqn):
        return _product(eqn, operands)
    callees = [_callee(plan, step, functions) for plan in step.plans]
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


def _spread(step: TypedStep, operands: list[Any]) -> list[Any]:
    """Sends an array to many devices in 16 bits, with a derivative in float32.

    The transpose of the derivative sums over the devices.
    """

    @jax.custom_jvp
    def spread(*operands):
        return bind(step.eqn, in_dtypes(step.gives, operands))

    @spread.defjvp
    def tangents_of_spread(primals, tangents):
        wide = bind(step.eqn, tangents)
        return spread(*primals), in_dtypes(step.gives, wide)

    return spread(*operands)


def _rewrite(casting: Casting, fun: Callable[..., Any]) -> Callable[..., Any]:
    """The function with its products narrowed; it takes and gives the same dtypes.

    It traces `fun` when it is called, and runs the plan for that program.
    """

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
    """The result of a product whose operands are in 16 bits already, in 16 bits."""
    params = eqn.params | {"precision": None}
    if params.get("preferred_element_type") is not None:
        params["preferred_element_type"] = dtype_in(operands[0])
    return bind(eqn.replace(params=params), operands)
