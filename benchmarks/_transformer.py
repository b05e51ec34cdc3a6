"""The model whose whole step is compared: the demo's, in four blocks, computing in float16."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_lossscale.demo import _model

BLOCKS = 4


def init(width: int) -> dict[str, Any]:
    """Parameters, in float32."""
    return _model.init(jax.random.key(0), width, BLOCKS)


def tokens(batch: int) -> jax.Array:
    """Some text; int32."""
    shape = (batch, _model.CONTEXT + 1)
    return jax.random.randint(jax.random.key(1), shape, 0, _model.BYTES)


def loss(params: Any, tokens: jax.Array) -> jax.Array:
    """Casts the parameters itself, where they are not float16 yet."""
    return _model.loss(optax.tree.cast(params, jnp.float16), tokens)


def float32_loss(params: Any, tokens: jax.Array) -> jax.Array:
    """The same in float32."""
    return _model.loss(optax.tree.cast(params, jnp.float32), tokens)
