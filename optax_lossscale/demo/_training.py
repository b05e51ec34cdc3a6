"""One training run, with the four changes that a user makes."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
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
    "float32": (jnp.float32, None),
    "float16, no loss scaling": (jnp.float16, None),
    "float16, fixed scale": (jnp.float16, 128),
    "float16, dynamic scale": (jnp.float16, ols.DynamicLossScale(growth_interval=15)),
}


def optimizer_and_step(
    name: str, steps: int
) -> tuple[ols.LossScaledTransformation, Callable[..., Any]]:
    """The optimizer of one of `RUNS`, and its compiled step, which donates params and state."""
    dtype, loss_scale = RUNS[name]
    schedule = optax.warmup_cosine_decay_schedule(0.0, 3e-3, steps // 10, steps + 1)
    clip, adam = optax.clip_by_global_norm(1.0), optax.adamw(schedule)
    optimizer = optax.chain(optax.scale(float(MICRO_BATCHES)), clip, adam)
    tx = ols.with_loss_scale(optimizer, loss_scale)
    loss_fn = lambda params, tokens: _model.loss(params, tokens) / MICRO_BATCHES
    loss_fn = loss_fn if dtype == jnp.float32 else ols.autocast(loss_fn, dtype)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def train_step(params, state, tokens):
        loss, scaled_grads = ols.value_and_scaled_grad(loss_fn, state)(params, tokens)
        zeros = sum(jnp.sum(g == 0) for g in jax.tree.leaves(scaled_grads))
        params, state = tx.apply_gradients(scaled_grads, state, params)
        record = {"loss": loss * MICRO_BATCHES, "zeros": zeros / optax.tree.size(params)}
        return params, state, record | ols.metrics(state)

    return tx, train_step


def train(name: str, text: np.ndarray, steps: int, seed: int) -> dict[str, np.ndarray]:
    """Trains the model once; returns the loss, the share of zeros and the metrics of each step."""
    tx, train_step = optimizer_and_step(name, steps)
    params = _model.init(jax.random.key(seed))
    state, records = tx.init(params), []
    batches = _text.batches(text, steps, seed)
    with tqdm(batches, desc=f"{name:24}", total=steps, unit="step") as bar:
        for step, tokens in enumerate(bar, 1):
            params, state, record = train_step(params, state, tokens)
            records.append(record)
            if step % 10 == 0 or step == steps:  # reading them waits for the device
                bar.set_postfix(loss=f"{record['loss']:.3f}", scale=f"{record['loss_scale']:g}")
    return jax.tree.map(lambda *x: np.array(x), *jax.device_get(records))
