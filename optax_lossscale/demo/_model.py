"""A small transformer that predicts the next byte of a text, in plain JAX.

Activations have shape (batch, CONTEXT, width), and take the dtype of the parameters.
"""

import jax
import jax.numpy as jnp
from optax.losses import softmax_cross_entropy_with_integer_labels as cross_entropy

BYTES = 256  # the vocabulary
CONTEXT = 64
WIDTH = 128
HEADS = 4
BLOCKS = 2


def init(key, width=WIDTH, blocks=BLOCKS):
    """The initial parameters, a tree of float32 arrays."""
    keys = iter(jax.random.split(key, 4 * blocks + 3))

    def normal(inputs, outputs):
        """Weights of shape (inputs, outputs) that keep the variance of their inputs."""
        shape = (inputs, outputs)
        weights = jax.random.normal(next(keys), shape)
        return weights * inputs**-0.5

    def weights_of_block():
        """The parameters of a block: attention, and the two dense layers after it."""
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
        "blocks": [weights_of_block() for _ in range(blocks)],
        "norm": jnp.ones(width),
        "head": normal(width, BYTES),
    }


def loss(params, tokens):
    """The mean cross-entropy of each next byte, in nats; float32, shape ().

    `tokens` has shape (batch, CONTEXT + 1). Norms, softmax and loss are computed in
    float32, even if the parameters are cast to 16 bits.
    """
    inputs = tokens[:, :-1]
    targets = tokens[:, 1:]
    x = params["embedding"][inputs]
    x += params["position"]
    for layer in params["blocks"]:
        x = block(layer, x)
    logits = normed(x, params["norm"]) @ params["head"]
    logits = logits.astype(jnp.float32)
    losses = cross_entropy(logits, targets)
    return losses.mean()


def block(layer, x):
    """Attention, and then two dense layers, each added to its input."""
    x += attention(layer, normed(x, layer["norm1"]))
    hidden = normed(x, layer["norm2"]) @ layer["up"]
    return x + jax.nn.gelu(hidden) @ layer["down"]


def normed(x, gain):
    """RMS norm over the last axis, computed in float32, times a learned `gain`."""
    wide = x.astype(jnp.float32)
    mean_square = jnp.mean(wide**2, -1, keepdims=True)
    wide *= jax.lax.rsqrt(mean_square + 1e-6)
    return wide.astype(x.dtype) * gain


def attention(layer, x):
    """Causal multi-head attention, with the softmax in float32.

    It is written out, as `jax.nn.dot_product_attention` takes no float16 on CPU.
    """
    qkv = x @ layer["qkv"]
    heads = qkv.reshape(*x.shape[:2], HEADS, -1)
    q, k, v = jnp.split(heads, 3, -1)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    scores = scores.astype(jnp.float32)
    scores *= q.shape[-1] ** -0.5
    is_past = jnp.tri(CONTEXT, dtype=bool)
    scores = jnp.where(is_past, scores, -jnp.inf)
    weights = jax.nn.softmax(scores).astype(x.dtype)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
    return mixed.reshape(x.shape) @ layer["out"]
