"""Variables of Flax NNX, in which an `nnx.Optimizer` keeps its state, and the arrays in them."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax


def is_variable(x: Any) -> bool:
    """Whether this is an `nnx.Variable`."""
    return _is_of_nnx(x, "Variable")


def is_module(x: Any) -> bool:
    """Whether this is an `nnx.Module`, whose calls change its variables in place."""
    return _is_of_nnx(x, "Module")


def _is_of_nnx(x: Any, *classes: str) -> bool:
    # Only a program that has imported Flax can have one, so this does not import it.
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(x, tuple(getattr(nnx, name) for name in classes))


def found(is_one: Callable[[Any], bool], tree: Any) -> list[Any]:
    """The nodes of a tree for which `is_one` holds, however deeply nested."""
    return list(filter(is_one, jax.tree.leaves(tree, is_leaf=is_one)))


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """`function` of each leaf; a variable that is in two places is mapped once and stays one."""
    copies: dict[int, Any] = {}

    def mapped(leaf):
        if not is_variable(leaf):
            return function(leaf)
        if id(leaf) not in copies:
            copies[id(leaf)] = jax.tree.map(function, leaf)
        return copies[id(leaf)]

    return jax.tree.map(mapped, tree, is_leaf=is_variable)


def plain(tree: Any) -> Any:
    """The tree with each variable replaced by the array that it holds."""

    def value(x):
        # A variable is a pytree of one leaf, or of none if it holds nothing.
        leaves = jax.tree.leaves(x) if is_variable(x) else []
        return leaves[0] if leaves else x

    return jax.tree.map(value, tree, is_leaf=is_variable)


# --- what a traced function changes ---

_TAG = "optax_lossscale"


class _Apart(NamedTuple):
    """An object of NNX, taken apart: a tree of arrays."""

    graph: Any
    state: Any


class _AsItIs:
    """An object of NNX that is not taken apart, as it may not be changed here."""

    def __init__(self, x: Any):
        self.x = x


def _is_apart(x: Any) -> bool:
    """Whether this stands for an object of NNX in a tree that was taken apart."""
    return isinstance(x, (_Apart, _AsItIs))


def objects(tree: Any) -> list[Any]:
    """The modules, variables, random streams, optimizers and metrics of NNX in a tree."""
    return found(_is_object, tree)


def is_parameter(variable: Any) -> bool:
    """Whether a variable is an `nnx.Param`."""
    return _is_of_nnx(variable, "Param")


@contextlib.contextmanager
def changes_kept() -> Iterator[None]:
    """A context in which a traced function changes objects of NNX as it does without a trace.

    In it, its arguments are taken `apart`, put `together` inside of the trace, taken apart again
    there with the results, and put together outside, where each object is what it was inside.
    """
    nnx = sys.modules.get("flax.nnx")
    with contextlib.nullcontext() if nnx is None else nnx.update_context(_TAG):
        yield


def apart(tree: Any) -> Any:
    """The tree with arrays for the objects of NNX in it; an object in two places counts once."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return tree
    with nnx.split_context(_TAG) as context:

        def taken_apart(x):
            if not _is_object(x):
                return x
            return _Apart(*context.split([x])) if _may_change(x) else _AsItIs(x)

        return jax.tree.map(taken_apart, tree, is_leaf=_is_object)


def together(tree: Any, inside: bool) -> Any:
    """The tree with the objects that were taken apart, in or outside of the trace."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return tree
    with nnx.merge_context(_TAG, inner=inside) as context:

        def put_together(x):
            if isinstance(x, _Apart):
                # The context's `merge` would copy references, to which others write.
                return context.unflatten(x.graph, nnx.to_flat_state(x.state))[0]
            return x.x if isinstance(x, _AsItIs) else x

        return jax.tree.map(put_together, tree, is_leaf=_is_apart)


@contextlib.contextmanager
def told_to_go_in_as_arguments() -> Iterator[None]:
    """Turns an error about a variable that may not be changed into one that says what to do."""
    errors = sys.modules.get("flax.errors")
    try:
        yield
    except getattr(errors, "TraceContextError", ()) as error:
        raise TypeError(
            "autocast traces the function, which changes an NNX module or variable that is not "
            "among its arguments, or belongs to a function that is traced around it. Pass modules "
            "to both as arguments: autocast(lambda model, x: model(x))(model, x), not "
            "autocast(model)(x). A model that is merged inside needs variables of its own: "
            f"nnx.merge(graphdef, state, copy=True). NNX says: {error}"
        ) from error


def _is_object(x: Any) -> bool:
    """Whether this is an object of NNX, which functions change in place."""
    return _is_of_nnx(x, "Variable", "Pytree")


def _may_change(x: Any) -> bool:
    """Whether an object may be changed here: not if an enclosing function closes over it."""
    nnx = sys.modules["flax.nnx"]
    try:
        for _, held in nnx.iter_graph(x):
            if is_variable(held):
                held.set_metadata(held.get_metadata())
    except sys.modules["flax.errors"].TraceContextError:
        return False
    return True
