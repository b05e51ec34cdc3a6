"""Run a program by its plan, region by region.

Each region is a function from the values that it reads to those that it stores. A
region that is recomputed is wrapped in `jax.checkpoint`, so that its residuals are the
values that it reads and its `kept_reductions`, and no others. A step that holds
programs runs each of them by its own plan, in the same way.
"""

import contextlib
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import numpy as np
from jax.ad_checkpoint import checkpoint_name, checkpoint_policies
from jax.extend import source_info_util
from jax.extend.core import JaxprEqn, Literal, Var

from optax_lossscale._arrays.contexts import AUTOCAST_DTYPE
from optax_lossscale._autocast.alike import key_of_island
from optax_lossscale._autocast.classify import Kind
from optax_lossscale._autocast.derivatives import custom_jvp, custom_vjp
from optax_lossscale._autocast.facts import Casting
from optax_lossscale._autocast.outer import outer_product
from optax_lossscale._autocast.plan import Plan, plan_for
from optax_lossscale._autocast.products import SCOPE, is_narrowed, is_outer_product
from optax_lossscale._autocast.region import Dtypes, Region, Step
from optax_lossscale._programs.enter import Arrays, Function, enter
from optax_lossscale._programs.operations import Trait, traits
from optax_lossscale._programs.values import (
    HALVES,
    astype,
    astypes,
    dtype_in,
    dtypes_in,
)
from optax_lossscale._programs.versions import bind, name_of

# The policy of regions that keep reductions, to which `_Runner` gives the name
_KEEPS = checkpoint_policies.save_only_these_names(SCOPE)

# How a step runs that has a derivative of the user's own; `enter` would lose the rule
_WITH_RULE = {Trait.JVP: custom_jvp, Trait.VJP: custom_vjp}


def run(plan: Plan, args: Arrays) -> list[Any]:
    """The results of a program, for arguments that are cast to what its plan takes."""
    return _Runner().run(plan, args)


class _Runner:
    """Runs a program by its plan, and the programs in it by theirs.

    JAX traces and differentiates a function once, and caches the result by the identity
    of the function. So what runs in several places is one function: there is one for
    each inner program, and one for all islands that compute the same, by the same
    lines.
    """

    def __init__(self):
        self._program_function = functools.cache(self._jitted)
        self._islands: dict[Hashable, Function] = {}

    def run(self, plan: Plan, args: Arrays) -> list[Any]:
        """The results of a program, region by region."""
        program = plan.program
        args = astypes(args, plan.takes)
        values = dict(program.consts) | dict(zip(program.ins, args, strict=True))
        for region in plan.regions:
            function = self._region_function(region, plan.casting)
            stored = function([values[v] for v in region.reads])
            values |= zip(region.stores, stored, strict=True)
        results = [v.val if isinstance(v, Literal) else values[v] for v in program.outs]
        return astypes(results, plan.gives)

    def _region_function(self, region: Region, casting: Casting) -> Function:
        """The function from what a region reads to what it stores."""
        function = functools.partial(self._run_region, region)
        if not region.is_recomputed:
            return function
        # A policy makes tracing slow, so there is one only where it is needed.
        policy = _KEEPS if region.kept_reductions else None
        recomputed = jax.checkpoint(
            function, prevent_cse=casting.prevent_cse, policy=policy
        )
        return self._islands.setdefault(key_of_island(region, casting), recomputed)

    def _jitted(self, plan: Plan, name: str, is_call: bool) -> Function:
        """The function that runs an inner program, in a `jit` of its own.

        A program that was called stays a call. The body of a loop or a branch is
        inlined, as a compiler fuses less across a call: a scan over layers would move
        more bytes.
        """

        def results(args):
            return self.run(plan, args)

        results.__name__ = name  # for profiles
        return jax.jit(results, inline=not is_call)

    def _run_region(self, region: Region, operands: Arrays) -> list[Any]:
        """Runs the steps of a region, and returns the values that it stores."""
        values = dict(zip(region.reads, operands, strict=True))
        stored: dict[Var, Any] = {}

        # Steps that read a value in one dtype share one cast. So its cotangents are
        # summed in that dtype, before the transpose of the cast rounds the sum.
        @functools.cache
        def cast(v, dtype):
            return astype(values[v], dtype)

        def read(v, dtype):
            return astype(v.val, dtype) if isinstance(v, Literal) else cast(v, dtype)

        for step in region.steps:
            eqn = step.eqn
            with _at_its_line(eqn):
                taken = list(map(read, eqn.invars, step.takes))
                results = self._run_step(step, taken, region.stores)
                if not region.kept_reductions.isdisjoint(eqn.outvars):
                    results = [checkpoint_name(x, SCOPE) for x in results]
                values |= zip(eqn.outvars, results, strict=True)
                for v in eqn.outvars:
                    if v in region.stores:  # cast here, so that profiles show this line
                        stored[v] = cast(v, region.stores[v])
        return [stored[v] for v in region.stores]

    def _run_step(self, step: Step, operands: list[Any], stores: Dtypes) -> list[Any]:
        """The results of a step, from operands in the dtypes that it takes.

        `stores` has the dtypes in which its region stores values.
        """
        eqn = step.eqn
        if is_narrowed(eqn):
            return _product(eqn, operands)
        with eqn.ctx.manager:
            if step.plans:
                return self._run_rewritten(step, operands)
            if is_outer_product(eqn):
                return [outer_product(eqn, *operands)]
            if Trait.SPREADS in traits(eqn) and stores.get(eqn.outvars[0]) in HALVES:
                return _spread(eqn, operands, stores[eqn.outvars[0]])
        return bind(eqn, operands)

    def _run_rewritten(self, step: Step, operands: list[Any]) -> list[Any]:
        """The results of a step whose equation is rewritten, its programs by plans."""
        eqn = step.eqn
        name = eqn.params.get("name", name_of(eqn))
        is_call = Trait.INLINED in traits(eqn)
        programs = [self._program_function(plan, name, is_call) for plan in step.plans]
        with_rule = _WITH_RULE.get(traits(eqn) & (Trait.JVP | Trait.VJP))
        if with_rule is None:
            return enter(eqn, operands, programs)

        (plan,) = step.plans  # a custom derivative holds one program

        def original(*operands):
            traced = astypes(operands, dtypes_in(eqn.invars))
            return astypes(bind(eqn, traced), plan.gives)

        casting = plan.casting._replace(keeps_reductions=False)
        rewrite = functools.partial(_rewrite, casting)
        return with_rule(programs[0], original, operands, rewrite)


def _at_its_line(eqn: JaxprEqn) -> contextlib.AbstractContextManager[Any]:
    """A context in which errors, `debug_nans` and profiles show an equation's line."""
    source = eqn.source_info
    names = source_info_util.current_name_stack() + source.name_stack
    return source_info_util.user_context(source.traceback, name_stack=names)


def _product(eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    """The result of a product whose operands are in 16 bits already, in 16 bits."""
    types = {"precision": None, "preferred_element_type": dtype_in(operands[0])}
    return bind(eqn.replace(params=eqn.params | types), operands)


def _spread(eqn: JaxprEqn, operands: list[Any], low: np.dtype) -> list[Any]:
    """Sends an array to many devices in 16 bits, and its tangent in float32.

    So the cotangent is summed over the devices in float32.
    """

    @jax.custom_jvp
    def spread(x):
        return bind(eqn, [astype(x, low)])

    @spread.defjvp
    def tangents_of_spread(primals, tangents):
        wide = bind(eqn, tangents)
        return spread(*primals), [astype(x, low) for x in wide]

    return spread(*operands)


def _rewrite(casting: Casting, fun: Callable[..., Any]) -> Callable[..., Any]:
    """The function with its products narrowed, which gives the dtypes that it gave.

    Each call traces `fun`, and runs a plan for that program.
    """

    def of_arrays(*args):
        with AUTOCAST_DTYPE(casting.low):
            jaxpr, types = jax.make_jaxpr(fun, return_shape=True)(*args)
        arrays = jax.tree.leaves(args)
        plan = plan_for(jaxpr, arrays, [Kind.FLOAT32] * len(arrays), casting)
        leaves, structure = jax.tree.flatten(types)
        results = astypes(run(plan, arrays), dtypes_in(leaves))
        return jax.tree.unflatten(structure, results)

    return of_arrays
