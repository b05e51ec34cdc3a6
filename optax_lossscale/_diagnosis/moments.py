"""What Adam makes of gradients: whether its eps drowns them, and dtypes hold their squares."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale._arrays.precision import dtype_of
from optax_lossscale._arrays.variables import found


class Moments(NamedTuple):
    """The state of Adam's second moments.

    Attributes:
      eps: the number added to their root: the state's, if it holds hyperparameters, else 1e-8.
      below_eps: of the parameters with a gradient, the share for which the root is less than eps,
        so that they move less than they should.
      vanished: the share whose moment is zero in its dtype, although the gradient is not.
      dtypes: the dtypes of the moments.
    """

    eps: float
    below_eps: float
    vanished: float
    dtypes: tuple[np.dtype, ...]


def moments_of(opt_state: Any, grads: dict[str, np.ndarray]) -> Moments | None:
    """Those of an optimizer state, or those that true gradients give it in the first step."""
    states = found(lambda x: all(hasattr(x, name) for name in ("mu", "nu", "count")), opt_state)
    if not states:
        return None
    injected = found(lambda x: isinstance(getattr(x, "hyperparams", None), Mapping), opt_state)
    adams = {"eps": 1e-8, "b2": 0.999}  # unless the state says otherwise
    hyperparams = adams | dict(injected[0].hyperparams if injected else {})
    eps, b2 = (float(hyperparams[name]) for name in adams)
    moments = [x for state in states for x in jax.tree.leaves(state.nu)]
    dtypes = tuple(dict.fromkeys(jnp.dtype(dtype_of(x)) for x in moments))
    if after := [state for state in states if int(state.count)]:
        moves = _flat(state.mu for state in after) != 0
        held = _flat(state.nu for state in after)
        unbiased = [_flat([state.nu]) / (1 - b2 ** int(state.count)) for state in after]
        root = np.sqrt(np.maximum(np.concatenate(unbiased), 0))
    else:
        root = _flat(map(np.abs, grads.values()))
        moves, held = root != 0, (1 - b2) * root**2
        held = held.astype(dtypes[0]) if len(dtypes) == 1 else held
    share = lambda which: float(np.count_nonzero(which & moves) / max(moves.sum(), 1))
    return Moments(eps, share((root < eps) & (held != 0)), share(held == 0), dtypes)


def _flat(trees: Iterable[Any]) -> np.ndarray:
    """All numbers of some trees in one float64 array."""
    leaves = jax.tree.leaves(list(trees))
    return np.concatenate([np.zeros(0), *(np.ravel(x).astype(np.float64) for x in leaves)])
