"""The window of a skip rule: the last norms and losses, as the rows of one array."""

import jax
import jax.numpy as jnp


def with_newest(window: jax.Array, numbers: jax.Array) -> jax.Array:
    """A window with a new number at the front of each row, in place of the oldest.

    `window` has shape (2, length), the newest numbers first, and `numbers` shape (2,).
    """
    newest = numbers[:, None]
    return jnp.concatenate([newest, window[:, :-1]], axis=1)
