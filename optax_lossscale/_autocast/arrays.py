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
from optax_lossscale._programs.values import dtype_in, in_dtype


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
    parameters: Container[int],
    low: np.dtype,
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
        wide = [in_dtype(jnp.float32, x) if dtype_in(x) == low else x for x in arrays]
        args, kwargs = form.filled(wide, with_others=False)
        with nnx.told_to_go_in_as_arguments(), AUTOCAST_DTYPE(low):
            program = jax.make_jaxpr(of_arrays)(*args, **kwargs)
        flags = zip(_are_parameters(inputs, parameters), form.others, strict=True)
        of_arrays_alone = [flag for flag, other in flags if other is None]
        yield Call(program, arrays, of_arrays_alone, result)


class _Form(NamedTuple):
    """A tree without its arrays."""

    tree: Any  # its structure
    # For each leaf, None if it is an array, else a tuple of it
    others: list[tuple[Any] | None]

    def filled(self, arrays: Iterable[Any], with_others: bool = True) -> Any:
        """The tree of these arrays."""
        following = iter(arrays)
        leaves = []
        for other in self.others:
            if other is None:
                leaves.append(next(following))
            else:
                leaves.append(other[0] if with_others else None)
        return jax.tree.unflatten(self.tree, leaves)


def _form(
    tree: Any, unchanged: Mapping[int, Any] = MappingProxyType({})
) -> tuple[_Form, list[Any]]:
    """A tree's form and its arrays; for those with an `id` in `unchanged`, what is there."""
    leaves, structure = jax.tree.flatten(tree)
    others: list[tuple[Any] | None] = []
    arrays = []
    for leaf in leaves:
        if is_array(leaf) and id(leaf) not in unchanged:
            others.append(None)
            arrays.append(leaf)
        else:
            others.append((unchanged.get(id(leaf), leaf),))
    return _Form(structure, others), arrays


def _are_parameters(
    inputs: tuple[tuple, dict], positions: Container[int]
) -> list[bool]:
    """For each leaf of the arguments, whether it is a parameter: for NNX, an `nnx.Param`."""
    # No tree of flags: there are nodes that can hold nothing but arrays.
    args, kwargs = inputs
    flags: list[bool] = []
    trees = [(x, i in positions) for i, x in enumerate(args)]
    trees.append((kwargs, False))
    for tree, is_named in trees:
        for leaf in jax.tree.leaves(tree, is_leaf=is_variable):
            flag = nnx.is_parameter(leaf) if is_variable(leaf) else is_named
            flags += [flag] * len(jax.tree.leaves(leaf))
    return flags


def is_array(x: Any) -> bool:
    """Whether this is an array, concrete or traced, and not a Python number."""
    return isinstance(x, (jax.Array, np.ndarray, np.generic))
