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
    ignored = set()
    for place in [ignore] if isinstance(ignore, str) else ignore:
        inside = (f"{place}[", f"{place}.")
        paths = [p for p, name in names.items() if name == place or name.startswith(inside)]
        if not paths:
            shown = "\n".join(f"  {name}" for name in names.values())
            raise ValueError(f"ignore={place!r} names no output. There are\n{shown}")
        ignored.update(paths)
    return [path for path in names if path not in ignored]


def listed(title: str, outputs: list[Any], remedy: str = "") -> str:
    """A title, the first of the outputs under it, and what to do; nothing without outputs."""
    if not outputs:
        return ""
    lines = [x if isinstance(x, str) else name_of(x) for x in outputs]
    if len(lines) > _SHOWN:
        lines[_SHOWN:] = [f"and {len(lines) - _SHOWN} more"]
    shown = "".join(f"  {line}\n" for line in lines)
    return f"{title}\n{shown}{remedy}"
