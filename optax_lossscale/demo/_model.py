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

    def normal(*shape):
        """Weights that keep the size of what they are multiplied by."""
        return jax.random.normal(next(keys), shape) * shape[0] ** -0.5

    def block():
        """Those of attention and of the two layers after it."""
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
    p = jax.tree.map(lambda x: x.astype(dtype or x.dtype), params)
    x = embed(p, tokens[:, :-1])
    for layer in p["blocks"]:
        x = block(layer, x)
    return cross_entropy(logits(p, x), tokens[:, 1:])


def embed(p: dict[str, Any], tokens: jax.Array) -> jax.Array:
    """What goes into the first block."""
    return p["embedding"][tokens] + p["position"]


def block(p: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """One of `p["blocks"]`."""
    x += _attention(p, _normed(x, p["norm1"]))
    hidden = jax.nn.gelu(_normed(x, p["norm2"]) @ p["up"])
    x += hidden @ p["down"]
    return x


def logits(p: dict[str, Any], x: jax.Array) -> jax.Array:
    """Logits of each next byte, from what the last block returned; float32."""
    return (_normed(x, p["norm"]) @ p["head"]).astype(jnp.float32)


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Mean cross-entropy, in nats; a float32 scalar."""
    log_likelihood = jax.nn.log_softmax(logits)
    return -jnp.take_along_axis(log_likelihood, targets[..., None], -1).mean()


def _normed(x: jax.Array, gain: jax.Array) -> jax.Array:
    """RMS norm, computed in float32."""
    wide = x.astype(jnp.float32)
    wide *= jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-6)
    return wide.astype(x.dtype) * gain


def _attention(block: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """Causal attention, with the softmax in float32."""
    heads = (x @ block["qkv"]).reshape(*x.shape[:-1], HEADS, -1)
    q, k, v = jnp.split(heads, 3, -1)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32)
    scores *= q.shape[-1] ** -0.5
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf)).astype(x.dtype)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
    return mixed.reshape(x.shape) @ block["out"]
