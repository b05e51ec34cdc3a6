"""Variables of Flax NNX, and the arrays in them.

An `nnx.Optimizer` keeps each array of its state in a variable, an object that changes
in place. Most of this package computes with arrays alone, and `without_variables` puts
them in the places of the variables. Flax is not imported here: a program that has not
imported it has none of its variables.
"""

import sys
from collections.abc import Callable
from typing import Any

import jax

from optax_lossscale._arrays.precision import T


def is_variable(x: Any) -> bool:
    """Whether this is an `nnx.Variable`."""
    return is_of_nnx(x, "Variable")


def is_module(x: Any) -> bool:
    """Whether this is an `nnx.Module`, whose calls change its variables in place."""
    return is_of_nnx(x, "Module")


def is_of_nnx(x: Any, *classes: str) -> bool:
    """Whether this is an instance of a class of Flax NNX with one of these names."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return False
    types = tuple(getattr(nnx, name) for name in classes)
    return isinstance(x, types)


def find_nodes(is_node: Callable[[Any], bool], tree: Any) -> list[Any]:
    """All nodes of a tree for which `is_node` holds, without those inside of others."""
    nodes = jax.tree.leaves(tree, is_leaf=is_node)
    return [x for x in nodes if is_node(x)]


def distinct_nodes(nodes: list[T]) -> list[T]:
    """The nodes, but of several that hold the same variables only the first.

    Nodes without variables are all returned.
    """
    first = {}
    for place, node in enumerate(nodes):
        ids = variable_ids(node)
        key = ids or place
        first.setdefault(key, node)
    return list(first.values())


def variable_ids(tree: Any) -> tuple[int, ...]:
    """The ids of the variables in a tree; equal where two trees hold the same ones."""
    nodes = find_nodes(is_variable, tree)
    return tuple(map(id, nodes))


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """The tree with `function` of each leaf, those in variables included.

    A variable that is in two places is mapped once, and the new one is in both.
    """
    copies: dict[int, Any] = {}

    def mapped(leaf):
        if not is_variable(leaf):
            return function(leaf)
        if id(leaf) not in copies:
            copies[id(leaf)] = jax.tree.map(function, leaf)
        return copies[id(leaf)]

    return jax.tree.map(mapped, tree, is_leaf=is_variable)


def without_variables(tree: Any) -> Any:
    """The tree with the array that it holds in place of each variable."""

    def held(leaf):
        if not is_variable(leaf):
            return leaf
        # A variable is a pytree of one leaf, or of none if it holds nothing.
        arrays = jax.tree.leaves(leaf)
        return arrays[0] if arrays else leaf

    return jax.tree.map(held, tree, is_leaf=is_variable)
