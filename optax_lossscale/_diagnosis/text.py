"""The layout of reports: tables and percentages."""

import math
from collections.abc import Sequence


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
