"""Traces the loss and its gradient as one program, and divides it into two.

For `loss_fn(w, x)`, the first part maps `(w, x)` to the loss and to what the backward
pass reads. The second maps these and the *seed* to `seed` times the gradient. The seed
is the cotangent of the loss, and so the loss scale: it is an argument, so the second
part runs at any scale, and the first runs once.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Var

from optax_lossscale._arrays.checks import path_name, shown
from optax_lossscale._arrays.precision import at_least_float32
from optax_lossscale._arrays.variables import is_variable, map_leaves
from optax_lossscale._programs.call import is_traceable
from optax_lossscale._programs.flat import Flat, flat
from optax_lossscale._programs.values import Array, is_inexact, variables
from optax_lossscale._step.loss import check_scalar, loss_of


class Argument(NamedTuple):
    """An array among the arguments of the loss function.

    Attributes:
      name: its path, such as `encoder/w`, `args/0` or `kwargs/mask`.
      array: the array, on one device.
      is_parameter: whether the gradient is with respect to it.
    """

    name: str
    array: Array
    is_parameter: bool


class Gradient(NamedTuple):
    """A traced loss and its gradient.

    Attributes:
      program: the whole, from the arguments and the seed to the loss and the gradients.
      forward: from the arguments to the loss and what `backward` reads.
      backward: from what it reads and the seed to the gradients.
      arguments: the arguments, without the seed.
    """

    program: ClosedJaxpr
    forward: Flat
    backward: Flat
    arguments: list[Argument]

    @property
    def parameters(self) -> list[str]:
        """The names of the parameters, in the order of the gradients."""
        return [x.name for x in self.arguments if x.is_parameter]


def gradient_of(
    loss_fn: Callable[..., Any], params: Any, args: tuple, kwargs: dict, has_aux: bool
) -> Gradient:
    """Traces the gradient of a loss function.

    Raises:
      TypeError: if an argument is a `jax.ShapeDtypeStruct`, or if the loss is not a
        real floating-point scalar.
      ValueError: if no parameter is an array of floats.
    """
    inputs = (_with_floats_as_arrays(params), args, kwargs)
    arguments = _arguments(inputs)
    arrays = [argument.array for argument in arguments]
    positions = [n for n, argument in enumerate(arguments) if argument.is_parameter]
    gradient = _gradient_function(loss_fn, inputs, positions, has_aux)
    program = jax.make_jaxpr(gradient)(arrays, jnp.float32(1))
    if not positions:
        raise ValueError(
            "params must hold a floating-point array, to take the gradient with respect "
            f"to, got {shown(params)}. Call diagnose(loss_fn, params, *args)"
        )
    forward, backward = _divided(flat(program))
    return Gradient(program, forward, backward, arguments)


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
            loss = _checked(loss_of(loss_fn(params, *args, **kwargs), has_aux))
            # As in a training step, the loss is widened first, so that the loss scale,
            # its cotangent, is not rounded to 16 bits.
            return at_least_float32(loss), loss

        parameters = [arrays[n] for n in positions]
        wide, pullback, loss = jax.vjp(wide_loss, parameters, has_aux=True)
        return loss, pullback(seed.astype(wide.dtype))

    return gradient


def _with_arrays(inputs: tuple, arrays: Iterable[Array]) -> tuple:
    """Replaces the arrays among the inputs of the loss function, in their order."""
    remaining = iter(arrays)
    return map_leaves(lambda x: next(remaining) if is_traceable(x) else x, inputs)


def _checked(loss: Any) -> jax.Array:
    """Returns the loss as an array if it is a real floating-point scalar."""
    check_scalar("the loss", loss)
    loss = jnp.asarray(loss)
    if not jnp.issubdtype(loss.dtype, jnp.floating):
        raise TypeError(
            f"the loss must be a real floating-point scalar, got {loss.dtype}"
        )
    return loss


def _arguments(inputs: tuple) -> list[Argument]:
    """Names each array among the inputs of the loss function by its path.

    A variable of Flax NNX that is in two places is listed once. If two arrays have one
    path, as in `{"a/b": x, "a": {"b": y}}`, their positions tell them apart.
    """
    prefixes = ("", "args/", "kwargs/")
    arguments: list[Argument] = []
    seen: set[int] = set()
    leaves = jax.tree.leaves_with_path(inputs, is_leaf=is_variable)
    for (first, *path), leaf in leaves:
        if is_variable(leaf) and id(leaf) in seen:
            continue
        seen.add(id(leaf))
        name = prefixes[first.idx] + path_name(path)
        for x in filter(is_traceable, jax.tree.leaves(leaf)):
            if isinstance(x, jax.ShapeDtypeStruct):
                raise TypeError(
                    "diagnose runs the loss function, so give it arrays, not a "
                    "ShapeDtypeStruct"
                )
            # Arrays on several devices are compared on one.
            array = jnp.asarray(jax.device_get(x))
            arguments.append(Argument(name, array, first.idx == 0 and is_inexact(x)))
    counts = Counter(argument.name for argument in arguments)
    return [
        x if counts[x.name] == 1 else x._replace(name=f"{x.name} (argument {n})")
        for n, x in enumerate(arguments)
    ]


def _divided(program: Flat) -> tuple[Flat, Flat]:
    """Divides a program into what does not depend on its last argument, and the rest."""
    loss, *gradients = program.outs
    *ins, seed = program.ins
    depending: set[Var] = {seed}
    before = []
    after = []
    for eqn in program.eqns:
        if depending.isdisjoint(variables(eqn.invars)):
            before.append(eqn)
        else:
            after.append(eqn)
            depending.update(eqn.outvars)
    read = [v for eqn in after for v in variables(eqn.invars)] + variables(gradients)
    known = {*depending, *program.consts}
    kept = [v for v in dict.fromkeys(read) if v not in known]
    forward = program._replace(eqns=before, ins=ins, outs=[loss, *kept])
    return forward, program._replace(eqns=after, ins=[*kept, seed], outs=gradients)
