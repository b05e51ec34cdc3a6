"""Trains a transformer in float32, and in float16 with and without loss scaling.

The loss is a mean over a global batch of 1024 micro-batches, so gradients underflow in
float16. To save time, each step computes only one micro-batch and multiplies its
unscaled gradient by 1024.
"""

import argparse
import sys

import jax
import numpy as np
import optax
from numpy.lib.stride_tricks import sliding_window_view

import optax_lossscale as ols
from optax_lossscale.demo import _model, _text

MICRO_BATCHES = 1024
PICTURE = "loss_scaling.png"

LAST_STEPS = 40
"""The printed loss is the mean over this many steps, the last of a run."""

HEADER = f"""\
| run | loss of last {LAST_STEPS} steps | skipped | last scale |
| --- | ---: | ---: | ---: |"""


def loss_in_float32(params, tokens):
    """Computes one micro-batch's term of the mean loss: its loss divided by 1024."""
    return _model.loss(params, tokens) / MICRO_BATCHES


loss_in_float16 = ols.autocast(loss_in_float32)

RUNS = {
    "float32": (loss_in_float32, None),
    "float16, no loss scaling": (loss_in_float16, None),
    "float16, fixed scale": (loss_in_float16, 128),
    "float16, dynamic scale": (
        loss_in_float16,
        ols.DynamicLossScale(growth_interval=15),
    ),
}
"""The loss function and the loss scale of each run.

The dynamic scale grows after 15 finite steps instead of 2000, so that a short run shows
how it adapts.
"""


def make_train_step(loss_fn, loss_scale, steps):
    """Builds the wrapped optimizer and a compiled training step that uses it."""
    learning_rate = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=3e-3,
        warmup_steps=steps // 10,
        decay_steps=steps + 1,
    )
    optimizer = optax.chain(
        optax.scale(MICRO_BATCHES),
        optax.clip_by_global_norm(1.0),
        optax.adamw(learning_rate),
    )
    tx = ols.with_loss_scale(optimizer, loss_scale)

    @jax.jit
    def train_step(params, state, tokens):
        loss, params, state = tx.minimize(loss_fn, state, params, tokens)
        metrics = ols.metrics(state)
        metrics["loss"] = loss * MICRO_BATCHES
        return params, state, metrics

    return tx, train_step


def train(loss_fn, loss_scale, steps):
    """Trains the model once; returns the metrics, each of shape (steps,)."""
    tx, train_step = make_train_step(loss_fn, loss_scale, steps)
    params = _model.init(jax.random.key(0))
    state = tx.init(params)
    text = _text.read()
    batches = _text.batches(text, steps, seed=0)
    history = []
    for tokens in batches:
        params, state, metrics = train_step(params, state, tokens)
        history.append(metrics)
    return jax.tree.map(lambda *values: np.stack(values), *history)


def row(name, history):
    """Formats the table's row for a run."""
    final_loss = history["loss"][-LAST_STEPS:].mean()
    skipped = history["skipped_steps"][-1]
    exponent = history["log2_loss_scale"][-1]
    return f"| {name} | {final_loss:.4f} | {skipped} | 2^{exponent:g} |"


def draw(name, history, loss_axes, scale_axes):
    """Draws a run's loss, as a running mean over ten steps, and its loss scale."""
    # The two scaled runs draw over the line of float32, which is therefore wider.
    width = 5 if name == "float32" else 1.3
    losses = history["loss"]
    window = min(10, len(losses))
    means = sliding_window_view(losses, window).mean(axis=1)
    steps = range(window, len(losses) + 1)
    [line] = loss_axes.plot(steps, means, label=name, lw=width, alpha=0.5)
    color = line.get_color()
    ols.plot.loss_scale(history, scale_axes, color=color, lw=width, alpha=0.5)


def new_figure():
    """Returns an empty figure, or exits with an error if matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        sys.exit("The demo needs matplotlib: pip install 'optax_lossscale[demo]'")
    return Figure(figsize=(7, 5.5), layout="constrained")


def main(arguments=None):
    """Trains the model once for each run, prints a table and saves a plot."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400, help="of each run")
    steps = parser.parse_args(arguments).steps
    if steps < 1:
        parser.error(f"--steps must be at least 1, got {steps}")
    figure = new_figure()
    loss_axes, scale_axes = figure.subplots(2, sharex=True, height_ratios=(2, 1))
    loss_axes.set(
        title="The loss is divided by 1024, so gradients underflow in float16.",
        ylabel="loss (nats per byte, running mean)",
    )
    print(f"{__doc__}\n{HEADER}", flush=True)
    for name, (loss_fn, loss_scale) in RUNS.items():
        history = train(loss_fn, loss_scale, steps)
        print(row(name, history), flush=True)
        draw(name, history, loss_axes, scale_axes)
    loss_axes.legend(loc="upper center")
    figure.savefig(PICTURE, dpi=160)
    print("Picture:", PICTURE)


if __name__ == "__main__":
    main()
