"""Turns a call of any function into a program from arrays to arrays.

The function may take and return pytrees, modules and anything else, and may change
Flax NNX objects. A tree is flattened into its arrays and a function that returns the
tree with other arrays in their places. For `{"w": array, "name": "up"}` these are
`[array]` and a function that puts one array under `"w"`.

`as_program` traces a program. Its inputs are the arrays in the arguments; its results
are the arrays that changed in NNX objects, followed by those that the function returns.
`Call.to_result` writes the changed arrays into the objects and returns the others as a
tree.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr

from optax_lossscale._arrays.contexts import AUTOCAST_DTYPE
from optax_lossscale._programs import nnx
from optax_lossscale._programs.values import FLOAT32, astype


class Call(NamedTuple):
    """A traced call of a function, with the arrays in its arguments.

    Attributes:
      program: maps `arrays` to the arrays that the call changed in Flax NNX objects,
        followed by the arrays that it returned.
      arrays: the arrays in the arguments, in their own dtypes.
      to_result: converts results of the program to what the call returns and writes
        the changed arrays into the caller's Flax NNX objects.
    """

    program: ClosedJaxpr
    arrays: list[Any]
    to_result: Callable[[Iterable[Any]], Any]


@contextlib.contextmanager
def as_program(
    fun: Callable[..., Any],
    args: tuple,
    kwargs: dict,
    low: np.dtype | None = None,
) -> Iterator[Call]:
    """Traces a call of `fun`, with each array of dtype `low` traced as float32.

    `Call.to_result` works only inside this context, because Flax NNX recognizes the
    objects of the call only there.

    Args:
      fun: the function.
      args: its positional arguments.
      kwargs: its keyword arguments.
      low: the dtype of `autocast`'s products; None to trace every array as it is.
    """
    with nnx.changes_kept():
        inputs = nnx.split((args, kwargs))
        arrays, unflatten_inputs = _flatten(inputs)
        # Filled in by the trace. Not a part of its treedef: JAX keeps treedefs, and the
        # places of a tree may hold objects with arrays in them.
        returned_trees: list[Callable[..., Any]] = []

        def fun_of_arrays(*traced_args, **traced_kwargs):
            tracers = jax.tree.leaves((traced_args, traced_kwargs))
            args, kwargs = nnx.merge(unflatten_inputs(tracers), inside=True)
            objects = nnx.objects((args, kwargs))
            split_objects, results = nnx.split((objects, fun(*args, **kwargs)))
            # What an object held before the call and still holds is no result.
            changed, unflatten_objects = _flatten(split_objects, tracers)
            returned, unflatten_results = _flatten(results)
            returned_trees.extend([unflatten_objects, unflatten_results])
            return changed, returned

        # JAX shows a function by its name in messages, and a callable without code,
        # such as a partial, by its repr, which can be long.
        if hasattr(inspect.unwrap(fun), "__code__"):
            functools.update_wrapper(fun_of_arrays, fun)
        as_traced = functools.partial(_as_traced, low=low)
        wide_args, wide_kwargs = jax.tree.map(as_traced, inputs)
        with AUTOCAST_DTYPE(low), nnx.refusals_explained():
            trace = jax.make_jaxpr(fun_of_arrays, return_shape=True)
            program, (changed, _) = trace(*wide_args, **wide_kwargs)

        def to_result(program_results):
            new_arrays = list(program_results)
            unflatten_objects, unflatten_results = returned_trees
            split_objects = unflatten_objects(new_arrays[: len(changed)], arrays)
            results = unflatten_results(new_arrays[len(changed) :])
            _, results = nnx.merge((split_objects, results), inside=False)
            return results

        yield Call(program, arrays, to_result)


def _as_traced(x: Any, low: np.dtype | None) -> Any:
    """Returns a leaf, in float32 if its dtype is `low`; None if it is not traced."""
    if not is_traceable(x):
        return None
    # Check for None first, because `np.dtype("float64") == None` is True.
    if low is not None and x.dtype == low:
        return astype(x, FLOAT32)
    return x


class _Place(NamedTuple):
    """The place of an array in a tree.

    Attributes:
      n: the array's position in a list.
      is_argument: whether that is the list of the call's arguments.
    """

    n: int
    is_argument: bool


def _flatten(
    tree: Any, arguments: Sequence[Any] = ()
) -> tuple[list[Any], Callable[..., Any]]:
    """Flattens a tree into its arrays and a function that puts arrays in their places.

    Unlike `jax.tree.flatten`, it leaves what JAX cannot trace, such as a string, in the
    tree. An array that is one of the `arguments` is not returned: the function takes it
    from its second argument, a list of arrays in the same order.
    """
    leaves, treedef = jax.tree.flatten(tree)
    positions = {id(x): n for n, x in enumerate(arguments)}
    arrays = []
    places = []
    for x in leaves:
        if id(x) in positions:
            places.append(_Place(positions[id(x)], is_argument=True))
        elif is_traceable(x):
            places.append(_Place(len(arrays), is_argument=False))
            arrays.append(x)
        else:
            places.append(x)

    def unflatten(new_arrays, new_arguments=()):
        lists = list(new_arrays), new_arguments
        filled = [
            lists[x.is_argument][x.n] if isinstance(x, _Place) else x for x in places
        ]
        return jax.tree.unflatten(treedef, filled)

    return arrays, unflatten


def is_traceable(x: Any) -> bool:
    """Whether `x` is an array that JAX can trace, or the shape of one.

    A NumPy array must hold numbers or booleans. A JAX array may also hold random
    keys.
    """
    if isinstance(x, (np.ndarray, np.generic)):
        return x.dtype == np.bool_ or jnp.issubdtype(x.dtype, np.number)
    return isinstance(x, (jax.Array, jax.ShapeDtypeStruct))
