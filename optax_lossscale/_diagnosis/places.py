"""The tapped places of a model, in the order in which it runs them."""

import itertools
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


def places(taps: Any) -> Iterator[Place]:
    """Each place's name and record, in the order of the tree: those of a loop turn by turn."""
    return _in_order([((), taps)], ())


def _in_order(neighbors: list[tuple[tuple, Any]], turns: tuple) -> Iterator[Place]:
    """The places of trees beside each other, in some turns of the loops around them.

    Stacks of one length in one container are the turns of one loop, with all that lies beside
    them there. Two containers are two loops.
    """
    for length, run in itertools.groupby(neighbors, lambda entry: _length(entry[1])):
        trees = list(run)
        if length is not None and any(isinstance(tree, Probe) for _, tree in trees):
            for i in range(length):
                of_turn = lambda x, i=i: x[i] if np.ndim(x) else x
                slices = [(path, jax.tree.map(of_turn, tree)) for path, tree in trees]
                yield from _in_order(slices, (*turns, SequenceKey(i)))
            continue
        for path, tree in trees:
            if isinstance(tree, Probe):
                yield path_name((*path, *turns)), tree
            else:
                yield from _in_order(_entries(tree, path), turns)


def refuse_unordered(taps: Any) -> None:
    """Raises for a dict whose names are sorted and do not say in which order they were tapped."""
    for tree in filter(_is_sorted, jax.tree.leaves(taps, is_leaf=_is_sorted)):
        names = [str(name) for name, entry in tree.items() if jax.tree.leaves(entry)]
        if len({re.sub(r"\d+", "", name) for name in names}) > 1:
            raise ValueError(
                f"taps must come in the model's order, and jax sorts a dict's keys: {names}. Give "
                "the probes in a list, an OrderedDict, or under names that differ in their "
                "numbers alone"
            )
        refuse_unordered(list(tree.values()))


def _entries(tree: Any, path: tuple) -> list[tuple[tuple, Any]]:
    """What a container holds, under its paths; but for what holds no probes."""
    entries, _ = jax.tree.flatten_with_path(tree, is_leaf=lambda x: x is not tree)
    if entries and not entries[0][0]:
        raise TypeError(
            f"taps are a tree of Probes, got a {type(tree).__name__} at {path_name(path)}; are "
            "gradients and taps in the order of argnums?"
        )
    if _is_sorted(tree):  # by the alphabet, with layer_10 before layer_2
        entries = sorted(entries, key=lambda entry: natural(path_name(entry[0])))
    return [(path + key, entry) for key, entry in entries if jax.tree.leaves(entry)]


def _length(tree: Any) -> int | None:
    """How many slices every stack of the tree has; None if they differ or some is no stack."""
    probes = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, Probe))
    lengths = {np.shape(p.value.size)[:1] if isinstance(p, Probe) else () for p in probes}
    return next(iter(lengths))[0] if len(lengths) == 1 and () not in lengths else None


def _is_sorted(tree: Any) -> bool:
    """Whether it is a mapping that jax sorts by its keys."""
    return isinstance(tree, Mapping) and not isinstance(tree, OrderedDict)
