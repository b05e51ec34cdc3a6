"""How large the gradients of a training run in float16 are, step by step."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks._tasks import Task, in_float16

EXPONENTS = np.arange(-110, 40)
SAMPLE = 4096


class Recording(NamedTuple):
    """The true, unscaled gradients of a run.

    Attributes:
      largest: the largest gradient of each step; float32, shape (steps,).
      inner: the largest inside the model, or of the parameters where that is larger;
        float32, shape (steps,).
      counts: how many gradients of a sample have each exponent of `EXPONENTS`; int32, shape
        (steps, exponents).
    """

    largest: Any
    inner: Any
    counts: Any


@functools.partial(jax.jit, static_argnums=(0, 2))
def record(task: Task, seed: jax.Array, steps: int) -> Recording:
    """Trains in float16, and records each step's gradients as computed in float32.

    The scale keeps the largest number of each step right below overflow. float16's own gradients
    would lack what it flushes to zero.
    """
    key = jax.random.key(seed)
    params = task.init(key)
    size = sum(p.size for p in jax.tree.leaves(params))
    sample = jax.random.permutation(key, size)[: min(size, SAMPLE)]

    def step(carry, key):
        params, state = carry
        batch = task.batch(key)
        wide, probe = jax.grad(task.loss, argnums=(0, 2))(params, batch, jnp.float32(0))
        numbers = jnp.abs(jnp.concatenate([g.ravel() for g in jax.tree.leaves(wide)]))
        largest = numbers.max()
        inner = jnp.maximum(largest, probe)
        exponents = jnp.where(
            numbers > 0, jnp.frexp(numbers)[1] - 1, EXPONENTS[-1] + 1
        )[sample]
        counts = jnp.sum(exponents[:, None] == EXPONENTS, 0)

        scale = jnp.ldexp(jnp.float32(1), 15 - jnp.frexp(inner)[1])
        grads = jax.grad(lambda p: in_float16(task.loss, p, batch) * scale)(params)
        grads = jax.tree.map(lambda g: jnp.nan_to_num(g / scale), grads)
        updates, state = task.optimizer.update(grads, state, params)
        params = jax.tree.map(jnp.add, params, updates)
        return (params, state), Recording(largest, inner, counts)

    keys = jax.random.split(jax.random.fold_in(key, 1), steps)
    return jax.lax.scan(step, (params, task.optimizer.init(params)), keys)[1]
