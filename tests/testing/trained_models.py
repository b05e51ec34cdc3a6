"""Small models as they are trained in float16, each as a step and its arguments for a seed."""

import functools

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

import optax_lossscale as ols


class MLP(nn.Module):
    drops: bool = False

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(32)(x))
        if self.drops:
            x = nn.Dropout(0.3, deterministic=False)(x)
        return nn.Dense(4)(nn.relu(nn.Dense(32)(x)))


class Attention(nn.Module):
    """With Flax's default bias of the keys, whose gradient is zero in theory.

    Small numbers before a layer norm have large gradients, so that others underflow.
    """

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(32)(x / 1000)
        for _ in range(2):
            x = x + nn.MultiHeadDotProductAttention(2)(nn.LayerNorm()(x))
        return nn.Dense(4)(nn.LayerNorm()(x)).mean(1)


class Transformer(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(32, 16)(tokens)
        mask = nn.make_causal_mask(tokens)
        for _ in range(2):
            y = nn.LayerNorm()(x)
            x = x + nn.MultiHeadDotProductAttention(2)(y, mask=mask)
            y = nn.LayerNorm()(x)
            x = x + nn.Dense(16)(nn.gelu(nn.Dense(32)(y)))
        return nn.Dense(32)(nn.LayerNorm()(x))


class ResNet(nn.Module):
    """With Flax's default bias before each batch norm, whose gradient is zero in theory."""

    @nn.compact
    def __call__(self, x):
        norm = functools.partial(nn.BatchNorm, use_running_average=False)
        x = nn.relu(norm()(nn.Conv(8, (3, 3))(x)))
        for filters in (8, 16):
            y = nn.relu(norm()(nn.Conv(filters, (3, 3))(x)))
            y = norm()(nn.Conv(filters, (3, 3))(y))
            x = nn.relu(norm()(nn.Conv(filters, (1, 1))(x)) + y)
        return nn.Dense(10)(x.mean((1, 2)))


INNER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))


def step_of(model, x, y, seed, dtype=jnp.float32, inner=INNER):
    """A step of a model on a batch of images, vectors or tokens with labels."""
    tx = ols.with_loss_scale(inner)
    keys = {"params": jax.random.key(seed), "dropout": jax.random.key(seed + 1)}
    variables = model.init(keys, x)
    params = jax.tree.map(lambda p: p.astype(dtype), variables.pop("params"))

    @jax.jit
    def step(params, rest, state, key, x, y):
        key, now = jax.random.split(key)

        @ols.autocast
        def loss_fn(params):
            logits, changed = model.apply(
                {"params": params, **rest}, x, mutable=list(rest), rngs={"dropout": now}
            )
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, y)
            return losses.mean(), (changed, (logits.argmax(-1) == y).mean())

        grad_fn = ols.value_and_scaled_grad(loss_fn, state, has_aux=True)
        (loss, (changed, accuracy)), scaled_grads = grad_fn(params)
        norm = optax.tree.norm(ols.get_loss_scale(state).unscale(scaled_grads))
        params, state = tx.apply_gradients(scaled_grads, state, params, value=loss)
        logged = {"loss": loss, "accuracy": accuracy, "norm": norm}
        logged |= {f"train/{name}": x for name, x in ols.metrics(state).items()}
        return params, ols.where_applied(state, changed, rest), state, key, logged

    return step, (params, variables, tx.init(params), jax.random.key(seed), x, y)


def data(seed, shape, classes, labels=None):
    keys = jax.random.split(jax.random.key(100 + seed))
    x = jax.random.normal(keys[0], shape)
    return x, jax.random.randint(keys[1], labels or shape[:1], 0, classes)


def mlp(seed, drops=False, **options):
    return step_of(MLP(drops), *data(seed, (32, 8), 4), seed, **options)


def transformer(seed):
    _, tokens = data(seed, (8,), 32, (8, 12))
    return step_of(Transformer(), tokens, jnp.roll(tokens, -1, 1), seed)


def attention(seed):
    return step_of(Attention(), *data(seed, (16, 16, 2), 4), seed)


def resnet(seed, **options):
    return step_of(ResNet(), *data(seed, (16, 8, 8, 3), 10), seed, **options)


MODELS = {
    "mlp": mlp,
    "mlp with sgd": lambda seed: mlp(seed, inner=optax.sgd(0.1, 0.9)),
    "dropout": lambda seed: mlp(seed, drops=True),
    "attention": attention,
    "transformer": transformer,
    "resnet": resnet,
    "resnet with sgd": lambda seed: resnet(seed, inner=optax.sgd(0.1, 0.9)),
    "bfloat16 parameters": lambda seed: mlp(seed, dtype=jnp.bfloat16),
    "bfloat16 resnet": lambda seed: resnet(seed, dtype=jnp.bfloat16),
    "master weights": lambda seed: mlp(
        seed, dtype=jnp.bfloat16, inner=ols.with_master_weights(optax.adamw(1e-3))
    ),
}
