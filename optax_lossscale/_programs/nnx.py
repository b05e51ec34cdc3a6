"""Carries Flax NNX objects, which a function may change in place, through a trace.

A traced function must not change an object from outside the trace: the object would
hold tracers afterwards. The objects among its arguments, such as modules, are therefore
split into arrays and merged again twice:

1. Outside the trace, `split` turns the arguments into trees of arrays.
2. Inside, `merge` builds new objects from the traced arrays, for the function to use.
3. Inside, `split` turns these objects and the results into trees of traced arrays.
4. Outside, `merge` writes the new arrays into the caller's own objects.

Afterwards, each object has changed as it would have without a trace. The context
`changes_kept` surrounds all four calls, so that NNX recognizes the objects.

If nothing has imported Flax NNX, there are no such objects, and `split` and `merge`
return their arguments.
"""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax

from optax_lossscale._arrays.variables import find_nodes, is_of_nnx, is_variable

# The name by which NNX finds the objects of a call
_TAG = "optax_lossscale"


class _Split(NamedTuple):
    """An NNX object, split in two.

    Attributes:
      graph: an `nnx.GraphDef`, which is static.
      state: a tree of arrays.
    """

    graph: Any
    state: Any


class _Unsplit:
    """Holds an NNX object that stays whole: NNX forbids changing it in this trace.

    This class is not a pytree, so JAX treats it and the object as one leaf.

    Attributes:
      x: the object.
    """

    def __init__(self, x: Any):
        self.x = x


def objects(tree: Any) -> list[Any]:
    """Returns the NNX objects in a tree: modules, variables, optimizers and so on."""
    return find_nodes(_is_object, tree)


def changes_kept() -> contextlib.AbstractContextManager[Any]:
    """Returns the context in which `merge` finds the objects that `split` has split."""
    nnx = _nnx()
    if nnx is None:
        return contextlib.nullcontext()
    return nnx.update_context(_TAG)


@contextlib.contextmanager
def refusals_explained() -> Iterator[None]:
    """Returns a context in which NNX's refusal to change an object says what to do."""
    try:
        yield
    except Exception as error:
        if type(error).__name__ == "TraceContextError":
            error.add_note(
                "optax_lossscale traces this function: pass it every NNX object that "
                "it changes as an argument, instead of closing over it, as "
                "docs/frameworks.md shows under Flax NNX"
            )
        raise


def split(tree: Any) -> Any:
    """Splits each NNX object in a tree; arrays of a shared object appear only once."""
    nnx = _nnx()
    if nnx is None:
        return tree
    with nnx.split_context(_TAG) as context:

        def split_node(x):
            if not _is_object(x):
                return x
            if not _may_change(x):
                return _Unsplit(x)
            graph, state = context.split([x])
            return _Split(graph, state)

        return jax.tree.map(split_node, tree, is_leaf=_is_object)


def merge(tree: Any, *, inside: bool) -> Any:
    """Merges the objects of a split tree again, `inside` the trace or outside."""
    nnx = _nnx()
    if nnx is None:
        return tree
    with nnx.merge_context(_TAG, inner=inside) as context:

        def merge_node(x):
            if isinstance(x, _Unsplit):
                return x.x
            if not _is_split(x):
                return x
            # `context.merge` would copy a `jax.Ref`, to which other code writes.
            state = nnx.to_flat_state(x.state)
            nodes = context.unflatten(x.graph, state)
            return nodes[0]

        return jax.tree.map(merge_node, tree, is_leaf=_is_split)


def _nnx() -> Any:
    """Returns the module `flax.nnx`, or None if nothing has imported it."""
    return sys.modules.get("flax.nnx")


def _is_object(x: Any) -> bool:
    """Whether `x` is an NNX object, which a function may change in place."""
    return is_of_nnx(x, "Variable", "Pytree")


def _is_split(x: Any) -> bool:
    """Whether `x` stands for an NNX object that was split."""
    return isinstance(x, _Split)


def _may_change(x: Any) -> bool:
    """Whether NNX allows changes to an object's variables in the current trace.

    NNX forbids changes if the traced function closes over the object.
    """
    variables = [node for _, node in _nnx().iter_graph(x) if is_variable(node)]
    # NNX has no public attribute for this.
    return all(v._trace_state.is_valid() for v in variables)
