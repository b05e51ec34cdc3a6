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

from optax_lossscale._arrays import variables
from optax_lossscale._arrays.contexts import AUTOCAST_DTYPE
from optax_lossscale._programs.values import dtype_in, in_dtype


class Call(NamedTuple):
    """A call of a function as a program of the arrays in it."""

    # From the arrays in the arguments to those that the call changed in the Flax NNX modules and
    # variables among these, and to those in the results; as traced.
    program: Any
    arrays: list[Any]  # those in the arguments
    is_parameter: list[bool]  # for each of them
    # From the program's results to what the call returns; changes modules and variables.
    result: Callable[[Iterable[Any]], Any]


@contextlib.contextmanager
def as_program(
    fun: Callable[..., Any], args: tuple, kwargs: dict, parameters: Container[int], low: np.dtype
) -> Iterator[Call]:
    """A call, traced with arrays of dtype `low` in float32; for use in this context alone."""
    with variables.changes_kept():
        given = variables.apart((args, kwargs))
        form, arrays = _form(given)
        forms: list[_Form] = []

        def of_arrays(*args, **kwargs):
            xs = jax.tree.leaves((args, kwargs))
            args, kwargs = variables.together(form.filled(xs), inside=True)
            objects = variables.objects((args, kwargs))
            objects, outs = variables.apart((objects, fun(*args, **kwargs)))
            of_objects, changed = _form(objects, dict(zip(map(id, xs), arrays, strict=True)))
            of_outs, found = _form(outs)
            forms[:] = of_objects, of_outs
            return changed + found

        def result(arrays):
            left = iter(arrays)
            return variables.together([f.filled(left) for f in forms], inside=False)[1]

        # JAX names the function in what it says about the program, perhaps by its repr.
        if hasattr(inspect.unwrap(fun), "__code__"):
            of_arrays = functools.wraps(fun)(of_arrays)
        wide = [in_dtype(jnp.float32, x) if dtype_in(x) == low else x for x in arrays]
        args, kwargs = form.filled(wide, with_others=False)
        with variables.told_to_go_in_as_arguments(), AUTOCAST_DTYPE(low):
            program = jax.make_jaxpr(of_arrays)(*args, **kwargs)
        said = [(x, i in parameters) for i, x in enumerate(given[0])] + [(given[1], False)]
        flags = [flag for tree, is_said in said for flag in _are_parameters(tree, is_said)]
        flags = zip(flags, form.others, strict=True)
        yield Call(program, arrays, [is_it for is_it, other in flags if other is None], result)


class _Form(NamedTuple):
    """A tree without its arrays."""

    tree: Any  # its structure
    others: list[tuple[Any] | None]  # for each leaf, None if it is an array, else a tuple of it

    def filled(self, arrays: Iterable[Any], with_others: bool = True) -> Any:
        """The tree of these arrays."""
        left = iter(arrays)
        of_other = lambda other: other[0] if with_others else None
        leaves = [next(left) if o is None else of_other(o) for o in self.others]
        return jax.tree.unflatten(self.tree, leaves)


def _form(tree: Any, known: Mapping[int, Any] = MappingProxyType({})) -> tuple[_Form, list[Any]]:
    """A tree's form and its arrays; for those with an `id` in `known`, what is there instead."""
    leaves, structure = jax.tree.flatten(tree)
    is_other = lambda x: not is_array(x) or id(x) in known
    others = [(known.get(id(x), x),) if is_other(x) else None for x in leaves]
    return _Form(structure, others), [x for x in leaves if not is_other(x)]


def _are_parameters(tree: Any, said: bool) -> list[bool]:
    """For each leaf of an argument, whether it is a parameter: for NNX, an `nnx.Param`."""
    # No tree of flags: there are nodes that can hold nothing but arrays.
    of = lambda x: variables.is_parameter(x) if variables.is_variable(x) else said
    leaves = jax.tree.leaves(tree, is_leaf=variables.is_variable)
    return [of(leaf) for leaf in leaves for _ in jax.tree.leaves(leaf)]


def is_array(x: Any) -> bool:
    """Whether this is an array, concrete or traced, and not a Python number."""
    return isinstance(x, (jax.Array, np.ndarray, np.generic))
