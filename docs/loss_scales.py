"""Draws docs/loss_scales.png: all presets fed the same sequence. Run from the repository root."""

import pathlib

import jax
import matplotlib
import numpy as np

matplotlib.use("agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import LogLocator

from optax_lossscale import presets

STEPS = 300
# Intervals of tens of steps, not thousands, for three hundred steps to show them.
PANELS = {
    "TensorFlow, tf.keras, JMP": presets.tensorflow_dynamic(2.0**12, 20),
    "tf.contrib: every 2nd overflow, ×0.8": presets.tensorflow_contrib_exponential(
        2.0**12, 20
    ),
    "Keras 3, PyTorch: no floor": presets.pytorch(2.0**12, growth_interval=20),
    "Flax: one step later": presets.flax(scale=2.0**12, growth_interval=20),
    "MPX: capped at 65504": presets.mpx(2.0**12, period=20),
    "Apex: capped, here at 2¹⁴; no floor": presets.apex(
        init_scale=2.0**12, scale_window=20, max_loss_scale=2.0**14
    ),
    "Megatron-LM: hysteresis 2": presets.megatron(2.0**12, 1.0, 2.0, 0.5, 20, 2),
    "DeepSpeed: 2 in a row": presets.deepspeed(
        2.0**12, scale_window=20, delayed_shift=2, consecutive_hysteresis=True
    ),
    "fairseq: tolerance 25%": presets.fairseq(2.0**12, scale_window=20, tolerance=0.25),
    "OpenSeq2Seq: LogMax": presets.openseq2seq_logmax(beta1=0.9, beta2=0.9),
}


def gradients() -> tuple[np.ndarray, np.ndarray]:
    """Largest gradients and whether they are finite: calm, a rough patch, then a collapse."""
    rng = np.random.default_rng(0)
    t = np.arange(STEPS)
    finite = np.ones(STEPS, bool)
    finite[120:180] = rng.random(60) > 0.15
    finite[240:256] = False
    return np.exp2(rng.normal(-2 + 4 * (t > 120), 1.0)).astype(np.float32), finite


def main():
    """Draws the picture and prints its path."""
    largest, finite = gradients()
    step = lambda ls, g: (ls.update(g)[0], ls())
    figure, axes = plt.subplots(
        5, 2, figsize=(8, 9), sharex=True, sharey=True, layout="constrained"
    )
    for axis, (name, ls) in zip(axes.T.flat, PANELS.items(), strict=True):
        _, scale = jax.lax.scan(step, ls, np.where(finite, largest, np.inf))
        axis.vlines(np.flatnonzero(~finite), 0, 1, transform=axis.get_xaxis_transform(),
                    color="#d1495b", lw=0.8, alpha=0.35)  # fmt: skip
        axis.step(np.arange(STEPS), scale, where="post", color="#00798c", lw=1.4)
        axis.set_yscale("log", base=2)
        axis.yaxis.set_major_locator(LogLocator(base=2**8))
        axis.set_title(name, fontsize=9, loc="left")
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.2)
    figure.supxlabel("step (red: gradients not finite)", fontsize=10)
    figure.supylabel("loss scale", fontsize=10)
    path = pathlib.Path(__file__).with_suffix(".png")
    figure.savefig(path, dpi=140)
    print(path)


if __name__ == "__main__":
    main()
