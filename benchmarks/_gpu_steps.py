"""Training steps in float32 and float16, and what they take on the device that is there.

A process of its own measures one of them, `python -m benchmarks._gpu_steps full LSTM autocast`,
so that its memory is its own. It needs nothing more than this library does.
"""

import json
import math
import statistics
import sys
import textwrap
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_lossscale as ols
from benchmarks import _environment, _models

FLOAT32, BY_HAND, AUTOCAST = WAYS = ("float32", "cast by hand", "autocast")
LEARNER = "a small transformer, 300 steps"
MODELS: dict[str, Callable[..., _models.Model]] = {
    LEARNER: _models.transformer,
    "transformer": _models.transformer,
    "ResNet with batch norm": _models.resnet,
    "Mamba": _models.mamba,
    "LSTM": _models.lstm,
}
FULL: dict[str, dict[str, Any]] = {
    LEARNER: {"width": 64, "length": 16, "batch": 8, "layers": 2}
}
TINY = FULL | {  # to see that it runs
    "transformer": {"width": 64, "length": 8, "batch": 2, "layers": 1},
    "ResNet with batch norm": {"width": 4, "image": (2, 4, 4), "blocks": 1},
    "Mamba": {"width": 8, "length": 4, "batch": 2},
    "LSTM": {"width": 8, "length": 4, "batch": 2},
}
SIZES = {"full": FULL, "tiny": TINY}
OPTIMIZER = optax.adamw(3e-4)
CLASSES = 8  # of labels
FIRST_STEPS = 5  # whose losses are reported, before those that are timed
ROUNDS = 20


class TrainStep(NamedTuple):
    """A step to compile, called as `step(params, state, *batch)`."""

    params: Any  # shapes and dtypes, as those of the batch
    batch: tuple[jax.ShapeDtypeStruct, ...]
    init: Callable[[Any], Any]
    step: Callable[..., tuple[Any, Any, jax.Array]]


def train_step(model: str, way: str, size: str = "full") -> TrainStep:
    """The step of a model in float32, or with a loss scale in float16."""
    cast = _models.by_hand if way == BY_HAND else _models.left
    params, batch, loss_fn = MODELS[model](cast, **SIZES[size].get(model, {}))
    if way == AUTOCAST:
        loss_fn = ols.autocast(loss_fn)
    scale = {"loss_scale": None, "skip": None} if way == FLOAT32 else {}
    tx = ols.with_loss_scale(OPTIMIZER, **scale)

    def step(params, state, *batch):
        loss, params, state = tx.minimize(loss_fn, state, params, *batch)
        return params, state, loss

    return TrainStep(params, batch, tx.init, step)


def planned(program: jax.stages.Compiled) -> int:
    """Bytes that a program needs at once: arguments, results and all between."""
    memory = program.memory_analysis()
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return memory.argument_size_in_bytes + results + memory.temp_size_in_bytes


def measure(size: str, model: str, way: str) -> dict[str, Any]:
    """Takes steps, and says what they took and how the loss went."""
    train = train_step(model, way, size)
    start = time.perf_counter()
    # Before anything is allocated, so that a peak tells whether it is that of tuning.
    state = jax.eval_shape(train.init, train.params)
    jitted = jax.jit(train.step, donate_argnums=(0, 1))
    program = jitted.lower(train.params, state, *train.batch).compile()
    compile_s, peak_of_compiling = time.perf_counter() - start, _peak()

    params = _initial(train.params)
    carry, losses = (params, train.init(params)), []
    for seed in range(300 if model == LEARNER else FIRST_STEPS):
        batch = _batch(train, seed)
        *carry, loss = program(*carry, *batch)
        losses.append(loss)
    losses = [float(loss) for loss in losses]

    def take(count):
        nonlocal carry
        start = time.perf_counter()
        for _ in range(count):
            *carry, loss = program(*carry, *batch)
        jax.block_until_ready(loss)
        return (time.perf_counter() - start) / count

    count = max(1, round(0.1 / take(1)))  # that a round takes a tenth of a second
    times = [1000 * take(count) for _ in range(ROUNDS)]
    return {
        "ms": statistics.quantiles(times, n=4),
        "peak": _peak(),
        "peak_of_compiling": peak_of_compiling,
        "planned": planned(program),
        "compile_s": compile_s,
        "loss": [losses[0], statistics.fmean(losses[len(losses) // 2 :])],
        "skipped": int(carry[1].skipped_steps),
        "steps": len(losses) + 1 + ROUNDS * count,
    }


def _initial(params: Any) -> Any:
    """Small random matrices, and vectors of ones."""
    rng = np.random.default_rng(0)

    def initial(x):
        if x.ndim == 1:
            return jnp.ones(x.shape)
        scale = 0.5 * math.prod(x.shape[:-1]) ** -0.5
        return jnp.asarray(scale * rng.standard_normal(x.shape, np.float32))

    return jax.tree.map(initial, params)


def _batch(train: TrainStep, seed: int) -> tuple[jax.Array, jax.Array]:
    """Noise, and as labels the largest of its first numbers, or chance for images."""
    rng = np.random.default_rng(seed)
    inputs, labels = train.batch
    x = rng.standard_normal(inputs.shape, np.float32)
    is_of_each = labels.shape == inputs.shape[:-1]
    chance = rng.integers(0, CLASSES, labels.shape)
    y = x[..., :CLASSES].argmax(-1) if is_of_each else chance
    return jnp.asarray(x), jnp.asarray(y, jnp.int32)


def _peak() -> int | None:
    """Bytes of the device that were in use at most, if it counts them."""
    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def reason(error: Exception) -> str:
    """What went wrong, in a line that fits into a table."""
    if "RESOURCE_EXHAUSTED" in str(error):
        return "out of memory"
    line = f"{type(error).__name__}: {error}".splitlines()[0].replace("|", "/")
    return textwrap.shorten(line, 120, placeholder=" …")


def main(arguments: list[str]) -> None:
    """Prints what was measured as JSON; without arguments, what the device is."""
    try:
        found = measure(*arguments) if arguments else _environment.device()
    except Exception as error:
        found = {"failed": reason(error)}
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
