"""The last norms and losses, as two rows of one array, in which the newest come first."""

import jax
import jax.numpy as jnp


def with_newest(window: jax.Array, numbers: jax.Array) -> jax.Array:
    """A window with one more number at the front of each row, where the oldest falls out."""
    newest = numbers[:, None]
    return jnp.concatenate([newest, window[:, :-1]], axis=1)
