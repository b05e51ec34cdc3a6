"""A plan in words: a line for each region, with the lines of the user's code.

    island: exp reduce_sum (2:f16) -> 4:f32  # model.py:8 (f)

This region reads the value 2, computes `exp` and `reduce_sum`, and stores the value 4
in float32. What is read has the dtype to which the region first casts it, or else the
one in which it is stored. The word `island` stands before a region that is recomputed
in the backward pass, and `run` before any other: a single step, or an island that is
not recomputed. After `keeping` are the steps whose results are kept. A cheap step may
be in several lines. An equation whose results nothing reads has no line, unless it has
an effect. Literals that a step reads are not shown.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from jax.extend.core import JaxprEqn, Literal, Var

from optax_lossscale._autocast.region import Dtypes, Region
from optax_lossscale._programs.flat import Flat
from optax_lossscale._programs.lines import users_line
from optax_lossscale._programs.values import dtype_in
from optax_lossscale._programs.versions import name_of

if TYPE_CHECKING:
    from optax_lossscale._autocast.plan import Plan

Names = Mapping[Var, str]
"""The names of arguments in the user's code, and numbers of all other values."""


def shown(plan: "Plan") -> str:
    """A plan as text; one that several steps share is shown at the first of them."""
    return "\n".join(_lines(plan, set()))


def _lines(plan: "Plan", printed: set["Plan"]) -> Iterator[str]:
    """The lines of a plan; `printed` has each plan before it, and grows."""
    if plan in printed:
        yield "as above"
        return
    printed.add(plan)
    program = plan.program
    names = _names(program)
    stored = {v: dtype_in(v) for v in program.consts}
    stored |= zip(program.ins, plan.takes, strict=True)
    yield f"takes {_typed(names, zip(program.ins, plan.takes, strict=True))}"
    for region in plan.regions:
        yield _line(region, names, stored)
        stored |= region.stores
        for inner in region.steps[0].plans:
            yield from (f"  {line}" for line in _lines(inner, printed))
    yield f"gives {_typed(names, zip(program.outs, plan.gives, strict=True))}"


def _names(program: Flat) -> Names:
    """The names of the values of a program: numbers, but for arguments with names."""
    made = [v for eqn in program.eqns for v in eqn.outvars]
    values = [*program.ins, *program.consts, *made]
    names = dict(zip(program.ins, program.names, strict=False))
    return {v: names.get(v) or str(n) for n, v in enumerate(values)}


def _line(region: Region, names: Names, stored: Dtypes) -> str:
    """The line of a region; `stored` has the dtypes of the values before it."""
    eqns = [step.eqn for step in region.steps]
    kept = [eqn for eqn in eqns if not region.kept_reductions.isdisjoint(eqn.outvars)]
    word = "island" if region.is_recomputed else "run"
    reads = dict(region.reads)
    reads |= {v: stored[v] for v in _taken_as_stored(region) if v in reads}
    stores = _typed(names, region.stores.items())
    read = _typed(names, reads.items())
    line = f"{word}: {_operations(eqns)} ({read}) -> {stores}"
    if kept:
        line += f", keeping {_operations(kept)}"
    # Some equations have no line of the user's, such as the counter of a loop.
    sources = dict.fromkeys(filter(None, map(users_line, eqns)))
    return f"{line}  # {', '.join(sources)}" if sources else line


def _taken_as_stored(region: Region) -> set[Var]:
    """The values that some step of a region takes without a cast."""
    return {
        v
        for step in region.steps
        for v, dtype in zip(step.eqn.invars, step.takes, strict=True)
        if dtype is None and isinstance(v, Var)
    }


def _operations(eqns: Iterable[JaxprEqn]) -> str:
    return " ".join(map(name_of, eqns))


def _typed(names: Names, values: Iterable[tuple[Any, Any]]) -> str:
    """Values by name or number, and literals as they are, each with its dtype."""
    typed: list[str] = []
    for v, dtype in values:
        name = v.val if isinstance(v, Literal) else names[v]
        typed.append(f"{name}:{dtype.name.replace('float', 'f')}")
    return ", ".join(typed)
