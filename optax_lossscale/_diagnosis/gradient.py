"""The gradient of a loss function as a program from arrays to arrays."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale._arrays.names import path_name
from optax_lossscale._arrays.precision import at_least_float32, is_inexact
from optax_lossscale._arrays.variables import is_variable, map_leaves
from optax_lossscale._diagnosis.loops import Value
from optax_lossscale._diagnosis.notes import Note, Place, measured
from optax_lossscale._diagnosis.stretch import exact
from optax_lossscale._step.gradient import loss_of
from optax_lossscale._step.inputs import refuse_no_scalar


class Gradient(NamedTuple):
    """A traced gradient: its results are the loss, and the gradient of each parameter."""

    jaxpr: Any
    arrays: list[Any]  # its arguments, without the seed, which is the last
    names: list[str]  # of the arguments
    parameters: list[int]  # the arguments that are differentiated

    @property
    def loss_dtype(self) -> np.dtype:
        """The dtype of the loss."""
        return self.jaxpr.out_avals[0].dtype

    @property
    def grad_names(self) -> list[str]:
        """The parameters that are differentiated, by name."""
        return [self.names[n] for n in self.parameters]

    def values(self, scale: float) -> list[Value]:
        """The arguments of the program at a loss scale."""
        seed = _argument(np.float32(scale), Place("", "", "", "the loss scale"), seeded=True)
        places = [
            Place("", "", "", name, is_parameter=n in self.parameters)
            for n, name in enumerate(self.names)
        ]
        return [*map(_argument, self.arrays, places), seed]


def _argument(x: Any, place: Place, seeded: bool = False) -> Value:
    """A value that the program is given."""
    pair = exact(jax.device_get(x))
    numbers = measured(pair.in_float32, None) if is_inexact(x) else {}
    return Value(pair, Note(place, -1, (), (), x.dtype, seeded, **numbers))


def gradient_of(
    loss_fn: Callable[..., Any], params: Any, args: tuple, kwargs: dict, has_aux: bool
) -> Gradient:
    """The gradient of a loss function, traced; all but arrays is passed on as it is."""
    given = (params, args, kwargs)
    arrays: list[Any] = []
    map_leaves(lambda x: arrays.append(x) or x if _is_array(x) else x, given)
    names = _names(params)
    n_params = len(names)
    names += _names({"args": args, "kwargs": kwargs})
    parameters = [n for n in range(n_params) if is_inexact(arrays[n])]

    def gradient(arrays, seed):
        def loss_and_its_own(differentiated):
            every = list(arrays)
            for n, x in zip(parameters, differentiated, strict=True):
                every[n] = x
            left = iter(every)
            of_leaf = lambda x: next(left) if _is_array(x) else x
            params, args, kwargs = map_leaves(of_leaf, given)
            loss = loss_of(loss_fn(params, *args, **kwargs), has_aux)
            refuse_no_scalar("the loss", loss)
            loss = jnp.asarray(loss)
            if not jnp.issubdtype(loss.dtype, jnp.floating):
                raise TypeError(f"the loss must be a real floating-point scalar, got {loss.dtype}")
            return at_least_float32(loss), loss

        differentiated = [arrays[n] for n in parameters]
        wide, pull, loss = jax.vjp(loss_and_its_own, differentiated, has_aux=True)
        return loss, pull(seed.astype(wide.dtype))[0]

    jaxpr = jax.make_jaxpr(gradient)(arrays, jnp.float32(1))
    arrays = [jnp.asarray(x) for x in arrays]
    return Gradient(jaxpr, arrays, names, parameters)


def _is_array(x: Any) -> bool:
    if isinstance(x, (np.ndarray, np.generic)):
        return x.dtype == np.bool_ or jnp.issubdtype(x.dtype, np.number)
    return isinstance(x, jax.Array)


def _names(tree: Any) -> list[str]:
    """The names of the arrays in a tree; a variable in two places counts once."""
    names: list[str] = []
    variables: set[int] = set()
    for path, leaf in jax.tree.leaves_with_path(tree, is_leaf=is_variable):
        if is_variable(leaf) and id(leaf) in variables:
            continue
        variables.add(id(leaf))
        name = path_name(path)
        names += [name] * sum(map(_is_array, jax.tree.leaves(leaf)))
    return names
