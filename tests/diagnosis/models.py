"""Models and losses for `diagnose`: sound ones, and ones that 16 bits spoil."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import optax_lossscale as ols

F16, F32 = jnp.float16, jnp.float32
BF16 = jnp.bfloat16
CONV = {
    "window_strides": (1, 1),
    "padding": "SAME",
    "dimension_numbers": ("NHWC", "HWIO", "NHWC"),
}


def half(tree):
    return jax.tree.map(lambda x: x.astype(F16), tree)


def normal(*shape, scale=None, seed=0):
    scale = shape[0] ** -0.5 if scale is None else scale
    seed = [seed, *shape]
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) * scale, F32)


def crossentropy(logits, labels):
    logits = jax.nn.log_softmax(logits.astype(F32))
    return -jnp.mean(jnp.take_along_axis(logits, labels[..., None], -1))


def square(x, target=0.0):
    return jnp.mean((x.astype(F32) - target) ** 2)


# --- models: each returns its loss function, parameters and batch ---


def deep(depth=16):
    params = [normal(32, 32, scale=0.25, seed=i) for i in range(depth)]

    def loss_fn(params, x):
        for w in half(params):
            x = jax.nn.relu(x.astype(F16) @ w)
        return square(x)

    return loss_fn, params, normal(16, 32, scale=1)


def embedding(tokens=4096, rows=2, cast_first=True):
    params = {"embed": normal(rows, 16, scale=1), "out": normal(16, 4)}

    def loss_fn(params, tokens, y):
        table = params["embed"].astype(F16) if cast_first else params["embed"]
        rows = table[tokens].astype(F16)  # fault
        return square(rows @ params["out"].astype(F16), y + 1)

    tokens = jnp.asarray(np.random.default_rng(0).integers(0, rows, tokens))
    return loss_fn, params, tokens, normal(tokens.size, 4, scale=1)


def attention(softmax=F32):
    params = {name: normal(32, 32, seed=i) for i, name in enumerate("qkvo")}
    params |= {f"{name}_bias": jnp.zeros(32) for name in "qkv"}

    def loss_fn(params, x):
        p, x = half(params), x.astype(F16)
        q, k, v = (x @ p[name] + p[f"{name}_bias"] for name in "qkv")
        scores = q @ k.mT / F16(32**0.5)
        scores = jnp.where(np.tri(16, dtype=bool), scores, F16(-jnp.inf))
        return square(jax.nn.softmax(scores.astype(softmax)).astype(F16) @ v @ p["o"])

    return loss_fn, params, normal(4, 16, 32, scale=1)


def batch_normalized():
    """A convolution whose bias is normalized away, as that of a dense layer."""
    params = {
        "conv": normal(3, 3, 3, 8),
        "conv_bias": jnp.zeros(8),
        "w": normal(8, 16),
        "bias": jnp.zeros(16),
        "out": normal(16, 4),
    }

    def norm(x, axes):
        return (x - x.mean(axes)) * lax.rsqrt(x.var(axes) + 1e-5)

    def loss_fn(params, x):
        x = lax.conv_general_dilated(x, params["conv"], **CONV) + params["conv_bias"]
        x = jax.nn.relu(norm(x, (0, 1, 2))).mean((1, 2)) @ params["w"] + params["bias"]
        return square(jax.nn.relu(norm(x, 0)) @ params["out"], 1.0)

    return ols.autocast(loss_fn), params, normal(16, 8, 8, 3, scale=1)


def graph():
    params = {"w": normal(16, 16), "a": normal(16, scale=0.2), "out": normal(16, 3)}
    source, target = jnp.asarray(np.random.default_rng(0).integers(0, 64, (2, 256)))

    def loss_fn(params, x, y):
        p = half(params)
        x = x.astype(F16) @ p["w"]
        scores = jax.nn.leaky_relu((x @ p["a"])[source] + (x @ p["a"])[target]).astype(
            F32
        )
        weights = jnp.exp(scores - jax.ops.segment_max(scores, target, 64)[target])
        weights /= jax.ops.segment_sum(weights, target, 64)[target] + 1e-9
        x = jax.ops.segment_sum(x[source] * weights[:, None].astype(F16), target, 64)
        return crossentropy(jax.nn.elu(x) @ p["out"], y)

    return loss_fn, params, normal(64, 16, scale=1), jnp.arange(64) % 3


def lstm():
    params = {
        "w": normal(16, 64),
        "u": normal(8, 64),
        "b": jnp.zeros(64),
        "out": normal(16, 1),
    }

    def loss_fn(params, x):
        p = half(params)

        def body(state, x):
            c, y = state
            gates = y @ p["w"] + x @ p["u"] + p["b"]
            i, f, o, g = jnp.split(gates, 4, -1)
            c = jax.nn.sigmoid(f + 1) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            y = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (c, y), y @ p["out"]

        zeros = jnp.zeros((4, 16), F16)
        return square(jax.lax.scan(body, (zeros, zeros), x.astype(F16))[1], 1)

    return loss_fn, params, normal(50, 4, 8, scale=1)


def stack():
    params = {"w": normal(12, 16, 16, scale=0.25), "b": jnp.zeros((12, 16))}

    def loss_fn(params, x):
        body = jax.checkpoint(lambda x, p: (x + jnp.tanh(x @ p["w"] + p["b"]), None))
        return square(jax.lax.scan(body, x.astype(F16), half(params))[0])

    return loss_fn, params, normal(8, 16, scale=1)


def scan():
    def loss_fn(params, x):
        w = params["w"].astype(F16)
        y = lambda x: (w * x.astype(F16)).astype(F32)  # fault
        add = lambda total, x: (total + y(x), None)
        return jax.lax.scan(add, F32(0), x)[0]

    x = np.random.default_rng(0).uniform(0, 1.3e-4, 5000)
    return loss_fn, {"w": F32(0.5)}, jnp.asarray(x, F32)


def gate(at=9.0):
    params = {"gate": jnp.full(8, at), "w": normal(8, scale=1)}

    def loss_fn(params, x):
        p = half(params)
        x = jax.nn.sigmoid(p["gate"]) * p["w"] * x.astype(F16)  # fault
        return jnp.mean(x.astype(F32).sum(-1) ** 2)

    return loss_fn, params, normal(16, 8, scale=1)


def rotary(dtype=F32):
    params = {"q": normal(16, 16), "k": normal(16, 16, seed=1)}

    def loss_fn(params, x):
        p, x = half(params), x.astype(F16)
        frequencies = jnp.asarray(1e-4 ** (np.arange(8) / 8), dtype)
        angles = jnp.arange(4096).astype(dtype)[:, None] * frequencies  # fault
        cos, sin = jnp.cos(angles).astype(F16), jnp.sin(angles).astype(F16)
        turned = lambda x: jnp.concatenate(
            [x[:, :8] * cos - x[:, 8:] * sin, x[:, 8:] * cos + x[:, :8] * sin], -1
        )
        q, k = turned(x @ p["q"]), turned(x @ p["k"])
        return square((q[1:] * k[:-1]).sum(-1))

    return loss_fn, params, normal(4096, 16, scale=1)


HEALTHY = {
    "deep": deep,
    "embedding": embedding,
    "embedding summed in float32": functools.partial(
        embedding, 32_768, cast_first=False
    ),
    "sparse embedding": functools.partial(embedding, 256, rows=500),
    "attention": attention,
    "attention in float16": functools.partial(attention, softmax=F16),
    "batch norm": batch_normalized,
    "graph": graph,
    "lstm": lstm,
    "stack": stack,
    "gate": functools.partial(gate, 1.0),
    "rotary": rotary,
}


# --- losses that 16 bits spoil, each in the line that says so; above, some do as well ---

# Each makes a loss function, its parameters and its batch.
SPOILED = {}
X = normal(64, 8, scale=1)


def spoiled(make):
    SPOILED[make.__name__] = make
    return make


@spoiled
def small_difference_of_large_numbers():
    def loss_fn(params, x):
        return square(x @ params["w"] - x.sum(-1, keepdims=True))  # fault

    return ols.autocast(loss_fn), {"w": 1 + normal(8, 1, scale=1e-4)}, 10 + X


@spoiled
def derivative_of_a_small_energy():
    def loss_fn(p, x):
        energy = lambda x: 1e-7 * jnp.sum(jnp.tanh(x @ p["w"]) @ p["v"])  # fault
        return square(jax.grad(energy)(x) * 1e7 - x)

    params = {"w": normal(8, 16, scale=1), "v": normal(16, 1, scale=1)}
    return ols.autocast(loss_fn), params, X


@spoiled
def factor_of_a_matrix_that_is_barely_positive_definite():
    def loss_fn(params, x):
        y = x @ params["w"]
        factor = jnp.linalg.cholesky(y @ y.T + 1e-4 * jnp.eye(len(x)))  # fault
        return jnp.sum(jnp.log(jnp.diag(factor)))

    return ols.autocast(loss_fn), {"w": normal(8, 4, scale=1)}, X


@spoiled
def long_sum_in_16_bits():
    def loss_fn(params, x):
        y = x[:, 0] ** 2 * params["w"] ** 2 + 1
        add = lambda i, s: s + y[i].astype(F16)  # fault
        return lax.fori_loop(0, len(x), add, jnp.zeros((), F16)).astype(F32)

    return loss_fn, {"w": F32(0.7)}, normal(6000, 8, scale=1)


@spoiled
def value_below_the_range():
    def loss_fn(params, x):
        y = jnp.exp(-((x @ params["w"]) ** 2) - 18).astype(F16)  # fault
        return square(y.astype(F32) * 1e8)

    return ols.autocast(loss_fn), {"w": normal(8, 8, scale=0.1)}, X


@spoiled
def gradients_that_vanish_inside():
    def loss_fn(params, x):
        p = half(params)
        x = jnp.tanh(x.astype(F16) @ p["a"]) * F16(1e-4)
        x = x * F16(1e-4)  # fault
        return square((x.astype(F32) * 1e8).astype(F16) @ p["b"])

    params = {"a": normal(8, 8), "b": normal(8, 8, seed=1)}
    return loss_fn, params, normal(16, 8, scale=1)


@spoiled
def overflow_that_the_loss_swallows():
    def loss_fn(w, x):
        x = (x.astype(F16) * 1000) @ w.astype(F16)
        return 1 / (jnp.mean((x * x).astype(F32)) / 1e6)  # fault

    return loss_fn, normal(8, 8), normal(4, 8, scale=1)


@spoiled
def overflow_of_8_bits():
    def loss_fn(w, x):
        y = x.astype(F16) * w.astype(F16)
        y = y.astype(jnp.float8_e4m3fn)  # fault
        return square(y.astype(F32) / 300)

    return loss_fn, jnp.full(8, 10.0), jnp.linspace(1, 300, 8)


@spoiled
def return_that_is_rounded_in_each_iteration():
    def loss_fn(w, x, rewards):
        def step(c, reward):
            c = (reward + F32(0.999) * c.astype(F32)).astype(BF16)  # fault
            return c, c

        _, returns = lax.scan(step, jnp.zeros(16, BF16), rewards)
        return square(x.astype(BF16) @ w.astype(BF16) - returns)

    rewards = 0.1 + normal(400, 16, scale=0.01)
    return loss_fn, jnp.ones(8) / 3, normal(400, 16, 8, scale=1), rewards


SPOILED |= {
    "embedding of 32k tokens": functools.partial(embedding, 32_768),
    "saturated gate": gate,
    "parameter shared over a scan": scan,
    "positions in float16": functools.partial(rotary, F16),
}


def line_at_fault(make):
    """The number of the line that ends in `# fault`."""
    lines, first = inspect.getsourcelines(getattr(make, "func", make))
    (n,) = (n for n, line in enumerate(lines) if line.endswith("# fault\n"))
    return first + n
