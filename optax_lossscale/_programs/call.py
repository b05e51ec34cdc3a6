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
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr
from jax.tree_util import Partial

from optax_lossscale._arrays.contexts import AUTOCAST_DTYPE
from optax_lossscale._arrays.variables import is_of_nnx, is_variable
from optax_lossscale._programs import nnx
from optax_lossscale._programs.values import FLOAT32, astype

Unflatten = Callable[[Iterable[Any]], Any]
"""A function that returns a tree with the given arrays in it."""


class Call(NamedTuple):
    """A traced call of a function, with the arrays in its arguments.

    Attributes:
      program: maps `arrays` to the arrays that the call changed in Flax NNX objects,
        followed by the arrays that it returned.
      arrays: the arrays in the arguments, in their own dtypes.
      is_parameter: whether each of the `arrays` is a parameter.
      to_result: converts results of the program to what the call returns and writes
        the changed arrays into the caller's Flax NNX objects.
    """

    program: ClosedJaxpr
    arrays: list[Any]
    is_parameter: list[bool]
    to_result: Unflatten


@contextlib.contextmanager
def as_program(
    fun: Callable[..., Any],
    args: tuple,
    kwargs: dict,
    parameters: Container[int] = (),
    low: np.dtype | None = None,
) -> Iterator[Call]:
    """Traces a call of `fun`, with each array of dtype `low` traced as float32.

    `Call.to_result` works only inside this context, because Flax NNX recognizes the
    objects of the call only there.

    Args:
      fun: the function.
      args: its positional arguments.
      kwargs: its keyword arguments.
      parameters: the positions of the arguments that hold parameters.
      low: the dtype of `autocast`'s products; None to trace every array as it is.
    """
    with nnx.changes_kept():
        inputs = nnx.split((args, kwargs))
        arrays, unflatten_inputs = _flatten(inputs, {})
        fun_of_arrays = _of_arrays(fun, arrays, unflatten_inputs)
        as_traced = functools.partial(_as_traced, low=low)
        wide_args, wide_kwargs = jax.tree.map(as_traced, inputs)
        with AUTOCAST_DTYPE(low):
            trace = jax.make_jaxpr(fun_of_arrays, return_shape=True)
            program, shapes = trace(*wide_args, **wide_kwargs)
        yield Call(
            program=program,
            arrays=arrays,
            is_parameter=_are_parameters(inputs, parameters),
            to_result=functools.partial(_result, shapes),
        )


def _of_arrays(
    fun: Callable[..., Any], arrays: Iterable[Any], unflatten_inputs: Unflatten
) -> Callable[..., tuple[Partial, Partial]]:
    """Wraps `fun` as a function of arrays alone, which JAX can trace.

    The function returns two `Partial`s, one for the changed NNX objects and one for the
    results. A `Partial` is a pytree: JAX traces its arrays, and its function, which
    puts arrays into a tree, leaves the trace as a part of the treedef.

    Args:
      fun: the function.
      arrays: the arrays in the arguments of the call.
      unflatten_inputs: returns the arguments with the given arrays in them.
    """

    def fun_of_arrays(*traced_args, **traced_kwargs):
        tracers = jax.tree.leaves((traced_args, traced_kwargs))
        split_inputs = unflatten_inputs(tracers)
        args, kwargs = nnx.merge(split_inputs, inside=True)
        objects = nnx.objects((args, kwargs))
        outputs = fun(*args, **kwargs)
        split_objects, results = nnx.split((objects, outputs))
        # An array that an object held before the call and still holds is not a result
        # of the program.
        tracer_ids = map(id, tracers)
        unchanged = dict(zip(tracer_ids, arrays, strict=True))
        changed, unflatten_objects = _flatten(split_objects, unchanged)
        returned, unflatten_results = _flatten(results, {})
        return Partial(unflatten_objects, changed), Partial(unflatten_results, returned)

    # JAX shows a function by its name in messages, and a callable without code, such as
    # a partial, by its repr, which can be long.
    if hasattr(inspect.unwrap(fun), "__code__"):
        return functools.wraps(fun)(fun_of_arrays)
    return fun_of_arrays


def _result(shapes: Any, program_results: Iterable[Any]) -> Any:
    """Converts results of the program to what the call returns: see `Call.to_result`.

    `shapes` has the tree structure of what `fun_of_arrays` returns.
    """
    treedef = jax.tree.structure(shapes)
    partials = jax.tree.unflatten(treedef, program_results)
    trees = [partial() for partial in partials]
    _, results = nnx.merge(trees, inside=False)
    return results


def _as_traced(x: Any, low: np.dtype | None) -> Any:
    """Returns a leaf, in float32 if its dtype is `low`; None if it is not traced."""
    if not is_traceable(x):
        return None
    # Check for None first, because `np.dtype("float64") == None` is True.
    if low is not None and x.dtype == low:
        return astype(x, FLOAT32)
    return x


def _flatten(tree: Any, unchanged: Mapping[int, Any]) -> tuple[list[Any], Unflatten]:
    """Flattens a tree into its arrays and a function that puts arrays in their places.

    Unlike `jax.tree.flatten`, it leaves what JAX cannot trace, such as a string, in the
    tree.

    Args:
      tree: the tree.
      unchanged: arrays by id. An array of the tree whose id is among them is not
        returned: the function holds the array from `unchanged` instead.
    """
    leaves, treedef = jax.tree.flatten(tree)
    arrays = []
    static = []
    for x in leaves:
        if is_traceable(x) and id(x) not in unchanged:
            arrays.append(x)
            # None is never a leaf, so it can mark the place of an array. The array
            # itself may be a tracer, which must not outlive the trace.
            static.append(None)
        else:
            static.append(unchanged.get(id(x), x))

    def unflatten(new_arrays):
        remaining = iter(new_arrays)
        filled = [next(remaining) if x is None else x for x in static]
        return jax.tree.unflatten(treedef, filled)

    return arrays, unflatten


def _are_parameters(
    inputs: tuple[tuple, dict], positions: Container[int]
) -> list[bool]:
    """Returns, for each array in the arguments, whether it is a parameter.

    An array in a Flax NNX variable is a parameter if the variable is an `nnx.Param`.
    Any other array is a parameter if `positions` contains its argument's position.
    """
    args, kwargs = inputs
    flags = []
    for position, argument in enumerate((*args, kwargs)):
        for leaf in jax.tree.leaves(argument, is_leaf=is_variable):
            is_parameter = position in positions
            if is_variable(leaf):
                is_parameter = is_of_nnx(leaf, "Param")
            arrays = filter(is_traceable, jax.tree.leaves(leaf))
            flags += [is_parameter for _ in arrays]
    return flags


def is_traceable(x: Any) -> bool:
    """Whether `x` is an array that JAX can trace, or the shape of one.

    A NumPy array must hold numbers or booleans. A JAX array may also hold random
    keys.
    """
    if isinstance(x, (np.ndarray, np.generic)):
        return x.dtype == np.bool_ or jnp.issubdtype(x.dtype, np.number)
    return isinstance(x, (jax.Array, jax.ShapeDtypeStruct))
