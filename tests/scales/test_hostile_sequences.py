"""Gradients that were made up to fool a loss scale, and how many of them Headroom trains.

A family of sequences returns, for each step, log2 of the largest gradient, whether the
batch fails at any scale, and which of two sizes the gradients have.
"""

import jax
import jax.numpy as jnp
import numpy as np

import optax_lossscale as ols

STEPS = 4000
OVERFLOW, UNDERFLOW = 16, -25  # float16's range in bits
NEVER = np.zeros(STEPS, bool)


def order(rng, low, high):
    return np.exp(rng.uniform(np.log(low), np.log(high)))


def phase(rng, period):
    return (np.arange(STEPS) + rng.integers(round(period))) % round(period)


def rare(rng, n, in_turn):
    return phase(rng, n) == 0 if in_turn else rng.random(STEPS) < 1 / n


def sparse(rng):
    is_live = rare(rng, order(rng, 2, 400), in_turn=rng.random() < 0.6)
    return np.where(is_live, 0, -np.inf), NEVER, NEVER


def two_sizes(rng, in_turn):
    is_large = rare(rng, order(rng, 2, 101), in_turn) ^ (rng.random() > 0.8)
    return rng.uniform(6, 26) * is_large, NEVER, is_large


def broken(rng, low, high):
    noise = order(rng, low, high) * rng.normal(size=STEPS)
    return noise, rng.random(STEPS) < order(rng, 0.002, 0.3), NEVER


def both(rng):
    size, _, is_large = two_sizes(rng, rng.random() < 0.5)
    noise, is_broken, _ = broken(rng, 0.05, 4)
    return size + noise, is_broken, is_large


def heavy_tails(rng):
    noise = rng.uniform(0.3, 2) * rng.standard_t(rng.uniform(1.2, 5), STEPS)
    return np.clip(noise, -40, 40), NEVER, NEVER


def drift(rng):
    bits = rng.uniform(18, 40) * rng.choice([-1, 1])
    return bits * np.linspace(-0.5, 0.5, STEPS), NEVER, NEVER


def jumps(rng):
    n = order(rng, 200, 4000)
    return rng.uniform(18, 31) * (phase(rng, 2 * n) < n), NEVER, NEVER


def bursts(rng):
    return 0 * NEVER, phase(rng, order(rng, 150, 4000)) < order(rng, 2, 60), NEVER


def long_zeros(rng):
    zeros, live = order(rng, 100, 6000), order(rng, 10, 3000)
    return np.where(phase(rng, zeros + live) < zeros, -np.inf, 0), NEVER, NEVER


FAMILIES = [
    *(sparse, both, heavy_tails, drift, jumps, bursts, long_zeros),
    lambda rng: two_sizes(rng, in_turn=True),
    lambda rng: two_sizes(rng, in_turn=False),
    lambda rng: broken(rng, 0.05, 0.5),
    lambda rng: broken(rng, 1.5, 4.0),
]
RNG = np.random.default_rng(0)
SIZES, BROKEN, KIND = map(np.stack, zip(*[f(RNG) for f in FAMILIES * 7], strict=True))
SIZES += RNG.uniform(-25, 8, (77, 1))
SIZES += RNG.uniform(0.05, 2, (77, 1)) * RNG.normal(size=SIZES.shape)


@jax.jit
def replayed(policy):
    """log2 of the scales, and which steps were skipped; both (77, STEPS)."""

    def step(loss_scale, event):
        size, is_broken = event
        log2_scale = jnp.log2(loss_scale())
        skipped = is_broken | (size + log2_scale >= OVERFLOW)
        gradient = jnp.where(size + log2_scale < UNDERFLOW, 0, jnp.exp2(size))
        loss_scale, _ = loss_scale.update(jnp.where(skipped, jnp.inf, gradient))
        return loss_scale, (log2_scale, skipped)

    run = lambda *events: jax.lax.scan(step, policy, events)[1]
    return jax.vmap(run)(jnp.float32(SIZES), BROKEN)


def cost(policy):
    """Of each sequence, over the steps that could be applied: the mean of both sizes' means.

    A skipped step costs 1, and an applied one the share of its gradients that was flushed,
    if their logarithms are normally distributed, 9 bits below the largest.
    """
    log2_scale, skipped = jax.device_get(replayed(policy))
    room = SIZES + log2_scale - UNDERFLOW
    flushed = np.asarray(jax.scipy.special.ndtr((9 - room) / 4))
    costs = np.where(skipped | (room < 0), 1, flushed)
    kinds = np.stack([KIND, ~KIND]) & ~BROKEN & np.isfinite(SIZES)
    means = (costs * kinds).sum(2) / np.maximum(kinds.sum(2), 1)
    return means.sum(0) / kinds.any(2).sum(0)


def test_of_77_sequences_headroom_trains_at_least_60():
    """That is, as well as the better one of TensorFlow's and PyTorch's rules, but for 5%."""
    dynamic = ols.DynamicLossScale(), ols.DynamicLossScale(2.0**16, min_scale=None)
    trains = cost(ols.HeadroomLossScale()) <= np.minimum(*map(cost, dynamic)) + 0.05
    assert trains.sum() >= 60
