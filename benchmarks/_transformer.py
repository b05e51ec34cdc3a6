"""A transformer that predicts the next byte of a text, whose whole step is compared.

Activations have shape (batch, CONTEXT, width) and the dtype of the parameters.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax.losses import softmax_cross_entropy_with_integer_labels as cross_entropy

BYTES = 256  # the size of the vocabulary
CONTEXT = 64
HEADS = 4


def init(width: int, blocks: int = 4) -> dict[str, Any]:
    """Draws the initial parameters, a tree of float32 arrays."""
    keys = jax.random.split(jax.random.key(0), 4 * blocks + 3)
    keys_by_block = keys[2:-1].reshape(blocks, 4)
    return {
        "embedding": normal(keys[0], BYTES, width) * 4,  # standard deviation 1/4
        "position": normal(keys[1], CONTEXT, width) * 0.5,  # standard deviation 1/16
        "blocks": [init_block(block_keys, width) for block_keys in keys_by_block],
        "norm": jnp.ones(width),
        "head": normal(keys[-1], width, BYTES),
    }


def init_block(keys, width):
    """Draws a block's parameters from four keys: attention and two dense layers."""
    return {
        "norm1": jnp.ones(width),
        "qkv": normal(keys[0], width, 3 * width),
        "out": normal(keys[1], width, width),
        "norm2": jnp.ones(width),
        "up": normal(keys[2], width, 4 * width),
        "down": normal(keys[3], 4 * width, width),
    }


def normal(key, inputs, outputs):
    """Draws weights of shape (inputs, outputs) that preserve their inputs' variance."""
    weights = jax.random.normal(key, (inputs, outputs))
    return weights * inputs**-0.5


def tokens(batch: int) -> jax.Array:
    """Some text; int32, shape (batch, CONTEXT + 1)."""
    return jax.random.randint(jax.random.key(1), (batch, CONTEXT + 1), 0, BYTES)


def loss(params: Any, tokens: jax.Array) -> jax.Array:
    """Casts the parameters to float16 itself, where they are not yet."""
    return uncast_loss(optax.tree.cast(params, jnp.float16), tokens)


def float32_loss(params: Any, tokens: jax.Array) -> jax.Array:
    """The same in float32."""
    return uncast_loss(optax.tree.cast(params, jnp.float32), tokens)


def uncast_loss(params, tokens):
    """Computes the mean cross-entropy of the next bytes, in nats; float32, shape ().

    `tokens` has shape (batch, CONTEXT + 1). Norms, softmax and loss are computed in
    float32 even if the parameters are cast to 16 bits.
    """
    inputs = tokens[:, :-1]
    targets = tokens[:, 1:]
    x = params["embedding"][inputs]
    x += params["position"]
    for weights in params["blocks"]:
        x = block(weights, x)
    x = normed(x, params["norm"])
    logits = x @ params["head"]
    logits = logits.astype(jnp.float32)
    losses = cross_entropy(logits, targets)
    return losses.mean()


def block(weights, x):
    """Applies attention and then two dense layers, adding each result to its input."""
    x += attention(weights, normed(x, weights["norm1"]))
    return x + dense(weights, normed(x, weights["norm2"]))


def normed(x, gain):
    """Applies an RMS norm over the last axis, in float32, and then a learned gain."""
    wide = x.astype(jnp.float32)
    mean_square = jnp.mean(wide**2, axis=-1, keepdims=True)
    wide *= jax.lax.rsqrt(mean_square + 1e-6)
    return wide.astype(x.dtype) * gain


def dense(weights, x):
    """Applies two dense layers with a GELU between them."""
    hidden = x @ weights["up"]
    hidden = jax.nn.gelu(hidden)
    return hidden @ weights["down"]


def attention(weights, x):
    """Applies causal multi-head attention, with the softmax in float32.

    This is written out because `jax.nn.dot_product_attention` in float16, as in a model
    that is cast by hand, does not compile for a CPU at these sizes (jax 0.10).
    """
    batch, length, width = x.shape
    qkv = x @ weights["qkv"]
    qkv = qkv.reshape(batch, length, HEADS, -1)
    q, k, v = jnp.split(qkv, 3, axis=-1)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    scores = scores.astype(jnp.float32)
    scores *= q.shape[-1] ** -0.5
    is_past = jnp.tri(length, dtype=bool)
    scores = jnp.where(is_past, scores, -jnp.inf)
    probabilities = jax.nn.softmax(scores)
    probabilities = probabilities.astype(x.dtype)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", probabilities, v)
    mixed = mixed.reshape(batch, length, width)
    return mixed @ weights["out"]
