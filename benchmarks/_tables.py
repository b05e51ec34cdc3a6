"""Tables of text: whole in a CSV file beside a page, and in part on the page."""

import csv
import pathlib
from collections.abc import Callable, Iterable

Table = dict[str, dict[str, str]]  # by row, by column
HEADER = ["table", "row", "column", "value"]


def markdown(header: list[str], body: Iterable[list[str]]) -> str:
    """A Markdown table, whose first column has names and the others numbers."""
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [header, rule, *body])


def show(title: str, table: Table, columns: Iterable[str] = ()) -> str:
    """These columns of a table, or all, as Markdown."""
    columns = list(columns) or list(next(iter(table.values())))
    body = [[name, *(row[column] for column in columns)] for name, row in table.items()]
    return markdown([title, *columns], body)


def write(path: pathlib.Path, tables: dict[str, Table]) -> None:
    """Writes tables to one CSV file, with a line for each cell."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(HEADER)
        for name, table in tables.items():
            for row, cells in table.items():
                writer.writerows(
                    [name, row, column, value] for column, value in cells.items()
                )


def read(path: pathlib.Path) -> dict[str, Table]:
    """What `write` wrote."""
    tables: dict[str, Table] = {}
    with path.open(newline="") as file:
        for line in csv.DictReader(file):
            cells = tables.setdefault(line["table"], {}).setdefault(line["row"], {})
            cells[line["column"]] = line["value"]
    return tables


def publish(
    csv: pathlib.Path,
    page: Callable[[dict[str, Table]], str],
    measure: Callable[[], dict[str, Table]] | None,
) -> None:
    """Writes what is measured, and the page; or the page alone, from what is there."""
    csv.parent.mkdir(parents=True, exist_ok=True)
    if measure is not None:
        write(csv, measure())
    write_page(csv, page)


def write_page(csv: pathlib.Path, page: Callable[[dict[str, Table]], str]) -> None:
    """Writes the page that a file makes beside it, and prints it."""
    text = page(read(csv))
    csv.with_suffix(".md").write_text(text)
    print(text)
