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


def transformer(params, x, planted, in_a_scan=False):
    p = half(params)
    x = place(x @ p["embed"], "embed", planted)
    block = lambda x, parts: (transformer_block(parts[0], x, parts[1]), None)
    parts = p["blocks"], planted["blocks"]
    if in_a_scan:
        x, _ = lax.scan(jax.checkpoint(block), x, parts)
    else:
        for of_one in zip(*parts, strict=True):
            x, _ = block(x, of_one)
    return squares(place(normed(x) @ p["head"], "head", planted), planted)


# A residual convolutional net, with a convolution on the shortcut of every block.


def conv(x, w):
    return lax.conv_general_dilated(
        x, w, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
    )


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


def mixture(params, x, planted):
    p = half(params)
    x = place(x @ p["in"], "in", planted)
    gates = place(jax.nn.softmax(normed(x) @ p["router"]), "router", planted)
    mixed = 0
    for i, expert in enumerate(p["ex"]):
        y = jax.nn.gelu(x @ expert["w1"]) @ expert["w2"]
        mixed += gates[..., i, None] * place(y, i, planted["ex"])
    return squares(place(mixed @ p["out"], "out", planted), planted)


def autoencoder(params, x, planted):
    p = half(params)
    at = lambda x, name: place(x @ p[name], name, planted)
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


def blocks(n, *names):
    return [{name: at() for name in names} for _ in range(n)]


def is_shape(x):
    return isinstance(x, tuple)


SQUARE = (WIDTH, WIDTH)
ATTENTION = {"qkv": (WIDTH, 3 * WIDTH), "out": SQUARE}
BLOCK = {"attn": ATTENTION, "mlp": {"up": SQUARE, "down": SQUARE}}
STACKED = jax.tree.map(lambda shape: (4, *shape), BLOCK, is_leaf=is_shape)
IN_A_BLOCK = "scores", "attn", "mlp"
KERNEL = (3, WIDTH, WIDTH)
IN_A_STEP = {"pre": at(3, LENGTH), "hidden": at(3, LENGTH)}
# Of each the loss, the shapes of its parameters, and its places.
MODELS = {
    "transformer": (
        transformer,
        {"embed": (3, WIDTH), "blocks": [BLOCK] * 4, "head": (WIDTH, 5)},
        {"embed": at(), "blocks": blocks(4, *IN_A_BLOCK), "head": at()},
    ),
    "scanned transformer": (
        functools.partial(transformer, in_a_scan=True),
        {"embed": (3, WIDTH), "blocks": STACKED, "head": (WIDTH, 5)},
        {"embed": at(), "blocks": {name: at(4) for name in IN_A_BLOCK}, "head": at()},
    ),
    "conv net, accumulated": (
        functools.partial(accumulated, conv_net),
        {
            "stem": (3, 3, WIDTH),
            "blocks": [dict.fromkeys(("conv1", "conv2", "shortcut"), KERNEL)] * 3,
        },
        {"stem": at(), "blocks": blocks(3, "conv1", "conv2", "shortcut", "sum")},
    ),
    "rnn": (
        rnn,
        {
            "embed": (3, WIDTH),
            "layers": {"inner": (3, *SQUARE), "outer": (3, *SQUARE)},
        },
        {"embed": at(), "layers": {"steps": IN_A_STEP, "sum": at(3)}},
    ),
    "mixture of experts, vmapped": (
        functools.partial(vmapped, mixture),
        {
            "in": (3, WIDTH),
            "router": (WIDTH, 4),
            "ex": [{"w1": SQUARE, "w2": SQUARE}] * 4,
            "out": SQUARE,
        },
        {"in": at(), "router": at(), "ex": [at()] * 4, "out": at()},
    ),
    "autoencoder": (
        autoencoder,
        {"hidden": (3, WIDTH)}
        | dict.fromkeys(("mean", "log_variance", "decoder"), SQUARE),
        {name: at() for name in ("hidden", "mean", "log_variance", "z", "decoder")},
    ),
}


def key_of(entry):
    """A key of a dict, or an index of a list, from a path."""
    return entry.key if hasattr(entry, "key") else entry.idx


def with_fault(model, path=(), turn=(), kind=None):
    """The loss function of a model, and its inputs with one fault or none."""
    loss_fn, shapes, places = MODELS[model]
    planted = jax.tree.map(np.copy, places) | {"the loss": at(), "divergence": at()}
    if path:
        inside = functools.reduce(lambda tree, key: tree[key_of(key)], path, planted)
        inside[turn] = KINDS[kind]
    rng = np.random.default_rng(7)
    weight = lambda shape: jnp.float32(rng.normal(size=shape) * shape[-2] ** -0.5)
    params = jax.tree.map(weight, shapes, is_leaf=is_shape)
    x = rng.normal(size=(BATCH, LENGTH, 3))
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
