"""What Adam makes of gradients: whether eps exceeds them, and dtypes hold their squares."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale._arrays.precision import dtype_of
from optax_lossscale._arrays.variables import find


class Moments(NamedTuple):
    """The state of Adam's second moments.

    Attributes:
      eps: the number added to their root: the state's, if it holds hyperparameters,
        else 1e-8.
      below_eps: of the parameters with a gradient, the share for which the root is less
        than eps, so that they move less than they should.
      vanished: the share whose moment is zero in its dtype, although the gradient is
        not.
      dtypes: the dtypes of the moments.
    """

    eps: float
    below_eps: float
    vanished: float
    dtypes: tuple[np.dtype, ...]


def moments_of(opt_state: Any, grads: dict[str, np.ndarray]) -> Moments | None:
    """Those of an optimizer state, or those that true gradients give it in the first step."""
    states = find(_is_adam, opt_state)
    if not states:
        return None
    hyperparams = {"eps": 1e-8, "b2": 0.999}  # Adam's, unless the state says otherwise
    for injected in find(_holds_hyperparams, opt_state):
        hyperparams |= injected.hyperparams
    eps = float(hyperparams["eps"])
    b2 = float(hyperparams["b2"])
    moments = [x for state in states for x in jax.tree.leaves(state.nu)]
    dtypes = tuple(dict.fromkeys(jnp.dtype(dtype_of(x)) for x in moments))
    steps = max(int(state.count) for state in states)
    if steps:
        moves = _flat(state.mu for state in states) != 0
        squares = _flat(moments)
        roots = np.sqrt(np.maximum(squares, 0) / (1 - b2**steps))  # without their bias
    else:
        roots = _flat(map(np.abs, grads.values()))
        moves = roots != 0
        squares = (1 - b2) * roots**2
        if len(dtypes) == 1:
            squares = squares.astype(dtypes[0])
    has_vanished = squares == 0
    is_below_eps = (roots < eps) & ~has_vanished
    return Moments(
        eps, _share(is_below_eps, moves), _share(has_vanished, moves), dtypes
    )


def _is_adam(x: Any) -> bool:
    """Whether this is the state of Adam or of one like it, with two moments of each number."""
    if not all(hasattr(x, name) for name in ("mu", "nu", "count")):
        return False
    return _shapes(x.mu) == _shapes(x.nu)


def _shapes(tree: Any) -> list[tuple[int, ...]]:
    return [np.shape(x) for x in jax.tree.leaves(tree)]


def _holds_hyperparams(x: Any) -> bool:
    """Whether this is the state of `optax.inject_hyperparams`."""
    return isinstance(getattr(x, "hyperparams", None), Mapping)


def _share(which: np.ndarray, moves: np.ndarray) -> float:
    """The share of parameters among those that have a gradient."""
    return float(np.count_nonzero(which & moves) / max(moves.sum(), 1))


def _flat(trees: Iterable[Any]) -> np.ndarray:
    """All numbers of some trees in one float64 array."""
    leaves = jax.tree.leaves(list(trees))
    rows = [np.ravel(x).astype(np.float64) for x in leaves]
    return np.concatenate([np.zeros(0), *rows])
