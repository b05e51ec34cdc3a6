"""Runs a program by its plan, region by region.

Each region is a function from the values that it reads to the values that it stores. A
region that the backward pass recomputes is wrapped in `jax.checkpoint`, so its only
residuals are the values that it reads and its `kept_reductions`. A rewritten equation
runs each of its programs by that program's own plan, in the same way.
"""

import contextlib
import functools
from collections.abc import Callable, Hashable
from typing import Any

import jax
import numpy as np
from jax.ad_checkpoint import checkpoint_name, checkpoint_policies
from jax.extend import source_info_util
from jax.extend.core import JaxprEqn, Literal

from optax_lossscale._arrays.contexts import AUTOCAST_DTYPE
from optax_lossscale._autocast.alike import key_of_island
from optax_lossscale._autocast.classify import Kind
from optax_lossscale._autocast.derivatives import custom_jvp, custom_vjp
from optax_lossscale._autocast.facts import Casting
from optax_lossscale._autocast.outer import outer_product
from optax_lossscale._autocast.plan import Plan, plan_for
from optax_lossscale._autocast.products import is_narrowed, is_outer_product
from optax_lossscale._autocast.region import Dtypes, PlannedEquation, Region
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

# The name that `_run_region` gives to `kept_reductions`
_KEPT = "ols.autocast.kept"
# The policy with which `jax.checkpoint` saves the values of this name
_SAVE_REDUCTIONS = checkpoint_policies.save_only_these_names(_KEPT)


def run(plan: Plan, args: Arrays) -> list[Any]:
    """Runs a program by its plan; the arguments are cast to the plan's dtypes."""
    return _Runner().run(plan, args)


class _Runner:
    """Runs a program by its plan, and each program in it by its own plan.

    JAX traces and differentiates a function once and caches the result by the identity
    of the function. To have layers that are alike traced once, a runner therefore makes
    one function for each plan of an inner program, however many equations share the
    plan, and one for all islands that are alike (see `alike`).
    """

    def __init__(self):
        self._program_function = functools.cache(self._jitted)
        self._islands: dict[Hashable, Function] = {}

    def run(self, plan: Plan, args: Arrays) -> list[Any]:
        """Runs the regions of a program in order and returns its results."""
        program = plan.program
        values = dict(program.consts)
        cast_args = astypes(args, plan.in_dtypes)
        values.update(zip(program.ins, cast_args, strict=True))
        for region in plan.regions:
            function = self._region_function(region, plan.casting)
            inputs = [values[v] for v in region.reads]
            stored = function(inputs)
            values.update(zip(region.stores, stored, strict=True))
        results = []
        for v in program.outs:
            result = v.val if isinstance(v, Literal) else values[v]
            results.append(result)
        return astypes(results, plan.out_dtypes)

    def _region_function(self, region: Region, casting: Casting) -> Function:
        """Returns the function from what a region reads to what it stores."""
        function = functools.partial(self._run_region, region)
        if not region.is_recomputed:
            return function
        key = key_of_island(region, casting)
        if key not in self._islands:
            # A policy slows down tracing, so it is there only for saved reductions.
            policy = _SAVE_REDUCTIONS if region.kept_reductions else None
            self._islands[key] = jax.checkpoint(
                function, prevent_cse=casting.prevent_cse, policy=policy
            )
        return self._islands[key]

    def _jitted(self, plan: Plan, name: str, is_call: bool) -> Function:
        """Returns a jitted function that runs an inner program.

        A call, such as a `jit`, stays a call. The body of a loop or a branch is
        inlined, because a compiler fuses less across a call: as compiled (not timed), a
        scan over layers with a call in it moved 1.05 times the bytes.
        """

        def program(args):
            return self.run(plan, args)

        program.__name__ = name  # for profiles
        return jax.jit(program, inline=not is_call)

    def _run_region(self, region: Region, inputs: Arrays) -> list[Any]:
        """Runs the equations of a region and returns the values that it stores."""
        values = dict(zip(region.reads, inputs, strict=True))
        stored = {}

        # Equations that read a value in the same dtype share one cast, so the value's
        # cotangents are summed in that dtype, and the transpose of the cast rounds only
        # the sum.
        @functools.cache
        def cast(v, dtype):
            return astype(values[v], dtype)

        def read(v, dtype):
            if isinstance(v, Literal):
                return astype(v.val, dtype)
            return cast(v, dtype)

        for planned in region.equations:
            eqn = planned.eqn
            with _at_its_line(eqn):
                operands = list(map(read, eqn.invars, planned.operand_dtypes))
                results = self._run_equation(planned, operands, region.stores)
                if not region.kept_reductions.isdisjoint(eqn.outvars):
                    results = [checkpoint_name(x, _KEPT) for x in results]
                values.update(zip(eqn.outvars, results, strict=True))
                # The casts for storing happen here, so that profiles show this line.
                for v in eqn.outvars:
                    if v in region.stores:
                        stored[v] = cast(v, region.stores[v])
        return [stored[v] for v in region.stores]

    def _run_equation(
        self, planned: PlannedEquation, operands: Arrays, stores: Dtypes
    ) -> list[Any]:
        """Runs an equation on operands in its `operand_dtypes`.

        `stores` has the dtypes in which the equation's region stores values.
        """
        eqn = planned.eqn
        if is_narrowed(eqn):
            return _product(eqn, operands)
        with eqn.ctx.manager:
            if planned.plans:
                return self._run_rewritten(planned, operands)
            if is_outer_product(eqn):
                return [outer_product(eqn, *operands)]
            if Trait.SPREADS in traits(eqn):
                stored_dtype = stores.get(eqn.outvars[0])
                if stored_dtype in HALVES:
                    return _spread(eqn, operands, stored_dtype)
        return bind(eqn, operands)

    def _run_rewritten(self, planned: PlannedEquation, operands: Arrays) -> list[Any]:
        """Runs a rewritten equation, with each of its programs run by a plan."""
        eqn = planned.eqn
        name = eqn.params.get("name", name_of(eqn))
        is_call = Trait.INLINED in traits(eqn)
        functions = []
        for plan in planned.plans:
            functions.append(self._program_function(plan, name, is_call))
        if traits(eqn) & (Trait.JVP | Trait.VJP):
            (function,) = functions
            return _run_with_rule(planned, function, operands)
        return enter(eqn, operands, functions)


def _at_its_line(eqn: JaxprEqn) -> contextlib.AbstractContextManager[Any]:
    """Returns a context in which errors and profiles show an equation's line."""
    source = eqn.source_info
    name_stack = source_info_util.current_name_stack() + source.name_stack
    return source_info_util.user_context(source.traceback, name_stack=name_stack)


def _product(eqn: JaxprEqn, operands: Arrays) -> list[Any]:
    """Computes a product in 16 bits, from operands that are in 16 bits already.

    The precision of the equation was meant for float32 operands, so it is dropped.
    """
    params = {
        **eqn.params,
        "precision": None,
        "preferred_element_type": dtype_in(operands[0]),
    }
    return bind(eqn.replace(params=params), operands)


def _run_with_rule(
    planned: PlannedEquation, function: Function, operands: Arrays
) -> list[Any]:
    """Runs a function with a custom derivative, whose rule `enter` would lose.

    `function` runs the user's function by its plan: see `derivatives`.
    """
    eqn = planned.eqn
    (plan,) = planned.plans

    def original(*operands):
        traced = astypes(operands, dtypes_in(eqn.invars))
        results = bind(eqn, traced)
        return astypes(results, plan.out_dtypes)

    casting = plan.casting._replace(keeps_reductions=False)
    rewrite = functools.partial(_rewrite, casting)
    run_rule = custom_jvp if Trait.JVP in traits(eqn) else custom_vjp
    return run_rule(function, original, operands, rewrite)


def _spread(eqn: JaxprEqn, operands: Arrays, low: np.dtype) -> list[Any]:
    """Spreads an array over devices in 16 bits and its tangent in float32.

    The cotangent is then summed over the devices in float32.
    """

    @jax.custom_jvp
    def spread(x):
        return bind(eqn, [astype(x, low)])

    @spread.defjvp
    def spread_jvp(primals, tangents):
        wide_tangents = bind(eqn, tangents)
        low_tangents = [astype(tangent, low) for tangent in wide_tangents]
        return spread(*primals), low_tangents

    return spread(*operands)


def _rewrite(casting: Casting, fun: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a function run by a plan, with the dtypes of its results unchanged.

    Each call of the returned function traces `fun`, plans the program, and runs it.
    """

    def rewritten(*args):
        with AUTOCAST_DTYPE(casting.low):
            trace = jax.make_jaxpr(fun, return_shape=True)
            jaxpr, result_shapes = trace(*args)
        arrays = jax.tree.leaves(args)
        kinds = (Kind.FLOAT32,) * len(arrays)
        plan = plan_for(jaxpr, arrays, kinds, casting)
        results = run(plan, arrays)
        treedef = jax.tree.structure(result_shapes)
        return jax.tree.unflatten(treedef, results)

    return rewritten
