"""The interpreter: a program is run by a rule, and so are the programs that its equations hold.

An equation that holds programs, as `scan` does, is entered with each of these run in another
way. Running them may return records beside the results, which loops and branches gather: the
largest over all iterations, branches and devices is kept.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Literal

from optax_lossscale._arrays.placement import varying_axes, zeros_of
from optax_lossscale._programs.operations import TABLE, Is
from optax_lossscale._programs.values import dtype_in, dtypes_in, in_dtype, in_dtypes
from optax_lossscale._programs.versions import constants, mapped_axes, open_jaxpr, scan_sizes
from optax_lossscale._programs.walk import programs_in

Records = dict[int, Any]
"""What was noted about an equation, under its number: arrays, whose maximum is kept."""

Compute = Callable[[int, Any, Sequence[Any]], tuple[list[Any], Any]]
"""Gives an equation's results, and a note or None, from its number, itself and its operands."""


class Run(NamedTuple):
    """A program, and how it is run."""

    takes: Sequence[Any]  # the dtypes in which it is to be given its arguments
    gives: Sequence[Any]  # the dtypes of its results
    call: Callable[[Sequence[Any]], tuple[list[Any], Records]]
    records: bool  # whether calling it may return any


def by_equation(
    program: Any, compute: Compute, holds: Callable[[Any], Any], first: int = 0
) -> Run:
    """How to run a program equation by equation, numbered from `first` as by `numbered`."""
    # Numbers are held in the dtypes that `holds` returns for their own.
    jaxpr = open_jaxpr(program)
    held = lambda x: in_dtype(holds(dtype_in(x)), x)
    all_held = lambda variables: list(map(holds, dtypes_in(variables)))

    def call(args):
        given = [*constants(program), *args]
        values = dict(zip([*jaxpr.constvars, *jaxpr.invars], map(held, given), strict=True))
        read = lambda v: held(jnp.asarray(v.val)) if isinstance(v, Literal) else values[v]
        records: Records = {}
        number = first
        for eqn in jaxpr.eqns:
            ins = list(map(read, eqn.invars))
            if is_entered(eqn):
                runs = []
                for inner in programs_in(eqn):
                    runs.append(by_equation(inner, compute, holds, number))
                    number += sum(1 for _ in numbered(inner))
                outs, noted = enter(eqn, ins, runs)
                records |= noted
            else:
                outs, note = compute(number, eqn, ins)
                if note is not None:
                    records[number] = note
                number += 1
            values.update(zip(eqn.outvars, outs, strict=True))
        return list(map(read, jaxpr.outvars)), records

    return Run(all_held(jaxpr.invars), all_held(jaxpr.outvars), call, records=True)


def numbered(jaxpr: Any) -> Iterator[Any]:
    """The equations of a program that are not entered, in the order of their numbers."""
    for eqn in open_jaxpr(jaxpr).eqns:
        if is_entered(eqn):
            for program in programs_in(eqn):
                yield from numbered(program)
        else:
            yield eqn


def is_entered(eqn: Any) -> bool:
    """Whether the programs that an equation holds can be run in another way."""
    return eqn.primitive.name in _CALLS


def enter(eqn: Any, ins: Sequence[Any], runs: Sequence[Run]) -> tuple[list[Any], Records]:
    """The results of an equation that holds programs, each run as told, and their records."""
    return _CALLS[eqn.primitive.name](eqn, ins, runs)


def is_placed(eqn: Any) -> bool:
    """Whether a `jit` was told where to place its arguments or results."""
    told = (*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ()))
    return any(map(_is_told, told))


# --- one function for each kind of equation ---


def _inlined(eqn: Any, ins: Sequence[Any], runs: Sequence[Run]) -> tuple[list[Any], Records]:
    (run,) = runs
    outs, records = run.call(_placed(eqn.params.get("in_shardings"), ins))
    return _placed(eqn.params.get("out_shardings"), outs), records


def _remat(eqn: Any, ins: Sequence[Any], runs: Sequence[Run]) -> tuple[list[Any], Records]:
    params, (run,) = eqn.params, runs
    if params["differentiated"] and params["prevent_cse"]:
        ins = lax.optimization_barrier(ins)
    of = lambda *xs: run.call(xs)
    return jax.checkpoint(of, prevent_cse=params["prevent_cse"], policy=params["policy"])(*ins)


def _scan(eqn: Any, ins: Sequence[Any], runs: Sequence[Run]) -> tuple[list[Any], Records]:
    params, (run,) = eqn.params, runs
    n_consts, n_carry = scan_sizes(eqn)
    ins = in_dtypes(run.takes, ins)
    consts, carry, xs = ins[:n_consts], ins[n_consts:][:n_carry], ins[n_consts + n_carry :]
    # From round to round in the wider of two dtypes, and from there in the one that is taken.
    taken = run.takes[n_consts:][:n_carry]
    carried = [_widest(dtypes) for dtypes in zip(taken, run.gives, strict=False)]
    carry = in_dtypes(carried, carry)

    def body(carry, xs):
        outs, records = run.call([*consts, *in_dtypes(taken, carry), *xs])
        return in_dtypes(carried, outs[:n_carry]), (outs[n_carry:], records)

    how = {name: params[name] for name in ("length", "reverse", "unroll")}
    splits = params.get("_split_transpose", False)  # which few scans have
    carry, (ys, records) = lax.scan(body, carry, xs, **how, _split_transpose=splits)
    return [*carry, *ys], jax.tree.map(lambda x: x.max(0, initial=0), records)


def _while(eqn: Any, ins: Sequence[Any], runs: Sequence[Run]) -> tuple[list[Any], Records]:
    condition, body = runs
    n_cond, n_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    cond_consts = ins[:n_cond]
    body_consts = ins[n_cond:][:n_body]
    carried = body.takes[n_body:]
    carry = in_dtypes(carried, ins[n_cond + n_body :])

    is_batched = eqn.params["cond_jaxpr"].out_avals[0].ndim > 0

    def flags(carry):
        """Whether to go on: under `vmap` a flag for each element of the batch."""
        return condition.call([*cond_consts, *carry])[0][0]

    def goes_on(state):
        carry, _ = state
        return flags(carry).any() if is_batched else flags(carry)

    def step(state):
        carry, records = state
        outs, new = body.call([*body_consts, *carry])
        outs = in_dtypes(carried, outs)
        # An element of a batch that has come to its end waits for the others, unchanged.
        if is_batched:
            outs = _where_leading(flags(carry), outs, carry)
        return outs, jax.tree.map(jnp.maximum, records, new)

    noted = _noted(body, [*body_consts, *carry])
    return lax.while_loop(goes_on, step, (carry, jax.tree.map(zeros_of, noted)))


def _where_leading(flags: Any, xs: Sequence[Any], ys: Sequence[Any]) -> list[Any]:
    """Of each pair x where its flag is set, y elsewhere; flags are along the leading axes."""
    chosen = []
    for x, y in zip(xs, ys, strict=True):
        trailing = tuple(range(flags.ndim, x.ndim))
        chosen.append(jnp.where(jnp.expand_dims(flags, trailing), x, y))
    return chosen


def _cond(eqn: Any, ins: Sequence[Any], runs: Sequence[Run]) -> tuple[list[Any], Records]:
    index, *ins = ins
    gives = [_widest(dtypes) for dtypes in zip(*(run.gives for run in runs), strict=True)]
    noted: Records = {}
    for run in runs:
        noted |= _noted(run, ins)

    def branch(run):
        def of(*ins):
            outs, records = run.call(ins)
            return in_dtypes(gives, outs), jax.tree.map(zeros_of, noted) | records

        return of

    return lax.switch(index, list(map(branch, runs)), *ins)


def _noted(run: Run, ins: Sequence[Any]) -> Records:
    """The types of a program's records; if it may have any, it is traced once more for them."""
    return jax.eval_shape(lambda xs: run.call(xs)[1], ins) if run.records else {}


def _shard_map(eqn: Any, ins: Sequence[Any], runs: Sequence[Run]) -> tuple[list[Any], Records]:
    params, (run,) = eqn.params, runs
    axes = mapped_axes(eqn)

    def largest(x):
        along = tuple(varying_axes(x) if params["check_vma"] else axes)
        return lax.pmax(x, along) if along else x

    def of_each(*ins):
        outs, records = run.call(ins)
        return outs, jax.tree.map(largest, records)

    mapped = jax.shard_map(
        of_each,
        mesh=params["mesh"],
        in_specs=tuple(params["in_specs"]),
        out_specs=(list(params["out_specs"]), jax.P()),
        axis_names=set(axes),
        check_vma=params["check_vma"],
    )
    return mapped(*ins)


def _widest(dtypes: Sequence[Any]) -> Any:
    return max(dtypes, key=lambda dtype: dtype.itemsize)


def _placed(shardings: Sequence[Any] | None, xs: Sequence[Any]) -> list[Any]:
    """Arrays where `jit` was told to place them; None means nowhere in particular."""
    pairs = zip(xs, shardings or [None] * len(xs), strict=True)
    return [lax.with_sharding_constraint(x, s) if _is_told(s) else x for x, s in pairs]


def _is_told(sharding: Any) -> bool:
    return isinstance(sharding, jax.sharding.Sharding)


_CALLS = {name: _inlined for name, traits in TABLE.items() if Is.INLINED in traits}
_CALLS |= {name: _remat for name, traits in TABLE.items() if Is.KEEPS in traits}
_CALLS |= {
    "cond": _cond,
    "custom_jvp_call": _inlined,  # once differentiation is done
    "custom_vjp_call": _inlined,
    "scan": _scan,
    "shard_map": _shard_map,
    "while": _while,
}
