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
    hk = pytest.importorskip("haiku")

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

STEPS = 30
PATTERNS = {}


class Pattern(NamedTuple):
    """A loss function of parameters, what else it keeps from step to step, and a batch."""

    loss_fn: Any  # (params, kept, batch) -> (loss, kept)
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

    def loss_fn(params, stats, batch):
        images, labels = batch
        variables = {"params": params, "batch_stats": stats}
        logits, new = model.apply(variables, images, mutable=["batch_stats"])
        loss = optax.softmax_cross_entropy(logits, jax.nn.one_hot(labels, 4)).mean()
        return loss, new["batch_stats"]

    params, stats = variables["params"], variables["batch_stats"]
    return Pattern(loss_fn, params, (images, labels), stats)


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

    def loss_fn(params, kept, tokens):
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

    def loss_fn(p, kept, tokens):
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

    def loss_fn(p, kept, batch):
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

    def loss_fn(p, kept, tokens):
        @jax.checkpoint
        def block(x, w):
            q, k, v = jnp.split(norm(x, w["norms"][0]) @ w["qkv"], 3, -1)
            heads = lambda y: y.reshape(*y.shape[:2], 2, -1)
            x = x + jax.nn.dot_product_attention(
                heads(q), heads(k), heads(v), is_causal=True
            ).reshape(x.shape) @ w["out"]  # fmt: skip
            return x + jax.nn.gelu(norm(x, w["norms"][1]) @ w["up"]) @ w["down"], None

        x, _ = lax.scan(block, p["embedding"][tokens[:, :-1]], p["blocks"])
        logits = 30 * jnp.tanh(x @ p["embedding"].T / d**0.5 / 30)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return losses.mean(), None

    return Pattern(loss_fn, params, text(16, 4, 16))


def trained(pattern, autocast):
    """The losses of all steps, and how many were skipped."""
    loss_scale = ols.DynamicLossScale(initial_scale=2.0**10) if autocast else None
    tx = ols.with_loss_scale(optax.adam(pattern.learning_rate), loss_scale)
    loss_fn = ols.autocast(pattern.loss_fn) if autocast else pattern.loss_fn

    def step(carry, _):
        params, kept, state = carry
        value_and_grad = ols.value_and_scaled_grad(loss_fn, state, has_aux=True)
        (loss, kept), grads = value_and_grad(params, kept, pattern.batch)
        params, state = tx.apply_gradients(grads, state, params)
        return (params, kept, state), loss

    carry = pattern.params, pattern.kept, tx.init(pattern.params)
    if autocast:
        assert_computes_in(jnp.float16, step, carry, None, many=200)
    run = jax.jit(lambda carry: lax.scan(step, carry, length=STEPS))
    (params, _, state), losses = run(carry)
    dtypes = lambda tree: [x.dtype for x in jax.tree.leaves(tree)]
    assert dtypes(params) == dtypes(pattern.params)
    return losses, state.skipped_steps


@pytest.mark.slow
@pytest.mark.parametrize("make", PATTERNS.values(), ids=PATTERNS)
def test_thirty_steps_in_float16_end_where_float32_does(make):
    pattern = make()
    expected, _ = trained(pattern, autocast=False)
    losses, skipped = trained(pattern, autocast=True)
    assert np.mean(expected[-3:]) < 0.95 * expected[0], "the model does not learn"
    assert skipped == 0
    np.testing.assert_allclose(losses[0], expected[0], rtol=0.005)
    np.testing.assert_allclose(np.mean(losses[-3:]), np.mean(expected[-3:]), rtol=0.02)


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
