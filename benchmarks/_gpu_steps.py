"""Training steps of four models in float32 and float16, and what they take where they run.

Nothing here needs more than this library does, so that it runs after the README's installation.
"""

import functools
import math
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_lossscale as ols
from benchmarks import _models

FLOAT32, BY_HAND, AUTOCAST = WAYS = ("float32", "cast by hand", "autocast")
OPTIMIZER = optax.adamw(3e-4)
CLASSES = 8  # of labels
LOSS_STEPS = 300
WARM_UP = 5  # steps
ROUNDS = 20  # of steps that are timed together
ROUND_S = 0.1
ROUNDS_S = 2.0  # after which no further round begins

Build: TypeAlias = Callable[[_models.Cast], _models.Model]
FULL: dict[str, Build] = {
    "transformer": _models.transformer,
    "ResNet with batch norm": _models.resnet,
    "Mamba": _models.mamba,
    "LSTM": _models.lstm,
}


def _resized(**sizes: dict[str, Any]) -> dict[str, Build]:
    both = zip(FULL.items(), sizes.values(), strict=True)
    return {name: functools.partial(build, **size) for (name, build), size in both}


# For a CPU, which computes float16 in float32.
SMALL = _resized(
    transformer={"width": 128, "length": 64, "batch": 4, "layers": 2},
    resnet={"width": 32, "image": (8, 32, 32), "blocks": 2},
    mamba={"width": 64, "length": 64, "batch": 4},
    lstm={"width": 128, "length": 64, "batch": 16},
)
# To see that it runs.
TINY = _resized(
    transformer={"width": 64, "length": 8, "batch": 2, "layers": 1},
    resnet={"width": 4, "image": (2, 4, 4), "blocks": 1},
    mamba={"width": 8, "length": 4, "batch": 2},
    lstm={"width": 8, "length": 4, "batch": 2},
)
SIZES = {"full": FULL, "small": SMALL, "tiny": TINY}
# The same on every device, so that its losses can be compared.
LEARNER = functools.partial(_models.transformer, width=64, length=16, batch=8, layers=2)


class TrainStep(NamedTuple):
    """A step to compile.

    Attributes:
      params: shapes and dtypes of the parameters.
      batch: those of the further arguments of the loss, of which the last are labels.
      init: from parameters to the state of the optimizer.
      step: called as `step(params, state, *batch)`, returns `(params, state, loss)`.
    """

    params: Any
    batch: tuple[jax.ShapeDtypeStruct, ...]
    init: Callable[[Any], Any]
    step: Callable[..., tuple[Any, Any, jax.Array]]


class Costs(NamedTuple):
    """What a step took.

    Attributes:
      ms: the median of a step's time, in milliseconds.
      quartiles: the quarters of the rounds below and above took less and more than these.
      peak: bytes of the device's memory that were in use at most, or None if it does not say.
      peak_of_compiling: whether that was before the first step, so that steps needed less.
      planned: bytes that the compiler plans for arguments, results and all between.
      compile_s: seconds to trace, lower and compile.
      loss: of the last step before the timed ones.
      skipped: how many steps were skipped.
      steps: out of how many.
    """

    ms: float
    quartiles: tuple[float, float]
    peak: int | None
    peak_of_compiling: bool
    planned: int
    compile_s: float
    loss: float
    skipped: int
    steps: int


class Losses(NamedTuple):
    """How a model learned.

    Attributes:
      losses: one for each step.
      skipped: how many steps were skipped.
      loss_scale: the last one, or None in float32.
    """

    losses: list[float]
    skipped: int
    loss_scale: float | None


def train_step(build: Build, way: str) -> TrainStep:
    """The step of a model in float32, or with a loss scale in float16."""
    cast = _models.by_hand if way == BY_HAND else _models.left
    params, batch, loss_fn = build(cast)
    if way == FLOAT32:
        return TrainStep(params, batch, OPTIMIZER.init, _float32_step(loss_fn))
    if way == AUTOCAST:
        loss_fn = ols.autocast(loss_fn)
    tx = ols.with_loss_scale(OPTIMIZER)

    def step(params, state, *batch):
        loss, params, state = tx.minimize(loss_fn, state, params, *batch)
        return params, state, loss

    return TrainStep(params, batch, tx.init, step)


def _float32_step(loss_fn: Callable[..., jax.Array]) -> Callable[..., Any]:
    def step(params, state, *batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, *batch)
        updates, state = OPTIMIZER.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    return step


def costs(size: str, model: str, way: str) -> Costs:
    """Takes steps on one batch, and measures them; in a process of its own, for the memory."""
    train = train_step(SIZES[size][model], way)
    # Compiled before anything is allocated, so that a peak tells of the steps and not
    # of tuning.
    start = time.perf_counter()
    program = _compiled(train)
    compile_s = time.perf_counter() - start
    peak_of_compiling = _peak() or 0

    run = _Run(program, train)
    run.take(WARM_UP)
    loss_then = float(run.loss)
    count = max(1, round(ROUND_S / run.take(1)))
    times = []
    end = time.perf_counter() + ROUNDS_S
    while len(times) < 3 or (len(times) < ROUNDS and time.perf_counter() < end):
        times.append(1e3 * run.take(count) / count)
    low, median, high = statistics.quantiles(times, n=4, method="inclusive")
    peak = _peak()
    return Costs(
        ms=median,
        quartiles=(low, high),
        peak=peak,
        peak_of_compiling=peak == peak_of_compiling,
        planned=planned(program),
        compile_s=compile_s,
        loss=loss_then,
        skipped=_skipped(run.state),
        steps=run.steps,
    )


def losses(size: str, way: str) -> Losses:
    """Trains a model to say which of the first eight inputs of a token is the largest."""
    train = train_step(TINY["LSTM"] if size == "tiny" else LEARNER, way)
    program = _compiled(train)
    params = _initial(train.params)
    state = train.init(params)
    found = []
    for step in range(LOSS_STEPS):
        params, state, loss = program(params, state, *_batch(train, seed=step))
        found.append(loss)
    scale = float(state.loss_scale()) if way != FLOAT32 else None
    return Losses([float(loss) for loss in found], _skipped(state), scale)


def planned(program: jax.stages.Compiled) -> int:
    """Bytes that a compiled program needs at once: arguments, results and all between."""
    memory = program.memory_analysis()
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return memory.argument_size_in_bytes + results + memory.temp_size_in_bytes


def _compiled(train: TrainStep) -> jax.stages.Compiled:
    state = jax.eval_shape(train.init, train.params)
    step = jax.jit(train.step, donate_argnums=(0, 1))
    return step.lower(train.params, state, *train.batch).compile()


def _initial(params: Any) -> Any:
    """Small random matrices, and vectors of ones, be they biases or not."""
    rng = np.random.default_rng(0)

    def initial(x):
        if x.ndim == 1:
            return jnp.ones(x.shape)
        fan_in = math.prod(x.shape[:-1])
        return jnp.asarray(0.5 * rng.standard_normal(x.shape, "float32") / fan_in**0.5)

    return jax.tree.map(initial, params)


def _batch(train: TrainStep, seed: int) -> tuple[jax.Array, jax.Array]:
    """Noise, and as labels the largest of its first components, or chance if these do not fit."""
    rng = np.random.default_rng(seed)
    inputs, labels = train.batch
    x = rng.standard_normal(inputs.shape, "float32")
    if labels.shape == inputs.shape[:-1]:
        y = x[..., :CLASSES].argmax(-1)
    else:
        y = rng.integers(0, CLASSES, labels.shape)
    return jnp.asarray(x), jnp.asarray(y, jnp.int32)


class _Run:
    """Steps on one batch, one after the other."""

    def __init__(self, program: jax.stages.Compiled, train: TrainStep):
        self.program = program
        self.params = _initial(train.params)
        self.state = train.init(self.params)
        self.batch = _batch(train, seed=0)
        self.steps = 0

    def take(self, count: int) -> float:
        """Takes so many, and returns the seconds until the last has ended."""
        start = time.perf_counter()
        for _ in range(count):
            self.params, self.state, self.loss = self.program(
                self.params, self.state, *self.batch
            )
        jax.block_until_ready(self.loss)
        self.steps += count
        return time.perf_counter() - start


def _peak() -> int | None:
    """Bytes of the device's memory that this process has had in use at most."""
    of_device = jax.devices()[0].memory_stats() or {}
    return of_device.get("peak_bytes_in_use")


def _skipped(state: Any) -> int:
    is_scaled = isinstance(state, ols.LossScaleState)
    return int(state.skipped_steps) if is_scaled else 0
