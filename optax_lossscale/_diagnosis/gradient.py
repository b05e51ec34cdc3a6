"""The loss and its gradient as one traced program, from arrays to arrays.

Its arguments are the arrays in the parameters, arguments and keywords of the loss
function, and last the *seed*: the cotangent of the loss, which is the loss scale. Its
results are the loss, the gradient of each parameter, scaled, and the floats that the
loss function returns beside the loss, such as batch statistics.
"""

import functools
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Var

from optax_lossscale._arrays.names import path_name
from optax_lossscale._arrays.precision import at_least_float32
from optax_lossscale._arrays.variables import is_variable, map_leaves
from optax_lossscale._autocast.arrays import is_traceable
from optax_lossscale._diagnosis.equations import equations
from optax_lossscale._diagnosis.notes import A_VALUE_INSIDE, ALL, THE_LOSS
from optax_lossscale._diagnosis.shadow import Argument
from optax_lossscale._programs.lines import line_of
from optax_lossscale._programs.values import (
    Array,
    dtypes_in,
    is_inexact,
    is_narrow_dtype,
    variables,
)
from optax_lossscale._programs.versions import is_ref
from optax_lossscale._step.loss import check_scalar, loss_of


class Gradient(NamedTuple):
    """The program of a loss and its gradient, with its arguments before the seed."""

    jaxpr: ClosedJaxpr
    forward: Jaxpr  # its equations that do not depend on the seed
    arguments: list[Argument]
    # The dtypes of 16 bits or fewer among the results in the program
    narrow_dtypes: tuple[np.dtype, ...]

    @property
    def parameters(self) -> dict[str, Array]:
        """The arrays by which the loss is differentiated, by name."""
        return {x.name: x.array for x in self.arguments if x.is_parameter}


def gradient_of(
    loss_fn: Callable[..., Any], params: Any, args: tuple, kwargs: dict, has_aux: bool
) -> Gradient:
    """Traces the gradient of a loss function.

    Whatever is not an array is passed on to the loss function as it is. If no
    parameter is an array, Python floats are taken for arrays, as `jax.grad` does.
    """
    if not any(map(is_traceable, jax.tree.leaves(params))):
        params = map_leaves(lambda x: jnp.asarray(x) if type(x) is float else x, params)
    everything = (params, args, kwargs)
    arguments = _arguments(everything)
    positions = [n for n, argument in enumerate(arguments) if argument.is_parameter]
    leaves = [argument.array for argument in arguments]
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves):
        raise TypeError(
            "diagnose runs the loss function: give it arrays, and no ShapeDtypeStruct"
        )

    def wide_loss(parameters, arrays):
        inputs = dict(enumerate(arrays)) | parameters
        params, args, kwargs = _with_arrays(everything, inputs.values())
        loss, aux = _loss_and_aux(loss_fn(params, *args, **kwargs), has_aux)
        return at_least_float32(loss), (loss, aux)

    def gradient(arrays, seed):
        parameters = {n: arrays[n] for n in positions}
        of_parameters = functools.partial(wide_loss, arrays=arrays)
        wide, pull, (loss, aux) = jax.vjp(of_parameters, parameters, has_aux=True)
        return loss, pull(seed.astype(wide.dtype)), aux

    closed = jax.make_jaxpr(gradient)(leaves, jnp.float32(1))
    _refuse_refs(closed.jaxpr)
    on_host = [
        argument._replace(array=jax.device_get(jnp.asarray(argument.array)))
        for argument in arguments
    ]
    return Gradient(
        closed, _forward(closed.jaxpr), on_host, _narrow_dtypes(closed.jaxpr)
    )


def _forward(jaxpr: Jaxpr) -> Jaxpr:
    """The equations of a gradient that do not depend on its seed.

    The jaxpr is there to be read, not to be run: nothing in it makes its results.
    """
    of_backward: set[Var] = {jaxpr.invars[-1]}
    forward = []
    for eqn in jaxpr.eqns:
        if of_backward.isdisjoint(variables(eqn.invars)):
            forward.append(eqn)
        else:
            of_backward.update(eqn.outvars)
    return jaxpr.replace(eqns=forward)


def _with_arrays(everything: tuple, arrays: Iterable[Array]) -> tuple:
    """Parameters, arguments and keywords with others in the places of their arrays."""
    remaining = iter(arrays)
    return map_leaves(lambda x: next(remaining) if is_traceable(x) else x, everything)


def _loss_and_aux(returned: Any, has_aux: bool) -> tuple[jax.Array, list[jax.Array]]:
    """The loss that a loss function returned, and the floats beside it."""
    loss = loss_of(returned, has_aux)
    check_scalar(THE_LOSS, loss)
    loss = jnp.asarray(loss)
    if not jnp.issubdtype(loss.dtype, jnp.floating):
        raise TypeError(
            f"the loss must be a real floating-point scalar, got {loss.dtype}"
        )
    leaves = jax.tree.leaves(returned[1]) if has_aux else []
    return loss, [x for x in leaves if is_traceable(x) and is_inexact(x)]


def _arguments(everything: tuple) -> list[Argument]:
    """The arrays in parameters, arguments and keywords.

    A variable of Flax NNX that is in two places counts once.
    """
    prefixes = ("", "args/", "kwargs/")
    arguments = []
    seen: set[int] = set()
    leaves = jax.tree.leaves_with_path(everything, is_leaf=is_variable)
    for (first, *path), leaf in leaves:
        if is_variable(leaf) and id(leaf) in seen:
            continue
        seen.add(id(leaf))
        name = prefixes[first.idx] + path_name(path)
        for x in filter(is_traceable, jax.tree.leaves(leaf)):
            is_parameter = first.idx == 0 and is_inexact(x)
            arguments.append(Argument(name, x, is_parameter))
    return _told_apart(arguments)


def _told_apart(arguments: list[Argument]) -> list[Argument]:
    """Arguments with numbers in equal names, as those in `{"a/b": x, "a": {"b": y}}`."""
    names = [argument.name for argument in arguments]
    counts = Counter([THE_LOSS, ALL, A_VALUE_INSIDE, *names])
    return [
        argument._replace(name=f"{argument.name} (argument {n})")
        if counts[argument.name] > 1
        else argument
        for n, argument in enumerate(arguments)
    ]


def _refuse_refs(jaxpr: Jaxpr) -> None:
    """Raises if a program makes a `jax.Ref`, an array to be changed in place."""
    for eqn in equations(jaxpr):
        if any(map(is_ref, eqn.outvars)):
            raise TypeError(
                "diagnose cannot follow numbers through a jax.Ref, such as that made "
                f"at {line_of(eqn)}: give it a loss function that passes values on"
            )


def _narrow_dtypes(jaxpr: Jaxpr) -> tuple[np.dtype, ...]:
    """The dtypes of 16 bits and fewer that results in a program have."""
    results = [v for eqn in equations(jaxpr) for v in eqn.outvars]
    return tuple(filter(is_narrow_dtype, dict.fromkeys(dtypes_in(results))))
