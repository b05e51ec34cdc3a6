"""Variables of Flax NNX and the arrays in them.

An `nnx.Optimizer` keeps each array of its state in a variable, a mutable object. Most
of this package works with arrays alone, so `without_variables` replaces each variable
with its array. Flax is not imported here: a program that has not imported it has no
variables.
"""

import sys
from collections.abc import Callable
from typing import Any

import jax

from optax_lossscale._arrays.precision import T


def is_variable(x: Any) -> bool:
    """Whether an object is an `nnx.Variable`."""
    return is_of_nnx(x, "Variable")


def is_module(x: Any) -> bool:
    """Whether an object is an `nnx.Module`, whose calls may change its variables."""
    return is_of_nnx(x, "Module")


def is_of_nnx(x: Any, *classes: str) -> bool:
    """Whether an object is an instance of one of these classes of Flax NNX."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return False
    # While Flax is being imported, its module may not have all names yet.
    types = [getattr(nnx, name, None) for name in classes]
    return isinstance(x, tuple(filter(None, types)))


def find_nodes(is_node: Callable[[Any], bool], tree: Any) -> list[Any]:
    """Returns the outermost nodes of a tree for which `is_node` returns True."""
    nodes_and_leaves = jax.tree.leaves(tree, is_leaf=is_node)
    return [x for x in nodes_and_leaves if is_node(x)]


def distinct_nodes(nodes: list[T]) -> list[T]:
    """Drops each node that contains the same variables as an earlier one.

    An NNX module that is passed twice, for example, is one node. Nodes without
    variables are all kept.
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
    """Returns the ids of a tree's variables: equal for trees that share them all."""
    variables = find_nodes(is_variable, tree)
    return tuple(map(id, variables))


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """Applies `function` to each leaf of a tree, including the leaves in variables.

    `jax.tree.map` would call it twice for a variable that occurs twice in the tree, and
    return two variables. Here, both places share one new variable.
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
    """Replaces each variable in a tree with its array; an empty variable stays."""

    def to_array(leaf):
        if not is_variable(leaf):
            return leaf
        # A variable is a pytree with one leaf, or with none if it is empty.
        arrays = jax.tree.leaves(leaf)
        return arrays[0] if arrays else leaf

    return jax.tree.map(to_array, tree, is_leaf=is_variable)
