"""Draws docs/_static's logo and icon, a loss scale that grows and backs off, with `plot`.

To draw them again, run `python docs/logo.py`. The same matplotlib gives the same files.
"""

import os
import pathlib

import jax
import jax.numpy as jnp
import matplotlib
import optax

matplotlib.use("agg")
import matplotlib.pyplot as plt

import optax_lossscale as ols
from optax_lossscale import plot

STATIC = pathlib.Path(__file__).parent / "_static"
LIGHT = {"line": "#00798c", "cross": "#d1495b"}
DARK = {"line": "#5cc8d7", "cross": "#ff8a98"}
GRADS = jnp.array([1, 1, 1, 1, jnp.inf, 1, 1])


def history():
    """The metrics of a few steps: doubled at the finite ones, a quarter at the other."""
    scale = ols.DynamicLossScale(2.0, growth_interval=1, backoff_factor=0.25)
    tx = ols.with_loss_scale(optax.sgd(0.1), scale)

    def step(state, grad):
        state = tx.update(grad, state)[1]
        return state, ols.metrics(state)

    return jax.lax.scan(step, tx.init(jnp.zeros(())), GRADS)[1]


def draw(name: str, colors: dict[str, str]):
    """Draws the loss scale of `history` as a picture of one inch by one, with no axes."""
    figure, axes = plt.subplots(figsize=(1, 1))
    axes.set_position((0.02, 0.02, 0.96, 0.96))
    plot.loss_scale(history(), axes, color=colors["line"], lw=6.5)
    _, crosses = axes.lines
    crosses.set(
        color=colors["cross"], markersize=14, markeredgewidth=5.5, clip_on=False
    )
    axes.margins(0.08, 0.15)
    axes.set_axis_off()
    figure.savefig(STATIC / name, transparent=True)
    plt.close(figure)


if __name__ == "__main__":
    # or ids would differ from run to run,
    plt.rcParams["svg.hashsalt"] = "optax_lossscale"
    os.environ["SOURCE_DATE_EPOCH"] = "0"  # and dates
    draw("logo-light.svg", LIGHT)
    draw("logo-dark.svg", DARK)
    draw("favicon.png", LIGHT)
