"""How much of the gradients is lost to underflow, and which scale would lose least."""

import dataclasses
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale._arrays.names import natural, scale_name, without_numbers
from optax_lossscale._diagnosis.summary import Summary, empty, inexact_leaves, summarize
from optax_lossscale._diagnosis.text import table
from optax_lossscale._scales import validation
from optax_lossscale._scales.get import resolve

_TITLES = ("numbers", "zero", "subnormal", "in range", "inf, NaN", "spare bits")
_SHOWN = 20


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class UnderflowReport:
    """The result of `underflow_report`; print it for a table.

    Attributes:
      leaves: the `Summary` of each leaf, under its path.
      loss_scale: the loss scale of these gradients; float32, shape ().
      dtype: the dtype whose range the numbers are compared with.
    """

    leaves: dict[str, Summary]
    loss_scale: jax.Array
    dtype: np.dtype = dataclasses.field(metadata={"static": True})

    @property
    def total(self) -> Summary:
        """The `Summary` of all leaves together."""
        return _total(self.leaves.values())

    @property
    def best_scale(self) -> jax.Array:
        """This scale times the largest power of two that keeps all numbers in range.

        At most 2**127. It depends on these numbers alone: to see what overflows *inside* the
        model, use `tap` and `find_initial_scale`. NaN if some are ±inf or NaN, or all are zero.
        """
        total = self.total
        known = jnp.isfinite(total.largest) & (total.largest > 0) & (total.nans == 0)
        # By mantissa and exponent, as a logarithm and its power of two are not exact.
        most, most_exponent = jnp.frexp(jnp.float32(jnp.finfo(self.dtype).max))
        mantissa, exponent = jnp.frexp(total.largest)
        spare_bits = most_exponent - exponent - (mantissa > most).astype(jnp.int32)
        best = jnp.minimum(jnp.ldexp(self.loss_scale, spare_bits), 2.0**127)  # float32's last
        return jnp.where(known, best, jnp.nan)

    @property
    def groups(self) -> dict[str, Summary]:
        """A `Summary` of each group of leaves, such as all `blocks/*/mlp/w1`; the worst first.

        The worst are those with overflows, then those that lose most. Waits for the device.
        """
        groups: dict[str, list[Summary]] = {}
        for name, leaf in jax.device_get(self.leaves).items():
            groups.setdefault(without_numbers(name), []).append(leaf)
        totals = {name: _total(leaves) for name, leaves in groups.items()}
        loss = lambda leaf: (not leaf.nonfinite, -leaf.underflow, -leaf.zeros)
        return dict(sorted(totals.items(), key=lambda item: (*loss(item[1]), natural(item[0]))))

    def __str__(self) -> str:
        host, groups = jax.device_get(self), list(self.groups.items())
        rows = [_row(*group, self.dtype) for group in [*groups[:_SHOWN], ("all", host.total)]]
        *lines, of_all = table([("", *_TITLES), *rows])
        more = [f"and {len(groups) - _SHOWN} more"] if len(groups) > _SHOWN else []
        title = f"Gradients times {scale_name(float(host.loss_scale))}, in {self.dtype}:"
        best = f"Best scale for these: {scale_name(float(host.best_scale))}"
        return "\n".join([title, *lines, *more, of_all, best])


def underflow_report(
    scaled_grads: Any, loss_scale: Any, dtype: Any = jnp.float16
) -> UnderflowReport:
    """Counts the scaled gradients that underflow, overflow, or are in a dtype's range.

    Works under `jit`, which can return the report. Gradients computed in float16 and then
    converted show the actual underflow; those computed in float32, the underflow in float16.

    Args:
      scaled_grads: the gradients, still scaled; any pytree.
      loss_scale: the scale of these: anything that `get` accepts, or a state that holds one.
      dtype: the floating-point dtype to compare them with.

    Returns:
      An `UnderflowReport`: print it, with a row for each of the first twenty `groups`, or read
      its `leaves`, `groups`, `total` and `best_scale`.

    Raises:
      ValueError: if `loss_scale` is not a loss scale, or a state that holds none or several,
        or `dtype` is not a floating-point dtype.

    Example:
      >>> import jax.numpy as jnp
      >>> import optax_lossscale as ols
      >>> grads = {"w": jnp.array([1e-9, 1e-5, 0.25, 2.0]), "b": jnp.array([0.0, 1e-7])}
      >>> print(ols.diagnosis.underflow_report(grads, ols.get(128)))
      Gradients times 2**7, in float16:
           numbers   zero  subnormal  in range  inf, NaN  spare bits
      b          2  50.0%      50.0%      0.0%         0        39.3
      w          4  25.0%      25.0%     50.0%         0        15.0
      all        6  33.3%      33.3%     33.3%         0        15.0
      Best scale for these: 2**21
    """
    dtype = validation.floating_dtype("dtype", dtype)
    leaves = {name: summarize(x, dtype) for name, x in inexact_leaves(scaled_grads).items()}
    if isinstance(loss_scale, jax.Array) and not isinstance(loss_scale, jax.core.Tracer):
        validation.scale("loss_scale", loss_scale)
    return UnderflowReport(leaves, resolve(loss_scale)(), dtype)


def _total(leaves: Collection[Summary]) -> Summary:
    """The `Summary` of several arrays together; not of what a `vmap` over models returned."""
    for shape in filter(None, (np.shape(leaf.size) for leaf in leaves)):
        raise TypeError(
            f"this is a report of many models, with leaves of shape {shape}; select one: "
            "jax.tree.map(lambda x: x[0], report)"
        )
    *counts, largest = map(jnp.stack, zip(empty(), *leaves, strict=True))
    return Summary(*map(jnp.sum, counts), largest=jnp.max(largest))


def _row(name: str, summary: Summary, dtype: np.dtype) -> tuple[str, ...]:
    size = np.maximum(summary.size, 1)
    in_range = summary.size - summary.zeros - summary.subnormals - summary.nonfinite
    with np.errstate(divide="ignore"):
        spare_bits = np.log2(float(jnp.finfo(dtype).max)) - np.log2(summary.largest)
    shares = [f"{n / size:.1%}" for n in (summary.zeros, summary.subnormals, in_range)]
    return name, f"{summary.size:.0f}", *shares, f"{summary.nonfinite:.0f}", f"{spare_bits:.1f}"
