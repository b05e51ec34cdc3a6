"""Small models to train in float16 on the CPU, on data that they make themselves.

Those named in `TUNING` are what `HeadroomLossScale` was developed with; what
`docs/benchmarks/policies.md` says about it was measured on the others.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

Params = dict[str, Any]
CLASSES = 8


@jax.custom_vjp
def _noted(x: jax.Array, probe: jax.Array) -> jax.Array:
    return x


def _backward(_: None, g: jax.Array) -> tuple[jax.Array, jax.Array]:
    return g, jnp.abs(g).max().astype(jnp.float32)


_noted.defvjp(lambda x, probe: (x, None), _backward)


def noted(x: jax.Array, probe: jax.Array | None) -> jax.Array:
    """`x`; the gradient of the probe, if there is one, is the largest of `x`."""
    return x if probe is None else _noted(x, probe)


class Task(NamedTuple):
    """A model and its data.

    Attributes:
      init: from a key to float32 parameters.
      batch: from a key to the arguments of the loss besides the parameters.
      loss: called as `loss(params, batch, probe)`, with the parameters in the dtype to compute
        in; a float32 scalar. The gradient of the probe is the largest gradient where the model
        is widest; None for no probe.
      optimizer: what it is trained with.
    """

    init: Callable[[jax.Array], Params]
    batch: Callable[[jax.Array], Any]
    loss: Callable[[Params, Any, Any], jax.Array]
    optimizer: optax.GradientTransformation


def weights(key: jax.Array, **shapes: tuple[int, ...]) -> Params:
    """Matrices with entries of variance 1 / fan-in, and biases of zero."""
    keys = jax.random.split(key, len(shapes))
    made = {}
    for of_one, (name, shape) in zip(keys, shapes.items(), strict=True):
        normal = jax.random.normal(of_one, shape) * math.prod(shape[:-1]) ** -0.5
        made[name] = normal if len(shape) > 1 else jnp.zeros(shape)
    return made


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    wide = logits.astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(wide, labels).mean()


def fixed(*shape: int, seed: int) -> jax.Array:
    """What a task's data is made from: the same for every seed of a run."""
    return jax.random.normal(jax.random.key(seed), shape)


def normed(x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-6)).astype(
        x.dtype
    )


def _sentences(key: jax.Array, logits: jax.Array, length: int) -> jax.Array:
    """Eight chains of symbols, each drawn from its predecessor's logits and Zipf's law."""
    logits -= jnp.log(1 + jnp.arange(len(logits)))
    tokens = [jnp.zeros(8, jnp.int32)]
    for step in jax.random.split(key, length):
        tokens.append(jax.random.categorical(step, logits[tokens[-1]]))
    return jnp.stack(tokens[1:], 1)


def _transformer() -> Task:
    """One block, on sequences of a Markov chain whose symbols are as unequal as words."""
    symbols, width, length = 64, 24, 8

    def batch(key):
        return _sentences(key, 6 * fixed(symbols, symbols, seed=1), length + 1)

    def loss(p, tokens, probe):
        x = p["embedding"][tokens[:, :-1]] + p["position"]
        q, k, v = jnp.split(normed(x) @ p["qkv"], 3, -1)
        scores = (q @ k.mT).astype(jnp.float32) * width**-0.5
        causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        scores = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf)).astype(x.dtype)
        x += (scores @ v) @ p["out"]
        x += jax.nn.gelu(normed(x) @ p["up"]) @ p["down"]
        logits = noted(normed(x) @ p["head"], probe)
        return cross_entropy(logits, tokens[:, 1:])

    shapes = {
        "embedding": (symbols, width), "position": (length, width), "qkv": (width, 3 * width),
        "out": (width, width), "up": (width, 4 * width), "down": (4 * width, width),
        "head": (width, symbols),
    }  # fmt: skip
    return Task(lambda key: weights(key, **shapes), batch, loss, optax.adamw(3e-3))


def _convolution() -> Task:
    """Two convolutions, on noisy patterns."""

    def batch(key):
        labels, noise = jax.random.split(key)
        labels = jax.random.randint(labels, (16,), 0, CLASSES)
        patterns = fixed(CLASSES, 8, 8, 1, seed=2)
        return patterns[labels] + jax.random.normal(noise, (16, 8, 8, 1)), labels

    def convolve(x, kernel):
        # As a product of matrices: float16 convolutions are slow on CPUs.
        height, width = x.shape[1] - 2, x.shape[2] - 2
        parts = [
            x[:, i : i + height, j : j + width] for i in range(3) for j in range(3)
        ]
        return jnp.concatenate(parts, -1) @ kernel

    def loss(p, batch, probe):
        x, labels = batch
        x = jax.nn.relu(convolve(x.astype(p["first"].dtype), p["first"]) + p["bias"])
        x = noted(jax.nn.relu(convolve(x, p["second"])), probe)
        return cross_entropy(x.reshape(len(x), -1) @ p["head"], labels)

    shapes = {
        "first": (9, 16), "bias": (16,), "second": (9 * 16, 16), "head": (256, CLASSES),
    }  # fmt: skip
    sgd = optax.sgd(optax.cosine_decay_schedule(0.01, 6000, 0.01), momentum=0.9)
    return Task(lambda key: weights(key, **shapes), batch, loss, sgd)


def _gru() -> Task:
    """A gated recurrent unit that remembers which of two marked numbers is larger."""
    width, length = 32, 12

    def batch(key):
        numbers, marks = jax.random.split(key)
        numbers = jax.random.uniform(numbers, (16, length))
        first, second = jax.random.randint(marks, (2, 16), 0, length // 2)
        rows, second = jnp.arange(16), second + length // 2
        marks = jnp.zeros((16, length)).at[rows, first].set(1).at[rows, second].set(1)
        labels = (numbers[rows, first] > numbers[rows, second]).astype(jnp.int32)
        return jnp.stack([numbers, marks], -1), labels

    def loss(p, batch, probe):
        x, labels = batch

        def step(h, x):
            both = jnp.concatenate([h, x], -1)
            update, reset = jnp.split(
                jax.nn.sigmoid(both @ p["gates"] + p["bias"]), 2, -1
            )
            new = jnp.tanh(jnp.concatenate([reset * h, x], -1) @ p["new"])
            return update * h + (1 - update) * new, None

        h = jnp.zeros((len(x), width), p["gates"].dtype)
        h, _ = jax.lax.scan(step, h, x.astype(h.dtype).swapaxes(0, 1))
        return cross_entropy(noted(h, probe) @ p["head"], labels)

    shapes = {
        "gates": (width + 2, 2 * width), "bias": (2 * width,), "new": (width + 2, width),
        "head": (width, 2),
    }  # fmt: skip
    clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(2e-3))
    return Task(lambda key: weights(key, **shapes), batch, loss, clipped)


def _perceptron(widths: tuple[int, ...], activation: Callable[[jax.Array], jax.Array]):
    """`init`, and a function from parameters, inputs and a probe to outputs."""
    shapes = {f"w{i}": s for i, s in enumerate(itertools.pairwise(widths))}

    def apply(p, x, probe):
        x = x.astype(p["w0"].dtype)
        for i in range(len(shapes) - 1):
            x = activation(x @ p[f"w{i}"])
        return noted(x, probe) @ p[f"w{len(shapes) - 1}"]

    return (lambda key: weights(key, **shapes)), apply


def _regression() -> Task:
    """A perceptron that learns a smooth function without noise, ever more exactly."""
    init, apply = _perceptron((8, *6 * [48], 1), jnp.tanh)

    def batch(key):
        x = jax.random.normal(key, (32, 8))
        return x, jnp.sin(x @ fixed(8, 1, seed=3) / 3)

    def loss(p, batch, probe):
        x, y = batch
        return jnp.mean((apply(p, x, probe).astype(jnp.float32) - y) ** 2)

    return Task(init, batch, loss, optax.adam(optax.cosine_decay_schedule(3e-3, 6000)))


def _classification() -> Task:
    """A perceptron that learns the largest of a few linear functions."""
    init, apply = _perceptron((16, *5 * [48], CLASSES), jax.nn.relu)

    def batch(key):
        x = jax.random.normal(key, (32, 16))
        return x, jnp.argmax(x @ fixed(16, CLASSES, seed=4), -1)

    def loss(p, batch, probe):
        x, labels = batch
        return cross_entropy(apply(p, x, probe), labels)

    return Task(init, batch, loss, optax.adam(1e-3))


def _autoencoder() -> Task:
    """A perceptron with a bottleneck; the mean over many outputs makes gradients small."""
    init, apply = _perceptron((64, 48, 24, 6, 24, 48, 64), jax.nn.gelu)

    def batch(key):
        return (jnp.tanh(jax.random.normal(key, (16, 6)) @ fixed(6, 64, seed=5)),)

    def loss(p, batch, probe):
        (x,) = batch
        return jnp.mean((apply(p, x, probe).astype(jnp.float32) - x) ** 2)

    return Task(
        init,
        batch,
        loss,
        optax.adamw(optax.warmup_cosine_decay_schedule(0, 3e-3, 500, 6000)),
    )


def _words() -> Task:
    """The next of many words from the two before it, with a table of embeddings."""
    symbols, width = 128, 24

    def batch(key):
        return _sentences(key, 8 * fixed(symbols, symbols, seed=6), 10)

    def loss(p, tokens, probe):
        x = p["embedding"][tokens]
        x = jnp.concatenate([x[:, :-2], x[:, 1:-1]], -1) @ p["hidden"]
        return cross_entropy(noted(jax.nn.relu(x), probe) @ p["head"], tokens[:, 2:])

    shapes = {
        "embedding": (symbols, width),
        "hidden": (2 * width, width),
        "head": (width, symbols),
    }
    return Task(lambda key: weights(key, **shapes), batch, loss, optax.adam(3e-3))


def _patterns() -> Task:
    """A perceptron that soon separates noisy patterns without mistakes: spiky gradients."""
    init, apply = _perceptron((32, 48, 48, CLASSES), jax.nn.relu)

    def batch(key):
        labels, noise = jax.random.split(key)
        labels = jax.random.randint(labels, (16,), 0, CLASSES)
        patterns = fixed(CLASSES, 32, seed=7)
        return patterns[labels] + jax.random.normal(noise, (16, 32)), labels

    def loss(p, batch, probe):
        x, labels = batch
        return cross_entropy(apply(p, x, probe), labels)

    return Task(init, batch, loss, optax.sgd(0.02, momentum=0.9))


TUNING = {
    "patterns": _patterns(),
    "words": _words(),
    "classification": _classification(),
    "autoencoder": _autoencoder(),
}
REPORTED = {
    "transformer": _transformer(),
    "convolution": _convolution(),
    "GRU": _gru(),
    "regression": _regression(),
}


def in_float16(loss: Callable[..., jax.Array], params: Params, batch: Any) -> jax.Array:
    """The loss computed in float16, of float32 parameters."""
    return loss(jax.tree.map(lambda p: p.astype(jnp.float16), params), batch, None)
