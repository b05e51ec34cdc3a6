"""One training run. What a user of loss scaling writes is in `make_train_step`: three lines."""

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
CAUSE = (
    f"The loss is divided by {MICRO_BATCHES}, so that gradients underflow in float16."
)

# Growth after 15 steps instead of 2000 shows in a short run how the scale adapts.
RUNS = {
    "float32": None,
    "float16, no loss scaling": None,
    "float16, fixed scale": 128,
    "float16, dynamic scale": ols.DynamicLossScale(growth_interval=15),
}


def make_loss_fn(name: str) -> Callable[..., jax.Array]:
    """This micro-batch's share of the mean over all of them, in float32 or float16."""

    def loss_fn(params, tokens):
        return _model.loss(params, tokens) / MICRO_BATCHES

    return loss_fn if name == "float32" else ols.autocast(loss_fn)


def make_optimizer(steps: int) -> optax.GradientTransformationExtraArgs:
    """AdamW, as it would be without loss scaling."""
    rate = optax.warmup_cosine_decay_schedule(0.0, 3e-3, steps // 10, steps + 1)
    return optax.chain(
        optax.scale(float(MICRO_BATCHES)),
        optax.clip_by_global_norm(1.0),
        optax.adamw(rate),
    )


def make_train_step(
    name: str, steps: int
) -> tuple[ols.LossScaledTransformation, Callable[..., Any]]:
    """The optimizer of one of the runs, and its compiled step, which donates params and state."""
    loss_fn = make_loss_fn(name)
    tx = ols.with_loss_scale(make_optimizer(steps), RUNS[name])

    @functools.partial(jax.jit, donate_argnames=("params", "state"))
    def train_step(params, state, tokens):
        loss, params, state = tx.minimize(loss_fn, state, params, tokens)
        record = {"loss": loss * MICRO_BATCHES, **ols.metrics(state)}
        return params, state, record

    return tx, train_step


def train(name: str, text: np.ndarray, steps: int, seed: int) -> dict[str, np.ndarray]:
    """Trains the model once.

    Returns:
      The loss and the metrics of each step, and of the last one the share of zero
      gradients.
    """
    tx, train_step = make_train_step(name, steps)
    params = _model.init(jax.random.key(seed))
    state = tx.init(params)
    records = []
    batches = tqdm(
        _text.batches(text, steps, seed),
        desc=f"{name:24}",
        total=steps,
        unit="step",
        disable=None,  # shown on a terminal alone
    )
    for tokens in batches:
        params, state, record = train_step(params, state, tokens)
        records.append(record)
    history = jax.tree.map(lambda *x: np.array(x), *jax.device_get(records))
    scaled_grad = jax.jit(ols.value_and_scaled_grad(make_loss_fn(name), state))
    _, scaled_grads = scaled_grad(params, tokens)
    return history | {"zeros": share_of_zeros(scaled_grads)}


def share_of_zeros(grads: Any) -> float:
    """The share of the gradients that are zero: all but a few of these have underflowed."""
    nonzero = sum(np.count_nonzero(grad) for grad in jax.tree.leaves(grads))
    return 1 - nonzero / optax.tree.size(grads)
