"""Gradient sizes made up to fool a loss scale, and what each step of them costs."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import optax_lossscale as ols
from benchmarks._replay import UNDERFLOW

LENGTHS = (2000, 6000, 20_000)


class Sequence(NamedTuple):
    """The gradients of some steps.

    Attributes:
      log2_largest: of each step; -inf where all gradients are zero.
      broken: whether the batch fails whatever the scale.
      kind: which of two sizes a step has, or 0.
      median: by how many bits the median of a step's gradients is smaller than the largest. Their
        logarithms are normally distributed.
      spread: the standard deviation of these, in bits.
    """

    log2_largest: np.ndarray
    broken: np.ndarray
    kind: np.ndarray
    median: float
    spread: float


class _Draw:
    """Random parameters and events of one sequence."""

    def __init__(self, seed: tuple[int, ...], steps: int):
        self.random, self.steps = np.random.default_rng(seed), steps

    def between(self, low: float, high: float) -> float:
        return self.random.uniform(low, high)

    def order(self, low: float, high: float) -> float:
        """A number for which every order of magnitude is equally likely."""
        return math.exp(self.between(math.log(low), math.log(high)))

    def count(self, low: int, high: int) -> int:
        return round(self.order(low, high))

    def every(self, n: int) -> np.ndarray:
        return (np.arange(self.steps) + self.random.integers(n)) % n == 0

    def at_random(self, share: float) -> np.ndarray:
        return self.random.random(self.steps) < share

    def phase(self, period: int) -> np.ndarray:
        return (np.arange(self.steps) + self.random.integers(period)) % period

    def noise(self, low: float, high: float) -> np.ndarray:
        return self.order(low, high) * self.random.normal(size=self.steps)


def _sparse(d: _Draw) -> dict[str, Any]:
    n = d.count(2, 400)
    live = d.every(n) if d.between(0, 1) < 0.6 else d.at_random(1 / n)
    return {"shift": np.where(live, 0, -np.inf)}


def _two_sizes(d: _Draw, in_turn: bool) -> dict[str, Any]:
    n = d.count(2, 101)
    rare = d.every(n) if in_turn else d.at_random(1 / n)
    large = rare if d.between(0, 1) < 0.8 else ~rare
    return {"shift": d.between(6, 26) * large, "kind": large.astype(int)}


def _broken(d: _Draw, noise: tuple[float, float]) -> dict[str, Any]:
    return {"broken": d.at_random(d.order(0.002, 0.3)), "noise": d.noise(*noise)}


def _both(d: _Draw) -> dict[str, Any]:
    noise = (0.05, 0.5) if d.between(0, 1) < 0.5 else (1.5, 4.0)
    return _two_sizes(d, d.between(0, 1) < 0.5) | _broken(d, noise)


def _heavy_tails(d: _Draw) -> dict[str, Any]:
    if d.between(0, 1) < 0.5:
        return {"noise": d.between(0.5, 4) * d.random.exponential(size=d.steps)}
    student = d.between(0.3, 2) * d.random.standard_t(d.between(1.2, 5), size=d.steps)
    return {"noise": np.clip(student, -40, 40)}


def _drift(d: _Draw) -> dict[str, Any]:
    bits = d.between(18, 40) * d.random.choice([-1, 1])
    way = np.arange(d.steps) / d.steps * d.random.choice([0.3, 1.0, 2.0]) % 2
    return {"shift": bits * (np.minimum(way, 2 - way) - 0.5)}


def _jumps(d: _Draw) -> dict[str, Any]:
    n = d.count(200, 4000)
    return {"shift": d.between(18, 31) * (d.phase(2 * n) < n)}


def _bursts(d: _Draw) -> dict[str, Any]:
    return {"broken": d.phase(d.count(150, 4000)) < d.count(2, 60)}


def _long_zeros(d: _Draw) -> dict[str, Any]:
    zeros, live = d.count(100, 6000), d.count(10, 3000)
    return {"shift": np.where(d.phase(zeros + live) < zeros, -np.inf, 0)}


FAMILIES = {
    "sparse": _sparse,
    "two sizes in turn": lambda d: _two_sizes(d, in_turn=True),
    "two at random": lambda d: _two_sizes(d, in_turn=False),
    "broken, little noise": lambda d: _broken(d, (0.05, 0.5)),
    "broken, much noise": lambda d: _broken(d, (1.5, 4.0)),
    "two sizes, broken": _both,
    "heavy tails": _heavy_tails,
    "drifts": _drift,
    "jumps": _jumps,
    "bursts": _bursts,
    "long zeros": _long_zeros,
}


def sequence(family: str, seed: int, steps: int) -> Sequence:
    """A sequence of a family, with parameters drawn at random."""
    d = _Draw((seed, list(FAMILIES).index(family), steps), steps)
    base, noise = d.between(-25, 8), d.noise(0.05, 2.0)
    drawn = {
        "shift": 0.0,
        "broken": d.at_random(0),
        "kind": np.zeros(steps, int),
        "noise": noise,
    }
    drawn |= FAMILIES[family](d)
    log2_largest = (base + drawn["shift"] + drawn["noise"]).astype(np.float32)
    return Sequence(
        log2_largest,
        drawn["broken"],
        drawn["kind"],
        d.between(5, 13),
        d.between(2, 5.5),
    )


class Hostile:
    """Sequences of all families, ready to be replayed."""

    def __init__(self, seed: int, of_each: int):
        """Makes `of_each` sequences of each family and length."""
        seeds = range(seed * of_each, (seed + 1) * of_each)
        self._batches = [
            [sequence(family, seed, steps) for family in FAMILIES for seed in seeds]
            for steps in LENGTHS
        ]
        self._shape = (len(LENGTHS), len(FAMILIES), of_each)

    def __call__(self, policy: ols.LossScale) -> np.ndarray:
        """The cost of each sequence in percent; shape (families, sequences)."""
        costs = []
        for batch in self._batches:
            sizes = np.stack([s.log2_largest for s in batch])
            broken = np.stack([s.broken for s in batch])
            replayed = jax.device_get(_replay(policy, sizes, broken))
            costs += [
                _cost(s, *outcome) for s, *outcome in zip(batch, *replayed, strict=True)
            ]
        return 100 * np.concatenate(np.reshape(costs, self._shape), axis=1)


@jax.jit
def _replay(policy: ols.LossScale, sizes: Any, broken: Any) -> tuple[Any, Any]:
    """log2 of the scales, and which steps were skipped; both (sequences, steps)."""

    def step(loss_scale, event):
        size, broken = event
        log2_scale = jnp.log2(loss_scale())
        scaled = size + log2_scale
        skipped = broken | (scaled >= 16)
        gradient = jnp.where(scaled < UNDERFLOW, 0, jnp.exp2(size))
        new, _ = loss_scale.update(jnp.where(skipped, jnp.inf, gradient))
        return new, (log2_scale, skipped)

    run = lambda sizes, broken: jax.lax.scan(step, policy, (sizes, broken))[1]
    return jax.vmap(run)(sizes, broken)


def _cost(sequence: Sequence, log2_scale: np.ndarray, skipped: np.ndarray) -> float:
    """The mean over the steps that could be applied; for two sizes, the mean of their means.

    A skipped step costs 1, and an applied one the share of its gradients that was flushed.
    """
    room = sequence.log2_largest + log2_scale - UNDERFLOW
    flushed = np.asarray(
        jax.scipy.special.ndtr((sequence.median - room) / sequence.spread)
    )
    cost = np.where(skipped, 1, np.where(room < 0, 1, flushed))
    possible = ~sequence.broken & np.isfinite(sequence.log2_largest)
    kinds = [possible & (sequence.kind == kind) for kind in (0, 1)]
    return float(np.mean([cost[kind].mean() for kind in kinds if kind.any()] or [0.0]))
