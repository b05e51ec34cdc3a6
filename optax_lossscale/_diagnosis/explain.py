"""Which layer is at fault when gradients are not finite."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from optax_lossscale._arrays.names import natural
from optax_lossscale._arrays.variables import plain
from optax_lossscale._diagnosis.places import Place, recorded_places, refuse_unordered
from optax_lossscale._diagnosis.summary import Summary, inexact_leaves, summarize
from optax_lossscale._diagnosis.text import wrapped
from optax_lossscale._scales.validation import at_hand, is_numeric, shown

_SHOWN = 5


class Suspect(NamedTuple):
    """A place in the model, and the evidence against it.

    Attributes:
      name: the place: the path of a leaf or a probe.
      finding: the evidence against it, in words.
    """

    name: str
    finding: str


class Explanation(NamedTuple):
    """The result of `explain`; print it for the report.

    Attributes:
      suspects: the places to look at, the likeliest first; none if all is finite.
      summary: one line about all leaves.
    """

    suspects: list[Suspect]
    summary: str

    def __str__(self) -> str:
        lines = [f"{i}. {s.name}: {s.finding}" for i, s in enumerate(self.suspects, 1)]
        more = [f"and {len(lines) - _SHOWN} more."] if len(lines) > _SHOWN else []
        return "\n".join(map(wrapped, [self.summary, *lines[:_SHOWN], *more]))


def nonfinite_leaves(tree: Any) -> dict[str, Summary]:
    """How many numbers of each leaf are NaN or infinite.

    Works under `jit`: return it from the step, beside the loss. One pass over the tree.

    Args:
      tree: the gradients, or any pytree; integers and the like are left out.

    Returns:
      A flat dict from a leaf's path, such as `decoder/layer_3/kernel`, to its `Summary`.

    Example:
      >>> import jax.numpy as jnp
      >>> import optax_lossscale as ols
      >>> grads = {"dense": {"kernel": jnp.array([1.0, jnp.inf, -jnp.inf]), "bias": jnp.ones(3)}}
      >>> for path, leaf in ols.diagnosis.nonfinite_leaves(grads).items():
      ...     print(path, leaf.infinities, leaf.nans)
      dense/bias 0.0 0.0
      dense/kernel 2.0 0.0
    """
    return {name: summarize(x) for name, x in inexact_leaves(tree).items()}


def explain(
    leaves: dict[str, Summary], *, taps: Any = None, loss: jax.typing.ArrayLike | None = None
) -> Explanation:
    """A short report on where numbers first stopped being finite. Waits for the device.

    Infinities and NaNs spread: forwards to the loss, from there to every gradient. So the suspect
    is the first tapped place whose value is not finite; or else the loss; or, if that is finite,
    the place after the last one whose gradient is not finite, passing over places on parallel
    branches: those with parameters under their path, all of whose gradients are finite. A -inf may
    come from a mask and is no fault, nor is an infinity if the loss is finite. If all of these are
    finite, the suspects are the parameters, infinities before NaNs, few before many.

    Args:
      leaves: the result of `nonfinite_leaves` for the gradients.
      taps: the records of `tap` at the ends of the model's layers, a tree in the model's order: a
        list, a stack, an `OrderedDict`, or a dict whose names differ only in numbers. A container
        that holds nothing but stacks of one length counts as one loop: give each loop its own.
      loss: the unscaled loss.

    Returns:
      An `Explanation`: print it, or read its `suspects`.

    Raises:
      ValueError: if `taps` has a dict of other names, which do not show the model's order.
      TypeError: if `leaves`, `taps` or `loss` have another type, or belong to an ensemble.

    Example:
      >>> import jax.numpy as jnp
      >>> import optax_lossscale as ols
      >>> grads = {"dense": {"kernel": jnp.array([1.0, jnp.inf]), "bias": jnp.ones(3)}}
      >>> print(ols.diagnosis.explain(ols.diagnosis.nonfinite_leaves(grads)))
      1 of 2 gradients are not finite.
      1. dense/kernel: 1 inf and 0 NaN of 2 in its gradient
    """
    refuse_other_leaves(leaves)
    loss = plain(loss)
    if loss is not None and not is_numeric(loss):
        raise TypeError(
            f"loss must be the loss, a number, got {shown(loss)}; of a pair (loss, aux), pass the "
            "loss alone"
        )
    at_hand("explain", (leaves, taps, loss))
    leaves, taps, loss = jax.device_get((leaves, taps, loss))
    recorded = recorded_places(taps)
    refuse_unordered(taps)
    bad = _ranked(leaves)
    count = f"{len(bad)} of {len(leaves)} gradients are not finite."
    summary = count if bad else "All gradients are finite."
    if not recorded and jax.tree.leaves(taps):
        summary += " No tap recorded anything: differentiate with respect to the probes as well."
    if leaves and not bad and (loss is None or np.isfinite(loss).all()):
        return Explanation([], summary)
    if first := _first_value(recorded, loss) or _last_gradient(recorded, leaves):
        return Explanation([first], summary)
    suspects = [Suspect(name, f"{_count(leaf)} in its gradient") for name, leaf in bad.items()]
    return Explanation(suspects, summary)


def refuse_other_leaves(leaves: Any) -> None:
    """Raises for what `nonfinite_leaves` does not return."""
    is_one = lambda leaf: isinstance(leaf, Summary) and not np.ndim(leaf.size)
    if not isinstance(leaves, Mapping) or not all(map(is_one, leaves.values())):
        raise TypeError(
            "leaves must be what nonfinite_leaves returned, a dict of Summary; for replicas or an "
            "ensemble, pass those of one, with its taps and its loss: "
            "jax.tree.map(lambda x: x[0], (leaves, taps, loss))"
        )


def _first_value(recorded: list[Place], loss: Any) -> Suspect | None:
    """The first place whose value is not finite, or else the loss, if that is not."""
    is_finite = loss is not None and np.isfinite(loss).all()
    for name, record in recorded:
        value = record.value
        may_be_masked = not value.positive_infinities and value.infinities < value.size
        if value.nans or (value.infinities and not is_finite and not may_be_masked):
            return Suspect(name, f"{_count(value)} in its value")
    return None if loss is None or is_finite else Suspect("the loss", f"it is {loss}")


def _last_gradient(recorded: list[Place], leaves: dict[str, Summary]) -> Suspect | None:
    """A place after the last one whose gradient is not finite."""
    last = max((i for i, (_, r) in enumerate(recorded) if r.cotangent.nonfinite), default=None)
    if last is None:
        return None
    name, record = recorded[last]
    after = [place for place, _ in recorded[last + 1 :]] or ["the loss"]
    at_fault = next((place for place in after if not _is_cleared(place, leaves)), after[0])
    finding = f"{_count(record.cotangent)} in the gradient that it passes to {name}"
    return Suspect(at_fault, finding)


def _is_cleared(place: str, leaves: dict[str, Summary]) -> bool:
    """Whether the gradients of a place's own parameters are known, and finite."""
    own = [leaf for name, leaf in leaves.items() if f"{name}/".startswith(f"{place}/")]
    return bool(own) and not any(leaf.nonfinite for leaf in own)


def _ranked(leaves: dict[str, Summary]) -> dict[str, Summary]:
    """Those that are not finite: infinities before what they turn into, few before many."""
    bad = [(name, leaf) for name, leaf in leaves.items() if leaf.nonfinite]
    shares = lambda leaf: (leaf.nans / leaf.nonfinite, leaf.nonfinite / leaf.size)
    return dict(sorted(bad, key=lambda item: (*shares(item[1]), natural(item[0]))))


def _count(summary: Summary) -> str:
    """How much of it is not finite, in words."""
    return f"{summary.infinities:.0f} inf and {summary.nans:.0f} NaN of {summary.size:.0f}"
