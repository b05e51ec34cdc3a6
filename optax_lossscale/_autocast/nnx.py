"""Objects of Flax NNX, such as modules, which a traced function may change in place.

The arguments of a function are `split` into trees of arrays outside of the trace, and
`merge` makes objects of these inside. After the call, the arguments and results are
split inside, and merged outside. So each object that goes in comes out as the same
object, changed as it would be without a trace. Both ways have to be in one context,
`changes_kept`.

Where no program has imported Flax, there are no such objects, and `split` and `merge`
return what they take.
"""

import contextlib
import sys
from typing import Any, NamedTuple

import jax

from optax_lossscale._arrays.variables import find_nodes, is_of_nnx, is_variable

_TAG = "optax_lossscale"  # by which NNX finds the objects of one call


class _Split(NamedTuple):
    """An object of NNX, split into a graph, which is static, and a tree of arrays."""

    graph: Any
    state: Any


class _AsItIs:
    """An object of NNX that stays whole, as NNX lets no one change it in this trace.

    It is no tree, so that JAX takes the object for a leaf.
    """

    def __init__(self, x: Any):
        self.x = x


def objects(tree: Any) -> list[Any]:
    """The objects of NNX in a tree: modules, variables, optimizers and so on."""
    return find_nodes(_is_object, tree)


def changes_kept() -> contextlib.AbstractContextManager[Any]:
    """The context for `split` and `merge`, which knows objects across the trace."""
    nnx = _nnx()
    return contextlib.nullcontext() if nnx is None else nnx.update_context(_TAG)


def split(tree: Any) -> Any:
    """A tree with its objects of NNX split; one in two places gives arrays once."""
    nnx = _nnx()
    if nnx is None:
        return tree
    with nnx.split_context(_TAG) as context:

        def split_node(x):
            if not _is_object(x):
                return x
            return _Split(*context.split([x])) if _may_change(x) else _AsItIs(x)

        return jax.tree.map(split_node, tree, is_leaf=_is_object)


def merge(tree: Any, inside: bool) -> Any:
    """A split tree with its objects merged again, `inside` of the trace or outside."""
    nnx = _nnx()
    if nnx is None:
        return tree
    with nnx.merge_context(_TAG, inner=inside) as context:

        def merge_node(x):
            if isinstance(x, _AsItIs):
                return x.x
            if not _is_split(x):
                return x
            # The context's own `merge` would copy a `jax.Ref`, to which others write.
            return context.unflatten(x.graph, nnx.to_flat_state(x.state))[0]

        return jax.tree.map(merge_node, tree, is_leaf=_is_split)


def _nnx() -> Any:
    """Flax NNX; None where no program has imported it."""
    return sys.modules.get("flax.nnx")


def _is_object(x: Any) -> bool:
    """Whether `x` is an object of NNX, which functions may change in place."""
    return is_of_nnx(x, "Variable", "Pytree")


def _is_split(x: Any) -> bool:
    """Whether `x` stands for an object of NNX that was split."""
    return isinstance(x, _Split)


def _may_change(x: Any) -> bool:
    """Whether NNX lets the variables of an object be changed in the current trace.

    It does not if the traced function closes over the object.
    """
    variables = [node for _, node in _nnx().iter_graph(x) if is_variable(node)]
    # NNX has no public attribute that tells.
    return all(v._trace_state.is_valid() for v in variables)
