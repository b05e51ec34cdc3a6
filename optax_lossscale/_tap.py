"""The gradients *inside* a model, where float16 really under- and overflows."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from optax_lossscale._names import natural, path_name
from optax_lossscale._precision import dtype_of, is_inexact
from optax_lossscale._summary import Summary, summarize


class Probe(NamedTuple):
    """What `tap` records at one place of a model: the gradient of a `probe()`.

    Attributes:
      value: the `Summary` of what passed in the forward pass.
      cotangent: that of its gradient, as scaled as the loss was.
    """

    value: Summary
    cotangent: Summary


def probe(shape: int | tuple[int, ...] = ()) -> Probe:
    """An empty record, to be filled by a `tap`.

    Args:
      shape: of each of its leaves: `()` for one place, or the number of layers for
        a stack of them that `lax.scan` goes through.

    Returns:
      A `Probe` of zeros, float32.

    Example:
      >>> import optax_lossscale as ols
      >>> ols.probe(12).cotangent.largest.shape
      (12,)
    """
    empty = Summary(*[jnp.zeros(shape, jnp.float32)] * len(Summary._fields))
    return Probe(value=empty, cotangent=empty)


def tap(x: jax.Array, probe: Probe | None) -> jax.Array:
    """`x` itself, whose value and gradient leave their `Summary` in the probe's gradient.

    A probe is an argument of the loss function like the parameters, and what was
    recorded comes out as the gradient with respect to it, in the one pass that computes
    the others: under `jit`, `scan`, `remat` and sharding, with no callback to the host.
    With `None` for a probe there is nothing to compile, and one whose gradient is not asked
    for compiles to nothing. Reverse mode only.

    A probe that is tapped twice, or by a `vmap` that does not map it, records sums; so
    does a `largest`. Under `shard_map` a replicated probe sees all replicas.

    Args:
      x: a floating-point array, any shape.
      probe: from `probe()`, in whatever tree names the places; or None, for off. The order
        of the tree should be the model's: that of a list, or of an `OrderedDict`.

    Returns:
      `x`.

    Raises:
      TypeError: if `x` is no floating-point array.

    Example:
      Two places of a model, and a third argument that is off by default:

      >>> import jax, jax.numpy as jnp
      >>> import optax_lossscale as ols
      >>> def loss_fn(w, x, probes=(None, None)):
      ...     hidden = ols.tap(w * x, probes[0])
      ...     return jnp.sum(ols.tap(hidden ** 2, probes[1]))
      >>> w, x = jnp.float16(2**-10), jnp.ones(8, jnp.float16)
      >>> probes = (ols.probe(), ols.probe())
      >>> grads, records = jax.grad(loss_fn, argnums=(0, 2))(w, x, probes)
      >>> float(records[0].value.largest), float(records[0].cotangent.largest)
      (0.0009765625, 0.001953125)
      >>> float(records[1].value.underflow)  # 2**-20 is subnormal in float16
      1.0
    """
    if not is_inexact(x):
        raise TypeError(f"only floating-point arrays have gradients to tap, got {dtype_of(x)}")
    return x if probe is None else _tap(x, probe)


def places(taps: Any, path: tuple = ()) -> Iterator[tuple[str, Probe]]:
    """The tapped places in the order of their tree, a stack's one by one."""
    if isinstance(taps, Probe):
        for i in np.ndindex(np.shape(taps.value.size)):
            stacked = [str(n) for n in i]
            name = "/".join(([path_name(path)] if path else []) + stacked)
            yield name, jax.tree.map(lambda x, i=i: x[i], taps)
        return
    branches, _ = jax.tree.flatten_with_path(taps, is_leaf=lambda x: x is not taps)
    if type(taps) is dict:  # whose order is the alphabet's, with layer_10 before layer_2
        branches = sorted(branches, key=lambda branch: natural(path_name(branch[0])))
    for key, branch in branches:
        yield from places(branch, path + key)


@jax.custom_vjp
def _tap(x, probe):
    return x


def _forward(x, probe):
    return x, (summarize(x), probe)


def _backward(residuals, cotangent):
    value, probe = residuals
    record = Probe(value, summarize(cotangent))
    return cotangent, Probe(*map(_of_all_replicas, record, probe))


def _of_all_replicas(summary: Summary, probe: Summary) -> Summary:
    """The summary over the axes of `shard_map` along which there is only one probe."""
    axes = tuple(_varying_axes(summary.largest) - _varying_axes(probe.largest))
    if axes:
        summary = Summary(
            size=summary.size * lax.axis_size(axes),
            **{kind: lax.psum(getattr(summary, kind), axes) for kind in summary._fields[1:-1]},
            largest=lax.pmax(summary.largest, axes),
        )
    return jax.tree.map(lambda s, p: s + jnp.zeros_like(p), summary, probe)


def _varying_axes(x: jax.Array) -> frozenset:
    kind: Any = jax.typeof(x)
    return kind.vma if hasattr(kind, "vma") else kind.manual_axis_type.varying  # jax >= 0.9


_tap.defvjp(_forward, _backward)
