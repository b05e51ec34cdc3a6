"""Tables in Markdown."""

from collections.abc import Mapping, Sequence


def markdown(columns: Sequence[str], rows: Mapping[str, Sequence[str]]) -> str:
    """A table whose first column has the rows' names, and whose others have numbers."""
    rule = ["---", *["---:"] * (len(columns) - 1)]
    lines = [columns, rule, *([name, *cells] for name, cells in rows.items())]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
