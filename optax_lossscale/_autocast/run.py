"""Runs a program as its plan says."""

import collections
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name, checkpoint_policies

from optax_lossscale._arrays.contexts import AUTOCAST_DTYPE
from optax_lossscale._autocast.alike import common
from optax_lossscale._autocast.classify import Kind
from optax_lossscale._autocast.derivatives import custom_jvp, custom_vjp
from optax_lossscale._autocast.flat import Instruction
from optax_lossscale._autocast.known import Casting
from optax_lossscale._autocast.outer import outer_product
from optax_lossscale._autocast.plan import Part, Plan, plan
from optax_lossscale._autocast.products import (
    SCOPE,
    is_narrowed,
    is_outer_product,
    why_left,
)
from optax_lossscale._autocast.uses import Use
from optax_lossscale._programs.operations import Is, traits
from optax_lossscale._programs.run import Run, enter
from optax_lossscale._programs.values import (
    FLOAT32,
    dtype_in,
    dtypes_in,
    in_dtype,
    in_dtypes,
)
from optax_lossscale._programs.versions import bind

_SAVES = checkpoint_policies.save_only_these_names(SCOPE)

Inside = Callable[[Instruction], list[Run]]
"""How to run each of the programs that an instruction holds."""

Islands = dict[Hashable, Callable[[list[Any]], list[Any]]]
"""What computes islands that are recomputed, by what those that are alike have in common."""


def run(made: Plan, args: Sequence[Any]) -> list[Any]:
    """The results of a program for arguments in the dtypes that its plan takes."""
    repeated = _repeated(made)
    shared: dict[int, Run] = {}  # by the `id` of the plan
    islands: Islands = {}

    def inside(step: Instruction) -> list[Run]:
        name = step.eqn.params.get("name", step.name)
        return [run_of(plan, name) for plan in step.plans]

    def run_of(made: Plan, name: str) -> Run:
        if id(made) not in repeated:
            return _by_plan(made, inside, islands)
        if id(made) not in shared:
            shared[id(made)] = _traced_once(_by_plan(made, inside, islands), name)
        return shared[id(made)]

    return run_of(made, "").call(args)


def _repeated(made: Plan) -> set[int]:
    """The plans in a plan, by `id`, that several steps have: for a program that JAX shares."""
    uses = collections.Counter[int]()
    unread = [made]
    while unread:
        steps = [step for part in unread.pop().parts for step in part.steps]
        for inner in [inner for step in steps for inner in step.plans]:
            uses[id(inner)] += 1
            if uses[id(inner)] == 1:
                unread.append(inner)
    return {i for i, n in uses.items() if n > 1}


def _traced_once(run: Run, name: str) -> Run:
    """A program that is called wherever it is run, and not copied."""

    def results(args):
        return run.call(args)

    results.__name__ = name
    jitted = jax.jit(results)
    return run._replace(call=lambda args: jitted(list(args)))


def _by_plan(made: Plan, inside: Inside, islands: Islands) -> Run:
    """How to run a program as a plan says."""
    program = made.program

    def call(args):
        # A value is held under its number, as an array for each dtype in which it is
        # read.
        values: dict[int, dict[Any, Any]] = {}
        for i, x in (*program.consts.items(), *zip(program.ins, args, strict=True)):
            values[i] = {dtype_in(x): x}
        for i, literal in program.literals.items():
            values[i] = {dtype_in(literal): literal.val}

        def read(i, dtype=None):
            """A value in a dtype, if it is there in it, or else as it is kept."""
            forms = values[i]
            return forms[dtype] if dtype in forms else next(iter(forms.values()))

        for part in made.parts:
            operands = [read(i, dtype) for i, dtype in part.reads.items()]
            written = _written(part, operands, made, inside, islands)
            if part.is_spread:
                (step,) = part.steps
                written = _spread(step, written, [read(i, FLOAT32) for i in step.ins])
            for i, forms in written.items():
                values[i] = dict(zip(part.writes[i], forms, strict=True))
        pairs = zip(program.outs, made.gives, strict=True)
        return [in_dtype(dtype, read(i, dtype)) for i, dtype in pairs]

    return Run(made.takes, made.gives, call)


def _spread(
    step: Instruction, low: dict[int, list[Any]], ins: list[Any]
) -> dict[int, list[Any]]:
    """What was sent in 16 bits, and the same in float32, from which only derivatives are made."""
    with step.at_its_line():
        wide = bind(step.eqn, in_dtypes(dtypes_in(step.eqn.invars), ins))
    return {
        i: [_in_place_of(low[i][0], x), x] for i, x in zip(step.outs, wide, strict=True)
    }


@jax.custom_jvp
def _in_place_of(low: jax.Array, wide: jax.Array) -> jax.Array:
    """An array in 16 bits, with the derivative of one in float32."""
    # Where the forward pass sends an array to many devices, the backward pass sums over
    # them: this way in float32. The compiler drops the sending in float32, whose
    # results nothing reads.
    return low


@_in_place_of.defjvp
def _tangent_in_place_of(primals, tangents):
    return primals[0], in_dtype(dtype_in(primals[0]), tangents[1])


def _written(
    part: Part, operands: list[Any], made: Plan, inside: Inside, islands: Islands
) -> dict[int, list[Any]]:
    """What a part writes, in each dtype; recomputed in the backward pass, if the part says so."""
    if not part.is_recomputed:
        return _computed(part, operands, made, inside)

    def computed(operands):
        written = _computed(part, operands, made, inside)
        return [written[i] for i in sorted(written)]

    alike = common(part, made.program)
    # JAX knows by the function that it has traced and differentiated it before.
    function = (
        computed if alike is None else islands.setdefault((alike, made.how), computed)
    )
    policy = _SAVES if part.saved else None  # which takes longer to trace
    recomputed = jax.checkpoint(
        function, prevent_cse=made.how.prevent_cse, policy=policy
    )
    return dict(zip(sorted(part.writes), recomputed(operands), strict=True))


def _computed(
    part: Part, operands: list[Any], made: Plan, inside: Inside
) -> dict[int, list[Any]]:
    """What a part writes, in each dtype."""
    values = dict(zip(part.reads, operands, strict=True))
    values |= {i: literal.val for i, literal in made.program.literals.items()}

    # So that its gradients are summed in the dtype in which it is read
    @functools.cache
    def cast(i, dtype):
        return in_dtype(dtype, values[i])

    written: dict[int, list[Any]] = {}
    for step in part.steps:
        with step.at_its_line():
            results = _results(
                step, list(map(cast, step.ins, step.takes)), made.how, inside
            )
            results = in_dtypes(step.gives, results)
            if not part.saved.isdisjoint(step.outs):
                results = [checkpoint_name(x, SCOPE) for x in results]
            values |= zip(step.outs, results, strict=True)
            for i in step.outs:
                if i in part.writes:
                    written[i] = [
                        in_dtype(dtype, values[i]) for dtype in part.writes[i]
                    ]
    return written


def _results(
    step: Instruction, ins: list[Any], how: Casting, inside: Inside
) -> list[Any]:
    """The results of an instruction."""
    eqn = step.eqn
    if is_narrowed(eqn):
        return _product(eqn, ins)
    runs = inside(step)
    narrowed = functools.partial(_narrowed, how._replace(keeps=False))
    with eqn.ctx.manager:
        if is_outer_product(eqn):
            return [outer_product(eqn, *ins)]
        if Is.VJP in traits(eqn) and not why_left(eqn):
            return custom_vjp(step, ins, runs, narrowed)
        if Is.JVP in traits(eqn) and runs:
            return custom_jvp(step, ins, runs, narrowed)
        if runs:
            return enter(eqn, ins, runs)
    return bind(eqn, ins)


def _narrowed(
    how: Casting,
    fun: Callable[..., Any],
    args: Any,
    kinds: Sequence[Kind],
    uses: Callable[[Any], Sequence[Use]],
) -> tuple[Any, list[Any]]:
    """The results of a function of arguments in the original's dtypes, narrowed; their dtypes."""
    with AUTOCAST_DTYPE(how.dtype):
        jaxpr, shape = jax.make_jaxpr(fun, return_shape=True)(*args)
    arrays = jax.tree.leaves(args)
    results = run(plan(jaxpr, arrays, kinds, how, uses(shape)), arrays)
    leaves, structure = jax.tree.flatten(shape)
    return jax.tree.unflatten(structure, results), dtypes_in(leaves)


def _product(eqn: Any, ins: Sequence[Any]) -> list[Any]:
    """A matrix product or convolution that takes and gives 16 bits."""
    params = eqn.params | {"precision": None}
    if params.get("preferred_element_type") is not None:
        params["preferred_element_type"] = dtype_in(ins[0])
    return bind(eqn.replace(params=params), ins)
