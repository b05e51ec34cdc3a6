"""The interpreter: a program is run by a rule, and so are the programs that its equations hold.

An equation that holds programs, as `scan` does, is entered with each of these run in another
way. What runs them may return records beside the results, which loops and branches gather: of
all rounds, branches and devices the largest is kept.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Literal

from optax_lossscale._arrays.placement import varying_axes, zeros_of
from optax_lossscale._programs.values import dtype_in, in_dtype, in_dtypes
from optax_lossscale._programs.versions import (
    constants,
    mapped_axes,
    open_jaxpr,
    scan_sizes,
)
from optax_lossscale._programs.walk import programs_in

Records = dict[int, Any]
"""What was noted of an equation, under its number: arrays, of which the maximum is kept."""


class Run(Protocol):
    """A program, and how it is run.

    Attributes:
      takes: the dtypes in which it is to be given its arguments.
      gives: the dtypes of its results.
    """

    @property
    def takes(self) -> Sequence[Any]: ...

    @property
    def gives(self) -> Sequence[Any]: ...

    def __call__(self, args: Sequence[Any]) -> tuple[list[Any], Records]: ...


class Rule(NamedTuple):
    """How to run a program equation by equation.

    Attributes:
      compute: gives the results of an equation that holds no programs to run, and what to note of
        it or None, from its number, the equation, and its operands.
      holds: the dtype in which numbers of a dtype are held.
    """

    compute: Callable[[int, Any, Sequence[Any]], tuple[list[Any], Any]]
    holds: Callable[[Any], Any]


class ByEquation(NamedTuple):
    """A program that is run equation by equation.

    Attributes:
      jaxpr: the program, closed or without constants.
      rule: computes each equation.
      first: the number of its first equation, as `numbered` counts them.
    """

    jaxpr: Any
    rule: Rule
    first: int = 0

    @property
    def takes(self) -> list[Any]:
        return self._held(open_jaxpr(self.jaxpr).invars)

    @property
    def gives(self) -> list[Any]:
        return self._held(open_jaxpr(self.jaxpr).outvars)

    def __call__(self, args: Sequence[Any]) -> tuple[list[Any], Records]:
        jaxpr = open_jaxpr(self.jaxpr)
        held = lambda x: in_dtype(self.rule.holds(dtype_in(x)), x)
        given = [*constants(self.jaxpr), *args]
        values = dict(zip([*jaxpr.constvars, *jaxpr.invars], map(held, given), strict=True))
        read = lambda v: held(jnp.asarray(v.val)) if isinstance(v, Literal) else values[v]
        records: Records = {}
        number = self.first
        for eqn in jaxpr.eqns:
            ins = list(map(read, eqn.invars))
            if is_entered(eqn):
                runs = []
                for program in programs_in(eqn):
                    runs.append(ByEquation(program, self.rule, number))
                    number += sum(1 for _ in numbered(program))
                outs, noted = enter(eqn, ins, runs)
                records |= noted
            else:
                outs, note = self.rule.compute(number, eqn, ins)
                if note is not None:
                    records[number] = note
                number += 1
            values.update(zip(eqn.outvars, outs, strict=True))
        return list(map(read, jaxpr.outvars)), records

    def _held(self, variables: Sequence[Any]) -> list[Any]:
        return [self.rule.holds(dtype_in(v)) for v in variables]


def numbered(jaxpr: Any) -> Iterator[Any]:
    """The equations of a program that are not entered, in order: their places number them."""
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
    """The results of an equation that holds programs, and what running these recorded.

    Args:
      eqn: the equation.
      ins: its operands, in any floating-point dtypes.
      runs: how to run each of `programs_in(eqn)`.
    """
    return _CALLS[eqn.primitive.name](eqn, ins, runs)


def is_placed(eqn: Any) -> bool:
    """Whether a `jit` was told where to have what it takes or gives."""
    told = (*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ()))
    return any(isinstance(s, jax.sharding.Sharding) for s in told)


# --- one function for each kind of equation ---


def _inlined(eqn: Any, ins: Sequence[Any], runs: Sequence[Run]) -> tuple[list[Any], Records]:
    """What `jit` compiles; and custom derivatives, once differentiation is done."""
    (run,) = runs
    outs, records = run(_placed(eqn.params.get("in_shardings"), ins))
    return _placed(eqn.params.get("out_shardings"), outs), records


def _remat(eqn: Any, ins: Sequence[Any], runs: Sequence[Run]) -> tuple[list[Any], Records]:
    params, (run,) = eqn.params, runs
    if params["differentiated"] and params["prevent_cse"]:
        ins = lax.optimization_barrier(ins)
    of = lambda *xs: run(xs)
    return jax.checkpoint(of, prevent_cse=params["prevent_cse"], policy=params["policy"])(*ins)


def _scan(eqn: Any, ins: Sequence[Any], runs: Sequence[Run]) -> tuple[list[Any], Records]:
    params, (run,) = eqn.params, runs
    n_consts, n_carry = scan_sizes(eqn)
    ins = in_dtypes(run.takes, ins)
    consts, carry, xs = ins[:n_consts], ins[n_consts:][:n_carry], ins[n_consts + n_carry :]
    carried = run.takes[n_consts:][:n_carry]

    def body(carry, xs):
        outs, records = run([*consts, *carry, *xs])
        return in_dtypes(carried, outs[:n_carry]), (outs[n_carry:], records)

    how = {name: params[name] for name in ("length", "reverse", "unroll")}
    splits = params.get("_split_transpose", False)  # which few scans have
    carry, (ys, records) = lax.scan(body, carry, xs, **how, _split_transpose=splits)
    return [*carry, *ys], jax.tree.map(lambda x: x.max(0, initial=0), records)


def _while(eqn: Any, ins: Sequence[Any], runs: Sequence[Run]) -> tuple[list[Any], Records]:
    condition, body = runs
    n_cond, n_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    of_cond, of_body = ins[:n_cond], ins[n_cond:][:n_body]
    carried = body.takes[n_body:]
    carry = in_dtypes(carried, ins[n_cond + n_body :])

    def step(state):
        carry, records = state
        outs, new = body([*of_body, *carry])
        return in_dtypes(carried, outs), jax.tree.map(jnp.maximum, records, new)

    goes_on = lambda state: condition([*of_cond, *state[0]])[0][0]
    noted = jax.eval_shape(lambda xs: body([*of_body, *xs])[1], carry)
    return lax.while_loop(goes_on, step, (carry, jax.tree.map(zeros_of, noted)))


def _cond(eqn: Any, ins: Sequence[Any], runs: Sequence[Run]) -> tuple[list[Any], Records]:
    index, *ins = ins
    widest = lambda dtypes: max(dtypes, key=lambda dtype: dtype.itemsize)
    gives = [widest(dtypes) for dtypes in zip(*(run.gives for run in runs), strict=True)]
    noted: Records = {}
    for run in runs:
        noted |= jax.eval_shape(lambda xs, run=run: run(xs)[1], ins)

    def branch(run):
        def of(*ins):
            outs, records = run(ins)
            return in_dtypes(gives, outs), jax.tree.map(zeros_of, noted) | records

        return of

    return lax.switch(index, list(map(branch, runs)), *ins)


def _shard_map(eqn: Any, ins: Sequence[Any], runs: Sequence[Run]) -> tuple[list[Any], Records]:
    params, (run,) = eqn.params, runs
    axes = mapped_axes(eqn)

    def largest(x):
        along = tuple(varying_axes(x) if params["check_vma"] else axes)
        return lax.pmax(x, along) if along else x

    def of_each(*ins):
        outs, records = run(ins)
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


def _placed(shardings: Sequence[Any] | None, xs: Sequence[Any]) -> list[Any]:
    """Arrays where `jit` was told to have them; None for nowhere in particular."""
    is_told = lambda s: isinstance(s, jax.sharding.Sharding)
    if shardings is None:
        return list(xs)
    pairs = zip(xs, shardings, strict=True)
    return [lax.with_sharding_constraint(x, s) if is_told(s) else x for x, s in pairs]


_CALLS = {
    "checkpoint": _remat,
    "closed_call": _inlined,
    "cond": _cond,
    "core_call": _inlined,
    "custom_jvp_call": _inlined,
    "custom_vjp_call": _inlined,
    "eval_jaxpr": _inlined,
    "jit": _inlined,
    "pjit": _inlined,
    "remat": _remat,
    "remat2": _remat,
    "scan": _scan,
    "shard_map": _shard_map,
    "while": _while,
}
