"""The names of a step's outputs, in errors and in the argument `ignore`."""

from collections.abc import Collection, Iterable

from jax.tree_util import keystr

from optax_lossscale.testing._numbers import Path

_SHOWN = 8  # how many outputs an error lists at most


def name_of(path: Path) -> str:
    """A path as text: `result[0]['w']`, or `args[1].mean` for an argument."""
    return f"{path[0].key}{keystr(path[1:])}"


def not_ignored(
    ignore: str | Collection[str],
    outputs: Collection[Path],
) -> list[Path]:
    """The outputs that are neither ignored by name nor inside an ignored one.

    A name that is not that of an output raises a `ValueError`, which lists the outputs.
    """
    ignored = [ignore] if isinstance(ignore, str) else ignore
    names = {path: _names_of(path) for path in outputs}
    for name in ignored:
        if not any(name in x for x in names.values()):
            known = "\n  ".join(map(name_of, outputs))
            raise ValueError(f"ignore={name!r} names no output. There are\n  {known}")
    return [path for path in outputs if names[path].isdisjoint(ignored)]


def _names_of(path):
    """The name of an output, and those of all trees that it is in."""
    return {name_of(path[:depth]) for depth in range(1, len(path) + 1)}


def listed(
    title: str,
    outputs: Iterable[Path | str],
    remedy: str = "",
) -> str:
    """Text of a title, at most eight outputs below it, and a remedy.

    It is empty if there are no outputs.
    """
    names = [x if isinstance(x, str) else name_of(x) for x in outputs]
    if not names:
        return ""
    if len(names) > _SHOWN:
        names[_SHOWN:] = [f"and {len(names) - _SHOWN} more"]
    return "\n  ".join([title, *names]) + "\n" + remedy
