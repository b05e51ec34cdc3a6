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


def places(taps: Any) -> Iterator[tuple[str, Probe]]:
    """Each place's name and record: those of a loop once for each of its turns.

    The tree says which stacks ran in one loop: those that lie beside each other in one container,
    with all that is there beside them. Two containers are two loops.

    Args:
      taps: a tree of `Probe`s whose order is the model's.
    """
    return _walk([((), taps)], ())


def _walk(trees: list[tuple[tuple, Any]], turns: tuple) -> Iterator[tuple[str, Probe]]:
    """The places of trees beside each other, in some turns of the loops around them."""
    for length, run in itertools.groupby(trees, lambda entry: _length(entry[1])):
        neighbors = list(run)
        if length is not None and any(isinstance(tree, Probe) for _, tree in neighbors):
            for i in range(length):
                slices = [(path, _slice(tree, i)) for path, tree in neighbors]
                yield from _walk(slices, (*turns, SequenceKey(i)))
            continue
        for path, tree in neighbors:
            if isinstance(tree, Probe):
                yield path_name((*path, *turns)), tree
            else:
                yield from _walk(_branches(tree, path), turns)


def _slice(tree: Any, i: int) -> Any:
    return jax.tree.map(lambda x: x[i], tree)


def refuse_unordered(taps: Any) -> None:
    """Raises for a dict whose names are sorted and do not say in which order they were tapped."""
    for tree in filter(_is_unordered, jax.tree.leaves(taps, is_leaf=_is_unordered)):
        names = [str(name) for name, branch in tree.items() if jax.tree.leaves(branch)]
        if len({re.sub(r"\d+", "", name) for name in names}) > 1:
            raise ValueError(
                f"taps must come in the model's order, and jax sorts a dict's keys: {names}. Give "
                "the probes in a list, an OrderedDict, or under names that differ in their "
                "numbers alone"
            )
        refuse_unordered(list(tree.values()))


def _branches(taps: Any, path: tuple) -> list[tuple[tuple, Any]]:
    """The container's entries that hold probes, under their paths."""
    branches, _ = jax.tree.flatten_with_path(taps, is_leaf=lambda x: x is not taps)
    if branches and not branches[0][0]:
        raise TypeError(
            f"taps are a tree of Probes, got a {type(taps).__name__} at "
            f"{path_name(path)}; are gradients and taps in the order of argnums?"
        )
    if _is_unordered(taps):  # its order is the alphabet's, with layer_10 before layer_2
        branches = sorted(branches, key=lambda branch: natural(path_name(branch[0])))
    return [(path + key, tree) for key, tree in branches if jax.tree.leaves(tree)]


def _length(tree: Any) -> int | None:
    """How many slices every stack of the tree has; None if they differ or some is no stack."""
    probes = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, Probe))
    lengths = {np.shape(p.value.size)[:1] if isinstance(p, Probe) else () for p in probes}
    return next(iter(lengths))[0] if len(lengths) == 1 and () not in lengths else None


def _is_unordered(tree: Any) -> bool:
    """Whether it is a mapping that jax sorts by its keys."""
    return isinstance(tree, Mapping) and not isinstance(tree, OrderedDict)
