"""Reports as text: paragraphs, lists, tables and percentages."""

import math
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

_NAMED = 3  # how many names of a list are shown


def wrapped(paragraph: str) -> str:
    """A paragraph in lines, all but the first of them indented.

    A line has at most 100 characters, unless one word is longer.
    """
    return textwrap.fill(
        paragraph,
        width=100,
        subsequent_indent="   ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def some(names: Sequence[str]) -> str:
    """The first names of a list, as in `a, b, c and 2 more`."""
    first = ", ".join(names[:_NAMED])
    further = len(names) - _NAMED
    return f"{first} and {further} more" if further > 0 else first


def lines_of(operations: Iterable[Any]) -> str:
    """The source lines of operations, each once, of which the first are shown."""
    return some(list(dict.fromkeys(operation.source for operation in operations)))


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of text for the rows of a table, in columns two spaces apart."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = map(str.ljust, row, widths)
        lines.append("  ".join(cells).rstrip())
    return lines


def percent(share: float) -> str:
    """A share or an error in percent; `not finite` if it is infinite."""
    return f"{share:.1%}" if share < math.inf else "not finite"
