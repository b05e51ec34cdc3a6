"""A plan in words, with the lines of the user's code."""

import collections
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax

from optax_lossscale._autocast.flat import Flat, Instruction
from optax_lossscale._programs.operations import Is, traits
from optax_lossscale._programs.walk import line_of

if TYPE_CHECKING:
    from optax_lossscale._autocast.plan import Part, Plan

_WIDTH = 120
_NO_BREAK = "\N{NO-BREAK SPACE}"


def shown(plan: "Plan") -> str:
    """A plan as it is printed; one that several calls share is printed at the first of them."""
    return "\n".join(_lines(plan, set()))


def _lines(plan: "Plan", printed: set[int]) -> Iterator[str]:
    """The lines of a plan; `printed` are the plans that were printed before, by `id`."""
    printed.add(id(plan))
    names = _names(plan.program)
    yield from _wrapped("takes " + _typed(names, plan.program.ins, plan.takes))
    for part in plan.parts:
        yield from _wrapped(_line(part, names))
        for step in part.steps:
            yield from _inside(step, printed)
    yield from _wrapped("gives " + _typed(names, plan.program.outs, plan.gives))


def _inside(step: Instruction, printed: set[int]) -> Iterator[str]:
    """The lines of the plans for the programs that an instruction holds."""
    for label, inner in zip(_labels(step), step.plans, strict=True):
        indent = "  "
        if label:
            yield f"  {label}:"
            indent = "    "
        lines = ["as above"] if id(inner) in printed else _lines(inner, printed)
        yield from (indent + line for line in lines)


def _labels(step: Instruction) -> Sequence[str]:
    """What tells apart the programs that an instruction holds, if there are several."""
    if not step.plans:
        return []
    if Is.WAITS in traits(step.eqn):
        return ["condition", "body"]
    if Is.BRANCHES in traits(step.eqn):
        return [f"branch {n}" for n in range(len(step.plans))]
    return [""]


def _line(part: "Part", names: Mapping[int, Any]) -> str:
    """What a part runs, reads and writes, and the lines that made it."""
    how = "island" if part.is_recomputed else "spread" if part.is_spread else "run"
    repeated = part.steps[: part.repeated]
    steps = part.steps[part.repeated :]
    reads = _typed(names, part.reads, part.reads.values())
    writes = [
        f"{i}:{' and '.join(map(_short, dtypes))}" for i, dtypes in part.writes.items()
    ]
    line = f"{how}: {_operations(steps)} ({reads}) -> {', '.join(writes)}"
    if repeated:
        line += f", repeating {_operations(repeated)}"
    saved = [f"{s.outs[0]} ({s.name})" for s in part.steps if s.outs[0] in part.saved]
    if saved:
        line += f", keeping {', '.join(saved)}"
    sources = _sources(steps)
    return f"{line}  #{_NO_BREAK}{sources}" if sources else line


def _operations(steps: Iterable[Instruction]) -> str:
    return " ".join(step.name for step in steps)


def _sources(steps: Iterable[Instruction]) -> str:
    """The user's lines that made instructions, as `model.py:12, 14 (f)`; "" if there are none."""
    lines: dict[tuple[str, str], dict[str, None]] = collections.defaultdict(dict)
    for step in steps:
        file, _, place = line_of(step.eqn).rpartition(":")
        line, _, function = place.partition(" ")
        if file:  # or else it is JAX's own, such as the counter of a loop
            lines[file, function][line] = None
    return ", ".join(f"{file}:{', '.join(lines[file, f])} {f}" for file, f in lines)


def _names(program: Flat) -> Mapping[int, Any]:
    """What values are called: arguments as in the user's code, literals as they are."""
    names = {i: literal.val for i, literal in program.literals.items()}
    counts = collections.Counter(program.names)
    pairs = zip(program.ins, program.names, strict=False)
    return names | {i: name for i, name in pairs if name and counts[name] == 1}


def _typed(
    names: Mapping[int, Any], numbers: Iterable[int], dtypes: Iterable[Any]
) -> str:
    """Values by name, or else by number, each with its dtype, if it is said."""
    typed = []
    for i, dtype in zip(numbers, dtypes, strict=True):
        name = str(names.get(i, i))
        typed.append(f"{name}:{_short(dtype)}" if dtype else name)
    return ", ".join(typed)


def _short(dtype: Any) -> str:
    """`f16` for float16, as jaxprs have it."""
    return (
        jax.core.ShapedArray((), dtype).str_short(short_dtypes=True).removesuffix("[]")
    )


def _wrapped(line: str) -> list[str]:
    """A line in as many as it takes."""
    lines = textwrap.wrap(
        line,
        _WIDTH,
        subsequent_indent="    ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace(_NO_BREAK, " ") for line in lines]
