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

from optax_lossscale._autocast.flat import TypedStep
from optax_lossscale._autocast.store import Region
from optax_lossscale._programs.walk import has_users_line, line_of

if TYPE_CHECKING:
    from optax_lossscale._autocast.plan import Plan

Names = Mapping[int, str]
"""By number, the names of arguments in the user's code, and the values of literals."""


def shown(plan: "Plan") -> str:
    """A plan as text; an inner plan that several steps share is shown at the first."""
    return "\n".join(_lines(plan, set()))


def _lines(plan: "Plan", printed: set["Plan"]) -> Iterator[str]:
    """The lines of a plan; `printed` has each plan before it, and grows."""
    if plan in printed:
        yield "as above"
        return
    printed.add(plan)
    program = plan.program
    names = {i: str(literal.val) for i, literal in program.literals.items()}
    named = zip(program.ins, program.names, strict=False)
    names |= {i: name for i, name in named if name}
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
            for n, inner in enumerate(step.plans):
                if len(step.plans) > 1:
                    yield f"  program {n}:"
                for line in _lines(inner, printed):
                    yield f"  {line}"
    yield f"gives {_typed(names, zip(program.outs, plan.gives, strict=True))}"


def _line(region: Region, names: Names, made: set[int]) -> str:
    """The line of a region; `made` has the results of the regions before it."""
    new = [step for step in region.steps if made.isdisjoint(step.outs)]
    repeated = [step for step in region.steps if step not in new]
    kept = [step for step in new if not region.kept.isdisjoint(step.outs)]
    line = "island" if region.is_recomputed else "run"
    line += f": {_operations(new)} ({_typed(names, region.reads.items())})"
    line += f" -> {_typed(names, region.stores.items())}"
    if repeated:
        line += f", repeating {_operations(repeated)}"
    if kept:
        line += f", keeping {_operations(kept)}"
    # Other equations have no line of the user's, such as the counter of a loop.
    eqns = [step.eqn for step in new if has_users_line(step.eqn)]
    sources = dict.fromkeys(map(line_of, eqns))
    return f"{line}  # {', '.join(sources)}" if sources else line


def _operations(steps: Iterable[TypedStep]) -> str:
    return " ".join(step.name for step in steps)


def _typed(names: Names, dtypes: Iterable[tuple[int, Any]]) -> str:
    """Values by name, or else by number, each with its dtype if that is not None."""
    typed = []
    for i, dtype in dtypes:
        of_dtype = f":{dtype.name.replace('float', 'f')}" if dtype else ""
        typed.append(names.get(i, str(i)) + of_dtype)
    return ", ".join(typed)
