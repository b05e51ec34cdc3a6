"""Runs a program as its plan says."""

import collections
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name, checkpoint_policies

from optax_lossscale._arrays.contexts import AUTOCAST_DTYPE
from optax_lossscale._autocast.derivatives import custom_jvp, custom_vjp
from optax_lossscale._autocast.flat import Instruction
from optax_lossscale._autocast.classify import Kind
from optax_lossscale._autocast.outer import outer_product
from optax_lossscale._autocast.known import Casting
from optax_lossscale._autocast.plan import Part, Plan, plan
from optax_lossscale._autocast.products import SCOPE, is_narrowed, is_outer_product, why_left
from optax_lossscale._autocast.uses import Use
from optax_lossscale._programs.operations import Is, traits
from optax_lossscale._programs.run import Run, enter
from optax_lossscale._programs.values import FLOAT32, dtype_in, dtypes_in, in_dtype, in_dtypes
from optax_lossscale._programs.versions import bind, open_jaxpr

_KEEPS = checkpoint_policies.save_only_these_names(SCOPE)


def narrowed(
    jaxpr: Any,
    args: Sequence[Any],
    given: Sequence[Kind],
    how: Casting,
    uses: Sequence[Use] | None = None,
) -> list[Any]:
    """The results of a program for arguments of some kinds, narrowed."""
    pairs = zip(args, open_jaxpr(jaxpr).invars, strict=True)
    takes = [how.dtype if dtype_in(x) == how.dtype else dtype_in(v) for x, v in pairs]
    return _Runs(plan(jaxpr, takes, given, how, uses)).whole.call(args)


class _Runs:
    """How to run a program, and those in it, as their plans say."""

    def __init__(self, made: Plan):
        self._repeated = _repeated(made)
        self._shared: dict[int, Run] = {}  # by the `id` of the plan
        self.whole = _by_plan(made, self)

    def inside(self, step: Instruction) -> list[Run]:
        """How to run each of the programs that a step holds."""
        name = step.eqn.params.get("name", step.name)
        return [self._of(made, name) for made in step.plans]

    def _of(self, made: Plan, name: str) -> Run:
        if id(made) not in self._repeated:
            return _by_plan(made, self)
        if id(made) not in self._shared:
            self._shared[id(made)] = _traced_once(_by_plan(made, self), name)
        return self._shared[id(made)]


def _repeated(made: Plan) -> set[int]:
    """The plans in a plan, by `id`, that several steps have: for a program that JAX shares."""
    uses = collections.Counter[int]()
    unread = [made]
    while unread:
        steps = (step for part in unread.pop().parts for step in part.steps)
        for inner in (inner for step in steps for inner in step.plans):
            uses[id(inner)] += 1
            if uses[id(inner)] == 1:
                unread.append(inner)
    return {i for i, n in uses.items() if n > 1}


def _traced_once(run: Run, name: str) -> Run:
    """A program that is called wherever it is run, and not copied."""

    def outs(args):
        return run.call(args)

    outs.__name__ = name
    jitted = jax.jit(outs)
    return run._replace(call=lambda args: jitted(list(args)))


def _by_plan(made: Plan, runs: _Runs) -> Run:
    """How to run a program as a plan says."""
    program = made.program

    def call(args):
        # A value is held under its number, as an array for each dtype in which it is read.
        held: dict[int, dict[Any, Any]] = {}
        for i, x in (*program.consts.items(), *zip(program.ins, args, strict=True)):
            held[i] = {dtype_in(x): x}
        held |= {i: {dtype_in(x): x.val} for i, x in program.literals.items()}

        def read(i, dtype=None):
            forms = held[i]
            return forms[dtype] if dtype in forms else next(iter(forms.values()))

        for part in made.parts:
            of = lambda xs, part=part: _computed(part, xs, made, runs)
            if part.is_recomputed:
                policy = _KEEPS if part.saved else None  # which takes longer to trace
                of = jax.checkpoint(of, prevent_cse=made.how.prevent_cse, policy=policy)
            written = of([read(i, dtype) for i, dtype in part.reads.items()])
            if part.is_spread:
                (step,) = part.steps
                written = _spread(step, written, [read(i, FLOAT32) for i in step.ins])
            for i, forms in written.items():
                held[i] = dict(zip(part.writes[i], forms, strict=True))
        pairs = zip(program.outs, made.gives, strict=True)
        return [in_dtype(dtype, read(i, dtype)) for i, dtype in pairs]

    return Run(made.takes, made.gives, call)


def _spread(step: Instruction, low: dict[int, list[Any]], ins: list[Any]) -> dict[int, list[Any]]:
    """What was sent in 16 bits, and the same in float32, from which only derivatives are made."""
    with step.at_its_line():
        wide = bind(step.eqn, in_dtypes(dtypes_in(step.eqn.invars), ins))
    return {i: [_in_place_of(low[i][0], x), x] for i, x in zip(step.outs, wide, strict=True)}


@jax.custom_jvp
def _in_place_of(low: jax.Array, wide: jax.Array) -> jax.Array:
    """An array in 16 bits, with the derivative of one in float32."""
    # Where the forward pass sends an array to many devices, the backward pass sums over them: this
    # way in float32. The compiler drops the sending in float32, whose results nothing reads.
    return low


@_in_place_of.defjvp
def _tangent_in_place_of(primals, tangents):
    return primals[0], in_dtype(dtype_in(primals[0]), tangents[1])


def _computed(part: Part, xs: Sequence[Any], made: Plan, runs: _Runs) -> dict[int, list[Any]]:
    """What a part writes, in each dtype."""
    values = dict(zip(part.reads, xs, strict=True))
    values |= {i: literal.val for i, literal in made.program.literals.items()}
    # Each is cast once, so that its gradients are summed in the dtype in which it is read.
    cast = functools.cache(lambda i, dtype: in_dtype(dtype, values[i]))
    written = {}
    for step in part.steps:
        with step.at_its_line():
            outs = _run(step, list(map(cast, step.ins, step.takes)), made.how, runs)
            outs = in_dtypes(step.gives, outs)
            if not part.saved.isdisjoint(step.outs):
                outs = [checkpoint_name(x, SCOPE) for x in outs]
            values |= zip(step.outs, outs, strict=True)
            new = [i for i in step.outs if i in part.writes]
            written |= {i: [in_dtype(d, values[i]) for d in part.writes[i]] for i in new}
            for i in made.fenced.intersection(new):
                written[i][0] = lax.optimization_barrier(written[i][0])
    return written


def _run(step: Instruction, ins: list[Any], how: Casting, runs: _Runs) -> list[Any]:
    """The results of an instruction."""
    eqn = step.eqn
    if is_narrowed(eqn):
        return _product(eqn, ins)
    inside = runs.inside(step)
    narrowly = functools.partial(_traced_and_narrowed, how._replace(keeps=False))
    with eqn.ctx.manager:
        if is_outer_product(eqn):
            return [outer_product(eqn, *ins)]
        if Is.VJP in traits(eqn) and not why_left(eqn):
            return custom_vjp(eqn, ins, inside, step, narrowly)
        if Is.JVP in traits(eqn) and inside:
            return custom_jvp(eqn, ins, inside, step, narrowly)
        if inside:
            return enter(eqn, ins, inside)
    return bind(eqn, ins)


def _traced_and_narrowed(
    how: Casting,
    of: Callable[..., Any],
    args: Any,
    given: Sequence[Kind],
    uses: Callable[[Any], Sequence[Use]],
) -> Any:
    """The results of a function of arguments in the original's dtypes, narrowed; their dtypes."""
    with AUTOCAST_DTYPE(how.dtype):
        jaxpr, shape = jax.make_jaxpr(of, return_shape=True)(*args)
    outs = narrowed(jaxpr, jax.tree.leaves(args), given, how, uses(shape))
    return jax.tree.unflatten(jax.tree.structure(shape), outs), dtypes_in(jax.tree.leaves(shape))


def _product(eqn: Any, ins: Sequence[Any]) -> list[Any]:
    """A matrix product or convolution that takes and gives 16 bits."""
    params = eqn.params | {"precision": None}
    if params.get("preferred_element_type") is not None:
        params["preferred_element_type"] = dtype_in(ins[0])
    return bind(eqn.replace(params=params), ins)
