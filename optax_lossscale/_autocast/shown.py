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

from optax_lossscale._autocast.flat import Flat, TypedStep
from optax_lossscale._autocast.store import Region
from optax_lossscale._programs.walk import has_users_line, line_of

if TYPE_CHECKING:
    from optax_lossscale._autocast.plan import Plan

Names = Mapping[int, Any]
"""By number, the names of arguments in the user's code, and the values of literals."""


def shown(plan: "Plan") -> str:
    """A plan as text; an inner plan that several steps share is shown at the first."""
    return "\n".join(_lines(plan, set()))


def _lines(plan: "Plan", printed: set["Plan"]) -> Iterator[str]:
    """The lines of a plan; `printed` has each plan before it, and grows."""
    printed.add(plan)
    program = plan.program
    names = _names(program)
    yield f"takes {_typed(names, zip(program.ins, plan.takes, strict=True))}"
    made: set[int] = set()
    for region in plan.regions:
        yield from textwrap.wrap(
            _line(region, names, made),
            width=120,
            subsequent_indent="    ",
            break_long_words=False,
            break_on_hyphens=False,
        )
        for step in region.steps:
            made.update(step.outs)
            yield from _inside(step, printed)
    yield f"gives {_typed(names, zip(program.outs, plan.gives, strict=True))}"


def _inside(step: TypedStep, printed: set["Plan"]) -> Iterator[str]:
    """The lines of the plans for the programs that a step holds."""
    for n, inner in enumerate(step.plans):
        indent = "  "
        if len(step.plans) > 1:
            yield f"  program {n}:"
            indent = "    "
        lines = ["as above"] if inner in printed else _lines(inner, printed)
        for line in lines:
            yield indent + line


def _line(region: Region, names: Names, made: set[int]) -> str:
    """The line of a region; `made` has the results of the regions before it."""
    repeated = [step.name for step in region.steps if not made.isdisjoint(step.outs)]
    steps = [step for step in region.steps if made.isdisjoint(step.outs)]
    kept = [step.name for step in steps if not region.kept.isdisjoint(step.outs)]
    how = "island" if region.is_recomputed else "run"
    line = f"{how}: {' '.join(step.name for step in steps)}"
    line += f" ({_typed(names, region.reads.items())})"
    line += f" -> {_typed({}, region.stores.items())}"
    if repeated:
        line += f", repeating {' '.join(repeated)}"
    if kept:
        line += f", keeping {' '.join(kept)}"
    # Other equations have no line of the user's, such as the counter of a loop.
    eqns = [step.eqn for step in steps if has_users_line(step.eqn)]
    sources = dict.fromkeys(map(line_of, eqns))
    return f"{line}  # {', '.join(sources)}" if sources else line


def _names(program: Flat) -> Names:
    """The names of those values of a program that have one."""
    names = {i: literal.val for i, literal in program.literals.items()}
    for i, name in zip(program.ins, program.names, strict=False):
        if name:
            names[i] = name
    return names


def _typed(names: Names, pairs: Iterable[tuple[int, Any]]) -> str:
    """Values by name, or else by number, each with its dtype if that is not None."""
    typed = []
    for i, dtype in pairs:
        name = str(names.get(i, i))
        if dtype:
            name += ":" + dtype.name.replace("float", "f")
        typed.append(name)
    return ", ".join(typed)
