"""Models as public repositories write them, in float32 and unchanged, trained under autocast.

Each is small and written anew: what counts is how it is made. Thirty steps are to end at the loss
of float32, with every matrix product and convolution in float16.
"""

import functools
import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from against_float32 import assert_computes_in
from jax import lax

import optax_lossscale as ols

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # the frameworks', not ours
    nn = pytest.importorskip("flax.linen")
    nnx = pytest.importorskip("flax.nnx")
    hk = pytest.importorskip("haiku")

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

STEPS = 30
PATTERNS = {}


class Pattern(NamedTuple):
    """A loss function of parameters, what else it keeps from step to step, a key and a batch."""

    loss_fn: Any  # (params, kept, key, batch) -> (loss, kept)
    params: Any
    batch: Any  # the same in every step
    kept: Any = None
    learning_rate: float = 3e-3


def pattern(make):
    PATTERNS[make.__name__] = make
    return make


def key(n):
    return jax.random.key(n)


def normal(n, *shape):
    return jax.random.normal(key(n), shape)


def text(vocabulary, batch, length):
    """Tokens, each of which follows from the one before it."""
    rows = [(np.arange(length) * (3 + i % 2) + i) % vocabulary for i in range(batch)]
    return jnp.asarray(np.stack(rows), jnp.int32)


# --- Flax Linen ---


class ResidualBlock(nn.Module):
    features: int
    strides: int

    @nn.compact
    def __call__(self, x, train):
        norm = functools.partial(
            nn.BatchNorm, use_running_average=not train, momentum=0.9
        )
        strides = (self.strides, self.strides)
        y = nn.Conv(self.features, (3, 3), strides, use_bias=False)(x)
        y = nn.relu(norm()(y))
        y = nn.Conv(self.features, (3, 3), use_bias=False)(y)
        y = norm(scale_init=nn.initializers.zeros)(y)
        if x.shape != y.shape:
            x = norm()(nn.Conv(self.features, (1, 1), strides, use_bias=False)(x))
        return nn.relu(x + y)


class ResNet(nn.Module):
    @nn.compact
    def __call__(self, x, train=True):
        x = nn.Conv(8, (3, 3), use_bias=False)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
        x = nn.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
        for features, strides in [(8, 1), (16, 2)]:
            x = ResidualBlock(features, strides)(x, train)
        return nn.Dense(4)(jnp.mean(x, (1, 2)))


@pattern
def linen_resnet():
    model = ResNet()
    images, labels = normal(0, 16, 12, 12, 3) * 2 + 1, jnp.arange(16) % 4
    variables = model.init(key(1), images)

    def loss_fn(params, stats, key, batch):
        images, labels = batch
        variables = {"params": params, "batch_stats": stats}
        logits, new = model.apply(variables, images, mutable=["batch_stats"])
        loss = optax.softmax_cross_entropy(logits, jax.nn.one_hot(labels, 4)).mean()
        decay = (
            0.5
            * 1e-4
            * sum(jnp.sum(x**2) for x in jax.tree.leaves(params) if x.ndim > 1)
        )
        return loss + decay, new["batch_stats"]

    return Pattern(
        loss_fn, variables["params"], (images, labels), variables["batch_stats"]
    )


# --- Flax NNX ---


class RMSNorm(nnx.Module):
    def __init__(self, features):
        self.scale = nnx.Param(jnp.zeros(features))

    def __call__(self, x):
        variance = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
        return x * lax.rsqrt(variance + 1e-6) * (1 + self.scale[...])


def rotated(x, positions):
    half = x.shape[-1] // 2
    angles = positions[:, None] / 10_000 ** (jnp.arange(half) / half)
    sin, cos = jnp.sin(angles)[:, None], jnp.cos(angles)[:, None]
    first, second = jnp.split(x, 2, axis=-1)
    out = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)
    return out.astype(x.dtype)


class GroupedAttention(nnx.Module):
    """Four heads of queries share two of keys and values."""

    def __init__(self, rngs):
        init = nnx.initializers.normal(0.2)
        self.q = nnx.Param(init(rngs.params(), (4, 32, 8)))
        self.kv = nnx.Param(init(rngs.params(), (2, 2, 32, 8)))
        self.out = nnx.Param(init(rngs.params(), (4, 8, 32)))

    def __call__(self, x):
        positions = jnp.arange(x.shape[1])
        q = jnp.einsum("btd,ndh->btnh", x, self.q[...])
        k, v = jnp.einsum("btd,ckdh->cbtkh", x, self.kv[...])
        q, k = rotated(q, positions) * 8**-0.5, rotated(k, positions)
        b, t = q.shape[:2]
        scores = jnp.einsum("btkgh,bskh->btkgs", q.reshape(b, t, 2, 2, 8), k)
        scores = jnp.tanh(scores / 50.0) * 50.0
        mask = positions[:, None] >= positions
        scores = jnp.where(mask[:, None, None], scores, -2.3819763e38)
        attended = jnp.einsum("btkgs,bskh->btkgh", jax.nn.softmax(scores, axis=-1), v)
        return jnp.einsum("btnh,nhd->btd", attended.reshape(b, t, 4, 8), self.out[...])


class GemmaBlock(nnx.Module):
    def __init__(self, rngs):
        self.norms = nnx.List([RMSNorm(32) for _ in range(4)])
        self.attention = GroupedAttention(rngs)
        linear = functools.partial(nnx.Linear, use_bias=False, rngs=rngs)
        self.gate, self.up, self.down = linear(32, 64), linear(32, 64), linear(64, 32)

    def __call__(self, x):
        x = x + self.norms[1](self.attention(self.norms[0](x)))
        y = self.norms[2](x)
        return x + self.norms[3](self.down(nnx.gelu(self.gate(y)) * self.up(y)))


class Gemma(nnx.Module):
    def __init__(self, rngs):
        self.embedding = nnx.Param(0.2 * jax.random.normal(rngs.params(), (32, 32)))
        self.blocks = nnx.List([GemmaBlock(rngs) for _ in range(2)])
        self.norm = RMSNorm(32)

    def __call__(self, tokens):
        x = self.embedding[...][tokens] * 32**0.5
        for block in self.blocks:
            x = block(x)
        logits = jnp.dot(self.norm(x), self.embedding[...].T)
        return jnp.tanh(logits / 30.0) * 30.0


@pattern
def nnx_gemma():
    graph, params, rest = nnx.split(Gemma(nnx.Rngs(0)), nnx.Param, ...)

    def loss_fn(params, kept, key, tokens):
        logits = nnx.merge(graph, params, kept)(tokens[:, :-1])
        log_probabilities = jax.nn.log_softmax(logits, axis=-1)
        chosen = jnp.take_along_axis(log_probabilities, tokens[:, 1:, None], axis=-1)
        return -jnp.mean(chosen), kept

    return Pattern(loss_fn, params, text(32, 8, 16), rest)


# --- Haiku ---


@pattern
def haiku_lstm_with_remat():
    def forward(tokens):
        x = hk.Embed(16, 24)(tokens)
        core = hk.DeepRNN([hk.LSTM(24), jnp.tanh, hk.LSTM(24)])
        unrolled, _ = hk.dynamic_unroll(
            hk.remat(core), x, core.initial_state(tokens.shape[1])
        )
        return hk.BatchApply(hk.Linear(16))(unrolled)

    model, tokens = hk.without_apply_rng(hk.transform(forward)), text(16, 6, 12).T

    def loss_fn(params, kept, key, tokens):
        logits = model.apply(params, tokens[:-1])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[1:])
        return losses.mean(), None

    return Pattern(loss_fn, model.init(key(0), tokens[:-1]), tokens, learning_rate=1e-2)


# --- JAX alone ---


def dense(n, *shape):
    return normal(n, *shape) / np.sqrt(shape[-2])


@pattern
def selective_state_space_by_associative_scan():
    """As Mamba: decays from a softplus, a depthwise convolution, a gate."""
    d, n = 16, 4
    params = {
        "embedding": normal(0, 16, d),
        "in": dense(1, d, 2 * d),
        "conv": normal(2, 4, 1, d) / 2,
        "bc": dense(3, d, 2 * n),
        "delta": dense(4, d, d),
        "delta_bias": jnp.full(d, -2.0),
        "log_a": jnp.log(jnp.broadcast_to(jnp.arange(1.0, n + 1), (d, n))),
        "skip": jnp.ones(d),
        "norm": jnp.ones(d),
        "out": dense(5, d, d),
    }

    def mixed(p, x):
        x, gate = jnp.split(x @ p["in"], 2, -1)
        x = lax.conv_general_dilated(
            x, p["conv"], (1,), [(3, 0)], dimension_numbers=("NWC", "WIO", "NWC"),
            feature_group_count=d,
        )  # fmt: skip
        x = jax.nn.silu(x)
        b, c = jnp.split(x @ p["bc"], 2, -1)
        delta = jax.nn.softplus(x @ p["delta"] + p["delta_bias"])
        decay = jnp.exp(delta[..., None] * -jnp.exp(p["log_a"]))
        drive = (delta * x)[..., None] * b[..., None, :]
        combine = lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1])
        _, h = lax.associative_scan(combine, (decay, drive), axis=1)
        y = jnp.einsum("btdn,btn->btd", h, c) + x * p["skip"]
        return (y * jax.nn.silu(gate)) @ p["out"]

    def loss_fn(p, kept, key, tokens):
        x = p["embedding"][tokens[:, :-1]]
        norm = lambda x: (
            x * lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-5) * p["norm"]
        )
        x = x + mixed(p, norm(x))
        logits = norm(x) @ p["embedding"].T
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return losses.mean(), None

    return Pattern(loss_fn, params, text(16, 4, 20))


@pattern
def diagonal_state_space_of_complex_numbers():
    """As S5: complex parameters, whose products stay complex; the rest is in float16."""
    d, n = 16, 8
    params = {
        "a": jnp.log(jnp.linspace(0.05, 0.5, n)),
        "angle": jnp.linspace(0.1, 3, n),
        "b": dense(1, 2, d, n),
        "c": dense(2, 2, n, d),
        "in": dense(3, 6, d),
        "out": dense(4, d, 6),
    }

    def loss_fn(p, kept, key, batch):
        x, y = batch
        u = jax.nn.gelu(x @ p["in"])
        decay = jnp.exp(-jnp.exp(p["a"]) + 1j * p["angle"])
        drive = u.astype(jnp.complex64) @ (p["b"][0] + 1j * p["b"][1])
        combine = lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1])
        decays = jnp.broadcast_to(decay, drive.shape)
        _, h = lax.associative_scan(combine, (decays, drive), axis=1)
        z = (h @ (p["c"][0] + 1j * p["c"][1])).real
        return jnp.mean(((u + z) @ p["out"] - y) ** 2), None

    x = normal(0, 4, 16, 6)
    return Pattern(loss_fn, params, (x, jnp.cumsum(x, 1) / 4))


@pattern
def mixture_of_experts_by_ragged_dot():
    """Tokens are sorted by expert; with a loss that balances the experts' load."""
    d, experts = 16, 4
    params = {
        "in": dense(0, 8, d),
        "router": dense(1, d, experts),
        "up": dense(2, experts, d, 2 * d),
        "down": dense(3, experts, 2 * d, d),
        "out": dense(4, d, 8),
    }

    def mixture(p, x):
        logits = x @ p["router"]
        probabilities = jax.nn.softmax(logits)
        gates, chosen = lax.top_k(probabilities, 2)
        gates = gates / (gates.sum(-1, keepdims=True) + 1e-9)
        order = jnp.argsort(chosen.ravel())
        sizes = jnp.bincount(chosen.ravel(), length=experts).astype(jnp.int32)
        tokens = jnp.repeat(x, 2, axis=0)[order]
        y = lax.ragged_dot(
            jax.nn.silu(lax.ragged_dot(tokens, p["up"], sizes)), p["down"], sizes
        )
        y = y[jnp.argsort(order)].reshape(*gates.shape, d)
        load = jnp.mean(jax.nn.one_hot(chosen, experts).sum(1), 0)
        balance = experts * jnp.sum(load * probabilities.mean(0))
        z_loss = jnp.mean(jax.nn.logsumexp(logits, -1) ** 2)
        return jnp.einsum("tkd,tk->td", y, gates), 0.01 * balance + 1e-3 * z_loss

    def loss_fn(p, kept, key, batch):
        x, y = batch
        h = x @ p["in"]
        mixed, auxiliary = mixture(p, h)
        return jnp.mean(((h + mixed) @ p["out"] - y) ** 2) + auxiliary, None

    x = normal(9, 32, 8)
    return Pattern(loss_fn, params, (x, jnp.sin(2 * x)))


@pattern
def layers_by_scan_with_remat():
    """A stack of parameters, a layer a round, as large transformers are compiled."""
    d, layers = 16, 3
    params = {
        "embedding": normal(0, 16, d),
        "blocks": {
            "qkv": dense(1, layers, d, 3 * d),
            "out": dense(2, layers, d, d),
            "up": dense(3, layers, d, 4 * d),
            "down": dense(4, layers, 4 * d, d),
            "norms": jnp.ones((layers, 2, d)),
        },
    }

    def norm(x, scale):
        x = x - x.mean(-1, keepdims=True)
        return x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * scale

    def loss_fn(p, kept, key, tokens):
        @jax.checkpoint
        def block(x, w):
            q, k, v = jnp.split(norm(x, w["norms"][0]) @ w["qkv"], 3, -1)
            heads = lambda y: y.reshape(*y.shape[:2], 2, -1)
            x = x + jax.nn.dot_product_attention(
                heads(q), heads(k), heads(v), is_causal=True
            ).reshape(x.shape) @ w["out"]  # fmt: skip
            return x + jax.nn.gelu(norm(x, w["norms"][1]) @ w["up"]) @ w["down"], None

        x, _ = lax.scan(block, p["embedding"][tokens[:, :-1]], p["blocks"])
        logits = x @ p["embedding"].T / d**0.5
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return losses.mean(), None

    return Pattern(loss_fn, params, text(16, 4, 16))


def trained(pattern, autocast):
    """The losses of all steps, how many were skipped, and what it keeps at the end."""
    loss_scale = ols.DynamicLossScale(initial_scale=2.0**10) if autocast else None
    tx = ols.with_loss_scale(optax.adam(pattern.learning_rate), loss_scale)
    loss_fn = ols.autocast(pattern.loss_fn) if autocast else pattern.loss_fn

    def step(carry, key):
        params, kept, state = carry
        value_and_grad = ols.value_and_scaled_grad(loss_fn, state, has_aux=True)
        (loss, kept), grads = value_and_grad(params, kept, key, pattern.batch)
        params, state = tx.apply_gradients(grads, state, params)
        return (params, kept, state), loss

    carry = pattern.params, pattern.kept, tx.init(pattern.params)
    if autocast:
        assert_computes_in_float16(step, carry, key(7))
    run = jax.jit(lambda carry: lax.scan(step, carry, jax.random.split(key(7), STEPS)))
    (params, kept, state), losses = run(carry)
    dtypes = lambda tree: [x.dtype for x in jax.tree.leaves(tree)]
    assert dtypes(params) == dtypes(pattern.params)
    return losses, state.skipped_steps, kept


def assert_computes_in_float16(fun, *args):
    """All products but those of complex numbers."""
    report = ols.dtype_report(fun, *args)
    dtypes = {str(p.dtype) for p in report.products}
    assert "float16" in dtypes, report
    if "complex64" in dtypes:
        assert dtypes == {"float16", "complex64"}, report
    else:
        assert_computes_in(jnp.float16, fun, *args, many=200)


def differences_of_floats(actual, expected):
    """Those of each array of floats, relative to its norm; all arrays have equal dtypes."""
    pairs = list(zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True))
    assert [x.dtype for x, _ in pairs] == [y.dtype for _, y in pairs]
    floats = [(x, y) for x, y in pairs if jnp.issubdtype(y.dtype, jnp.floating)]
    return [np.linalg.norm(x - y) / np.linalg.norm(y) for x, y in floats]


def rounded(pattern):
    """The same in float32, of parameters and a batch that are rounded to float16 in each step."""
    is_float32 = lambda x: jnp.result_type(x) == jnp.float32
    of_leaf = lambda x: lax.reduce_precision(x, 5, 10) if is_float32(x) else x
    low = lambda tree: jax.tree.map(of_leaf, tree)
    loss_fn = lambda p, kept, key, x: pattern.loss_fn(low(p), kept, key, low(x))
    return pattern._replace(loss_fn=loss_fn)


@pytest.mark.slow
@pytest.mark.parametrize("make", PATTERNS.values(), ids=PATTERNS)
def test_thirty_steps_in_float16_end_where_float32_does(make):
    pattern = make()
    expected, _, kept = trained(pattern, autocast=False)
    losses, skipped, cast_kept = trained(pattern, autocast=True)
    assert np.mean(expected[-3:]) < 0.95 * expected[0], "the model does not learn"
    assert skipped == 0
    np.testing.assert_allclose(losses[0], expected[0], rtol=0.005)
    np.testing.assert_allclose(np.mean(losses[-3:]), np.mean(expected[-3:]), rtol=0.02)
    off = differences_of_floats(cast_kept, kept)
    if max(off, default=0) > 0.15:  # as one of a ResNet's, which follows every rounding
        _, _, rounded_kept = trained(rounded(pattern), autocast=False)
        assert max(off) <= 2 * max(differences_of_floats(rounded_kept, kept))


@pytest.mark.slow
def test_importance_ratios_of_a_policy_begin_at_one():
    def log_probabilities(weights, observations, actions):
        *hidden, last = weights
        for w in hidden:
            observations = jnp.tanh(observations @ w)
        log_softmax = jax.nn.log_softmax(observations @ last)
        return jnp.take_along_axis(log_softmax, actions[:, None], 1)[:, 0]

    weights = [
        dense(n, *shape) for n, shape in enumerate([(17, 64), (64, 64), (64, 8)])
    ]
    batch = normal(3, 4096, 17), jax.random.randint(key(4), (4096,), 0, 8)
    learning = jax.jit(ols.autocast(log_probabilities))(weights, *batch)
    acting = jax.jit(log_probabilities)(weights, *batch)
    assert 0 < jnp.max(jnp.abs(jnp.exp(learning - acting) - 1)) < 0.002
    pairs = [x[:, None] for x in batch]  # a policy acts on one observation at a time
    of_pairs = jax.vmap(ols.autocast(log_probabilities), in_axes=(None, 0, 0))
    acting = jax.jit(of_pairs)(weights, *pairs)[:, 0]
    np.testing.assert_array_equal(jnp.exp(learning - acting), 1)
