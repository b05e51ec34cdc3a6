"""Flax NNX, whose objects a traced function changes in place; all that is NNX's own is here.

A function's arguments are taken `apart` into arrays, put `together` inside of the
trace, taken apart again there with the results, and put together outside. So each
object that goes in comes out as itself, changed as without a trace. All of it happens
in one context, `changes_kept`.

Where Flax is not imported, there are no such objects: then every function returns what
it takes.
"""

import contextlib
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from optax_lossscale._arrays.variables import find, is_of_nnx, is_variable

_TAG = "optax_lossscale"  # by which NNX knows what belongs to one call


class _Apart(NamedTuple):
    """An object of NNX, taken apart: a tree of arrays."""

    graph: Any
    state: Any


class _AsItIs:
    """An object of NNX that is not taken apart, as it may not be changed here."""

    def __init__(self, x: Any):
        self.x = x


def objects(tree: Any) -> list[Any]:
    """The modules, variables, random streams, optimizers and metrics of NNX in a tree."""
    return find(_is_object, tree)


def changes_kept() -> contextlib.AbstractContextManager[Any]:
    """A context in which a traced function changes objects of NNX as it does without a trace."""
    nnx = _nnx()
    return contextlib.nullcontext() if nnx is None else nnx.update_context(_TAG)


def apart(tree: Any) -> Any:
    """The tree with arrays for the objects of NNX in it; an object in two places counts once."""
    nnx = _nnx()
    if nnx is None:
        return tree
    with nnx.split_context(_TAG) as context:

        def split(x):
            return _Apart(*context.split([x])) if _may_change(x) else _AsItIs(x)

        return _map(split, _is_object, tree)


def together(tree: Any, inside: bool) -> Any:
    """The tree with the objects that were taken apart, in or outside of the trace."""
    nnx = _nnx()
    if nnx is None:
        return tree
    with nnx.merge_context(_TAG, inner=inside) as context:

        def merged(x):
            if isinstance(x, _AsItIs):
                return x.x
            # The context's `merge` would copy references, to which others write.
            return context.unflatten(x.graph, nnx.to_flat_state(x.state))[0]

        return _map(merged, _is_apart, tree)


def _nnx() -> Any:
    """Flax NNX; None where no program has imported it."""
    return sys.modules.get("flax.nnx")


def _map(
    function: Callable[[Any], Any], is_one: Callable[[Any], bool], tree: Any
) -> Any:
    """The tree with `function` of each node for which `is_one` holds."""
    return jax.tree.map(lambda x: function(x) if is_one(x) else x, tree, is_leaf=is_one)


def _is_object(x: Any) -> bool:
    """Whether this is an object of NNX, which functions change in place."""
    return is_of_nnx(x, "Variable", "Pytree")


def _is_apart(x: Any) -> bool:
    """Whether this stands for an object of NNX."""
    return isinstance(x, (_Apart, _AsItIs))


def _may_change(x: Any) -> bool:
    """Whether an object may be changed here: not if an enclosing function closes over it."""
    nodes = [node for _, node in _nnx().iter_graph(x)]
    return all(map(_is_writable, filter(is_variable, nodes)))


def _is_writable(variable: Any) -> bool:
    """Whether NNX lets a variable be changed in the current trace."""
    try:
        # NNX has no public question for it: this writes what is there already.
        variable.set_metadata(variable.get_metadata())
    except sys.modules["flax.errors"].TraceContextError:
        return False
    return True
