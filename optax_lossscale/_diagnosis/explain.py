"""Which layer is at fault when gradients are not finite."""

import textwrap
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from optax_lossscale._arrays.variables import plain
from optax_lossscale._diagnosis.origin import Suspect, count, origin, ranked, recorded_places
from optax_lossscale._diagnosis.places import refuse_unordered
from optax_lossscale._diagnosis.summary import Summary, summarize_leaves
from optax_lossscale._scales.validation import at_hand, is_numeric, shown

_SHOWN = 5
WRAPPED = textwrap.TextWrapper(
    width=100, subsequent_indent="   ", break_long_words=False, break_on_hyphens=False
)


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
        lines = [self.summary, *shown, *([f"and {more} more."] if more > 0 else [])]
        return "\n".join(WRAPPED.fill(line) for line in lines)


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
      >>> for path, leaf in ols.diagnosis.nonfinite_leaves(grads).items():
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
    not. Infinities that go no further are meant, as a mask's are; and where loss and
    gradients are finite nothing is a suspect. Of branches that run in parallel it is the one
    with parameters of its own, under its name, whose gradients are not finite; where that
    does not decide, the finding names the branches. Without taps there are only the
    parameters' gradients, of which infinities come before NaNs, and few before many; or,
    where none is finite, the suspect is the forward pass or the loss.

    Args:
      leaves: what `nonfinite_leaves` returned for the gradients.
      taps: what `tap` recorded at the ends of the model's layers, a tree of `Probe`s whose
        order is the model's: a list, a stack, an `OrderedDict`, or a dict whose names differ
        in numbers alone, such as `layer_2` and `layer_10`. Stacks of one length in one
        container are turns of one loop, with what lies beside them there; two containers are
        two loops.
      loss: the loss, not scaled.

    Returns:
      An `Explanation`: print it, or read its `suspects`.

    Raises:
      ValueError: if `taps` has a dict of other names, which do not tell the model's order.
      TypeError: if `leaves`, `taps` or `loss` are something else, or those of an ensemble.

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
            f"loss must be the loss, a number, got {shown(loss)}; of a pair (loss, aux) give the "
            "loss alone"
        )
    at_hand("explain", (leaves, taps, loss))
    leaves, taps, loss = jax.device_get((leaves, taps, loss))
    recorded = recorded_places(taps)
    refuse_unordered(taps)
    bad = {name: leaf for name, leaf in leaves.items() if leaf.nonfinite}
    summary = f"{len(bad)} of {len(leaves)} gradients are not finite."
    if not bad:
        summary = "All gradients are finite."
    if not recorded and jax.tree.leaves(taps):
        summary += " No tap recorded anything: differentiate with respect to the probes as well."
    if leaves and not bad and (loss is None or np.isfinite(loss).all()):
        return Explanation([], summary)

    if first := origin(recorded, leaves, loss):
        # Of what it spread to, those that are NaN throughout have nothing to add.
        bad = {name: leaf for name, leaf in bad.items() if leaf.nans < leaf.size}
    elif len(bad) == len(leaves) > 1 and not recorded and loss is None:
        first = Suspect(
            "the forward pass or the loss",
            "no gradient is finite; give the loss and tap the layers to tell",
        )
    arrived = "; those at the taps are finite" if bad and recorded and first is None else ""
    others = [
        Suspect(name, f"{count(bad[name])} in its gradient{arrived}") for name in ranked(bad)
    ]
    return Explanation([first, *others] if first else others, summary)


def refuse_other_leaves(leaves: Any) -> None:
    """Raises for what `nonfinite_leaves` does not return."""
    is_one = lambda leaf: isinstance(leaf, Summary) and not np.ndim(leaf.size)
    if not isinstance(leaves, Mapping) or not all(map(is_one, leaves.values())):
        raise TypeError(
            "leaves must be what nonfinite_leaves returned, a dict of Summary; of replicas or an "
            "ensemble give those of one, with its taps and its loss: "
            "jax.tree.map(lambda x: x[0], (leaves, taps, loss))"
        )
