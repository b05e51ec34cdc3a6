"""One training run. What a user of loss scaling writes is in `train`: wrap, autocast, minimize."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from tqdm import tqdm

import optax_lossscale as ols
from optax_lossscale.demo import _model, _text

MICRO_BATCHES = 1024
SETTING = f"""\
Setting: the loss is a mean over a global batch of {MICRO_BATCHES} micro-batches. A step computes
one of them and lets it stand for all: its unscaled gradient is summed {MICRO_BATCHES} times."""
CAUSE = f"The loss is divided by {MICRO_BATCHES}, so that gradients underflow in float16."

# Growth after 15 steps instead of 2000 shows in a short run how the scale adapts.
RUNS = {
    "float32": None,
    "float16, no loss scaling": None,
    "float16, fixed scale": 128,
    "float16, dynamic scale": ols.DynamicLossScale(growth_interval=15),
}


def loss_fn(params: Any, tokens: jax.Array) -> jax.Array:
    """This micro-batch's share of the mean over all of them."""
    return _model.loss(params, tokens) / MICRO_BATCHES


def loss_of(name: str) -> Callable[..., jax.Array]:
    """The loss function of one of the runs, in float32 or float16."""
    return loss_fn if name == "float32" else ols.autocast(loss_fn)


def optimizer_and_step(
    name: str, steps: int
) -> tuple[ols.LossScaledTransformation, Callable[..., Any]]:
    """The optimizer of one of the runs, and its compiled step, which donates params and state."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, 3e-3, steps // 10, steps + 1)
    summed = optax.scale(float(MICRO_BATCHES))
    adamw = optax.chain(summed, optax.clip_by_global_norm(1.0), optax.adamw(schedule))
    tx = ols.with_loss_scale(adamw, RUNS[name])

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def train_step(params, state, tokens):
        loss, params, state = tx.minimize(loss_of(name), state, params, tokens)
        return params, state, {"loss": loss * MICRO_BATCHES} | ols.metrics(state)

    return tx, train_step


def share_of_zeros(
    name: str, params: Any, state: ols.LossScaleState, tokens: jax.typing.ArrayLike
) -> float:
    """The share of the gradients that are zero: all but a few of these have underflowed."""
    _, grads = jax.jit(ols.value_and_scaled_grad(loss_of(name), state))(params, tokens)
    zeros = sum(np.sum(np.asarray(grad) == 0) for grad in jax.tree.leaves(grads))
    return zeros / optax.tree.size(grads)


def train(name: str, text: np.ndarray, steps: int, seed: int) -> dict[str, np.ndarray]:
    """Trains the model once.

    Returns:
      The loss and the metrics of each step, and of the last one the share of zero gradients.
    """
    tx, train_step = optimizer_and_step(name, steps)
    params = _model.init(jax.random.key(seed))
    state = tx.init(params)
    records = []
    batches = _text.batches(text, steps, seed)
    only_on_a_terminal = None  # tqdm's word for it
    bar = tqdm(batches, f"{name:24}", total=steps, unit="step", disable=only_on_a_terminal)
    for tokens in bar:
        params, state, record = train_step(params, state, tokens)
        records.append(record)
        if len(records) % 10 == 0:  # reading it waits for the device
            bar.set_postfix(loss=f"{record['loss']:.3f}", scale=f"{record['loss_scale']:g}")
    history = jax.tree.map(lambda *x: np.array(x), *jax.device_get(records))
    return history | {"zeros": share_of_zeros(name, params, state, tokens)}
