"""Models whose casts to 16 bits are made by hand, or left to autocast.

Each is a function of a cast, which gives the types of its parameters and of its batch, and its
loss. The cast is `by_hand`, as a careful author writes it, or `left`, which does nothing.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.ad_checkpoint import checkpoint_name

Cast: TypeAlias = Callable[[jax.Array], jax.Array]


class Model(NamedTuple):
    """A model to differentiate: `loss(params, *batch)`."""

    params: Any
    batch: tuple[jax.ShapeDtypeStruct, ...]
    loss: Callable[..., jax.Array]


def by_hand(x: jax.Array) -> jax.Array:
    """In float16."""
    return x.astype(jnp.float16)


def left(x: jax.Array) -> jax.Array:
    """As it is."""
    return x


def _floats(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _integers(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32)


def _cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    losses = optax.softmax_cross_entropy_with_integer_labels(_wide(logits), labels)
    return jnp.mean(losses)


def _layer_norm(cast: Cast, x: jax.Array, norm: tuple[jax.Array, ...]) -> jax.Array:
    scale, bias = norm
    return cast(jax.nn.standardize(_wide(x), epsilon=1e-6) * scale + bias)


def resnet(
    cast: Cast,
    *,
    width: int = 128,
    image: tuple[int, ...] = (64, 32, 32),
    blocks: int = 4,
) -> Model:
    """Convolutions with a batch norm after each; `image` is of a batch, without its channels."""

    def conv(x, w):
        numbers = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(
            cast(x), cast(w), (1, 1), "SAME", dimension_numbers=numbers
        )

    def normed(x, scale, bias):
        x = _wide(x)
        mean, square = jnp.mean(x, (0, 1, 2)), jnp.mean(x**2, (0, 1, 2))
        return cast((x - mean) * lax.rsqrt(square - mean**2 + 1e-5) * scale + bias)

    def loss(params, images, labels):
        x = jax.nn.relu(conv(images, params["stem"]))
        for p in params["blocks"]:
            h = jax.nn.relu(normed(conv(x, p["w1"]), *p["norm1"]))
            x = jax.nn.relu(x + normed(conv(h, p["w2"]), *p["norm2"]))
        x = jnp.mean(_wide(x), (1, 2))
        return _cross_entropy(cast(x) @ cast(params["head"]), labels)

    norms = dict.fromkeys(("norm1", "norm2"), (_floats(width), _floats(width)))
    block = norms | dict.fromkeys(("w1", "w2"), _floats(3, 3, width, width))
    params = {"stem": _floats(3, 3, 3, width), "blocks": [block] * blocks}
    params["head"] = _floats(width, 10)
    return Model(params, (_floats(*image, 3), _integers(image[0])), loss)


def classifier(cast: Cast) -> Model:
    """One of 128k classes for each of 4096 tokens."""
    width, classes, tokens = 1024, 128 * 1024, 4096

    def loss(params, x, labels):
        h = jax.nn.gelu(cast(x) @ cast(params["w"]))
        return _cross_entropy(cast(h) @ cast(params["out"]), labels)

    params = {"w": _floats(width, width), "out": _floats(width, classes)}
    return Model(params, (_floats(tokens, width), _integers(tokens)), loss)


def _attention(cast: Cast, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    scores = _wide(jnp.einsum("bthd,bshd->bhts", cast(q), cast(k)))
    scores *= q.shape[-1] ** -0.5
    causal = jnp.tri(q.shape[1], dtype=bool)
    weights = jax.nn.softmax(jnp.where(causal, scores, -1e9))
    return jnp.einsum("bhts,bshd->bthd", cast(weights), cast(v))


def transformer(
    cast: Cast,
    *,
    norms_after: bool = False,
    in_scan: bool = False,
    width: int = 1024,
    length: int = 512,
    batch: int = 8,
    layers: int = 4,
) -> Model:
    """With norms before its layers or, as BERT, after them; maybe in a scan that keeps by name."""
    head = 64

    def layer(x, p):
        before = lambda x, n: x if norms_after else _layer_norm(cast, x, p[n])
        after = lambda x, n: _layer_norm(cast, x, p[n]) if norms_after else x
        qkv = jnp.split(cast(before(x, "norm1")) @ cast(p["qkv"]), 3, -1)
        q, k, v = (y.reshape(batch, length, width // head, head) for y in qkv)
        attended = checkpoint_name(
            _attention(cast, q, k, v).reshape(x.shape), "attended"
        )
        x = after(x + cast(attended) @ cast(p["out"]), "norm1")
        up = cast(before(x, "norm2")) @ cast(p["up"]) + cast(p["bias"])
        up = checkpoint_name(up, "up")
        return after(x + cast(jax.nn.gelu(up)) @ cast(p["down"]), "norm2")

    def loss(params, x, labels):
        x = cast(x) @ cast(params["embed"])
        if in_scan:
            names = jax.checkpoint_policies.save_only_these_names("attended", "up")
            of_layer = jax.checkpoint(layer, policy=names)
            x, _ = lax.scan(lambda x, p: (of_layer(x, p), None), x, params["layers"])
        else:
            for p in params["layers"]:
                x = layer(x, p)
        return _cross_entropy(cast(x) @ cast(params["head"]), labels)

    norm = (_floats(width), _floats(width))
    one = {
        "norm1": norm,
        "norm2": norm,
        "qkv": _floats(width, 3 * width),
        "out": _floats(width, width),
        "up": _floats(width, 4 * width),
        "bias": _floats(4 * width),
        "down": _floats(4 * width, width),
    }
    stacked = jax.tree.map(lambda x: _floats(layers, *x.shape), one)
    params = {
        "embed": _floats(width, width),
        "layers": stacked if in_scan else [one] * layers,
        "head": _floats(width, 1024),
    }
    inputs = (_floats(batch, length, width), _integers(batch, length))
    return Model(params, inputs, loss)


def mamba(cast: Cast, *, width: int = 512, length: int = 1024, batch: int = 4) -> Model:
    """Two layers of a selective state space, by an associative scan."""
    states = 16

    def layer(x, p):
        z, u = jnp.split(_layer_norm(cast, x, p["norm"]) @ cast(p["in"]), 2, -1)
        u = jax.nn.silu(u)
        step = jax.nn.softplus(_wide(cast(u) @ cast(p["step"])))
        b, c = jnp.split(_wide(cast(u) @ cast(p["bc"])), 2, -1)
        decay = jnp.exp(-step[..., None] * jnp.exp(p["a"]))
        given = step[..., None] * b[:, :, None] * _wide(u)[..., None]
        combine = lambda s, t: (s[0] * t[0], s[1] * t[0] + t[1])
        _, hidden = lax.associative_scan(combine, (decay, given), axis=1)
        y = jnp.einsum("btdn,btn->btd", cast(hidden), cast(c))
        return x + cast(y * jax.nn.silu(z)) @ cast(p["out"])

    def loss(params, x, labels):
        x = cast(x) @ cast(params["embed"])
        for p in params["layers"]:
            x = layer(x, p)
        return _cross_entropy(cast(x) @ cast(params["head"]), labels)

    one = {
        "norm": (_floats(width), _floats(width)),
        "in": _floats(width, 2 * width),
        "step": _floats(width, width),
        "bc": _floats(width, 2 * states),
        "a": _floats(width, states),
        "out": _floats(width, width),
    }
    params = {
        "embed": _floats(width, width),
        "layers": [one] * 2,
        "head": _floats(width, 256),
    }
    inputs = (_floats(batch, length, width), _integers(batch, length))
    return Model(params, inputs, loss)


def lstm(cast: Cast, *, width: int = 512, length: int = 128, batch: int = 64) -> Model:
    """Over some steps of time."""

    def loss(params, xs, labels):
        def step(carry, x):
            h, cell = carry
            gates = _wide(cast(x) @ cast(params["x"]) + cast(h) @ cast(params["h"]))
            i, f, g, o = jnp.split(gates, 4, -1)
            cell = jax.nn.sigmoid(f) * cell + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = cast(jax.nn.sigmoid(o) * jnp.tanh(cell))
            return (h, cell), h

        zeros = jnp.zeros((batch, width))
        _, hs = lax.scan(step, (cast(zeros), zeros), cast(xs))
        return _cross_entropy(cast(hs) @ cast(params["head"]), labels)

    params = dict.fromkeys("xh", _floats(width, 4 * width))
    params["head"] = _floats(width, 256)
    inputs = (_floats(length, batch, width), _integers(length, batch))
    return Model(params, inputs, loss)


def experts(cast: Cast) -> Model:
    """A mixture of eight experts, two for each token."""
    width, count, tokens = 512, 8, 4096

    def loss(params, x, labels):
        x = cast(x) @ cast(params["embed"])
        gates = jax.nn.softmax(_wide(cast(x) @ cast(params["gate"])))
        top, chosen = lax.top_k(gates, 2)
        weights = jnp.zeros_like(gates).at[jnp.arange(tokens)[:, None], chosen].set(top)
        h = jax.nn.gelu(jnp.einsum("td,edf->etf", cast(x), cast(params["up"])))
        y = jnp.einsum("etf,efd->etd", cast(h), cast(params["down"]))
        x = x + jnp.einsum("etd,te->td", cast(y), cast(weights))
        return _cross_entropy(cast(x) @ cast(params["head"]), labels)

    params = {
        "embed": _floats(width, width),
        "gate": _floats(width, count),
        "up": _floats(count, width, 2 * width),
        "down": _floats(count, 2 * width, width),
        "head": _floats(width, 256),
    }
    return Model(params, (_floats(tokens, width), _integers(tokens)), loss)


def recommender(cast: Cast) -> Model:
    """Embeddings, their products with each other, and a perceptron."""
    width, features, rows, batch = 64, 26, 100_000, 8192

    def loss(params, ids, dense, clicks):
        d = jax.nn.relu(cast(dense) @ cast(params["dense"]))
        z = jnp.concatenate([cast(params["table"][ids]), cast(d)[:, None]], 1)
        pairs = jnp.einsum("bfd,bgd->bfg", z, z).reshape(batch, -1)
        h = jnp.concatenate([pairs, cast(d)], -1)
        for w in params["layers"]:
            h = jax.nn.relu(cast(h) @ cast(w))
        logit = _wide(cast(h) @ cast(params["out"]))[:, 0]
        return jnp.mean(jnp.logaddexp(0, logit) - logit * clicks)

    first = (features + 1) ** 2 + width
    params = {
        "table": _floats(rows, width),
        "dense": _floats(13, width),
        "layers": [_floats(first, 512), _floats(512, 256)],
        "out": _floats(256, 1),
    }
    inputs = (_integers(batch, features), _floats(batch, 13), _floats(batch))
    return Model(params, inputs, loss)


MODELS: dict[str, Callable[[Cast], Model]] = {
    "transformer": transformer,
    "norms after the sums, as in BERT": functools.partial(
        transformer, norms_after=True
    ),
    "layers in a scan, kept by name": functools.partial(transformer, in_scan=True),
    "4096 tokens of attention": functools.partial(
        transformer, length=4096, batch=1, layers=1, width=512
    ),
    "128k classes": classifier,
    "ResNet with batch norm": resnet,
    "Mamba": mamba,
    "LSTM": lstm,
    "mixture of experts": experts,
    "recommender": recommender,
}
