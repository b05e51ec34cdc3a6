"""A plan in words: a line for each region, with the lines of the user's code.

    island: exp reduce_sum (2) -> 4:f32  # model.py:8 (f)

This region reads the value 2 as it is stored, computes `exp` and `reduce_sum`, and
stores the value 4 in float32. The word `island` stands before a region that is
recomputed in the backward pass, and `run` before any other: a single step, or an island
that is not recomputed. After `repeating` are the steps that an earlier line has as
well, and after `keeping` those whose results are kept. Where all readers of a step
repeat it, its own line remains, and the compiler drops the step.
"""

import textwrap
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from jax.extend.core import JaxprEqn, Literal, Var

from optax_lossscale._autocast.flat import Flat
from optax_lossscale._autocast.store import Region
from optax_lossscale._programs.versions import name_of
from optax_lossscale._programs.walk import has_users_line, line_of

if TYPE_CHECKING:
    from optax_lossscale._autocast.plan import Plan

Names = Mapping[Var, str]
"""The names of arguments in the user's code, and numbers of all other values."""


def shown(plan: "Plan") -> str:
    """A plan as text; an inner plan that several steps share is shown at the first."""
    return "\n".join(_lines(plan, set()))


def _lines(plan: "Plan", printed: set["Plan"]) -> Iterator[str]:
    """The lines of a plan; `printed` has each plan before it, and grows."""
    if plan in printed:
        yield "as above"
        return
    printed.add(plan)
    names = _names(plan.program)
    yield f"takes {_typed(names, zip(plan.program.ins, plan.takes, strict=True))}"
    made: set[Var] = set()
    for region in plan.regions:
        yield from textwrap.wrap(
            _line(region, names, made),
            width=120,
            subsequent_indent="    ",
            break_long_words=False,
            break_on_hyphens=False,
        )
        for step in region.steps:
            made.update(step.eqn.outvars)
            for n, inner in enumerate(step.plans):
                if len(step.plans) > 1:
                    yield f"  program {n}:"
                for line in _lines(inner, printed):
                    yield f"  {line}"
    yield f"gives {_typed(names, zip(plan.program.outs, plan.gives, strict=True))}"


def _names(program: Flat) -> Names:
    """The names of the values of a program: numbers, but for arguments with names."""
    made = [v for eqn in program.eqns for v in eqn.outvars]
    values = [*program.ins, *program.consts, *made]
    names = {v: str(n) for n, v in enumerate(values)}
    named = zip(program.ins, program.names, strict=False)
    return names | {v: name for v, name in named if name}


def _line(region: Region, names: Names, made: set[Var]) -> str:
    """The line of a region; `made` has the results of the regions before it."""
    new: list[JaxprEqn] = []
    repeated: list[JaxprEqn] = []
    for step in region.steps:
        is_new = made.isdisjoint(step.eqn.outvars)
        (new if is_new else repeated).append(step.eqn)
    kept = [eqn for eqn in new if not region.kept.isdisjoint(eqn.outvars)]
    line = "island" if region.is_recomputed else "run"
    line += f": {_operations(new)} ({_typed(names, region.reads.items())})"
    line += f" -> {_typed(names, region.stores.items())}"
    if repeated:
        line += f", repeating {_operations(repeated)}"
    if kept:
        line += f", keeping {_operations(kept)}"
    # Other equations have no line of the user's, such as the counter of a loop.
    sources = dict.fromkeys(map(line_of, filter(has_users_line, new)))
    return f"{line}  # {', '.join(sources)}" if sources else line


def _operations(eqns: Iterable[JaxprEqn]) -> str:
    return " ".join(map(name_of, eqns))


def _typed(names: Names, dtypes: Iterable[tuple[Any, Any]]) -> str:
    """Values by name or number, and literals as they are, each with its dtype."""
    typed = []
    for v, dtype in dtypes:
        name = str(v.val) if isinstance(v, Literal) else names[v]
        typed.append(f"{name}:{dtype.name.replace('float', 'f')}")
    return ", ".join(typed)
