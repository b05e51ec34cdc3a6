"""A call of any function as a program from arrays to arrays.

The function may take and return trees, modules and anything else, and change Flax NNX
objects. A tree is divided into its arrays, which the program takes or gives, and its
*form*, a function that makes the tree from arrays in their place. `as_program` traces
the program from the arrays in the arguments to the arrays that the call changed and
returned. From the program's results, the forms of what changed and of what was returned
make both again.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial

from optax_lossscale._arrays.contexts import AUTOCAST_DTYPE
from optax_lossscale._arrays.variables import is_of_nnx, is_variable
from optax_lossscale._autocast import nnx
from optax_lossscale._programs.values import FLOAT32, astype


class Call(NamedTuple):
    """A call of a function as a program, with its arguments."""

    # The closed jaxpr, from the arrays in the arguments to those that the call changed
    # in Flax NNX objects, followed by those that it returned
    program: Any
    arrays: list[Any]  # the arrays in the arguments
    is_parameter: list[bool]  # for each of these arrays
    # From the results of the program to what the call returns; also puts the changed
    # arrays into the Flax NNX objects
    result: Callable[[Iterable[Any]], Any]


@contextlib.contextmanager
def as_program(
    fun: Callable[..., Any],
    args: tuple,
    kwargs: dict,
    parameters: Container[int] = (),
    low: np.dtype | None = None,
) -> Iterator[Call]:
    """Traces a call, with each array of dtype `low` taken as float32.

    The `Call` is valid in this context only.

    Args:
      fun: the function.
      args: its positional arguments.
      kwargs: its keyword arguments.
      parameters: the positions of the arguments that hold parameters.
      low: the dtype of products, or None to trace every array as it is.
    """
    with nnx.changes_kept():
        inputs = nnx.split((args, kwargs))
        arrays, form = _split(inputs, {})

        def of_arrays(*traced_args, **traced_kwargs):
            traced = jax.tree.leaves((traced_args, traced_kwargs))
            call_args, call_kwargs = nnx.merge(form(traced), inside=True)
            objects = nnx.objects((call_args, call_kwargs))
            split_objects, results = nnx.split(
                (objects, fun(*call_args, **call_kwargs))
            )
            # An array that an object has before and after the call is not a result.
            unchanged = dict(zip(map(id, traced), arrays, strict=True))
            changed, form_of_objects = _split(split_objects, unchanged)
            returned, form_of_results = _split(results, {})
            # A `Partial` is a tree: its leaves are the arrays, its structure the form.
            return Partial(form_of_objects, changed), Partial(form_of_results, returned)

        # JAX shows the name of the function in messages. A callable without code, such
        # as a partial, would be shown by its repr, which may be long.
        if hasattr(inspect.unwrap(fun), "__code__"):
            of_arrays = functools.wraps(fun)(of_arrays)
        wide_args, wide_kwargs = jax.tree.map(functools.partial(_wide, low), inputs)
        with AUTOCAST_DTYPE(low):
            trace = jax.make_jaxpr(of_arrays, return_shape=True)
            program, shapes = trace(*wide_args, **wide_kwargs)

        def result(arrays):
            filled = jax.tree.unflatten(jax.tree.structure(shapes), arrays)
            _, results = nnx.merge([tree() for tree in filled], inside=False)
            return results

        yield Call(program, arrays, _are_parameters(inputs, parameters), result)


def _wide(low: np.dtype | None, x: Any) -> Any:
    """An array as the program takes it, in float32 if it is low; else None."""
    if not is_traceable(x):
        return None
    # `np.dtype("float64") == None` is True
    is_low = low is not None and x.dtype == low
    return astype(x, FLOAT32) if is_low else x


def _split(
    tree: Any, unchanged: Mapping[int, Any]
) -> tuple[list[Any], Callable[[Iterable[Any]], Any]]:
    """The arrays of a tree, and a function that makes the tree of others in their place.

    An array whose `id` is in `unchanged` is not among them: the form holds what
    `unchanged` has for it.
    """
    leaves, structure = jax.tree.flatten(tree)

    def is_new(x):
        return is_traceable(x) and id(x) not in unchanged

    # None, which is no leaf, stands for each array: to keep arrays would leak tracers.
    others = [None if is_new(x) else unchanged.get(id(x), x) for x in leaves]

    def form(arrays):
        following = iter(arrays)
        filled = [next(following) if x is None else x for x in others]
        return jax.tree.unflatten(structure, filled)

    return list(filter(is_new, leaves)), form


def _are_parameters(
    inputs: tuple[tuple, dict], positions: Container[int]
) -> list[bool]:
    """For each array in the arguments, whether it is a parameter.

    An array is one if its argument's position is listed; one in a variable of Flax NNX,
    if the variable is an `nnx.Param`.
    """
    args, kwargs = inputs
    flags: list[bool] = []
    for n, argument in enumerate((*args, kwargs)):
        for leaf in jax.tree.leaves(argument, is_leaf=is_variable):
            is_one = is_of_nnx(leaf, "Param") if is_variable(leaf) else n in positions
            flags += [is_one for x in jax.tree.leaves(leaf) if is_traceable(x)]
    return flags


def is_traceable(x: Any) -> bool:
    """Whether `x` is an array that JAX can trace, or the shape of one.

    An array of NumPy's has to hold numbers; one of JAX's may hold random keys.
    """
    if isinstance(x, (np.ndarray, np.generic)):
        return x.dtype == np.bool_ or jnp.issubdtype(x.dtype, np.number)
    return isinstance(x, (jax.Array, jax.ShapeDtypeStruct))
