"""How errors name and list a step's outputs, and how `ignore` refers to them.

Both use the same names, so a user can copy a name from an error, as in
`ignore="result[0]['w']"`. The name of an output is its path in the step's result, such
as `result[0]['w']`. An argument that the step changes in place is an output, too, and
its name is its path among the arguments, such as `args[1].mean`. The name of a tree,
such as `result[0]`, stands for all outputs in this tree.
"""

from collections.abc import Collection, Iterable

from jax.tree_util import keystr

from optax_lossscale.testing._numbers import Path

# How many outputs an error lists at most
_MAX_LISTED = 8


def name_of(path: Path) -> str:
    """Formats a path, as in `result[0]['w']` or, for an argument, `args[1].mean`."""
    return f"{path[0].key}{keystr(path[1:])}"


def without_ignored(
    ignore: str | Collection[str],
    outputs: Collection[Path],
) -> list[Path]:
    """Returns the outputs that `ignore` does not name, neither singly nor as a tree.

    Raises a `ValueError` that lists the outputs if a name in `ignore` matches none.
    """
    ignored = [ignore] if isinstance(ignore, str) else ignore
    names = {path: _names_of(path) for path in outputs}
    all_names = set().union(*names.values())
    for name in ignored:
        if name not in all_names:
            known = "\n  ".join(map(name_of, outputs))
            raise ValueError(
                f"ignore={name!r} names no output. The outputs are\n  {known}"
            )
    return [path for path in outputs if names[path].isdisjoint(ignored)]


def _names_of(path: Path) -> set[str]:
    """Returns the names of an output and of all trees that contain it."""
    return {name_of(path[:depth]) for depth in range(1, len(path) + 1)}


def format_fault(
    title: str,
    outputs: Iterable[Path | str],
    remedy: str = "",
) -> str:
    """Formats the text of an error: a title, at most eight outputs, and a remedy.

    If there are no outputs, there is no fault, and the text is empty.
    """
    names = [x if isinstance(x, str) else name_of(x) for x in outputs]
    if not names:
        return ""
    hidden = len(names) - _MAX_LISTED
    if hidden > 0:
        names[_MAX_LISTED:] = [f"and {hidden} more"]
    return joined("\n  ".join([title, *names]), remedy)


def joined(*parts: str) -> str:
    """Joins the parts of an error's text that are not empty, each on its own lines."""
    return "\n".join(filter(None, parts))
