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
    eqx = pytest.importorskip("equinox")
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


class LanguageModel(nn.Module):
    """As lm1b: tied embeddings, sinusoidal positions, masks, dropout, LayerNorm before each."""

    @nn.compact
    def __call__(self, tokens, train=True):
        embed = nn.Embed(32, 32, embedding_init=nn.initializers.normal(1.0))
        inputs = jnp.pad(tokens, ((0, 0), (1, 0)))[:, :-1]
        mask = nn.combine_masks(nn.make_attention_mask(tokens >= 0, tokens >= 0),
                                nn.make_causal_mask(tokens))  # fmt: skip
        position = jnp.arange(tokens.shape[1])[:, None] / 10_000 ** (
            jnp.arange(16) / 16
        )
        x = embed(inputs) + jnp.concatenate([jnp.sin(position), jnp.cos(position)], -1)
        x = nn.Dropout(0.1, deterministic=not train)(x)
        for _ in range(2):
            y = nn.LayerNorm()(x)
            x = x + nn.MultiHeadDotProductAttention(
                4, dropout_rate=0.1, use_bias=False, deterministic=not train
            )(y, mask=mask)
            y = nn.Dense(64)(nn.LayerNorm()(x))
            x = x + nn.Dropout(0.1, deterministic=not train)(nn.Dense(32)(nn.relu(y)))
        return embed.attend(nn.LayerNorm()(x)) / jnp.sqrt(32)


@pattern
def linen_language_model():
    model, tokens = LanguageModel(), text(32, 8, 16)
    params = model.init({"params": key(0), "dropout": key(1)}, tokens)["params"]

    def loss_fn(params, kept, key, tokens):
        logits = model.apply({"params": params}, tokens, rngs={"dropout": key})
        confidence = 0.9
        targets = jax.nn.one_hot(tokens, 32) * (confidence - 0.1 / 31) + 0.1 / 31
        losses = -jnp.sum(targets * nn.log_softmax(logits), -1)
        weights = jnp.where(tokens > 0, 1, 0).astype(jnp.float32)
        return jnp.sum(losses * weights) / jnp.sum(weights), None

    return Pattern(loss_fn, params, tokens)


class UNet(nn.Module):
    """As of diffusion models: an embedding of time, GroupNorm, up and down, skips."""

    @nn.compact
    def __call__(self, x, time):
        angles = time[:, None] * 1000 * jnp.exp(-jnp.arange(8) * jnp.log(10_000) / 8)
        time = nn.Dense(16)(jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1))
        time = nn.Dense(16)(nn.swish(time))

        def block(x):
            y = nn.Conv(16, (3, 3))(nn.swish(nn.GroupNorm(4, epsilon=1e-6)(x)))
            y = y + nn.Dense(16)(nn.swish(time))[:, None, None]
            y = nn.Conv(16, (3, 3))(nn.swish(nn.GroupNorm(4)(y)))
            return nn.Conv(16, (1, 1))(x) + y

        first = block(nn.Conv(16, (3, 3))(x))
        low = block(nn.Conv(16, (3, 3), strides=(2, 2))(first))
        b, h, w, c = low.shape
        q, k, v = (nn.Dense(c)(low).reshape(b, h * w, c) for _ in range(3))
        attention = jax.nn.softmax(jnp.einsum("bqc,bkc->bqk", q, k) * c**-0.5)
        low = low + jnp.einsum("bqk,bkc->bqc", attention, v).reshape(low.shape)
        up = nn.ConvTranspose(16, (3, 3), strides=(2, 2))(low)
        up = 0.5 * up + 0.5 * jax.image.resize(low, up.shape, "nearest")
        return nn.Conv(3, (3, 3))(nn.swish(block(jnp.concatenate([first, up], -1))))


@pattern
def linen_diffusion_unet():
    model, images = UNet(), jnp.tanh(normal(0, 4, 8, 8, 3) * 2)
    params = model.init(key(0), images, jnp.ones(4))["params"]

    def loss_fn(params, kept, key, images):
        keys = jax.random.split(key)
        time = jax.random.uniform(keys[0], (4,))
        noise = jax.random.normal(keys[1], images.shape)
        alpha = jnp.cos(time * jnp.pi / 2)[:, None, None, None]
        noisy = alpha * images + jnp.sqrt(1 - alpha**2) * noise
        error = model.apply({"params": params}, noisy, time) - noise
        weight = jnp.minimum(alpha**2 / (1 - alpha**2 + 1e-8), 5.0)
        return jnp.mean(weight * error**2), None

    return Pattern(loss_fn, params, images)


class Autoencoder(nn.Module):
    @nn.compact
    def __call__(self, x, key):
        h = nn.relu(nn.Dense(64)(x))
        mean, log_variance = nn.Dense(8)(h), nn.Dense(8)(h)
        z = mean + jnp.exp(0.5 * log_variance) * jax.random.normal(key, mean.shape)
        return nn.Dense(64)(nn.relu(nn.Dense(64)(z))), mean, log_variance


@pattern
def linen_variational_autoencoder():
    model = Autoencoder()
    x = (jax.random.uniform(key(0), (16, 64)) > jnp.linspace(0, 1, 64)).astype(
        jnp.float32
    )
    params = model.init(key(1), x, key(2))["params"]

    def loss_fn(params, kept, key, x):
        logits, mean, log_variance = model.apply({"params": params}, x, key)
        logits = nn.log_sigmoid(logits)
        entropy = -jnp.sum(x * logits + (1 - x) * jnp.log(-jnp.expm1(logits)), -1)
        divergence = -0.5 * jnp.sum(
            1 + log_variance - mean**2 - jnp.exp(log_variance), -1
        )
        return entropy.mean() + divergence.mean(), None

    return Pattern(loss_fn, params, x, learning_rate=1e-3)


class ActorCritic(nn.Module):
    @nn.compact
    def __call__(self, x):
        init = functools.partial(
            nn.Dense, kernel_init=nn.initializers.orthogonal(2**0.5)
        )
        actor = nn.tanh(init(32)(nn.tanh(init(32)(x))))
        mean = nn.Dense(3, kernel_init=nn.initializers.orthogonal(0.01))(actor)
        log_std = self.param("log_std", nn.initializers.constant(-0.5), (3,))
        critic = nn.tanh(init(32)(nn.tanh(init(32)(x))))
        return mean, jnp.broadcast_to(log_std, mean.shape), nn.Dense(1)(critic)[..., 0]


@pattern
def linen_ppo():
    """Advantages by a scan, clipped ratios and values, entropy of a normal distribution."""
    model, observations = ActorCritic(), normal(0, 16, 8, 6)
    params = model.init(key(1), observations)["params"]

    def log_probability(mean, log_std, actions):
        z = (actions - mean) / jnp.exp(log_std)
        return jnp.sum(-0.5 * z**2 - log_std - 0.5 * jnp.log(2 * jnp.pi), -1)

    mean, log_std, values = model.apply({"params": params}, observations)
    actions = mean + jnp.exp(log_std) * normal(2, *mean.shape)
    old = log_probability(mean, log_std, actions) + 0.1 * normal(3, 16, 8)
    rewards = observations[..., 0] * actions[..., 0] - 0.1 * jnp.sum(actions**2, -1)
    done = jnp.zeros((16, 8)).at[7].set(1.0)

    def advantages(values):
        def step(carry, now):
            advantage, after = carry
            reward, done, value = now
            delta = reward + 0.99 * after * (1 - done) - value
            advantage = delta + 0.99 * 0.95 * (1 - done) * advantage
            return (advantage, value), advantage

        init = (jnp.zeros_like(values[0]), values[-1])
        return lax.scan(step, init, (rewards, done, values), reverse=True)[1]

    old_advantages = advantages(values)

    def loss_fn(params, kept, key, batch):
        observations, actions, old, advantage, old_values = batch
        mean, log_std, values = model.apply({"params": params}, observations)
        targets = advantage + old_values
        ratio = jnp.exp(log_probability(mean, log_std, actions) - old)
        normalized = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        clipped = jnp.clip(ratio, 0.8, 1.2) * normalized
        actor = -jnp.minimum(ratio * normalized, clipped).mean()
        near = old_values + jnp.clip(values - old_values, -0.2, 0.2)
        critic = (
            0.5 * jnp.maximum((values - targets) ** 2, (near - targets) ** 2).mean()
        )
        entropy = jnp.mean(jnp.sum(log_std + 0.5 * jnp.log(2 * jnp.pi * jnp.e), -1))
        return 1 + actor + 0.5 * critic - 0.01 * entropy, None

    batch = (observations, actions, old, old_advantages, values)
    return Pattern(loss_fn, params, batch)


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


class Recognizer(nnx.Module):
    """A convolution, a bidirectional GRU and BatchNorm, for a CTC loss."""

    def __init__(self, rngs):
        self.conv = nnx.Conv(8, 16, (3,), rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.forward = nnx.RNN(nnx.GRUCell(16, 16, rngs=rngs))
        self.backward = nnx.RNN(
            nnx.GRUCell(16, 16, rngs=rngs), reverse=True, keep_order=True
        )
        self.out = nnx.Linear(32, 6, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.norm(self.conv(x)))
        return self.out(jnp.concatenate([self.forward(x), self.backward(x)], -1))


@pattern
def nnx_ctc():
    graph, params, rest = nnx.split(Recognizer(nnx.Rngs(0)), nnx.Param, ...)
    labels = jnp.array([[1, 2, 3, 0], [2, 2, 4, 5], [5, 4, 0, 0], [3, 1, 2, 5]])
    paddings = (labels == 0).astype(jnp.float32)
    lengths = (jnp.arange(14) >= jnp.array([[14], [12], [9], [14]])).astype(jnp.float32)

    def loss_fn(params, rest, key, x):
        # what changes is a trace's own
        model = nnx.merge(graph, params, rest, copy=True)
        losses = optax.ctc_loss(model(x), lengths, labels, paddings)
        return jnp.mean(losses), nnx.state(model, nnx.Not(nnx.Param))

    return Pattern(loss_fn, params, normal(0, 4, 14, 8), rest)


# --- Haiku ---


@pattern
def haiku_transformer():
    """With `hk.scan`-free blocks, GELU, and a dropout that splits its key."""

    def forward(tokens):
        init = hk.initializers.VarianceScaling(1.0)
        x = hk.Embed(32, 32, w_init=hk.initializers.TruncatedNormal(0.5))(tokens)
        x = x + hk.get_parameter("positions", [tokens.shape[1], 32], init=jnp.zeros)
        mask = jnp.tril(jnp.ones((1, 1, tokens.shape[1], tokens.shape[1])))
        norm = lambda: hk.LayerNorm(axis=-1, create_scale=True, create_offset=True)
        for _ in range(2):
            attention = hk.MultiHeadAttention(4, 8, w_init=init, model_size=32)
            y = norm()(x)
            x = x + hk.dropout(hk.next_rng_key(), 0.1, attention(y, y, y, mask=mask))
            x = x + hk.Sequential([hk.Linear(64), jax.nn.gelu, hk.Linear(32)])(
                norm()(x)
            )
        return hk.Linear(32)(norm()(x))

    model, tokens = hk.transform(forward), text(32, 8, 16)

    def loss_fn(params, kept, key, tokens):
        logits = model.apply(params, key, tokens[:, :-1])
        targets = jax.nn.one_hot(tokens[:, 1:], 32)
        return -jnp.mean(jnp.sum(targets * jax.nn.log_softmax(logits), -1)), None

    return Pattern(loss_fn, model.init(key(0), tokens[:, :-1]), tokens)


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


# --- Equinox ---


class VisionBlock(eqx.Module):
    norms: list
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP
    dropout: eqx.nn.Dropout

    def __init__(self, key):
        keys = jax.random.split(key)
        self.norms = [eqx.nn.LayerNorm(24), eqx.nn.LayerNorm(24)]
        self.attention = eqx.nn.MultiheadAttention(3, 24, key=keys[0])
        self.mlp = eqx.nn.MLP(24, 24, 48, 1, jax.nn.gelu, key=keys[1])
        self.dropout = eqx.nn.Dropout(0.1)

    def __call__(self, x, key):
        y = jax.vmap(self.norms[0])(x)
        x = x + self.attention(y, y, y)
        y = jax.vmap(self.mlp)(jax.vmap(self.norms[1])(x))
        return x + self.dropout(y, key=key)


class VisionTransformer(eqx.Module):
    patches: eqx.nn.Conv2d
    positions: jax.Array
    token: jax.Array
    blocks: list
    head: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 6)
        self.patches = eqx.nn.Conv2d(3, 24, 4, 4, key=keys[0])
        self.positions = 0.1 * jax.random.normal(keys[1], (10, 24))
        self.token = 0.1 * jax.random.normal(keys[2], (1, 24))
        self.blocks = [VisionBlock(k) for k in keys[3:5]]
        self.head = eqx.nn.Linear(24, 4, key=keys[5])

    def __call__(self, image, key):
        x = self.patches(image).reshape(24, -1).T
        x = jnp.concatenate([self.token, x]) + self.positions
        for block, k in zip(self.blocks, jax.random.split(key, 2), strict=True):
            x = block(x, k)
        return self.head(x[0])


@pattern
def equinox_vision_transformer():
    params, static = eqx.partition(VisionTransformer(key(0)), eqx.is_inexact_array)
    images, labels = normal(1, 8, 3, 12, 12), jnp.arange(8) % 4

    def loss_fn(params, kept, key, batch):
        images, labels = batch
        model = eqx.combine(params, static)
        logits = jax.vmap(model)(images, jax.random.split(key, 8))
        return optax.softmax_cross_entropy_with_integer_labels(
            logits, labels
        ).mean(), None

    return Pattern(loss_fn, params, (images, labels))


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
def graph_attention_by_segment_sum():
    nodes, edges, d = 24, 96, 16
    rng = np.random.default_rng(0)
    senders, receivers = rng.integers(0, nodes, (2, edges))
    params = {
        "in": dense(0, 6, d),
        "edge": dense(1, 2, 2 * d + 3, d),
        "score": dense(2, 2, d, 1),
        "node": dense(3, 2, 2 * d, d),
        "out": dense(4, d, 3),
    }

    def loss_fn(p, kept, key, batch):
        x, features, labels = batch
        h = x @ p["in"]
        for layer in range(2):
            pairs = jnp.concatenate([h[senders], h[receivers], features], -1)
            message = jax.nn.leaky_relu(pairs @ p["edge"][layer])
            score = (message @ p["score"][layer])[:, 0]
            top = jax.ops.segment_max(score, receivers, nodes)
            weight = jnp.exp(score - lax.stop_gradient(top)[receivers])
            total = jax.ops.segment_sum(weight, receivers, nodes)
            weight = weight / (total[receivers] + 1e-10)
            gathered = jax.ops.segment_sum(message * weight[:, None], receivers, nodes)
            h = h + jax.nn.elu(jnp.concatenate([h, gathered], -1) @ p["node"][layer])
        degree = jnp.maximum(jnp.bincount(receivers, length=nodes), 1)[:, None]
        h = h / jnp.sqrt(degree)
        losses = optax.softmax_cross_entropy_with_integer_labels(h @ p["out"], labels)
        return losses.mean(), None

    batch = (normal(5, nodes, 6), normal(6, edges, 3), jnp.arange(nodes) % 3)
    return Pattern(loss_fn, params, batch, learning_rate=1e-3)


@pattern
def lstm_by_scan_with_remat():
    d = 24
    params = {
        "embedding": normal(0, 16, d),
        "w": dense(1, 2 * d, 4 * d),
        "b": jnp.zeros(4 * d).at[d : 2 * d].set(1.0),
        "out": dense(2, d, 16),
    }

    def loss_fn(p, kept, key, tokens):
        @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)
        def step(carry, x):
            h, c = carry
            i, f, g, o = jnp.split(jnp.concatenate([x, h], -1) @ p["w"] + p["b"], 4, -1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        x = p["embedding"][tokens[:-1]]
        start = (jnp.zeros((tokens.shape[1], d)), jnp.zeros((tokens.shape[1], d)))
        _, h = lax.scan(step, start, x)
        losses = optax.softmax_cross_entropy_with_integer_labels(
            h @ p["out"], tokens[1:]
        )
        return losses.mean(), None

    return Pattern(loss_fn, params, text(16, 6, 16).T, learning_rate=1e-2)


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


@pattern
def contrastive_pairs():
    """As CLIP: two towers, unit vectors, a learned temperature, labels on the diagonal."""
    params = {
        "image": [dense(0, 12, 32), dense(1, 32, 16)],
        "text": [dense(2, 10, 32), dense(3, 32, 16)],
        "log_temperature": jnp.log(1 / 0.07),
    }

    def loss_fn(p, kept, key, batch):
        def tower(weights, x):
            y = jax.nn.gelu(x @ weights[0]) @ weights[1]
            return y / (jnp.linalg.norm(y, axis=-1, keepdims=True) + 1e-8)

        a, b = tower(p["image"], batch[0]), tower(p["text"], batch[1])
        logits = a @ b.T * jnp.exp(jnp.minimum(p["log_temperature"], jnp.log(100.0)))
        labels = jnp.arange(logits.shape[0])
        cross = optax.softmax_cross_entropy_with_integer_labels
        return 0.5 * (
            cross(logits, labels).mean() + cross(logits.T, labels).mean()
        ), None

    return Pattern(
        loss_fn, params, (normal(4, 16, 12), normal(5, 16, 10)), learning_rate=1e-2
    )


def trained(pattern, autocast):
    """The losses of all steps, how many were skipped, and the step of the loss function."""
    loss_scale = ols.DynamicLossScale(initial_scale=2.0**10) if autocast else None
    tx = ols.with_loss_scale(optax.adam(pattern.learning_rate), loss_scale)
    loss_fn = ols.autocast(pattern.loss_fn) if autocast else pattern.loss_fn

    def step(carry, key):
        params, kept, state = carry
        value_and_grad = ols.value_and_scaled_grad(loss_fn, state, has_aux=True)
        (loss, kept), grads = value_and_grad(params, kept, key, pattern.batch)
        params, state = tx.apply_gradients(grads, state, params)
        return (params, kept, state), loss

    @jax.jit
    def run(params, kept, state):
        return lax.scan(step, (params, kept, state), jax.random.split(key(7), STEPS))

    carry = (pattern.params, pattern.kept, tx.init(pattern.params))
    if autocast:
        gradients = lambda *args: jax.value_and_grad(loss_fn, has_aux=True)(*args)
        args = (pattern.params, pattern.kept, key(7), pattern.batch)
        assert_computes_in_float16(gradients, *args)
    (params, kept, state), losses = run(*carry)
    assert jax.tree.all(
        jax.tree.map(lambda x, y: x.dtype == y.dtype, params, pattern.params)
    )
    return losses, state.skipped_steps, (params, kept)


def assert_computes_in_float16(fun, *args):
    """All products but those of complex numbers."""
    report = ols.dtype_report(fun, *args)
    assert any(p.dtype == jnp.float16 for p in report.products), report
    if any(jnp.issubdtype(p.dtype, jnp.complexfloating) for p in report.products):
        dtypes = {str(p.dtype) for p in report.products}
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
    of = pattern.loss_fn
    return pattern._replace(
        loss_fn=lambda p, kept, key, x: of(low(p), kept, key, low(x))
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", PATTERNS)
def test_thirty_steps_in_float16_end_where_float32_does(name):
    pattern = PATTERNS[name]()
    expected, _, (_, kept) = trained(pattern, autocast=False)
    losses, skipped, (_, cast_kept) = trained(pattern, autocast=True)
    assert np.mean(expected[-3:]) < 0.95 * expected[0], "the model does not learn"
    assert skipped == 0
    np.testing.assert_allclose(losses[0], expected[0], rtol=0.005)
    np.testing.assert_allclose(np.mean(losses[-3:]), np.mean(expected[-3:]), rtol=0.02)
    off = differences_of_floats(cast_kept, kept)
    if max(off, default=0) > 0.15:  # as one of a ResNet's, which follows every rounding
        _, _, (_, rounded_kept) = trained(rounded(pattern), autocast=False)
        assert max(off) <= 2 * max(differences_of_floats(rounded_kept, kept))


@pytest.mark.slow
def test_importance_ratios_of_a_policy_begin_at_one():
    def log_probabilities(weights, observations, actions):
        *hidden, last = weights
        for w in hidden:
            observations = jnp.tanh(observations @ w)
        log_softmax = jax.nn.log_softmax(observations @ last)
        return jnp.take_along_axis(log_softmax, actions[:, None], 1)[:, 0]

    normal, keys = jax.random.normal, jax.random.split(jax.random.key(0), 5)
    shapes = [(17, 64), (64, 64), (64, 8)]
    weights = [normal(k, s) * s[0] ** -0.5 for k, s in zip(keys, shapes, strict=False)]
    batch = normal(keys[3], (4096, 17)), jax.random.randint(keys[4], (4096,), 0, 8)
    learning = jax.jit(ols.autocast(log_probabilities))(weights, *batch)
    acting = jax.jit(log_probabilities)(weights, *batch)
    assert 0 < jnp.max(jnp.abs(jnp.exp(learning - acting) - 1)) < 0.002
    pairs = [x[:, None] for x in batch]  # a policy acts on one observation at a time
    of_pairs = jax.vmap(ols.autocast(log_probabilities), in_axes=(None, 0, 0))
    acting = jax.jit(of_pairs)(weights, *pairs)[:, 0]
    np.testing.assert_array_equal(jnp.exp(learning - acting), 1)
