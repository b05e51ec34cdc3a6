"""One training run, by the three lines that a user writes."""

import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_lossscale as ols
from optax_lossscale.demo import _model, _text

MICRO_BATCHES = 1024

# Growth after 15 steps instead of 2000 shows in a short run how the scale adapts.
RUNS = {
    "float32": (jnp.float32, None),
    "float16, no loss scaling": (jnp.float16, None),
    "float16, fixed scale": (jnp.float16, 128),
    "float16, dynamic scale": (jnp.float16, ols.DynamicLossScale(growth_interval=15)),
}

_BATCH = f"{_text.BATCH} x {_model.CONTEXT} bytes"
_SHARE = 1 / (MICRO_BATCHES * _text.BATCH * _model.CONTEXT)
SETTING = f"""\
Setting: the loss is a mean over a global batch of {MICRO_BATCHES} micro-batches, as under
gradient accumulation or large data parallelism. So each micro-batch of {_BATCH}
is differentiated as loss / {MICRO_BATCHES}, and a byte's share of the gradient is about
{_SHARE:.0e}; float16 holds nothing below 6e-08. A step computes one micro-batch and
lets it stand for all: its unscaled float32 gradient is summed {MICRO_BATCHES} times."""


class Run(NamedTuple):
    """What was recorded of a run, an entry a step."""

    name: str
    loss: np.ndarray  # nats a byte
    loss_scale: np.ndarray
    zeros: np.ndarray  # share of gradient entries that are zero
    applied: np.ndarray
    milliseconds: float  # a step, without the first, which compiles; nan if there is no other

    @property
    def final_loss(self) -> float:
        """The mean loss of the last tenth of the steps."""
        return float(self.loss[-max(1, len(self.loss) // 10) :].mean())


def optimizer_and_step(
    name: str, steps: int
) -> tuple[ols.LossScaledTransformation, Callable[..., Any]]:
    """What a run trains with.

    Args:
      name: one of `RUNS`.
      steps: how many the learning rate is scheduled for.

    Returns:
      The optimizer, and the compiled step from `(params, state, tokens)` to
      `(params, state, record)`, which donates the first two.
    """
    dtype, loss_scale = RUNS[name]
    optimizer = optax.chain(
        optax.scale(float(MICRO_BATCHES)),
        optax.clip_by_global_norm(1.0),
        optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 3e-3, steps // 10, steps + 1)),
    )

    def loss_fn(params, tokens):
        return _model.loss(params, tokens, dtype) / MICRO_BATCHES

    tx = ols.with_loss_scale(optimizer, loss_scale)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def train_step(params, state, tokens):
        loss, scaled_grads = ols.value_and_scaled_grad(loss_fn, state)(params, tokens)
        used = state.loss_scale()
        params, state = tx.apply_gradients(scaled_grads, state, params)
        return (
            params,
            state,
            (loss * MICRO_BATCHES, used, _zeros(scaled_grads), state.should_apply),
        )

    return tx, train_step


def train(
    name: str, text: np.ndarray, steps: int, seed: int, progress: Callable[[Any, Any], None]
) -> Run:
    """Trains the model once.

    Args:
      name: one of `RUNS`.
      text: uint8, shape (bytes,).
      steps: how many.
      seed: of the parameters and the batches.
      progress: called after each step with its loss and its loss scale, on the device.
    """
    tx, train_step = optimizer_and_step(name, steps)
    params = _model.init(jax.random.key(seed))
    state = tx.init(params)
    history, start = [], 0.0
    for step, tokens in enumerate(_text.batches(text, steps, seed)):
        params, state, record = train_step(params, state, tokens)
        history.append(record)
        progress(*record[:2])
        if step == 0:
            jax.block_until_ready(record)
            start = time.perf_counter()
    loss, scales, zeros, applied = (
        np.array(jax.device_get(x)) for x in zip(*history, strict=True)
    )
    seconds = time.perf_counter() - start
    milliseconds = 1e3 * seconds / (steps - 1) if steps > 1 else float("nan")
    return Run(name, loss, scales, zeros, applied, milliseconds)


def _zeros(grads: Any) -> jax.Array:
    """The share of all entries that are zero: float32, shape ()."""
    zeros = jnp.array([jnp.sum(g == 0) for g in jax.tree.leaves(grads)])
    return zeros.sum() / optax.tree.size(grads)
