"""Trains a transformer in float32, and in float16 without and with a loss scale.

The loss is a mean over a global batch of 1024 micro-batches, so gradients underflow in
float16. To save time, each step computes only one micro-batch and multiplies its
unscaled gradient by 1024. Run it with `python -m optax_lossscale.demo`.
"""

import pathlib
import sys
import sysconfig

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_lossscale as ols

STEPS, MICRO_BATCHES, BATCH, CONTEXT = 300, 1024, 16, 64
BYTES, WIDTH, HEADS, BLOCKS = 256, 64, 4, 2


def batches(steps):
    """Draws excerpts of Python's standard library: (steps, BATCH, CONTEXT + 1) bytes."""
    files = sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8)
    starts = np.random.default_rng(0).integers(len(text) - CONTEXT, size=(steps, BATCH))
    return text[starts[..., None] + np.arange(CONTEXT + 1)].astype(np.int32)


def init(key):
    """Draws the initial parameters, a tree of float32 arrays."""
    keys = iter(jax.random.split(key, 4 * BLOCKS + 3))

    def normal(n_in, n_out):
        return jax.random.normal(next(keys), (n_in, n_out)) * n_in**-0.5

    def init_block():
        return {
            "qkv": normal(WIDTH, 3 * WIDTH),
            "out": normal(WIDTH, WIDTH),
            "up": normal(WIDTH, 4 * WIDTH),
            "down": normal(4 * WIDTH, WIDTH),
        }

    return {
        "embedding": normal(BYTES, WIDTH) * 4,
        "position": normal(CONTEXT, WIDTH) * 0.5,
        "blocks": [init_block() for _ in range(BLOCKS)],
        "head": normal(WIDTH, BYTES),
    }


def loss(params, tokens):
    """Computes the mean cross-entropy of the next bytes, in nats."""
    x = params["embedding"][tokens[:, :-1]] + params["position"]
    for weights in params["blocks"]:
        qkv = jax.nn.standardize(x) @ weights["qkv"]
        q, k, v = jnp.split(qkv.reshape(*x.shape[:2], HEADS, -1), 3, axis=-1)
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x += mixed.reshape(x.shape) @ weights["out"]
        x += jax.nn.gelu(jax.nn.standardize(x) @ weights["up"]) @ weights["down"]
    logits = jax.nn.standardize(x) @ params["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def mean_loss(params, tokens):
    """Computes one micro-batch's term of the mean over all of them."""
    return loss(params, tokens) / MICRO_BATCHES


in_float16 = ols.autocast(mean_loss)
# The scale grows after 10 finite steps, not 2000, to show how it adapts.
RUNS = {
    "float32": (mean_loss, None),
    "float16, no loss scale": (in_float16, None),
    "float16, dynamic scale": (in_float16, ols.DynamicLossScale(growth_interval=10)),
}


def train(loss_fn, loss_scale):
    """Trains the model once; returns the metrics, each of shape (STEPS,)."""
    rate = optax.warmup_cosine_decay_schedule(0.0, 3e-3, STEPS // 10, STEPS + 1)
    clip, adamw = optax.clip_by_global_norm(1.0), optax.adamw(rate)
    inner = optax.chain(optax.scale(MICRO_BATCHES), clip, adamw)
    tx = ols.with_loss_scale(inner, loss_scale)

    @jax.jit
    def train_step(params, state, tokens):
        loss, params, state = tx.minimize(loss_fn, state, params, tokens)
        return params, state, ols.metrics(state) | {"loss": loss * MICRO_BATCHES}

    params, history = init(jax.random.key(0)), []
    state = tx.init(params)
    for tokens in batches(STEPS):
        params, state, metrics = train_step(params, state, tokens)
        history.append(metrics)
    return jax.tree.map(lambda *values: np.stack(values), *history)


def main():
    """Trains the model once for each run, prints a table and saves a picture."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        sys.exit("The demo needs matplotlib: pip install 'optax_lossscale[demo]'")
    figure = Figure(figsize=(7, 5.5), layout="constrained")
    loss_axes, scale_axes = figure.subplots(2, sharex=True, height_ratios=(2, 1))
    loss_axes.set_title("The loss is divided by 1024: gradients underflow in float16.")
    loss_axes.set_ylabel("loss (nats per byte, running mean)")
    print(__doc__, "| run | loss of last 40 steps | skipped | last scale |", sep="\n")
    print("| --- | ---: | ---: | ---: |", flush=True)
    for name, (loss_fn, loss_scale) in RUNS.items():
        history = train(loss_fn, loss_scale)
        mean = history["loss"][-40:].mean()
        last = f"{history['skipped_steps'][-1]} | 2^{history['log2_loss_scale'][-1]:g}"
        print(f"| {name} | {mean:.4f} | {last} |", flush=True)
        # Another run draws over the line of float32, which is therefore wider.
        style = {"lw": 6, "alpha": 0.3} if name == "float32" else {"lw": 1.3}
        means = np.convolve(history["loss"], np.full(10, 0.1), "valid")
        [line] = loss_axes.plot(range(10, STEPS + 1), means, label=name, **style)
        if loss_scale is not None:
            ols.plot.loss_scale(history, scale_axes, color=line.get_color())
    loss_axes.legend(loc="upper center")
    figure.savefig("loss_scaling.png", dpi=160)
    print("Picture: loss_scaling.png")


if __name__ == "__main__":
    main()
