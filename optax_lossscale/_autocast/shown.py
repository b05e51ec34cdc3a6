"""A plan in words, with the lines of the user's code."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jax

from optax_lossscale._programs.walk import line_of

if TYPE_CHECKING:
    from optax_lossscale._autocast.plan import Part, Plan


def shown(plan: "Plan") -> str:
    """A plan as it is printed; one that several calls share is printed at the first of them."""
    return "\n".join(_lines(plan, set()))


def _lines(plan: "Plan", known: set[int]) -> Iterator[str]:
    known.add(id(plan))
    yield f"takes {_typed(plan, plan.program.ins, plan.takes)}"
    for part in plan.parts:
        yield _line(part)
        for inner in [inner for step in part.steps for inner in step.plans]:
            lines = ["as above"] if id(inner) in known else _lines(inner, known)
            yield from ("  " + line for line in lines)
    yield f"gives {_typed(plan, plan.program.outs, plan.gives)}"


def _line(part: "Part") -> str:
    """What a part runs, reads and writes, and the lines that made it."""
    how = "island" if part.is_recomputed else "spread" if part.is_spread else "run"
    names = [step.name for step in part.steps]
    reads = [f"{i}:{_short(dtype)}" if dtype else str(i) for i, dtype in part.reads.items()]
    writes = [f"{i}:{'+'.join(map(_short, dtypes))}" for i, dtypes in part.writes.items()]
    line = f"{how}: {' '.join(names[part.repeated :])} ({', '.join(reads)}) -> {', '.join(writes)}"
    if part.repeated:
        line += f", repeating {' '.join(names[: part.repeated])}"
    if part.saved:
        line += f", keeping {', '.join(map(str, sorted(part.saved)))}"
    sources = dict.fromkeys(line_of(step.eqn) for step in part.steps[part.repeated :])
    return f"{line}  # {', '.join(sources)}"


def _typed(plan: "Plan", numbers: Any, dtypes: Any) -> str:
    """Values by number, or literals, each with its dtype."""
    literals = plan.program.literals
    names = [literals[i].val if i in literals else i for i in numbers]
    pairs = zip(names, dtypes, strict=True)
    return ", ".join(f"{name}:{_short(dtype)}" for name, dtype in pairs)


def _short(dtype: Any) -> str:
    """`f16` for float16, as jaxprs have it."""
    return jax.core.ShapedArray((), dtype).str_short(short_dtypes=True).removesuffix("[]")
