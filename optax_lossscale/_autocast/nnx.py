"""Objects of Flax NNX, such as modules, which a traced function may change in place.

The arguments of a function are taken `apart` into trees of arrays outside of the trace,
and put `together` inside. After the call, the arguments and results are taken apart
inside, and put together outside. So each object that goes in comes out as the same
object, changed as it would be without a trace. Both ways have to be in one context,
`changes_kept`.

Where no program has imported Flax, there are no such objects, and `apart` and
`together` return what they take.
"""

import contextlib
import sys
from typing import Any, NamedTuple

import jax

from optax_lossscale._arrays.variables import find_nodes, is_of_nnx, is_variable

_TAG = "optax_lossscale"  # by which NNX finds the objects of one call


class _Apart(NamedTuple):
    """An object of NNX, taken apart: a graph, which is static, and a tree of arrays."""

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
    """The context for `apart` and `together`, which knows objects across the trace."""
    nnx = _nnx()
    return contextlib.nullcontext() if nnx is None else nnx.update_context(_TAG)


def apart(tree: Any) -> Any:
    """Takes the objects of NNX in a tree apart; one in two places gives arrays once."""
    nnx = _nnx()
    if nnx is None:
        return tree
    with nnx.split_context(_TAG) as context:

        def split(x):
            if not _is_object(x):
                return x
            return _Apart(*context.split([x])) if _may_change(x) else _AsItIs(x)

        return jax.tree.map(split, tree, is_leaf=_is_object)


def together(tree: Any, inside: bool) -> Any:
    """Puts the objects of a tree together again, `inside` of the trace or outside."""
    nnx = _nnx()
    if nnx is None:
        return tree
    with nnx.merge_context(_TAG, inner=inside) as context:

        def merged(x):
            if isinstance(x, _AsItIs):
                return x.x
            if not _is_apart(x):
                return x
            # The context's own `merge` would copy a `jax.Ref`, to which others write.
            return context.unflatten(x.graph, nnx.to_flat_state(x.state))[0]

        return jax.tree.map(merged, tree, is_leaf=_is_apart)


def _nnx() -> Any:
    """Flax NNX; None where no program has imported it."""
    return sys.modules.get("flax.nnx")


def _is_object(x: Any) -> bool:
    """Whether `x` is an object of NNX, which functions may change in place."""
    return is_of_nnx(x, "Variable", "Pytree")


def _is_apart(x: Any) -> bool:
    """Whether `x` stands for an object of NNX that `apart` has divided."""
    return isinstance(x, _Apart)


def _may_change(x: Any) -> bool:
    """Whether NNX lets the variables of an object be changed in the current trace.

    It does not if the traced function closes over the object.
    """
    variables = [node for _, node in _nnx().iter_graph(x) if is_variable(node)]
    # NNX has no public attribute that tells.
    return all(v._trace_state.is_valid() for v in variables)
