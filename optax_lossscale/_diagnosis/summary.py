"""What kinds of numbers an array holds, found in one pass if it is on one device."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.tree_util import keystr

from optax_lossscale._arrays.names import path_name
from optax_lossscale._arrays.placement import is_partitioned
from optax_lossscale._arrays.precision import at_least_float32, is_inexact


class Summary(NamedTuple):
    """How many numbers of each kind an array holds, in a floating-point dtype.

    Each count is float32, so that it can be a leaf of a gradient: shape (), or that of a stack
    of probes. Above 2**24 it is rounded. A complex number counts as two.

    Attributes:
      size: how many numbers there are.
      zeros: how many are zero, or would be flushed to it.
      subnormals: how many are below the smallest normal number, and not zero.
      infinities: how many are ±inf, or would overflow to it.
      positive_infinities: how many of these are +inf, which a mask does not put there.
      nans: how many are NaN.
      largest: the largest absolute value as given, NaNs aside, not as the dtype rounds it.
    """

    size: jax.Array
    zeros: jax.Array
    subnormals: jax.Array
    infinities: jax.Array
    positive_infinities: jax.Array
    nans: jax.Array
    largest: jax.Array

    @property
    def underflow(self) -> jax.Array:
        """The share of zeros and subnormals, in [0, 1]."""
        return (self.zeros + self.subnormals) / jnp.maximum(self.size, 1)

    @property
    def nonfinite(self) -> jax.Array:
        """How many are NaN or ±inf."""
        return self.infinities + self.nans


def empty(shape: int | tuple[int, ...] = ()) -> Summary:
    """The `Summary` of no numbers."""
    return Summary(*[jnp.zeros(shape, jnp.float32)] * len(Summary._fields))


def summarize(x: Any, dtype: Any = None) -> Summary:
    """The `Summary` of one array, as its numbers are or would be in another dtype."""
    x = lax.stop_gradient(jnp.asarray(x))
    if jnp.iscomplexobj(x):
        x = jnp.stack([x.real, x.imag])
    least, normal, limit = _thresholds(jnp.dtype(dtype or x.dtype), x.dtype)
    wide = at_least_float32(x)
    a, is_nan = jnp.abs(wide), wide != wide
    kinds = [a <= least, a < normal, a >= limit, wide >= limit, is_nan]
    largest, (zeros, small, *others) = _reduce(jnp.where(is_nan, 0, a), kinds)
    # Made to depend on `x`, so that `vmap` sums the sizes as it sums the counts.
    size = jnp.where(largest >= 0, float(x.size), 0.0)
    # A difference, so that no number counts twice: a processor that flushes subnormals may call
    # one zero in one comparison and not in the other.
    numbers = size, zeros, jnp.maximum(small - zeros, 0), *others, largest
    return Summary(*(jnp.asarray(n, jnp.float32) for n in numbers))


def inexact_leaves(tree: Any) -> dict[str, Any]:
    """The floating-point and complex leaves under their paths."""
    leaves, _ = jax.tree.flatten_with_path(tree)
    named: dict[str, Any] = {}
    for path, x in leaves:
        if is_inexact(x):
            name = path_name(path)
            name = keystr(path) if name in named else name  # {"a": {"b": …}, "a/b": …}
            named[name] = x
    return named


def _thresholds(dtype: np.dtype, given: np.dtype) -> tuple[float, float, float]:
    """The largest number that rounds to 0, the least to a normal one, the least to infinity."""
    info = jnp.finfo(dtype)
    half_step = float(info.smallest_subnormal) / 2
    largest = float(info.max)
    half_ulp = math.ldexp(float(info.eps), math.frexp(largest)[1] - 2)
    is_narrow = dtype.itemsize < max(given.itemsize, 4)  # than the dtype of the comparison
    limit = largest + half_ulp if is_narrow else math.inf
    return half_step, float(info.tiny) - half_step, limit


def _reduce(a: jax.Array, kinds: list[jax.Array]) -> tuple[jax.Array, list[jax.Array]]:
    """The largest number, and how many there are of each kind."""
    ones = [kind.astype(jnp.int32) for kind in kinds]
    if is_partitioned(a):
        # A reduction of several outputs is one pass, but the compiler would gather its input.
        # In two stages, as an array over many devices may have more numbers than int32 counts.
        by_row = [jnp.atleast_1d(kind).sum(-1).astype(jnp.float32) for kind in ones]
        return a.max(initial=0), [count.sum() for count in by_row]
    zeros = (np.zeros((), a.dtype), *[np.int32(0)] * len(ones))
    join = lambda x, y: (lax.max(x[0], y[0]), *map(lax.add, x[1:], y[1:]))
    largest, *counts = lax.reduce((a, *ones), zeros, join, range(a.ndim))
    return largest, counts
