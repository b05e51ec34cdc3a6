"""Reports as text: paragraphs, lists and tables."""

import textwrap
from collections.abc import Sequence

_COLUMNS = 100
_SHOWN = 3
wrapped = textwrap.TextWrapper(
    width=_COLUMNS, subsequent_indent="   ", break_long_words=False, break_on_hyphens=False
).fill


def some(names: Sequence[str], what: str = "more") -> str:
    """The first of them: `a, b, c and 2 more`."""
    left = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {left} {what}" if left > 0 else "")


def table(rows: Sequence[Sequence[str]], text: Sequence[int] = (0,)) -> list[str]:
    """Rows as lines; the first column is shortened to fit, and columns in `text` align left."""
    _, *widths = (max(map(len, column)) for column in zip(*rows, strict=True))
    room = max(_COLUMNS - sum(widths) - 2 * len(widths), 24)
    third = room // 3  # the end of a long name tells most
    fits = lambda name: name if len(name) <= room else f"{name[:third]}…{name[third + 1 - room :]}"
    rows = [(fits(name), *others) for name, *others in rows]
    widths = [max(len(row[0]) for row in rows), *widths]
    aligned = lambda i, x: x.ljust(widths[i]) if i in text else x.rjust(widths[i])
    return ["  ".join(map(aligned, range(len(row)), row)).rstrip() for row in rows]
