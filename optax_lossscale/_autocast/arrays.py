"""A call as a program from arrays to arrays, whatever else it takes, changes and returns."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale._arrays.contexts import AUTOCAST_DTYPE
from optax_lossscale._arrays.variables import is_variable
from optax_lossscale._autocast import nnx
from optax_lossscale._programs.values import FLOAT32, in_dtype


class Call(NamedTuple):
    """A call of a function as a program of the arrays in it."""

    # From the arrays in the arguments to those that the call changed in the Flax NNX
    # modules and variables among these, and to those in the results; as traced.
    program: Any
    arrays: list[Any]  # those in the arguments
    is_parameter: list[bool]  # for each of them
    # From the program's results to what the call returns; changes modules and
    # variables.
    result: Callable[[Iterable[Any]], Any]


@contextlib.contextmanager
def as_program(
    fun: Callable[..., Any],
    args: tuple,
    kwargs: dict,
    parameters: Container[int] = (),
    low: np.dtype | None = None,
) -> Iterator[Call]:
    """A call, traced with arrays of dtype `low` in float32; for use in this context alone."""
    with nnx.changes_kept():
        inputs = nnx.apart((args, kwargs))
        form, arrays = _form(inputs)
        # Those of the objects that the function may change, and of its results.
        forms: list[_Form] = []

        def of_arrays(*args, **kwargs):
            traced = jax.tree.leaves((args, kwargs))
            args, kwargs = nnx.together(form.filled(traced), inside=True)
            objects = nnx.objects((args, kwargs))
            objects, results = nnx.apart((objects, fun(*args, **kwargs)))
            ids = map(id, traced)
            unchanged = dict(zip(ids, arrays, strict=True))
            form_of_objects, changed = _form(objects, unchanged)
            form_of_results, returned = _form(results)
            forms[:] = form_of_objects, form_of_results
            return changed + returned

        def result(arrays):
            following = iter(arrays)
            filled = [form.filled(following) for form in forms]
            _, results = nnx.together(filled, inside=False)
            return results

        # JAX names the function in what it says about the program, perhaps by its repr.
        if hasattr(inspect.unwrap(fun), "__code__"):
            of_arrays = functools.wraps(fun)(of_arrays)
        wide = arrays
        if low is not None:
            wide = [in_dtype(FLOAT32, x) if x.dtype == low else x for x in arrays]
        args, kwargs = form.without_others().filled(wide)
        with AUTOCAST_DTYPE(low):
            program = jax.make_jaxpr(of_arrays)(*args, **kwargs)
        flags = zip(_are_parameters(inputs, parameters), form.leaves, strict=True)
        is_parameter = [flag for flag, leaf in flags if leaf is _ARRAY]
        yield Call(program, arrays, is_parameter, result)


_ARRAY = object()
"""What stands for an array in a form."""


class _Form(NamedTuple):
    """A tree without its arrays."""

    tree: Any  # its structure
    leaves: list[Any]  # with `_ARRAY` for each array

    def filled(self, arrays: Iterable[Any]) -> Any:
        """The tree of these arrays."""
        following = iter(arrays)
        leaves = [next(following) if leaf is _ARRAY else leaf for leaf in self.leaves]
        return jax.tree.unflatten(self.tree, leaves)

    def without_others(self) -> "_Form":
        """The form with None for all that is no array."""
        leaves = [leaf if leaf is _ARRAY else None for leaf in self.leaves]
        return self._replace(leaves=leaves)


def _form(
    tree: Any, unchanged: Mapping[int, Any] = MappingProxyType({})
) -> tuple[_Form, list[Any]]:
    """A tree's form and its arrays; for those with an `id` in `unchanged`, what is there."""
    leaves, structure = jax.tree.flatten(tree)
    kept = []
    arrays = []
    for leaf in leaves:
        if id(leaf) in unchanged:
            kept.append(unchanged[id(leaf)])
        elif is_array(leaf):
            kept.append(_ARRAY)
            arrays.append(leaf)
        else:
            kept.append(leaf)
    return _Form(structure, kept), arrays


def _are_parameters(
    inputs: tuple[tuple, dict], positions: Container[int]
) -> list[bool]:
    """For each leaf of the arguments, whether it is a parameter: for NNX, an `nnx.Param`."""
    flags: list[bool] = []
    leaves = jax.tree.leaves_with_path(inputs, is_leaf=is_variable)
    for (of_inputs, of_argument, *_), leaf in leaves:
        is_positional = of_inputs.idx == 0
        flag = is_positional and of_argument.idx in positions
        if is_variable(leaf):
            flag = nnx.is_parameter(leaf)
        flags += [flag] * len(jax.tree.leaves(leaf))
    return flags


def is_array(x: Any) -> bool:
    """Whether this is an array of numbers, perhaps traced, or the type of one."""
    if isinstance(x, (np.ndarray, np.generic)):
        return x.dtype == np.bool_ or jnp.issubdtype(x.dtype, np.number)
    return isinstance(x, (jax.Array, jax.ShapeDtypeStruct))
