"""What outputs are called: in errors, and by whoever ignores some of them."""

from collections.abc import Collection
from typing import Any

from jax.tree_util import keystr

from optax_lossscale.testing._runs import Path, Run

_SHOWN = 8


def name_of(path: Path) -> str:
    """The name of a place: `result[0]['w']`."""
    return f"{path[0].key}{keystr(path[1:])}"


def not_ignored(ignore: str | Collection[str], run: Run) -> list[Path]:
    """The outputs to look at."""
    names = {path: name_of(path) for path in run.outputs}
    ignored = [ignore] if isinstance(ignore, str) else list(ignore)
    is_in = lambda name, place: name == place or name.startswith((f"{place}[", f"{place}."))
    for place in ignored:
        if not any(is_in(name, place) for name in names.values()):
            shown = "\n".join(f"  {name}" for name in names.values())
            raise ValueError(f"ignore={place!r} names no output. There are\n{shown}")
    is_ignored = lambda name: any(is_in(name, place) for place in ignored)
    return [path for path, name in names.items() if not is_ignored(name)]


def listed(title: str, outputs: list[Any], remedy: str = "") -> str:
    """A title, the first of the outputs under it, and what to do; nothing without outputs."""
    lines = [x if isinstance(x, str) else name_of(x) for x in outputs]
    more = [f"and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    shown = [f"  {line}\n" for line in lines[:_SHOWN] + more]
    return "".join([title, "\n", *shown, remedy])
