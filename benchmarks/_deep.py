"""Small models made of blocks, to see where one loss scale serves all of them and where not."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from benchmarks._tasks import CLASSES, Params, cross_entropy, fixed, normed, weights
from optax_lossscale.demo import _model, _text


class Boundaries(NamedTuple):
    """What is done at the boundaries of a model's blocks.

    Attributes:
      enter: called with what goes into the first block.
      block: called with each block, a function of parameters, activations and further arguments.
      leave: called with what comes out of the last block.
    """

    enter: Callable[[Any], Any]
    block: Callable[[Callable[..., Any]], Callable[..., Any]]
    leave: Callable[[Any], Any]


NOTHING = Boundaries(lambda x: x, lambda block: block, lambda x: x)


class Model(NamedTuple):
    """A model in blocks, and its data.

    Attributes:
      init: from a key to float32 parameters.
      batch: from a key to inputs and targets.
      forward: called as `forward(params, inputs, dtype, boundaries)`, with float32 parameters
        that each block casts to the dtype to compute in; float32 outputs.
      loss: from outputs and targets to a float32 scalar.
      optimizer: what it is trained with.
      steps: how many.
    """

    init: Callable[[jax.Array], Params]
    batch: Callable[[jax.Array], Any]
    forward: Callable[..., jax.Array]
    loss: Callable[[jax.Array, Any], jax.Array]
    optimizer: optax.GradientTransformation
    steps: int


def _cast(params: Params, x: jax.Array) -> Params:
    return jax.tree.map(lambda p: p.astype(x.dtype), params)


def _stack(first: Callable[..., Any], layer: Callable[..., Any], last: Callable[..., Any]):
    """The forward pass through a first block, a stack of equal ones and a last."""

    def forward(params, x, dtype, boundaries):
        computed_in = lambda f: lambda p, x: f(_cast(p, x), x)
        begin = boundaries.block(lambda p, x: computed_in(first)(p, x.astype(dtype)))
        block = boundaries.block(computed_in(layer))
        end = boundaries.block(lambda p, x: computed_in(last)(p, x).astype(jnp.float32))
        h = begin(params["first"], boundaries.enter(x))
        h, _ = jax.lax.scan(lambda h, p: (block(p, h), None), h, params["blocks"])
        return boundaries.leave(end(params["last"], h))

    return forward


def _init(blocks: int, first: dict, layer: dict, last: dict) -> Callable[[jax.Array], Params]:
    """Of a stack, from the shapes of each block's parameters."""

    def init(key):
        start, middle, end = jax.random.split(key, 3)
        layers = jax.vmap(lambda key: weights(key, **layer))(jax.random.split(middle, blocks))
        return {"first": weights(start, **first), "blocks": layers, "last": weights(end, **last)}

    return init


def _squares(outputs: jax.Array, targets: jax.Array) -> jax.Array:
    return jnp.mean((outputs - targets) ** 2)


def _chain(bits: float) -> Model:
    """Contrived: 32 residual blocks, each of which shrinks the gradient by so many bits."""
    width, outputs = 32, 8

    def batch(key):
        x = jax.random.normal(key, (32, width))
        return x, jnp.tanh(x @ fixed(width, outputs, seed=11) / 4)

    def layer(p, x):
        x += 0.5 * jax.nn.gelu(normed(x) @ p["up"]) @ p["down"]
        return optax.scale_gradient(x, 2.0**-bits)

    square = (width, width)
    init = _init(32, {"in": square}, {"up": square, "down": square}, {"out": (width, outputs)})
    forward = _stack(lambda p, x: x @ p["in"], layer, lambda p, x: normed(x) @ p["out"])
    # Adam takes gradients of any size but its squares of small ones would underflow in float32.
    adam = optax.chain(optax.scale(2.0**30), optax.adam(3e-4))
    return Model(init, batch, forward, _squares, adam, 600)


def _unnormalized() -> Model:
    """A deep residual network without normalization: what goes through it grows."""
    width, blocks = 32, 20

    def batch(key):
        x = jax.random.normal(key, (32, 16))
        return x, jnp.argmax(x @ fixed(16, CLASSES, seed=4), -1)

    def layer(p, x):
        return x + jax.nn.relu(x @ p["up"]) @ (2**0.5 * p["down"])

    square = (width, width)
    start = _init(
        blocks, {"in": (16, width)}, {"up": square, "down": square}, {"out": (width, CLASSES)}
    )
    # A head of zeros, as is usual with such models: a random one would give logits of hundreds.
    init = lambda key: start(key) | {"last": {"out": jnp.zeros((width, CLASSES))}}
    forward = _stack(lambda p, x: x @ p["in"], layer, lambda p, x: x @ p["out"])
    return Model(init, batch, forward, cross_entropy, optax.adam(1e-3), 400)


def _layer_scale() -> Model:
    """A deep transformer that reverses a sequence, each of its branches times 1e-6 at first."""
    symbols, length, width, blocks = 32, 12, 32, 12

    def batch(key):
        tokens = jax.random.randint(key, (8, length), 0, symbols)
        return jax.nn.one_hot(tokens, symbols), tokens[:, ::-1]

    def layer(p, x):
        q, k, v = jnp.split(normed(x) @ p["qkv"], 3, -1)
        scores = (q @ k.mT).astype(jnp.float32) * width**-0.5
        x += (jax.nn.softmax(scores).astype(x.dtype) @ v) @ p["out"] * p["gain1"]
        return x + jax.nn.gelu(normed(x) @ p["up"]) @ p["down"] * p["gain2"]

    shapes = {
        "qkv": (width, 3 * width), "out": (width, width),
        "up": (width, 2 * width), "down": (2 * width, width),
    }  # fmt: skip
    start = _init(
        blocks,
        {"embedding": (symbols, width), "position": (length, width)},
        shapes,
        {"head": (width, symbols)},
    )

    def init(key):
        params = start(key)
        # Not 1e-6 sharp: float16 has it as a subnormal number of four bits.
        params["blocks"] |= {f"gain{i}": jnp.full((blocks, width), 2.0**-20) for i in (1, 2)}
        return params

    forward = _stack(
        lambda p, x: x @ p["embedding"] + p["position"], layer, lambda p, x: normed(x) @ p["head"]
    )
    return Model(init, batch, forward, cross_entropy, optax.adam(1e-3), 400)


def _recurrent() -> Model:
    """A recurrent network that adds two marked numbers among 500, ten steps a block."""
    length, together, width, examples = 500, 10, 24, 8

    def batch(key):
        numbers, marks = jax.random.split(key)
        numbers = jax.random.uniform(numbers, (examples, length))
        first, second = jax.random.randint(marks, (2, examples), 0, length // 2)
        rows, second = jnp.arange(examples), second + length // 2
        marks = jnp.zeros((examples, length)).at[rows, first].set(1).at[rows, second].set(1)
        return jnp.stack([numbers, marks], -1), numbers[rows, first] + numbers[rows, second] - 1

    def forward(params, x, dtype, boundaries):
        def several(p, h, x):
            p = _cast(p, h)
            for now in x.astype(h.dtype):
                h = jnp.tanh(h @ p["recurrent"] + now @ p["in"] + p["bias"])
            return h

        block = boundaries.block(several)
        end = boundaries.block(lambda p, h: (h @ p["out"].astype(h.dtype)).astype(jnp.float32))
        x = x.swapaxes(0, 1).reshape(length // together, together, examples, 2)
        h = boundaries.enter(jnp.zeros((examples, width), dtype))
        h, _ = jax.lax.scan(lambda h, x: (block(params["cell"], h, x), None), h, x)
        return boundaries.leave(end(params["last"], h))[:, 0]

    def init(key):
        shapes = {"in": (2, width), "bias": (width,)}
        square = jax.random.orthogonal(jax.random.fold_in(key, 1), width)
        cell = weights(key, **shapes) | {"recurrent": square}
        return {"cell": cell, "last": weights(jax.random.fold_in(key, 2), out=(width, 1))}

    clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
    return Model(init, batch, forward, _squares, clipped, 200)


def _demo() -> Model:
    """The demo's transformer, smaller, on the same text: the source of Python's own library."""
    width, blocks, examples, steps = 32, 4, 4, 300
    text = jnp.asarray(_text.read(None)[: 1 << 20])

    def batch(key):
        starts = jax.random.randint(key, (examples, 1), 0, len(text) - _model.CONTEXT)
        tokens = text[starts + jnp.arange(_model.CONTEXT + 1)].astype(jnp.int32)
        return tokens[:, :-1], tokens[:, 1:]

    def layer(p, x):
        x += _model._attention(p, _model._normed(x, p["norm1"]))
        return x + jax.nn.gelu(_model._normed(x, p["norm2"]) @ p["up"]) @ p["down"]

    stack = _stack(
        lambda p, x: x + p["position"],
        layer,
        lambda p, x: _model._normed(x, p["norm"]) @ p["head"],
    )

    def forward(params, tokens, dtype, boundaries):
        return stack(params, params["embedding"][tokens], dtype, boundaries)

    def init(key):
        p = _model.init(key, width, blocks)
        return {
            "embedding": p["embedding"],
            "first": {"position": p["position"]},
            "blocks": jax.tree.map(lambda *x: jnp.stack(x), *p["blocks"]),
            "last": {"norm": p["norm"], "head": p["head"]},
        }

    schedule = optax.warmup_cosine_decay_schedule(0.0, 3e-3, steps // 10, steps + 1)
    adamw = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
    return Model(init, batch, forward, cross_entropy, adamw, steps)


MODELS: dict[str, Model] = {
    "chain of 1.5 bits a block": _chain(1.5),
    "chain of 0.9 bits a block": _chain(0.9),
    "residual network without normalization": _unnormalized(),
    "transformer with LayerScale": _layer_scale(),
    "recurrent network, 500 steps": _recurrent(),
    "demo's transformer": _demo(),
}
