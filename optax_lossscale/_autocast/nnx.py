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
from typing import Any

import jax

from optax_lossscale._arrays.variables import find, is_of_nnx

_TAG = "optax_lossscale"  # by which NNX finds the objects of one call


class _AsItIs:
    """An object of NNX that stays whole, as NNX lets no one change it in this trace."""

    def __init__(self, x: Any):
        self.x = x


def objects(tree: Any) -> list[Any]:
    """The objects of NNX in a tree: modules, variables, optimizers and so on."""
    return find(_is_object, tree)


def changes_kept() -> contextlib.AbstractContextManager[Any]:
    """The context for `apart` and `together`, which knows objects across the trace."""
    nnx = _nnx()
    return contextlib.nullcontext() if nnx is None else nnx.update_context(_TAG)


def apart(tree: Any) -> Any:
    """Takes the objects of NNX in a tree apart; one in two places gives arrays once."""
    nnx = _nnx()
    if nnx is None:
        return tree

    def keep(x):
        return _AsItIs(x) if _is_object(x) and not _may_change(x) else x

    def split(context, path, prefix, x):
        return nnx.NodeStates.from_split(*context.split([x]))

    tree = jax.tree.map(keep, tree, is_leaf=_is_object)
    return nnx.to_tree(tree, split_fn=split, ctxtag=_TAG)


def together(tree: Any, inside: bool) -> Any:
    """Puts the objects of a tree together again, `inside` of the trace or outside."""
    nnx = _nnx()
    if nnx is None:
        return tree

    def merged(context, path, prefix, x):
        # The context's own `merge` would copy a `jax.Ref`, to which others write.
        return context.unflatten(x.graphdef, nnx.to_flat_state(x.state))[0]

    tree = nnx.from_tree(tree, merge_fn=merged, ctxtag=_TAG, is_inner=inside)
    return jax.tree.map(
        lambda x: x.x if isinstance(x, _AsItIs) else x, tree, is_leaf=_is_object
    )


def _nnx() -> Any:
    """Flax NNX; None where no program has imported it."""
    return sys.modules.get("flax.nnx")


def _is_object(x: Any) -> bool:
    """Whether `x` is an object of NNX, which functions may change in place."""
    return is_of_nnx(x, "Variable", "Pytree")


def _may_change(x: Any) -> bool:
    """Whether NNX lets an object be changed in the current trace.

    It does not if the traced function closes over the object.
    """
    nnx = _nnx()
    try:
        nnx.update([x], nnx.state([x]))  # NNX has no public function that tells
    except sys.modules["flax.errors"].TraceContextError:
        return False
    return True
