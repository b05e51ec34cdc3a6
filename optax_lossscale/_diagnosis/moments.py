"""What Adam makes of gradients: whether its eps drowns them, and 16 bits hold their squares."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale._arrays.precision import dtype_of

# Those of optax.adam, where the state does not say others, as that of inject_hyperparams does.
_EPS = 1e-8
_B2 = 0.999


class Moments(NamedTuple):
    """How Adam's second moments stand.

    Attributes:
      eps: what is added to their root: the state's, if it has its hyperparameters in it, or 1e-8.
      below_eps: the share of parameters with a gradient whose moment's root is less than it, so
        that they move less than they should.
      vanished: the share whose moment is zero in its dtype, and whose gradient is not.
      dtypes: the dtypes of the moments.

    Example:
      Adam divides gradients of 2e-10 by its `eps` of 1e-8, and not by their own size:

      >>> import jax.numpy as jnp, optax
      >>> import optax_lossscale as ols
      >>> loss_fn = lambda w: 1e-10 * jnp.sum(jnp.square(w.astype(jnp.float16)), dtype=jnp.float32)
      >>> params = jnp.ones(3)
      >>> state = optax.adam(1e-3).init(params)
      >>> ols.diagnose(loss_fn, params, opt_state=state).moments.below_eps
      1.0
    """

    eps: float
    below_eps: float
    vanished: float
    dtypes: tuple[np.dtype, ...]


def moments_of(opt_state: Any, grads: dict[str, np.ndarray]) -> Moments | None:
    """Those of an optimizer state, or of the first step, with these gradients, if it has none yet.

    Args:
      opt_state: any optimizer state; None if it has no second moments.
      grads: the true gradients.
    """
    is_adam = lambda x: hasattr(x, "mu") and hasattr(x, "nu") and hasattr(x, "count")
    states = [x for x in jax.tree.leaves(opt_state, is_leaf=is_adam) if is_adam(x)]
    if not states:
        return None
    hyperparams = _hyperparams(opt_state)
    eps, b2 = (float(hyperparams.get(name, usual)) for name, usual in (("eps", _EPS), ("b2", _B2)))
    leaves = [
        (np.asarray(mu).astype(np.float64), nu, int(state.count))
        for state in states
        for mu, nu in zip(*map(jax.tree.leaves, (state.mu, state.nu)), strict=True)
    ]
    dtypes = tuple(dict.fromkeys(jnp.dtype(dtype_of(nu)) for _, nu, _ in leaves))
    size = below = vanished = 0
    if all(count == 0 for *_, count in leaves):
        for g in grads.values():
            squares, moving = np.abs(g).astype(np.float64) ** 2, g != 0
            size += np.count_nonzero(moving)
            below += np.count_nonzero(moving & (np.abs(g) < eps))
            if len(dtypes) == 1:
                held = ((1 - b2) * squares).astype(dtypes[0])
                vanished += np.count_nonzero(moving & (held == 0))
    for mu, nu, count in leaves:
        if count:
            wide, moving = np.asarray(nu).astype(np.float64), mu != 0
            root = np.sqrt(np.maximum(wide, 0) / (1 - b2**count))
            size += np.count_nonzero(moving)
            below += np.count_nonzero(moving & (wide > 0) & (root < eps))
            vanished += np.count_nonzero(moving & (wide == 0))
    share = lambda n: float(n / max(size, 1))
    return Moments(eps, share(below), share(vanished), dtypes)


def _hyperparams(opt_state: Any) -> Mapping[str, Any]:
    """Those that `optax.inject_hyperparams` keeps in its state."""
    has_them = lambda x: isinstance(getattr(x, "hyperparams", None), Mapping)
    found = [x for x in jax.tree.leaves(opt_state, is_leaf=has_them) if has_them(x)]
    return found[0].hyperparams if found else {}
