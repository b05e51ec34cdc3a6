"""Traces the loss and its gradient as one program, with the loss scale as an argument.

For `loss_fn(w, x)`, the program maps `(w, x, seed)` to the loss and `seed` times the
gradient with respect to `w`. The *seed* is the cotangent of the loss, and so the loss
scale. Because the seed is an argument, one program runs at every scale. Its forward
pass does not depend on the seed, so it runs only once.

The arguments of the program are the arrays among the parameters, arguments and keyword
arguments of the loss function, and then the seed. The results are the loss, the scaled
gradient of each parameter, and the floats that the loss function returns beside the
loss, such as batch statistics.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var

from optax_lossscale._arrays.checks import path_name
from optax_lossscale._arrays.precision import at_least_float32
from optax_lossscale._arrays.variables import is_variable, map_leaves
from optax_lossscale._diagnosis.equations import equations
from optax_lossscale._diagnosis.notes import ALL, AN_INTERMEDIATE_VALUE, THE_LOSS
from optax_lossscale._diagnosis.shadow import Argument
from optax_lossscale._programs.call import is_traceable
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
    """The program of a loss and its gradient, with its arguments.

    Attributes:
      jaxpr: the program.
      forward: the part of `jaxpr` that does not depend on the seed.
      arguments: all arguments except the seed.
      narrow_dtypes: the dtypes of 16 bits or fewer among the results of all equations.
    """

    jaxpr: ClosedJaxpr
    forward: Jaxpr
    arguments: list[Argument]
    narrow_dtypes: tuple[np.dtype, ...]

    @property
    def parameters(self) -> dict[str, Array]:
        """The arrays with respect to which the loss is differentiated, by name."""
        return {x.name: x.array for x in self.arguments if x.is_parameter}


def gradient_of(
    loss_fn: Callable[..., Any], params: Any, args: tuple, kwargs: dict, has_aux: bool
) -> Gradient:
    """Traces the gradient of a loss function.

    Inputs that are not arrays are passed on to the loss function unchanged, except for
    parameters that `_with_floats_as_arrays` converts.

    Raises:
      TypeError: if an argument is a `jax.ShapeDtypeStruct`, if the loss is not a real
        floating-point scalar, or if the program creates a `jax.Ref`.
    """
    inputs = (_with_floats_as_arrays(params), args, kwargs)
    arguments = _arguments(inputs)
    arrays = [argument.array for argument in arguments]
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in arrays):
        raise TypeError(
            "diagnose runs the loss function, so give it arrays, not a ShapeDtypeStruct"
        )
    positions = [n for n, argument in enumerate(arguments) if argument.is_parameter]
    gradient = _gradient_function(loss_fn, inputs, positions, has_aux)
    closed = jax.make_jaxpr(gradient)(arrays, jnp.float32(1))
    jaxpr = closed.jaxpr
    _refuse_refs(jaxpr)
    on_host = [
        argument._replace(array=jax.device_get(jnp.asarray(argument.array)))
        for argument in arguments
    ]
    return Gradient(closed, _forward(jaxpr), on_host, _narrow_dtypes(jaxpr))


def _with_floats_as_arrays(params: Any) -> Any:
    """Converts Python floats to arrays, as `jax.grad` does, if there are no arrays."""
    if any(map(is_traceable, jax.tree.leaves(params))):
        return params

    def converted(x):
        return jnp.asarray(x) if type(x) is float else x

    return map_leaves(converted, params)


def _gradient_function(
    loss_fn: Callable[..., Any], inputs: tuple, positions: Sequence[int], has_aux: bool
) -> Callable[..., Any]:
    """Makes the function to trace, from the arrays among the inputs and the seed.

    Args:
      loss_fn: the loss function.
      inputs: its parameters, arguments and keyword arguments.
      positions: the positions of the parameters among these arrays.
      has_aux: whether `loss_fn` returns `(loss, aux)`.
    """

    def gradient(arrays, seed):
        def wide_loss(parameters):
            replaced = list(arrays)
            for n, x in zip(positions, parameters, strict=True):
                replaced[n] = x
            params, args, kwargs = _with_arrays(inputs, replaced)
            returned = loss_fn(params, *args, **kwargs)
            loss, aux = _loss_and_aux(returned, has_aux)
            # As in a training step, the loss is widened first, so that the loss scale,
            # its cotangent, is not rounded to 16 bits.
            return at_least_float32(loss), (loss, aux)

        parameters = [arrays[n] for n in positions]
        wide, pullback, (loss, aux) = jax.vjp(wide_loss, parameters, has_aux=True)
        cotangent = seed.astype(wide.dtype)
        return loss, pullback(cotangent), aux

    return gradient


def _forward(jaxpr: Jaxpr) -> Jaxpr:
    """Restricts a gradient to what does not depend on its seed: the loss and `aux`."""
    backward: set[Var] = {jaxpr.invars[-1]}
    forward_eqns = []
    for eqn in jaxpr.eqns:
        if backward.isdisjoint(variables(eqn.invars)):
            forward_eqns.append(eqn)
        else:
            backward.update(eqn.outvars)
    outvars = [x for x in jaxpr.outvars if isinstance(x, Literal) or x not in backward]
    return jaxpr.replace(eqns=forward_eqns, outvars=outvars)


def _with_arrays(inputs: tuple, arrays: Iterable[Array]) -> tuple:
    """Replaces the arrays among the inputs of the loss function, in their order."""
    remaining = iter(arrays)
    return map_leaves(lambda x: next(remaining) if is_traceable(x) else x, inputs)


def _loss_and_aux(returned: Any, has_aux: bool) -> tuple[jax.Array, list[jax.Array]]:
    """Splits what the loss function returned into the loss and the floats beside it.

    Raises:
      TypeError: if the loss function did not return a pair although `has_aux` is True,
        or if the loss is not a real floating-point scalar.
    """
    loss = loss_of(returned, has_aux)
    check_scalar(THE_LOSS, loss)
    loss = jnp.asarray(loss)
    if not jnp.issubdtype(loss.dtype, jnp.floating):
        raise TypeError(
            f"the loss must be a real floating-point scalar, got {loss.dtype}"
        )
    leaves = jax.tree.leaves(returned[1]) if has_aux else []
    return loss, [x for x in leaves if is_traceable(x) and is_inexact(x)]


def _arguments(inputs: tuple) -> list[Argument]:
    """Names each array among the inputs of the loss function by its path.

    A parameter is named by its path in `params`, such as `encoder/w`. Any other array
    is named as in `args/0` or `kwargs/mask`. A variable of Flax NNX that is in two
    places is listed once.
    """
    prefixes = ("", "args/", "kwargs/")
    arguments = []
    seen: set[int] = set()
    leaves = jax.tree.leaves_with_path(inputs, is_leaf=is_variable)
    for (first, *path), leaf in leaves:
        if is_variable(leaf) and id(leaf) in seen:
            continue
        seen.add(id(leaf))
        name = prefixes[first.idx] + path_name(path)
        for x in filter(is_traceable, jax.tree.leaves(leaf)):
            is_parameter = first.idx == 0 and is_inexact(x)
            arguments.append(Argument(name, x, is_parameter))
    return _with_unique_names(arguments)


def _with_unique_names(arguments: list[Argument]) -> list[Argument]:
    """Adds numbers to equal names of arguments, so that each gradient has its own.

    For example, both arrays in `{"a/b": x, "a": {"b": y}}` have the path `a/b`. A
    number is also added to a path that a report uses for something else, such as "the
    loss".
    """
    names = [argument.name for argument in arguments]
    counts = Counter([THE_LOSS, ALL, AN_INTERMEDIATE_VALUE, *names])
    renamed = []
    for n, argument in enumerate(arguments):
        name = argument.name
        unique = f"{name} (argument {n})" if counts[name] > 1 else name
        renamed.append(argument._replace(name=unique))
    return renamed


def _refuse_refs(jaxpr: Jaxpr) -> None:
    """Raises if a program creates a `jax.Ref`, an array that is changed in place.

    A note records one value of a variable, and a `jax.Ref` has a new one at each write.
    """
    for eqn in equations(jaxpr):
        if any(map(is_ref, eqn.outvars)):
            raise TypeError(
                "diagnose cannot follow values through a jax.Ref, such as the one "
                f"made at {line_of(eqn)}. Compute new arrays in the loss function "
                "instead of changing one in place"
            )


def _narrow_dtypes(jaxpr: Jaxpr) -> tuple[np.dtype, ...]:
    """Lists the dtypes of 16 bits or fewer among all equations' results, each once."""
    results = [v for eqn in equations(jaxpr) for v in eqn.outvars]
    return tuple(filter(is_narrow_dtype, dict.fromkeys(dtypes_in(results))))
