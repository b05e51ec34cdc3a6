"""The model whose whole step is compared: the demo's, in four blocks, computing in float16."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from optax_lossscale import experimental
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
    return _model.loss(params, tokens, jnp.float16)


def float32_loss(params: Any, tokens: jax.Array) -> jax.Array:
    """The same in float32."""
    return _model.loss(params, tokens, jnp.float32)


def rescaled_loss(params: Any, tokens: jax.Array) -> jax.Array:
    """The same with each block's backward pass at a scale of its own."""
    embed, block, logits = map(_rescaled, (_model.embed, _model.block, _model.logits))
    x = embed(params, experimental.enter(tokens[:, :-1]))
    for layer in params["blocks"]:
        x = block(layer, x)
    return _model.cross_entropy(experimental.leave(logits(params, x)), tokens[:, 1:])


def rescaled_model_loss(params: Any, tokens: jax.Array) -> jax.Array:
    """The same with the whole forward pass as one such block."""

    def forward(params, tokens):
        p = _in_float16(params)
        x = _model.embed(p, tokens)
        for layer in p["blocks"]:
            x = _model.block(layer, x)
        return _model.logits(p, x)

    logits = experimental.rescale_model(forward)(params, tokens[:, :-1])
    return _model.cross_entropy(logits, tokens[:, 1:])


def _rescaled(part: Callable[..., jax.Array]) -> Callable[..., Any]:
    return experimental.rescale(lambda p, x: part(_in_float16(p), x))


def _in_float16(params: Any) -> Any:
    return jax.tree.map(lambda p: p.astype(jnp.float16), params)
