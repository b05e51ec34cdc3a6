"""Variables of Flax NNX, and the arrays in them.

An `nnx.Optimizer` keeps each array of its state in a variable, an object that changes
in place. Most of this package works with arrays alone, so `without_variables` replaces
each variable by its array. Flax is not imported here: a program that has not imported
it has no variables.
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
    """Whether this is an `nnx.Module`; calls may change its variables in place."""
    return is_of_nnx(x, "Module")


def is_of_nnx(x: Any, *classes: str) -> bool:
    """Whether this is an instance of a class of Flax NNX with one of these names."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return False
    # A name is missing while Flax is being imported.
    types = [getattr(nnx, name, None) for name in classes]
    return isinstance(x, tuple(filter(None, types)))


def find_nodes(is_node: Callable[[Any], bool], tree: Any) -> list[Any]:
    """All nodes of a tree for which `is_node` holds, except for nodes inside such nodes."""
    nodes_and_leaves = jax.tree.leaves(tree, is_leaf=is_node)
    return [x for x in nodes_and_leaves if is_node(x)]


def distinct_nodes(nodes: list[T]) -> list[T]:
    """Drops each node that holds the same variables as an earlier one.

    Nodes without variables are all kept.
    """
    distinct = []
    seen = set()
    for node in nodes:
        ids = variable_ids(node)
        if ids not in seen:
            distinct.append(node)
        if ids:
            seen.add(ids)
    return distinct


def variable_ids(tree: Any) -> tuple[int, ...]:
    """The ids of the variables in a tree; equal if two trees hold the same variables."""
    variables = find_nodes(is_variable, tree)
    return tuple(map(id, variables))


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """Applies `function` to each leaf of a tree, including the leaves in variables.

    If a variable occurs twice in the tree, it is mapped once, and both places share the
    new variable.
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
    """Replaces each variable in a tree by the array that it holds."""

    def to_array(leaf):
        if not is_variable(leaf):
            return leaf
        # A variable is a pytree with one leaf, or with none if it is empty.
        arrays = jax.tree.leaves(leaf)
        return arrays[0] if arrays else leaf

    return jax.tree.map(to_array, tree, is_leaf=is_variable)
