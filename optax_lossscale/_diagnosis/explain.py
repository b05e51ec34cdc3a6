"""Which layer is at fault when gradients are not finite."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from optax_lossscale._arrays.names import natural
from optax_lossscale._diagnosis.summary import Summary, summarize_leaves
from optax_lossscale._diagnosis.tap import Probe, is_unordered, places
from optax_lossscale._scales.validation import at_hand

_SHOWN = 5


class Suspect(NamedTuple):
    """A place of the model, and what speaks against it.

    Attributes:
      name: the place: the path of a leaf or a probe.
      finding: what speaks against it, in words.
    """

    name: str
    finding: str


class Explanation(NamedTuple):
    """What `explain` found; print it for the report.

    Attributes:
      suspects: the places to look at, the likeliest first; none if all is finite.
      summary: one line about all leaves.
    """

    suspects: list[Suspect]
    summary: str

    def __str__(self) -> str:
        shown = [f"{i}. {s.name}: {s.finding}" for i, s in enumerate(self.suspects[:_SHOWN], 1)]
        more = len(self.suspects) - _SHOWN
        return "\n".join([self.summary, *shown, *([f"and {more} more."] if more > 0 else [])])


def nonfinite_leaves(tree: Any) -> dict[str, Summary]:
    """How many numbers of each leaf are NaN or infinite.

    Works under `jit`: return it from the step, beside the loss. One pass over the tree.

    Args:
      tree: the gradients, or any pytree; leaves that are no floating-point or complex
        numbers are left out.

    Returns:
      A flat dict from a leaf's path, such as `decoder/layer_3/kernel`, to its `Summary`,
      which counts `nans`, `infinities` of either sign, and more.

    Example:
      >>> import jax.numpy as jnp
      >>> import optax_lossscale as ols
      >>> grads = {"dense": {"kernel": jnp.array([1.0, jnp.inf, -jnp.inf]), "bias": jnp.ones(3)}}
      >>> for path, leaf in ols.nonfinite_leaves(grads).items():
      ...     print(path, leaf.infinities, leaf.nans)
      dense/bias 0.0 0.0
      dense/kernel 2.0 0.0
    """
    return summarize_leaves(tree)


def explain(
    leaves: dict[str, Summary], *, taps: Any = None, loss: jax.typing.ArrayLike | None = None
) -> Explanation:
    """A short report of where numbers stopped being finite first. Waits for the device.

    What is not finite spreads: forwards to the loss, from there to every gradient. So the
    place at fault is the first tapped one whose values are not finite; or if there is
    none, the loss; or if that is finite, the place whose gradient arrives finite and leaves
    not. Without taps there are only the parameters' gradients, of which infinities come
    before NaNs, and few before many; or, where none is finite, the suspect is the forward
    pass or the loss.

    Args:
      leaves: what `nonfinite_leaves` returned for the gradients.
      taps: what `tap` recorded at the ends of the model's layers, a tree of `Probe`s whose
        order is the model's: a list, a stack, an `OrderedDict`, or a dict whose names differ
        in numbers alone, such as `layer_2` and `layer_10`.
      loss: the loss, not scaled.

    Returns:
      An `Explanation`: print it, or read its `suspects`.

    Raises:
      ValueError: if `taps` has a dict of other names, which do not tell the model's order.
      TypeError: if `leaves` or `taps` are something else.

    Example:
      >>> import jax.numpy as jnp
      >>> import optax_lossscale as ols
      >>> grads = {"dense": {"kernel": jnp.array([1.0, jnp.inf]), "bias": jnp.ones(3)}}
      >>> print(ols.explain(ols.nonfinite_leaves(grads)))
      1 of 2 gradients are not finite.
      1. dense/kernel: 1 inf and 0 NaN of 2 in its gradient
    """
    refuse_other_leaves(leaves)
    at_hand("explain", (leaves, taps, loss))
    leaves, taps, loss = jax.device_get((leaves, taps, loss))
    tapped = list(places(taps))
    refuse_unordered(taps)
    recorded = [(name, record) for name, record in tapped if record.value.size]
    bad = {name: leaf for name, leaf in leaves.items() if leaf.nonfinite}
    summary = f"{len(bad)} of {len(leaves)} gradients are not finite."
    if not bad:
        summary = "All gradients are finite."
    if tapped and not recorded:
        summary += " No tap recorded anything: differentiate with respect to the probes as well."

    if first := _first(recorded, loss):
        # Of what it spread to, those that are NaN throughout have nothing to add.
        bad = {name: leaf for name, leaf in bad.items() if leaf.nans < leaf.size}
    elif len(bad) == len(leaves) > 1 and not recorded and loss is None:
        first = Suspect(
            "the forward pass or the loss",
            "no gradient is finite; give the loss and tap the layers to see which",
        )
    return Explanation([first, *_ranked(bad)] if first else _ranked(bad), summary)


def _ranked(bad: dict[str, Summary]) -> list[Suspect]:
    """Infinities before the NaNs that they turn into, and few before many."""

    def remoteness(name):
        leaf = bad[name]
        return leaf.nans / leaf.nonfinite, leaf.nonfinite / leaf.size, natural(name)

    names = sorted(bad, key=remoteness)
    return [Suspect(name, f"{_count(bad[name])} in its gradient") for name in names]


def refuse_other_leaves(leaves: Any) -> None:
    """Raises for what `nonfinite_leaves` does not return."""
    is_one = lambda leaf: isinstance(leaf, Summary) and not np.ndim(leaf.size)
    if not isinstance(leaves, Mapping) or not all(map(is_one, leaves.values())):
        raise TypeError(
            "leaves must be what nonfinite_leaves returned, a dict of Summary; of replicas give "
            "those of one: jax.tree.map(lambda x: x[0], leaves)"
        )


def refuse_unordered(taps: Any) -> None:
    """Raises for a dict whose names are sorted and do not say in which order they were tapped."""
    for tree in filter(is_unordered, jax.tree.leaves(taps, is_leaf=is_unordered)):
        names = [str(name) for name, branch in tree.items() if jax.tree.leaves(branch)]
        if len({re.sub(r"\d+", "", name) for name in names}) > 1:
            raise ValueError(
                f"taps must come in the model's order, and jax sorts a dict's keys: {names}. Give "
                "the probes in a list, an OrderedDict, or under names that differ in their "
                "numbers alone"
            )
        refuse_unordered(list(tree.values()))


def _first(tapped: list[tuple[str, Probe]], loss: Any) -> Suspect | None:
    """The place where it began, so far as taps and the loss can tell."""
    before = ""
    for name, record in tapped:
        if record.value.nonfinite:
            return Suspect(name, f"{_count(record.value)} in its value{before}")
        before = f"; the value of {name} is finite, at most {record.value.largest:.3g}"
    if loss is not None and not np.isfinite(loss).all():
        return Suspect("the loss", f"it is {loss}{before}")
    after, finite = "the loss", ""
    for name, record in reversed(tapped):
        if record.cotangent.nonfinite:
            return Suspect(
                after,
                f"{_count(record.cotangent)} in the gradient that it passes to {name}{finite}",
            )
        largest = record.cotangent.largest
        after, finite = name, f"; the one that reaches it is finite, at most {largest:.3g}"
    return None


def _count(summary: Summary) -> str:
    return f"{summary.infinities:.0f} inf and {summary.nans:.0f} NaN of {summary.size:.0f}"
