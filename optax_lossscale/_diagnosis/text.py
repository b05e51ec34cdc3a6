"""Reports as text: paragraphs, lists and tables."""

import textwrap
from collections.abc import Container, Iterable, Sequence
from typing import Any

_COLUMNS = 100
_LEAST = 24  # letters of a name that is shortened
_SHOWN = 3
wrapped = textwrap.TextWrapper(
    width=_COLUMNS,
    subsequent_indent="   ",
    break_long_words=False,
    break_on_hyphens=False,
).fill


def some(names: Sequence[str], what: str = "more") -> str:
    """The first of them: `a, b, c and 2 more`."""
    first = ", ".join(names[:_SHOWN])
    left = len(names) - _SHOWN
    return f"{first} and {left} {what}" if left > 0 else first


def lines_of(operations: Iterable[Any]) -> list[str]:
    """The lines of operations, in their order, each once."""
    return list(dict.fromkeys(one.source for one in operations))


def aligned(rows: Sequence[Sequence[str]], text: Container[int] = (0,)) -> list[str]:
    """Rows as lines in columns two spaces apart; those in `text` align left, others right."""
    columns = []
    for n, column in enumerate(zip(*rows, strict=True)):
        width = max(map(len, column))
        align = str.ljust if n in text else str.rjust
        columns.append([align(cell, width) for cell in column])
    return ["  ".join(row).rstrip() for row in zip(*columns, strict=True)]


def table(rows: Sequence[Sequence[str]], text: Container[int] = (0,)) -> list[str]:
    """Rows aligned, with the names in the first column shortened to fit."""
    room = _COLUMNS
    for cells in list(zip(*rows, strict=True))[1:]:
        room -= max(map(len, cells)) + 2
    return aligned(
        [(_shortened(row[0], max(room, _LEAST)), *row[1:]) for row in rows], text
    )


def _shortened(name: str, room: int) -> str:
    """The start of a name and more of its end, which tells most."""
    if len(name) <= room:
        return name
    start = room // 3
    return f"{name[:start]}…{name[start + 1 - room :]}"
