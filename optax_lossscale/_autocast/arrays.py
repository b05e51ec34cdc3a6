"""A call as a function from arrays to arrays, whatever else it takes, changes and returns."""

import sys
from collections.abc import Callable, Container
from typing import Any

import jax
import numpy as np


class Call:
    """A call of a function, of whose arguments and results the arrays are traced.

    What Flax NNX modules among the arguments change inside is a result, and is put into them.

    Attributes:
      arrays: those in the arguments.
      is_parameter: for each, whether it is one: all arrays of the arguments that were said to be,
        and every `nnx.Param`.
    """

    def __init__(
        self, fun: Callable[..., Any], args: tuple, kwargs: dict, parameters: Container[int]
    ):
        self._fun = fun
        is_parameter = [i in parameters for i, arg in enumerate(args) for _ in _leaves(arg)]
        self._leaves, self._tree = jax.tree.flatten((args, kwargs), is_leaf=_is_graph)
        is_parameter += [False] * (len(self._leaves) - len(is_parameter))
        self._at = [i for i, x in enumerate(self._leaves) if is_array(x)]
        self._graphs = tuple(x for x in self._leaves if _is_graph(x))
        self._graphdef, of_graphs, is_param = _split(self._graphs)
        self._state, self._state_tree = jax.tree.flatten(of_graphs)
        self.arrays = [*(self._leaves[i] for i in self._at), *self._state]
        self.is_parameter = [*(is_parameter[i] for i in self._at), *is_param]

    def of_arrays(self, arrays: list[Any]) -> list[Any]:
        """The arrays that the call gives for these, and what it changed in modules."""
        given = list(self._leaves)
        for i, x in zip(self._at, arrays, strict=False):
            given[i] = x
        state = arrays[len(self._at) :]
        graphs = self._merged(state)
        at_graphs = (i for i, x in enumerate(given) if _is_graph(x))
        for i, graph in zip(at_graphs, graphs, strict=True):
            given[i] = graph
        args, kwargs = jax.tree.unflatten(self._tree, given)
        outs, self._out_tree = jax.tree.flatten(self._fun(*args, **kwargs))
        _, after, _ = _split(graphs)
        after, self._after_tree = jax.tree.flatten(after)
        place = {id(x): i for i, x in enumerate(state)}
        self._unchanged = [place.get(id(x)) for x in after]
        self._outs = [None if is_array(x) else (x,) for x in outs]
        changed = [x for x in after if id(x) not in place]
        return [*(x for x in outs if is_array(x)), *changed]

    def result(self, arrays: list[Any]) -> Any:
        """What the call returns, from the arrays that it gives; changes its modules."""
        left = iter(arrays)
        outs = [next(left) if other is None else other[0] for other in self._outs]
        if self._graphs:
            after = [next(left) if i is None else self._state[i] for i in self._unchanged]
            nnx = sys.modules["flax.nnx"]
            nnx.update(self._graphs, *jax.tree.unflatten(self._after_tree, after))
        return jax.tree.unflatten(self._out_tree, outs)

    def _merged(self, state: list[Any]) -> tuple[Any, ...]:
        if not self._graphs:
            return ()
        parts = jax.tree.unflatten(self._state_tree, state)
        return sys.modules["flax.nnx"].merge(self._graphdef, *parts)


def is_array(x: Any) -> bool:
    """Whether this is an array at hand or a traced one; no Python number."""
    return isinstance(x, (jax.Array, np.ndarray, np.generic))


def _leaves(tree: Any) -> list[Any]:
    return jax.tree.leaves(tree, is_leaf=_is_graph)


def _is_graph(x: Any) -> bool:
    """Whether this is a module or a random stream of Flax NNX, which calls change in place."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(x, nnx.Pytree)


def _split(graphs: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...], list[bool]]:
    """What modules are, their arrays in two parts, and which of these are parameters."""
    if not graphs:
        return None, (), []
    nnx = sys.modules["flax.nnx"]
    graphdef, params, rest = nnx.split(graphs, nnx.Param, ...)
    n_params, n_rest = len(jax.tree.leaves(params)), len(jax.tree.leaves(rest))
    return graphdef, (params, rest), [True] * n_params + [False] * n_rest
