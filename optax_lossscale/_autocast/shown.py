"""Prints a plan: one line for each region, with the lines of the user's code.

    island: exp reduce_sum (2:f16) -> 4:f32  # model.py:8 (f)

This region reads the value 2, computes `exp` and `reduce_sum`, and stores the value 4
in float32. For a value that is read, the line shows the dtype to which the region first
casts it, or the dtype in which it is stored if an equation reads it without a cast.

A line begins with `island` if the backward pass recomputes the region and with `run`
otherwise, that is, for a single equation or for an island, or a part of one, that is
not recomputed. After `keeping` come the operations whose results are saved as
residuals. A cheap equation that several regions repeat appears in the line of each. An
equation has no line if nothing reads its results and it has no effect. Literals that an
equation reads are not shown.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from jax.extend.core import JaxprEqn, Literal, Var

from optax_lossscale._autocast.region import Dtypes, Region
from optax_lossscale._programs.flat import Flat
from optax_lossscale._programs.lines import users_line
from optax_lossscale._programs.values import dtype_in
from optax_lossscale._programs.versions import name_of
from optax_lossscale._programs.walk import producers_in

if TYPE_CHECKING:
    from optax_lossscale._autocast.plan import Plan

Names = Mapping[Var, str]
"""What each value is called: an argument as in the user's code, any other by number."""


def text_of(plan: "Plan") -> str:
    """Returns a plan as text, with each inner plan shown once and then "as above"."""
    return "\n".join(_lines(plan, set()))


def _lines(plan: "Plan", printed: set["Plan"]) -> Iterator[str]:
    """Yields the lines of a plan and adds the plan to the `printed` ones."""
    if plan in printed:
        yield "as above"
        return
    printed.add(plan)
    program = plan.program
    names = _names(program)
    arguments = list(zip(program.ins, plan.in_dtypes, strict=True))
    results = zip(program.outs, plan.out_dtypes, strict=True)
    stored = {v: dtype_in(v) for v in program.consts}
    stored.update(arguments)
    yield f"takes {_typed(names, arguments)}"
    for region in plan.regions:
        yield _line(region, names, stored)
        stored.update(region.stores)
        for inner in region.equations[0].plans:
            for line in _lines(inner, printed):
                yield f"  {line}"
    yield f"gives {_typed(names, results)}"


def _names(program: Flat) -> Names:
    """Names each value: by numbers, except for arguments that have a name."""
    computed = producers_in(program.eqns)
    values = [*program.ins, *program.consts, *computed]
    names = {v: str(n) for n, v in enumerate(values)}
    for v, name in zip(program.ins, program.names, strict=False):
        if name:
            names[v] = name
    return names


def _line(region: Region, names: Names, stored: Dtypes) -> str:
    """Returns the line of a region; `stored` has the dtypes of all values before it."""
    eqns = [planned.eqn for planned in region.equations]
    word = "island" if region.is_recomputed else "run"
    uncast = _read_uncast(region)
    reads = dict(region.reads)
    for v in reads.keys() & uncast:
        reads[v] = stored[v]
    operands = _typed(names, reads.items())
    stores = _typed(names, region.stores.items())
    line = f"{word}: {_operations(eqns)} ({operands}) -> {stores}"
    kept = [eqn for eqn in eqns if not region.kept_reductions.isdisjoint(eqn.outvars)]
    if kept:
        line += f", keeping {_operations(kept)}"
    # Some equations, such as the counter of a loop, come from no line of the user's.
    users_lines = filter(None, map(users_line, eqns))
    distinct = dict.fromkeys(users_lines)
    if distinct:
        line += f"  # {', '.join(distinct)}"
    return line


def _read_uncast(region: Region) -> set[Var]:
    """Finds the values that some equation of a region reads without a cast."""
    uncast = set()
    for planned in region.equations:
        operands = planned.eqn.invars
        for v, dtype in zip(operands, planned.operand_dtypes, strict=True):
            if dtype is None and isinstance(v, Var):
                uncast.add(v)
    return uncast


def _operations(eqns: Iterable[JaxprEqn]) -> str:
    return " ".join(map(name_of, eqns))


def _typed(names: Names, values: Iterable[tuple[Any, Any]]) -> str:
    """Names each value, or shows it if it is a literal, with its dtype.

    A token, which has no dtype, is shown as in `3:token`.
    """
    typed = []
    for v, dtype in values:
        name = v.val if isinstance(v, Literal) else names[v]
        short_dtype = "token" if dtype is None else dtype.name.replace("float", "f")
        typed.append(f"{name}:{short_dtype}")
    return ", ".join(typed)
