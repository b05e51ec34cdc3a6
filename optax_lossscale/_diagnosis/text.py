"""The layout of reports: wrapped paragraphs, shortened lists, tables, percentages.

For example, `abridged(["a", "b", "c", "d"])` returns `a, b, c and 1 more`.
"""

import math
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

# How many names of a list are shown.
_SHOWN_NAMES = 3


def wrapped(paragraph: str) -> str:
    """Wraps a paragraph at 100 characters and indents all lines but the first.

    Words are never broken, so a line that consists of one long word may be longer.
    """
    return textwrap.fill(
        paragraph,
        width=100,
        subsequent_indent="   ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def abridged(names: Sequence[str]) -> str:
    """Lists the first names and counts the others, as in `a, b, c and 2 more`."""
    shown = ", ".join(names[:_SHOWN_NAMES])
    n_hidden = len(names) - _SHOWN_NAMES
    return f"{shown} and {n_hidden} more" if n_hidden > 0 else shown


def listed(names: Sequence[Any]) -> str:
    """Lists all names, as in `a, b and c`."""
    shown = list(map(str, names))
    if len(shown) < 2:
        return "".join(shown)
    return f"{', '.join(shown[:-1])} and {shown[-1]}"


def lines_of(operations: Iterable[Any]) -> str:
    """Lists the distinct `source` lines of operations or notes.

    If there are many, only the first are listed and the others counted.
    """
    sources = list(dict.fromkeys(operation.source for operation in operations))
    return abridged(sources) if len(sources) > _SHOWN_NAMES else listed(sources)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Pads the cells of a table so that its columns are two spaces apart."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = map(str.ljust, row, widths)
        lines.append("  ".join(cells).rstrip())
    return lines


def percent(share: float) -> str:
    """Formats a share or an error in percent, or as `not finite` if it is infinite."""
    return f"{share:.1%}" if share < math.inf else "not finite"
