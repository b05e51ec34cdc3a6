"""A plan in words, with the lines of the user's code."""

import collections
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax

from optax_lossscale._autocast.flat import Flat, Step
from optax_lossscale._autocast.store import taken_by
from optax_lossscale._programs.operations import Is, traits
from optax_lossscale._programs.walk import line_of

if TYPE_CHECKING:
    from optax_lossscale._autocast.partition import Region
    from optax_lossscale._autocast.plan import Plan

_WIDTH = 120
_NO_BREAK = "\N{NO-BREAK SPACE}"


def shown(plan: "Plan") -> str:
    """A plan as it is printed; one that several calls share is printed at the first of them."""
    return "\n".join(_lines(plan, set()))


def _lines(plan: "Plan", printed: set[int]) -> Iterator[str]:
    """The lines of a plan; `printed` are the plans that were printed before, by `id`."""
    printed.add(id(plan))
    names = _names(plan.program)
    takes = zip(plan.program.ins, plan.takes, strict=True)
    yield from _wrapped("takes " + _typed(names, takes))
    seen: set[int] = set()
    for region in plan.regions:
        yield from _wrapped(_line(region, names, seen))
        seen.update(*(step.outs for step in region.steps))
        for step in region.steps:
            yield from _inside(step, printed)
    gives = zip(plan.program.outs, plan.gives, strict=True)
    yield from _wrapped("gives " + _typed(names, gives))


def _inside(step: Step, printed: set[int]) -> Iterator[str]:
    """The lines of the plans for the programs that a step holds."""
    for label, inner in zip(_labels(step), step.plans, strict=True):
        indent = "  "
        if label:
            yield f"  {label}:"
            indent = "    "
        lines = ["as above"] if id(inner) in printed else _lines(inner, printed)
        yield from (indent + line for line in lines)


def _labels(step: Step) -> Sequence[str]:
    """What tells apart the programs that a step holds, if there are several."""
    if not step.plans:
        return []
    if Is.WAITS in traits(step.eqn):
        return ["condition", "body"]
    if Is.BRANCHES in traits(step.eqn):
        return [f"branch {n}" for n in range(len(step.plans))]
    return [""]


def _line(region: "Region", names: Mapping[int, Any], seen: set[int]) -> str:
    """What a region runs, reads and stores, and the lines that made it; `seen` is repeated."""
    repeated = [step for step in region.steps if not seen.isdisjoint(step.outs)]
    steps = [step for step in region.steps if seen.isdisjoint(step.outs)]
    reads = _typed(names, taken_by(region))
    stores = _typed({}, region.stores.items())
    how = "island" if region.is_recomputed else "run"
    line = f"{how}: {_operations(steps)} ({reads}) -> {stores}"
    if repeated:
        line += f", repeating {_operations(repeated)}"
    if region.kept:
        kept = [step for step in region.steps if step.outs[0] in region.kept]
        line += ", keeping "
        line += ", ".join(f"{step.outs[0]} ({step.name})" for step in kept)
    sources = _sources(steps)
    return f"{line}  #{_NO_BREAK}{sources}" if sources else line


def _operations(steps: Iterable[Step]) -> str:
    return " ".join(step.name for step in steps)


def _sources(steps: Iterable[Step]) -> str:
    """The user's lines that made steps, as `model.py:12, 14 (f)`; "" if there are none."""
    numbers: dict[tuple[str, str], dict[str, None]] = collections.defaultdict(dict)
    for step in steps:
        file, _, place = line_of(step.eqn).rpartition(":")
        number, _, function = place.partition(" ")
        if file:  # or else it is JAX's own, such as the counter of a loop
            numbers[file, function][number] = None
    sources = []
    for (file, function), in_function in numbers.items():
        sources.append(f"{file}:{', '.join(in_function)} {function}")
    return ", ".join(sources)


def _names(program: Flat) -> Mapping[int, Any]:
    """What values are called: arguments as in the user's code, literals as they are."""
    names: dict[int, Any] = {}
    for i, literal in program.literals.items():
        names[i] = literal.val
    counts = collections.Counter(program.names)
    for i, name in zip(program.ins, program.names, strict=False):
        if name and counts[name] == 1:
            names[i] = name
    return names


def _typed(names: Mapping[int, Any], pairs: Iterable[tuple[int, Any]]) -> str:
    """Values by name, or else by number, each with its dtype, if it is said."""
    typed = []
    for i, dtype in pairs:
        name = str(names.get(i, i))
        typed.append(f"{name}:{_short(dtype)}" if dtype else name)
    return ", ".join(typed)


def _short(dtype: Any) -> str:
    """`f16` for float16, as jaxprs have it."""
    scalar = jax.core.ShapedArray((), dtype)
    return scalar.str_short(short_dtypes=True).removesuffix("[]")


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
