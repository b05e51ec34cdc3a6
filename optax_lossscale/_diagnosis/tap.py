"""The gradients *inside* a model, where float16 really under- and overflows."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from optax_lossscale._arrays.placement import varying_axes
from optax_lossscale._arrays.precision import is_inexact
from optax_lossscale._diagnosis.summary import Summary, empty, summarize
from optax_lossscale._scales import validation


class Probe(NamedTuple):
    """The record of a `tap` at one place of a model: the gradient of a `probe()`.

    Attributes:
      value: the `Summary` of the array in the forward pass.
      cotangent: the `Summary` of its gradient in the backward pass, scaled as the loss is.
    """

    value: Summary
    cotangent: Summary


def probe(shape: int | tuple[int, ...] = ()) -> Probe:
    """An empty record, to be filled by a `tap`: a `Probe` of float32 zeros.

    Args:
      shape: the shape of each leaf: `()` for one place, or the number of layers for a stack of
        them that `lax.scan` goes through.

    Example:
      >>> import optax_lossscale as ols
      >>> ols.diagnosis.probe(12).cotangent.largest.shape
      (12,)
    """
    for size in shape if isinstance(shape, tuple) else (shape,):
        validation.count("each size of shape", size, least=0)
    return Probe(empty(shape), empty(shape))


def tap(x: jax.Array, probe: Probe | None) -> jax.Array:
    """Returns `x`, and records a `Summary` of it and of its gradient in the probe's gradient.

    A probe is an argument of the loss function like the parameters, and the record comes out as
    the gradient with respect to it, in the same pass that computes the others: under `jit`,
    `scan`, `remat` and sharding, with no callback to the host. A probe that is `None`, or whose
    gradient is not asked for, compiles to nothing. Reverse mode only.

    A probe that is used twice, or under a `vmap` that does not map over it, records sums, even of
    `largest`. Under `shard_map` a replicated probe sees all replicas; under `pmap`, or with
    `check_vma=False`, each sees its own. A place that the loss does not depend on records nothing.

    Args:
      x: a floating-point or complex array, any shape.
      probe: from `probe()`, in any tree that names the places; or None, to record nothing. The
        tree should be in the model's order. If a scanned layer has several taps, put their stacks
        into a container of their own.

    Returns:
      `x`.

    Raises:
      TypeError: if `x` is not such an array, or `probe` is not a `Probe` of one place.

    Example:
      Two places of a model, and a third argument that is off by default:

      >>> import jax, jax.numpy as jnp
      >>> import optax_lossscale as ols
      >>> def loss_fn(w, x, probes=(None, None)):
      ...     hidden = ols.diagnosis.tap(w * x, probes[0])
      ...     return jnp.sum(ols.diagnosis.tap(hidden ** 2, probes[1]))
      >>> w, x = jnp.float16(2**-10), jnp.ones(8, jnp.float16)
      >>> probes = (ols.diagnosis.probe(), ols.diagnosis.probe())
      >>> grads, records = jax.grad(loss_fn, argnums=(0, 2))(w, x, probes)
      >>> float(records[0].value.largest), float(records[0].cotangent.largest)
      (0.0009765625, 0.001953125)
      >>> float(records[1].value.underflow)  # 2**-20 is subnormal in float16
      1.0
    """
    if not is_inexact(x):
        kind = getattr(x, "dtype", type(x).__name__)
        raise TypeError(
            f"only a floating-point or complex array has a gradient to tap, got {kind}"
        )
    if probe is None:
        return x
    if not isinstance(probe, Probe):
        kind = type(probe).__name__
        raise TypeError(f"a probe is made by probe(), or None, got {kind}; of a tree, pass one")
    if shape := np.shape(probe.value.size):
        raise TypeError(
            f"a tap takes the probe of one place, shape (), got one of shape {shape}; pass the "
            "slices of a stack through lax.scan"
        )
    return _tap(x, probe)


@jax.custom_vjp
def _tap(x, probe):
    return x


def _backward(residuals, cotangent):
    value, probe = residuals
    record = Probe(value, summarize(cotangent))
    # The axes of `shard_map` along which there is only one probe, which sees all replicas.
    axes = tuple(varying_axes(value.largest) - varying_axes(probe.value.largest))
    if axes:
        most = lax.pmax([summary.largest for summary in record], axes)
        totals = zip(lax.psum(record, axes), most, strict=True)
        record = Probe(*(total._replace(largest=largest) for total, largest in totals))
    # Added to zeros, the record varies over the axes that the probe varies over.
    return cotangent, jax.tree.map(lambda r, p: r + jnp.zeros_like(p), record, probe)


_tap.defvjp(lambda x, probe: (x, (summarize(x), probe)), _backward)
