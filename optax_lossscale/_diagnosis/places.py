"""The tapped places of a model, in the order in which it runs them."""

import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.tree_util import SequenceKey

from optax_lossscale._arrays.names import natural, path_name
from optax_lossscale._diagnosis.tap import Probe

Place = tuple[str, Probe]


def recorded_places(taps: Any) -> list[Place]:
    """The places that recorded something, in the order in which they ran."""
    return [(name, record) for name, record in places(taps) if record.value.size]


def places(taps: Any, path: tuple = (), turns: tuple = ()) -> Iterator[Place]:
    """Each place's name and record, in the tree's order; a loop's, iteration by iteration."""
    entries = [((), taps)] if isinstance(taps, Probe) else _entries(taps, path)
    lengths = {np.shape(x)[:1] for x in jax.tree.leaves(taps)}
    holds_a_probe = any(isinstance(entry, Probe) for _, entry in entries)
    if holds_a_probe and len(lengths) == 1 and () not in lengths:  # one loop
        for i in range(*lengths.pop()):
            of_turn = jax.tree.map(lambda x, i=i: x[i], taps)
            yield from places(of_turn, path, (*turns, SequenceKey(i)))
    elif isinstance(taps, Probe):
        yield path_name((*path, *turns)), taps
    else:
        for key, entry in entries:
            yield from places(entry, path + key, turns)


def refuse_unordered(taps: Any) -> None:
    """Raises for a dict, which jax sorts, if its names do not show in which order taps ran."""
    for tree in filter(_is_sorted, jax.tree.leaves(taps, is_leaf=_is_sorted)):
        names = [str(name) for name, entry in tree.items() if jax.tree.leaves(entry)]
        if len({re.sub(r"\d+", "", name) for name in names}) > 1:
            raise ValueError(
                f"taps must be in the model's order, but jax sorts a dict's keys: {names}. Put "
                "the probes into a list or an OrderedDict, or under names that differ only in "
                "their numbers"
            )
        refuse_unordered(list(tree.values()))


def _entries(tree: Any, path: tuple) -> list[tuple[tuple, Any]]:
    """What a container holds, under its keys, without what holds no probes."""
    entries, _ = jax.tree.flatten_with_path(tree, is_leaf=lambda x: x is not tree)
    if entries and not entries[0][0]:
        raise TypeError(
            f"taps must be a tree of Probes, got a {type(tree).__name__} at {path_name(path)}; "
            "are gradients and taps in the order of argnums?"
        )
    if _is_sorted(tree):  # alphabetically, with layer_10 before layer_2
        entries = sorted(entries, key=lambda entry: natural(path_name(entry[0])))
    return [(key, entry) for key, entry in entries if jax.tree.leaves(entry)]


def _is_sorted(tree: Any) -> bool:
    """Whether it is a mapping that jax sorts by its keys."""
    return isinstance(tree, Mapping) and not isinstance(tree, OrderedDict)
