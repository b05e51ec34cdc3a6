"""The loss and its gradient as one traced program, from arrays to arrays.

Its arguments are the arrays in the parameters, arguments and keywords of the loss
function, and last the *seed*: the cotangent of the loss, which is the loss scale. Its
results are the loss, and the gradient of each parameter, scaled.
"""

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale._arrays.names import path_name
from optax_lossscale._arrays.precision import at_least_float32, is_inexact
from optax_lossscale._arrays.variables import is_variable, map_leaves
from optax_lossscale._autocast.arrays import is_array
from optax_lossscale._diagnosis.loops import Value
from optax_lossscale._diagnosis.notes import Figures, Place, measured, note_of
from optax_lossscale._diagnosis.pairs import exact
from optax_lossscale._diagnosis.wide import is_narrow
from optax_lossscale._programs.values import dtype_in
from optax_lossscale._programs.versions import is_ref
from optax_lossscale._programs.walk import equations
from optax_lossscale._step.gradient import loss_of
from optax_lossscale._step.inputs import check_scalar

_PARAMETER = "params/"


class Gradient(NamedTuple):
    """The program of a loss and its gradient, with its arguments but for the seed."""

    jaxpr: Any
    arrays: list[np.ndarray]  # the arguments; the seed, which is the last, is not here
    names: list[str]  # the name of each of these arguments
    parameters: list[int]  # the positions of those that are differentiated

    @property
    def loss_dtype(self) -> np.dtype:
        """The dtype of the loss."""
        return self.jaxpr.out_avals[0].dtype

    @property
    def grad_names(self) -> list[str]:
        """The names of the parameters that are differentiated."""
        return [self.names[n] for n in self.parameters]

    @property
    def narrow_dtypes(self) -> tuple[np.dtype, ...]:
        """The dtypes of 16 bits and fewer that results in the program have."""
        results = (v for at in equations(self.jaxpr) for v in at.eqn.outvars)
        return tuple(filter(is_narrow, dict.fromkeys(map(dtype_in, results))))

    def values(self, scale: float) -> list[Value]:
        """All arguments of the program at a loss scale, with notes."""
        values = []
        for n, (x, name) in enumerate(zip(self.arrays, self.names, strict=True)):
            place = Place("", "", "", name, is_parameter=n in self.parameters)
            values.append(_argument(x, place))
        place = Place("", "", "", "the loss scale")
        return [*values, _argument(np.asarray(scale, np.float32), place, True)]


def gradient_of(
    loss_fn: Callable[..., Any], params: Any, args: tuple, kwargs: dict, has_aux: bool
) -> Gradient:
    """Traces the gradient of a loss function.

    Whatever is not an array is passed on to the loss function as it is.
    """
    # JAX also differentiates floats of Python, which here become arrays.
    params = map_leaves(lambda x: np.float32(x) if type(x) is float else x, params)
    everything = (params, args, kwargs)
    named = list(_named_arrays(everything))
    arrays = [x for _, x in named]
    names = _unlike([name.removeprefix(_PARAMETER) for name, _ in named])
    parameters = [
        n
        for n, (name, x) in enumerate(named)
        if name.startswith(_PARAMETER) and is_inexact(x)
    ]

    def loss_of_parameters(arrays, differentiated):
        # All arrays in order, with those that are differentiated in their places
        replaced = dict(enumerate(arrays)) | dict(
            zip(parameters, differentiated, strict=True)
        )
        left = iter(replaced.values())
        params, args, kwargs = map_leaves(
            lambda x: next(left) if is_array(x) else x, everything
        )
        loss = loss_of(loss_fn(params, *args, **kwargs), has_aux)
        check_scalar("the loss", loss)
        loss = jnp.asarray(loss)
        if not jnp.issubdtype(loss.dtype, jnp.floating):
            raise TypeError(
                f"the loss must be a real floating-point scalar, got {loss.dtype}"
            )
        return at_least_float32(loss), loss

    def gradient(arrays, seed):
        loss_and_its_own = functools.partial(loss_of_parameters, arrays)
        differentiated = [arrays[n] for n in parameters]
        wide, pull, loss = jax.vjp(loss_and_its_own, differentiated, has_aux=True)
        return loss, pull(seed.astype(wide.dtype))[0]

    jaxpr = jax.make_jaxpr(gradient)(arrays, jnp.float32(1))
    _check_no_refs(jaxpr)
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in arrays):
        raise TypeError(
            "diagnose runs the loss function: give it arrays, and no ShapeDtypeStruct"
        )
    on_host = jax.device_get([jnp.asarray(x) for x in arrays])
    return Gradient(jaxpr, on_host, names, parameters)


def _named_arrays(everything: tuple) -> Iterator[tuple[str, Any]]:
    """The arrays in parameters, arguments and keywords, each with its path.

    A variable of Flax NNX that is in two places counts once.
    """
    prefixes = (_PARAMETER, "args/", "kwargs/")
    variables: set[int] = set()
    for (first, *path), leaf in jax.tree.leaves_with_path(
        everything, is_leaf=is_variable
    ):
        if is_variable(leaf) and id(leaf) in variables:
            continue
        variables.add(id(leaf))
        for x in filter(is_array, jax.tree.leaves(leaf)):
            yield prefixes[first.idx] + path_name(path), x


def _argument(x: np.ndarray, place: Place, is_seed: bool = False) -> Value:
    """An argument of the program as a value, with a note about its size."""
    pair = exact(x)
    figures = measured(pair.in_float32, None) if is_inexact(x) else Figures()
    return Value(pair, note_of(figures, place, x.dtype, is_backward=is_seed))


def _check_no_refs(jaxpr: Any) -> None:
    """Raises if a program makes a `jax.Ref`, an array to be changed in place."""
    for at in equations(jaxpr):
        if any(map(is_ref, at.eqn.outvars)):
            raise TypeError(
                "diagnose cannot follow numbers through a jax.Ref, such as that made "
                f"at {at.source}: give it a loss function that passes values on"
            )


def _unlike(names: Sequence[str]) -> list[str]:
    """Tells equal names apart by numbers, as those in `{"a/b": x, "a": {"b": y}}`."""
    counts = Counter([*names, "the loss", "all"])  # which are not parameters
    return [
        f"{name} (argument {n})" if counts[name] > 1 else name
        for n, name in enumerate(names)
    ]
