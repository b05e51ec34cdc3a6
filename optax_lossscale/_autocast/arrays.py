"""A call as a function from arrays to arrays, whatever else it takes, changes and returns."""

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Container
from typing import Any, Self

import jax
import numpy as np

_TAG = "optax_lossscale.autocast"


class Call(contextlib.ExitStack):
    """A call of a function, of whose arguments and results the arrays are traced.

    What it changes in the Flax NNX modules among its arguments is a result, too, and is put into
    them. A context around both, as NNX keeps there which module is which.

    Attributes:
      arrays: those in the arguments.
      is_parameter: for each, whether it is one: all arrays of the arguments that were said to be,
        and every `nnx.Param`.
    """

    def __init__(
        self, fun: Callable[..., Any], args: tuple, kwargs: dict, parameters: Container[int]
    ):
        super().__init__()
        self._fun = fun
        self._leaves, self._tree = _flatten((args, kwargs))
        is_parameter = [i in parameters for i, arg in enumerate(args) for _ in _flatten(arg)[0]]
        is_parameter += [False] * (len(self._leaves) - len(is_parameter))
        pairs = zip(self._leaves, is_parameter, strict=True)
        self.is_parameter = [is_it for x, is_it in pairs if is_array(x)]
        self._given: list[Any] = [x if is_array(x) else None for x in self._leaves]
        self._modules_at = [i for i, x in enumerate(self._leaves) if _is_module(x)]
        self._state: list[Any] = []

    def __enter__(self) -> Self:
        if self._modules_at:
            nnx = sys.modules["flax.nnx"]
            self.enter_context(nnx.update_context(_TAG))
            with nnx.split_context(_TAG) as context:
                modules = [self._leaves[i] for i in self._modules_at]
                self._graphdef, *states = context.split(modules, nnx.Param, ...)
            first = self._modules_at[0]
            before = len(jax.tree.leaves(self._given[:first]))
            self._given[first] = states  # of all of them
            self._state = jax.tree.leaves(states)
            n_params = len(jax.tree.leaves(states[0]))
            of_state = [i < n_params for i in range(len(self._state))]
            self.is_parameter[before:before] = of_state
        self.arrays, self._given_tree = jax.tree.flatten(self._given)
        return super().__enter__()

    def traced(self, arrays: list[Any]) -> Any:
        """The program of such arrays; what JAX says of it names the function and its arguments."""
        given = jax.tree.unflatten(self._given_tree, arrays)
        args, kwargs = jax.tree.unflatten(self._tree, given)
        call = lambda *args, **kwargs: self._of_arrays(jax.tree.leaves((args, kwargs)))
        if hasattr(inspect.unwrap(self._fun), "__code__"):  # of others JAX would take the repr
            call = functools.wraps(self._fun)(call)
        return jax.make_jaxpr(call)(*args, **kwargs)

    def _of_arrays(self, arrays: list[Any]) -> list[Any]:
        """The arrays that the call gives for these, and those that it changed in modules."""
        leaves = jax.tree.unflatten(self._given_tree, arrays)
        state: list[Any] = []
        if self._modules_at:
            states = leaves[self._modules_at[0]]
            state = jax.tree.leaves(states)
            for i, module in zip(self._modules_at, self._merged(states), strict=True):
                leaves[i] = module
        pairs = zip(leaves, self._leaves, strict=True)
        leaves = [x if is_array(old) or _is_module(old) else old for x, old in pairs]
        args, kwargs = jax.tree.unflatten(self._tree, leaves)
        outs, self._out_tree = _flatten(self._fun(*args, **kwargs))
        after = self._split([leaves[i] for i in self._modules_at])
        unchanged = {id(x): i for i, x in enumerate(state)}
        self._unchanged = [unchanged.get(id(x)) for x in after]
        self._others = [None if is_array(x) else (x,) for x in outs]
        changed = [x for x in after if id(x) not in unchanged]
        return [*filter(is_array, outs), *changed]

    def result(self, arrays: list[Any]) -> Any:
        """What the call returns, of the arrays that it gives; changes its modules."""
        left = iter(arrays)
        outs = [next(left) if other is None else other[0] for other in self._others]
        if self._modules_at:
            after = [next(left) if i is None else self._state[i] for i in self._unchanged]
            with sys.modules["flax.nnx"].merge_context(_TAG, inner=False) as context:
                context.merge(self._graphdef_after, *jax.tree.unflatten(self._after_tree, after))
        return jax.tree.unflatten(self._out_tree, outs)

    def _merged(self, states: list[Any]) -> list[Any]:
        """The modules inside the call."""
        with sys.modules["flax.nnx"].merge_context(_TAG, inner=True) as context:
            return context.merge(self._graphdef, *states)

    def _split(self, modules: list[Any]) -> list[Any]:
        """The arrays in modules, after the call."""
        if not modules:
            return []
        with sys.modules["flax.nnx"].split_context(_TAG) as context:
            self._graphdef_after, *states = context.split(modules)
        after, self._after_tree = jax.tree.flatten(states)
        return after


def is_array(x: Any) -> bool:
    """Whether this is an array at hand or a traced one; no Python number."""
    return isinstance(x, (jax.Array, np.ndarray, np.generic))


def _flatten(tree: Any) -> tuple[list[Any], Any]:
    return jax.tree.flatten(tree, is_leaf=_is_module)


def _is_module(x: Any) -> bool:
    """Whether this is a module or a random stream of Flax NNX, which calls change in place."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(x, nnx.Pytree)
