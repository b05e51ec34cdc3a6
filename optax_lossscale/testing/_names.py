"""What outputs are called: in errors, and by whoever ignores some of them."""

from collections.abc import Collection, Iterable

from jax.tree_util import keystr

from optax_lossscale.testing._runs import Path, Run

_SHOWN = 8


def name_of(path: Path) -> str:
    """The name of a place: `result[0]['w']`."""
    return f"{path[0].key}{keystr(path[1:])}"


def not_ignored(ignore: str | Collection[str], run: Run) -> list[Path]:
    """The outputs to look at: those that are not of an ignored name, or inside of one."""
    paths = list(run.outputs)
    for place in [ignore] if isinstance(ignore, str) else ignore:
        inside = [path for path in run.outputs if _is_in(name_of(path), place)]
        if not inside:
            shown = "\n".join(f"  {name_of(path)}" for path in run.outputs)
            raise ValueError(f"ignore={place!r} names no output. There are\n{shown}")
        paths = [path for path in paths if path not in inside]
    return paths


def _is_in(name, place):
    """Whether an output of this name is the place of that name, or in it."""
    return name == place or name.startswith((f"{place}[", f"{place}."))


def listed(title: str, outputs: Iterable[Path | str], remedy: str) -> str:
    """A title, the first of the outputs under it, and what to do; nothing without outputs."""
    names = [x if isinstance(x, str) else name_of(x) for x in outputs]
    if not names:
        return ""
    if len(names) > _SHOWN:
        names[_SHOWN:] = [f"and {len(names) - _SHOWN} more"]
    lines = "\n  ".join([title, *names])
    return f"{lines}\n{remedy}"
