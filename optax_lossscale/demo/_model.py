"""A small byte-level transformer, in plain JAX."""

from typing import Any

import jax
import jax.numpy as jnp

BYTES = 256  # the vocabulary
CONTEXT = 64
WIDTH = 128
HEADS = 4
BLOCKS = 2


def init(key: jax.Array, width: int = WIDTH, blocks: int = BLOCKS) -> dict[str, Any]:
    """Parameters, in float32."""
    keys = iter(jax.random.split(key, 4 * blocks + 3))

    def normal(inputs, outputs):
        """Weights that keep the size of what they are multiplied by."""
        weights = jax.random.normal(next(keys), (inputs, outputs))
        return weights * inputs**-0.5

    def block():
        """Of attention, and of the two layers after it."""
        return {
            "norm1": jnp.ones(width),
            "qkv": normal(width, 3 * width),
            "out": normal(width, width),
            "norm2": jnp.ones(width),
            "up": normal(width, 4 * width),
            "down": normal(4 * width, width),
        }

    return {
        "embedding": normal(BYTES, width) * 4,
        "position": normal(CONTEXT, width) * 0.5,
        "blocks": [block() for _ in range(blocks)],
        "norm": jnp.ones(width),
        "head": normal(width, BYTES),
    }


def loss(params: Any, tokens: jax.Array, dtype: Any = None) -> jax.Array:
    """Mean cross-entropy of each next byte, in nats.

    With a `dtype` it is cast by hand: products and activations, and so their gradients,
    are in `dtype`; norms, softmax and loss in float32. Tokens have the shape (batch,
    CONTEXT + 1).
    """
    p = params
    if dtype is not None:
        p = jax.tree.map(lambda x: x.astype(dtype), params)
    x = embed(p, tokens[:, :-1])
    for layer in p["blocks"]:
        x = block(layer, x)
    return cross_entropy(logits(p, x), tokens[:, 1:])


def embed(p: dict[str, Any], tokens: jax.Array) -> jax.Array:
    """What goes into the first block."""
    return p["embedding"][tokens] + p["position"]


def block(p: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """One of `p["blocks"]`."""
    normed = _normed(x, p["norm1"])
    x += _attention(p, normed)
    normed = _normed(x, p["norm2"])
    hidden = jax.nn.gelu(normed @ p["up"])
    return x + hidden @ p["down"]


def logits(p: dict[str, Any], x: jax.Array) -> jax.Array:
    """Logits of each next byte, from what the last block returned; float32."""
    logits = _normed(x, p["norm"]) @ p["head"]
    return logits.astype(jnp.float32)


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Mean cross-entropy, in nats; a float32 scalar."""
    log_likelihoods = jax.nn.log_softmax(logits)
    of_targets = jnp.take_along_axis(log_likelihoods, targets[..., None], -1)
    return -of_targets.mean()


def _normed(x: jax.Array, gain: jax.Array) -> jax.Array:
    """RMS norm, computed in float32."""
    wide = x.astype(jnp.float32)
    mean_square = jnp.mean(wide**2, -1, keepdims=True)
    normed = wide * jax.lax.rsqrt(mean_square + 1e-6)
    return normed.astype(x.dtype) * gain


def _attention(block: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """Causal attention, with the softmax in float32."""
    batch, length, _ = x.shape
    qkv = x @ block["qkv"]
    heads = qkv.reshape(batch, length, HEADS, -1)
    q, k, v = jnp.split(heads, 3, -1)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32)
    scores *= q.shape[-1] ** -0.5
    is_past = jnp.tril(jnp.ones((length, length), bool))
    scores = jnp.where(is_past, scores, -jnp.inf)
    weights = jax.nn.softmax(scores).astype(x.dtype)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
    return mixed.reshape(x.shape) @ block["out"]
