"""Recorded gradient sizes, disturbed in several ways, and what loss scales make of them."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import optax_lossscale as ols
from benchmarks._recording import EXPONENTS, Recording

OVERFLOW = 65520.0  # float16 rounds this and more to infinity
UNDERFLOW = -25  # float16 rounds what is below this power of two to zero
AT_FIRST = 20  # steps that a policy is given to find a scale


class Scenario(NamedTuple):
    """What is done to a run of gradients.

    Attributes:
      name: as the tables have it.
      start: the scale to start from, or None for that of the policy.
      shift: by how many bits the gradients of a step are larger; called with the steps' numbers.
      inner: by how many more bits those inside the model are larger.
      broken: whether the batch of a step has a NaN in it; called with the steps' numbers.
      over: the step at which what disturbs it happens, or the first one after it is over.
    """

    name: str
    start: float | None = None
    shift: Any = np.zeros_like
    inner: int = 0
    broken: Any = lambda t: t < 0
    over: int = 0


_SMALLER = lambda t: np.full_like(t, -17)

UNDISTURBED = [
    Scenario("as recorded"),
    *(Scenario(f"from 2^{k}", start=2.0**k) for k in (0, 10, 20, 30, 40)),
    Scenario("2^17 smaller", shift=_SMALLER),
    Scenario("2^17 smaller, from 2^0", start=1.0, shift=_SMALLER),
    Scenario("2^17 smaller, from 2^40", start=2.0**40, shift=_SMALLER),
]
FALL, OUTLIERS, NANS = "a fall of 2^10", "5 outliers", "6 NaNs in a row"
DISTURBED = [
    Scenario(FALL, shift=lambda t: np.where(t < 2000, 0, -10), over=2000),
    Scenario("end of warm-up", shift=lambda t: np.minimum(t // 60, 8) - 8),
    Scenario("learning-rate jump", shift=lambda t: np.where(t < 3000, 0, 5)),
    Scenario(
        OUTLIERS,
        shift=lambda t: np.where(np.isin(t, (700, 1500, 2600, 3900, 5200)), 12, 0),
    ),
    Scenario(NANS, broken=lambda t: (t >= 3000) & (t < 3006), over=3006),
    Scenario("NaN every 200", broken=lambda t: t % 200 == 137),
    Scenario("inner 2^4 larger", inner=4),
    Scenario("inner 2^8 larger", inner=8),
    Scenario("inner 2^8, 2^17 smaller", inner=8, shift=_SMALLER),
]
SCENARIOS = UNDISTURBED + DISTURBED


class Outcome(NamedTuple):
    """The outcome of a replay, for each scenario and run.

    Attributes:
      early: steps skipped in the first `AT_FIRST`.
      skips: steps skipped after those, per thousand.
      lost: percent of the gradients that were flushed to zero, beyond what the best scale of
        each step would have lost; of the steps that were not skipped.
      found: the first step with a scale within a factor of 4 of the best; -1 for none.
      found_again: the same once what disturbs it is over, in steps from there.
      log2_scale: of each step.
      best: log2 of the largest power of two at which each step does not overflow.
    """

    early: np.ndarray
    skips: np.ndarray
    lost: np.ndarray
    found: np.ndarray
    found_again: np.ndarray
    log2_scale: np.ndarray
    best: np.ndarray


class Replays:
    """All scenarios of some runs, ready to be replayed."""

    def __init__(self, runs: list[Recording]):
        cases = [(scenario, run) for scenario in SCENARIOS for run in runs]
        self._shape = (len(SCENARIOS), len(runs))
        self._lost = np.stack([_lost_below(run.counts) for run in runs])
        steps = np.arange(len(runs[0].largest))
        shifts = np.stack([s.shift(steps) for s, _ in cases])
        largest = (
            np.stack([run.largest for _, run in cases]).astype(np.float64) * 2.0**shifts
        )
        inner = np.stack([run.inner * 2.0**s.inner for s, run in cases]) * 2.0**shifts
        self._shifts, self._best = shifts, np.floor(np.log2((OVERFLOW - 1e-3) / inner))
        broken = np.stack([s.broken(steps) for s, _ in cases])
        self._largest = largest.astype(np.float32)
        self._inner = np.where(broken, np.inf, inner).astype(np.float32)
        self._over = np.array([[s.over] for s, _ in cases])
        self._starts = np.array(
            [np.nan if s.start is None else s.start for s, _ in cases]
        )

    def __call__(self, policy: ols.LossScale) -> Outcome:
        """What the policy makes of them."""
        starts = np.where(np.isnan(self._starts), policy(), self._starts).astype(
            np.float32
        )
        scales, skipped = jax.device_get(
            _replay(policy, starts, self._largest, self._inner)
        )
        log2_scale = np.log2(scales)
        lost = self._lost_at(log2_scale) - self._lost_at(self._best)
        applied = ~skipped
        good = applied & (abs(log2_scale - self._best) <= 2)
        first = lambda good: np.where(good.any(1), good.argmax(1), -1)
        good_again = good & (np.arange(good.shape[1]) >= self._over)
        again = first(good_again)
        late = 1000 * skipped[:, AT_FIRST:].sum(1) / (skipped.shape[1] - AT_FIRST)
        outcome = Outcome(
            early=skipped[:, :AT_FIRST].sum(1),
            skips=late,
            lost=100 * np.sum(lost * applied, 1) / np.maximum(applied.sum(1), 1),
            found=first(good),
            found_again=np.where(again < 0, -1, again - self._over[:, 0]),
            log2_scale=log2_scale,
            best=self._best,
        )
        return jax.tree.map(lambda x: x.reshape(*self._shape, *x.shape[1:]), outcome)

    def _lost_at(self, log2_scale: np.ndarray) -> np.ndarray:
        """The share of each step's gradients that float16 flushes to zero at a scale."""
        smallest = np.ceil(UNDERFLOW - log2_scale - self._shifts).astype(int)
        index = np.clip(smallest - EXPONENTS[0], 0, len(EXPONENTS))
        shares = np.tile(self._lost, (self._shape[0], 1, 1))
        return np.take_along_axis(shares, index[..., None], -1)[..., 0]


def _lost_below(counts: np.ndarray) -> np.ndarray:
    """The share of a step's gradients that lie below each exponent, and below all of them."""
    shares = np.cumsum(counts, 1) / np.maximum(counts.sum(1, keepdims=True), 1)
    return np.pad(shares, ((0, 0), (1, 0)))


@jax.jit
def _replay(
    policy: ols.LossScale, starts: Any, largest: Any, inner: Any
) -> tuple[Any, Any]:
    """The scales, and which steps were skipped; both (cases, steps)."""

    def step(loss_scale, sizes):
        largest, inner = sizes
        scale = loss_scale()
        skipped = ~(inner * scale < OVERFLOW)
        underflows = largest * scale <= 2.0**UNDERFLOW
        gradient = jnp.where(skipped, jnp.inf, jnp.where(underflows, 0, largest))
        new, _ = loss_scale.update(gradient)
        return new, (scale, skipped)

    def run(start, largest, inner):
        first = policy
        if not isinstance(policy, ols.FixedLossScale):
            first = policy.replace(loss_scale=start)
        return jax.lax.scan(step, first, (largest, inner))[1]

    return jax.vmap(run)(starts, largest, inner)
