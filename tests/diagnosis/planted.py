"""Six float16 models, in which a fault can be planted at the end of each layer.

A fault is data: which kind of it is planted at which place.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

WIDTH, LENGTH, BATCH = 8, 6, 4
KINDS = {"overflow": 1, "nan": 2, "backward overflow": 3, "backward nan": 4}


@jax.custom_vjp
def hazard(x, kind):
    """The identity, or what the kind of fault makes of it or of its gradient."""
    return spoiled(x, kind == 1, kind == 2)


def spoiled(x, overflows, has_nan):
    gain = jnp.where(overflows, 6e4, 1.0).astype(x.dtype)
    first = jnp.arange(x.size).reshape(x.shape) == 0
    return jnp.where(first & has_nan, jnp.sqrt(-jnp.abs(x) - 1), x * gain * gain)


hazard.defvjp(
    lambda x, kind: (hazard(x, kind), kind),
    lambda kind, g: (spoiled(g, kind == 3, kind == 4), jnp.zeros_like(kind)),
)


def place(x, name, planted):
    """The end of a layer, and a fault, if one is planted there."""
    with jax.named_scope(f"end_of_{name}"):
        return hazard(x, planted[name])


def half(params):
    return jax.tree.map(lambda w: w.astype(jnp.float16), params)


def normed(x):
    wide = x.astype(jnp.float32)
    return (wide * lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-3)).astype(
        x.dtype
    )


def squares(x, planted):
    return jnp.mean(hazard(x, planted["the loss"]).astype(jnp.float32) ** 2)


class Weights:
    """Matrices, each from the next seed."""

    def __init__(self):
        self._seeds = itertools.count()

    def __call__(self, *shape):
        rng = np.random.default_rng(next(self._seeds))
        return jnp.asarray(rng.normal(size=shape) * shape[-2] ** -0.5, jnp.float32)


def stacked(layers):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)


# A transformer: embed, blocks of attention and a multi-layer perceptron, head.


def transformer_block(p, x, planted):
    q, k, v = jnp.split(normed(x) @ p["attn"]["qkv"], 3, -1)
    scores = jnp.where(jnp.tri(LENGTH, dtype=bool), q @ k.mT * WIDTH**-0.5, -jnp.inf)
    scores = place(scores, "scores", planted)
    attn = (
        jax.nn.softmax(scores.astype(jnp.float32)).astype(v.dtype)
        @ v
        @ p["attn"]["out"]
    )
    x = x + place(attn, "attn", planted)
    mlp = jax.nn.gelu(normed(x) @ p["mlp"]["up"]) @ p["mlp"]["down"]
    return x + place(mlp, "mlp", planted)


def transformer_params(join):
    weights = Weights()
    block = lambda: {
        "attn": {"qkv": weights(WIDTH, 3 * WIDTH), "out": weights(WIDTH, WIDTH)},
        "mlp": {"up": weights(WIDTH, WIDTH), "down": weights(WIDTH, WIDTH)},
    }
    blocks = join([block() for _ in range(4)])
    return {"embed": weights(3, WIDTH), "blocks": blocks, "head": weights(WIDTH, 5)}


def transformer(params, x, planted):
    p = half(params)
    x = place(x @ p["embed"], "embed", planted)
    for parts in zip(p["blocks"], planted["blocks"], strict=True):
        x = transformer_block(parts[0], x, parts[1])
    return squares(place(normed(x) @ p["head"], "head", planted), planted)


def scanned_transformer(params, x, planted):
    p = half(params)
    x = place(x @ p["embed"], "embed", planted)

    @jax.checkpoint
    def block(x, slices):
        return transformer_block(slices[0], x, slices[1]), None

    x, _ = lax.scan(block, x, (p["blocks"], planted["blocks"]))
    return squares(place(normed(x) @ p["head"], "head", planted), planted)


# A residual convolutional net, with a convolution on the shortcut of every block.


def conv(x, w):
    return lax.conv_general_dilated(
        x, w, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
    )


def conv_params():
    weights = Weights()
    block = lambda: {
        name: weights(3, WIDTH, WIDTH) for name in ("conv1", "conv2", "shortcut")
    }
    return {"stem": weights(3, 3, WIDTH), "blocks": [block(), block(), block()]}


def conv_net(params, x, planted):
    p = half(params)
    x = place(conv(x, p["stem"]), "stem", planted)
    for w, rest in zip(p["blocks"], planted["blocks"], strict=True):
        y = jax.nn.relu(place(conv(normed(x), w["conv1"]), "conv1", rest))
        y = place(conv(y, w["conv2"]), "conv2", rest)
        x = y + place(conv(x, w["shortcut"]), "shortcut", rest)
        x = place(x, "sum", rest)
    return squares(x, planted)


# A recurrent net by two scans: over time, inside one over layers.


def rnn_params():
    weights = Weights()
    layer = lambda: {"inner": weights(WIDTH, WIDTH), "outer": weights(WIDTH, WIDTH)}
    return {"embed": weights(3, WIDTH), "layers": stacked([layer() for _ in range(3)])}


def rnn(params, x, planted):
    p = half(params)
    x = place(x @ p["embed"], "embed", planted)

    def layer(x, slices):
        p, planted = slices

        def step(h, slices):
            x, rest = slices
            pre = place(x @ p["inner"] + h @ p["outer"], "pre", rest)
            h = place(jnp.tanh(pre), "hidden", rest)
            return h, h

        time = (x.swapaxes(0, 1), planted["steps"])
        _, y = lax.scan(step, jnp.zeros_like(x[:, 0]), time)
        return place(x + y.swapaxes(0, 1), "sum", planted), None

    x, _ = lax.scan(layer, x, (p["layers"], planted["layers"]))
    return squares(x, planted)


# A mixture of experts, and an autoencoder with a head for the mean and one for the
# variance.


def mixture_params():
    weights = Weights()
    expert = lambda: {"w1": weights(WIDTH, WIDTH), "w2": weights(WIDTH, WIDTH)}
    return {
        "in": weights(3, WIDTH),
        "router": weights(WIDTH, 4),
        "ex": [expert() for _ in range(4)],
        "out": weights(WIDTH, WIDTH),
    }


def mixture(params, x, planted):
    p = half(params)
    x = place(x @ p["in"], "in", planted)
    gates = place(jax.nn.softmax(normed(x) @ p["router"]), "router", planted)
    mixed = 0
    for i, expert in enumerate(p["ex"]):
        y = jax.nn.gelu(x @ expert["w1"]) @ expert["w2"]
        mixed += gates[..., i, None] * place(y, i, planted["ex"])
    return squares(place(mixed @ p["out"], "out", planted), planted)


def autoencoder_params():
    weights = Weights()
    names = ("hidden", "mean", "log_variance", "decoder")
    return {
        name: {"w": weights(3 if name == "hidden" else WIDTH, WIDTH)} for name in names
    }


def autoencoder(params, x, planted):
    p = half(params)
    at = lambda x, name: place(x @ p[name]["w"], name, planted)
    h = jnp.tanh(at(x, "hidden"))
    mean, log_variance = at(h, "mean"), at(h, "log_variance")
    noise = jnp.linspace(-1, 1, mean.size).reshape(mean.shape).astype(mean.dtype)
    z = place(mean + noise * jnp.exp(log_variance / 2), "z", planted)
    wide, log_wide = mean.astype(jnp.float32), log_variance.astype(jnp.float32)
    log_wide = hazard(log_wide, planted["divergence"])
    divergence = jnp.mean(wide**2 + jnp.exp(log_wide) - log_wide)
    return squares(at(z, "decoder"), planted) + divergence


# --- how they are called ---


def vmapped(loss_fn, params, x, planted):
    """Of each example alone."""
    return jnp.mean(jax.vmap(loss_fn, (None, 0, None))(params, x, planted))


def accumulated(loss_fn, params, x, planted):
    """Micro-batches, of which the second has the fault."""

    def micro_step(total, number_and_batch):
        i, x = number_and_batch
        on = jax.tree.map(lambda kind: kind * (i == 1), planted)
        return total + loss_fn(params, x, on), None

    return lax.scan(micro_step, jnp.float32(0), (jnp.arange(BATCH), x[:, None]))[0]


def at(*shape):
    """No fault, in each round of the loops around a place."""
    return np.zeros(shape, np.float32)


def blocks(*names):
    return [{name: at() for name in names} for _ in range(3)]


TRANSFORMER = {
    "embed": at(),
    "blocks": [*blocks("scores", "attn", "mlp")],
    "head": at(),
}
TRANSFORMER["blocks"].append({name: at() for name in ("scores", "attn", "mlp")})
MODELS = {
    "transformer": (transformer, transformer_params(list), TRANSFORMER),
    "scanned transformer": (
        scanned_transformer,
        transformer_params(stacked),
        {
            "embed": at(),
            "blocks": {name: at(4) for name in ("scores", "attn", "mlp")},
            "head": at(),
        },
    ),
    "conv net, accumulated": (
        functools.partial(accumulated, conv_net),
        conv_params(),
        {"stem": at(), "blocks": blocks("conv1", "conv2", "shortcut", "sum")},
    ),
    "rnn": (
        rnn,
        rnn_params(),
        {
            "embed": at(),
            "layers": {
                "steps": {"pre": at(3, LENGTH), "hidden": at(3, LENGTH)},
                "sum": at(3),
            },
        },
    ),
    "mixture of experts, vmapped": (
        functools.partial(vmapped, mixture),
        mixture_params(),
        {"in": at(), "router": at(), "ex": [at()] * 4, "out": at()},
    ),
    "autoencoder": (
        autoencoder,
        autoencoder_params(),
        {name: at() for name in ("hidden", "mean", "log_variance", "z", "decoder")},
    ),
}


def key_of(entry):
    """A key of a dict, or an index of a list, from a path."""
    return entry.key if hasattr(entry, "key") else entry.idx


def with_fault(model, path=(), turn=(), kind=None):
    """The loss function of a model, and its inputs with one fault or none."""
    loss_fn, params, places = MODELS[model]
    planted = jax.tree.map(np.copy, places) | {"the loss": at(), "divergence": at()}
    if path:
        inside = functools.reduce(lambda tree, key: tree[key_of(key)], path, planted)
        inside[turn] = KINDS[kind]
    x = np.random.default_rng(7).normal(size=(BATCH, LENGTH, 3))
    return loss_fn, params, jnp.asarray(x, jnp.float16), planted


def faults(model):
    """A fault at every place, one kind after the other."""
    kinds = itertools.cycle(KINDS)
    for path, kind_at in jax.tree.leaves_with_path(MODELS[model][2]):
        yield path, tuple(n // 2 for n in kind_at.shape), next(kinds)


def is_at(row, name, turn):
    """Whether a row is where the fault was planted."""
    is_line = row.line.endswith(("(spoiled)", "(place)", "(hazard)"))
    is_layer = f"end_of_{name}" in row.layer
    in_turn = row.iterations[len(row.iterations) - len(turn) :] == turn
    return is_line and is_layer and in_turn
