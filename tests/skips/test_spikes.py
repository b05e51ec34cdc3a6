"""The recommended rule: held to its docstring, written out in Python, and to its promises."""

import math
from fractions import Fraction

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optax_lossscale import skips


@jax.jit
def decided(rule, norms, losses=None):
    step = lambda rule, measured: rule.update(*measured)
    last, applied = jax.lax.scan(step, rule, (norms, losses))
    return applied, last


def is_spike(x, xs, least, factor, window):
    if len(xs) < 8:
        return False
    ordered = sorted(xs[-window:])
    n = len(ordered)
    median, quartile = ordered[n // 2], ordered[3 * n // 4]
    spread = 1.4826 * (quartile - median)
    allowed = max(factor * spread, least * max(1, 24 / n))
    common = ordered[n - max(3, n // 20)]
    return x > max(median + allowed, common + allowed / 2)


def plainly(norms, losses, factor, least, window, max_skips):
    """The rule of the docstring."""
    logs, last_losses, budget, applied = [], [], max_skips, []
    for norm, loss in zip(norms, losses, strict=True):
        log = math.log2(max(norm, np.finfo(np.float32).tiny))
        spike = norm > 0 and is_spike(log, logs, least, factor, window)
        if loss is not None and loss > 0:
            spike |= is_spike(math.log2(loss), last_losses, least, factor, window)
        if spike and budget >= 1:
            budget -= 1
            applied.append(False)
            continue
        budget = 0 if spike else budget
        applied.append(True)
        if norm > 0:
            budget = min(budget + Fraction(1, 20), max_skips)
            logs.append(log)
        if loss is not None and loss > 0:
            last_losses.append(math.log2(loss))
    return applied


def noisy(steps, noise=0.2, seed=0):
    return np.exp(noise * np.random.default_rng(seed).normal(size=steps)).astype(
        np.float32
    )


SERIES = {
    "noise": noisy(300),
    "spikes": noisy(300) * np.where(np.arange(300) % 37 == 36, 50, 1),
    "heavy tails": np.exp(np.random.default_rng(1).standard_t(2, 300)),
    "jumps": noisy(300) * np.repeat([1, 30, 0.1, 1000, 1000, 1], 50),
    "zeros": noisy(300) * (np.random.default_rng(2).random(300) > 0.3),
    "a rise": 1.2 ** np.arange(300.0),
}
CONFIGS = [(6.0, 1.0, 64, 16), (3.0, 0.5, 16, 2), (1.0, 2.0, 40, 0)]


LOSSES = {
    "none": None,
    "falls": 3 * np.exp(-np.arange(300) / 100) + 0.1 * noisy(300, seed=3),
    "spikes": noisy(300, seed=4) + 5 * (np.arange(300) % 29 == 28),
    "of either sign": noisy(300, 1.0, seed=5) - 1,
    "mostly zero": noisy(300, seed=6) * (np.arange(300) % 5 == 4),
}


@pytest.mark.parametrize("losses", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_decides_by_the_rule_in_its_docstring(config, losses):
    losses = None if losses is None else losses.astype(np.float32)
    factor, least, window, max_skips = config
    rule = skips.spikes(factor, least=least, window=window, max_skips=max_skips)
    for name, norms in SERIES.items():
        norms = norms.astype(np.float32)
        applied, last = decided(rule, norms, losses)
        expected = plainly(norms, [None] * 300 if losses is None else losses, *config)
        np.testing.assert_array_equal(applied, expected, name)
        assert last.skipped_by_rule == len(norms) - sum(expected)


def test_a_loss_far_above_the_usual_is_a_spike_as_well():
    losses = 2.5 + 0.1 * np.random.default_rng(0).normal(size=100).astype(np.float32)
    losses[[50, 80]] = [6.0, 12.0]
    for scale in (1.0, 1e-20, 1e20):
        applied, _ = decided(skips.spikes(), noisy(100), losses * np.float32(scale))
        np.testing.assert_array_equal(np.flatnonzero(~np.array(applied)), [50, 80])


def test_a_spike_is_skipped_and_widens_nothing():
    rule = skips.spikes()
    _, rule = decided(rule, noisy(100))
    limit = jax.jit(lambda rule: rule.update(1.0)[0].norm_limit)
    before = limit(rule)
    assert 2 < before < 8
    for norm in (8.0, 1e3, 1e18):
        rule, should_apply = rule.update(norm)
        assert not should_apply
        assert limit(rule) == before
    assert rule.skipped_by_rule == 3
    assert rule.update(1.0)[1]


@pytest.mark.parametrize("max_skips", [0, 5])
def test_a_lasting_change_of_level_is_taken_for_what_it_is(max_skips):
    norms = np.concatenate(
        [noisy(100), 100 * noisy(400, seed=1), 1e6 * noisy(50, seed=2)]
    )
    applied, _ = decided(skips.spikes(max_skips=max_skips), norms)
    skipped = np.flatnonzero(~np.array(applied))
    expected = [*range(100, 100 + max_skips), *range(500, 500 + max_skips)]
    np.testing.assert_array_equal(skipped, expected)


# What an adversary that knows the rule may do next: a norm and a loss, of the limits.
MOVES = {
    "usual": lambda norm, value: (1.0, 1.0),
    "a little above": lambda norm, value: (1.01 * norm, 1.0),
    "far above": lambda norm, value: (100 * norm, 1.0),
    "at the limit": lambda norm, value: (norm, value),
    "loss": lambda norm, value: (1.0, 3 * value),
    "no gradient": lambda norm, value: (0.0, 1.0),
    "no gradient, loss": lambda norm, value: (0.0, 3 * value),
    "falls": lambda norm, value: (1e-3 * norm, 1e-3 * value),
}
moves = st.lists(
    st.tuples(st.sampled_from(range(len(MOVES))), st.integers(1, 40)),
    min_size=1,
    max_size=12,
)


@jax.jit
def attacked(rule, moves):
    """Of each step, whether it is applied, and whether it has a gradient."""

    def step(rule, move):
        here = rule.update(1.0, 1.0)[0]
        limits = [jnp.clip(x, 1e-15, 1e15) for x in (here.norm_limit, here.value_limit)]
        as_numbers = lambda of_limits: lambda *x: tuple(map(jnp.float32, of_limits(*x)))
        norm, value = jax.lax.switch(move, [*map(as_numbers, MOVES.values())], *limits)
        rule, should_apply = rule.update(norm, value)
        return rule, (should_apply, norm > 0)

    return jax.lax.scan(step, rule, moves)[1]


@pytest.mark.parametrize(
    "config", [(6.0, 1.0, 64, 16), (1.0, 1e-3, 16, 3), (1.0, 0.1, 20, 0)]
)
@hypothesis.given(moves=moves)
def test_in_no_series_more_than_max_skips_and_1_in_20_are_skipped(config, moves):
    factor, least, window, max_skips = config
    rule = skips.spikes(factor, least=least, window=window, max_skips=max_skips)
    moves = np.resize(np.repeat(*zip(*moves, strict=True)), 480)
    applied, measured = map(np.array, attacked(rule, moves))
    beyond = np.cumsum(20 * ~applied - (applied & measured).astype(int))
    assert (beyond - np.minimum.accumulate([0, *beyond])[:-1]).max() <= 20 * max_skips


TURN = np.arange(2000)
HERE = TURN >= 200
COMMON = {
    "1 old batch in 10": np.where(HERE & (TURN % 10 != 0), 30, 1),
    "every second old": np.where(HERE & (TURN % 2 != 0), 30, 1),
    "two lengths in turn": np.where(TURN % 2, 1, 5),
    "three levels": np.where(HERE, 5.0 ** (TURN % 3), 1),
    "rises and stays": 1.2 ** np.clip(TURN - 200, 0, 50),
}


@pytest.mark.parametrize("of", ["norms", "losses"])
@pytest.mark.parametrize("levels", COMMON)
def test_what_is_common_is_no_spike(levels, of):
    """After some skips both levels are usual, and what is far above both is skipped."""
    series = (noisy(2000, 0.1) * COMMON[levels]).astype(np.float32)
    norms, losses = (noisy(2000), series) if of == "losses" else (series, np.ones(2000))
    applied, rule = decided(skips.spikes(), norms, losses.astype(np.float32))
    assert rule.skipped_by_rule <= 30
    assert applied[500:].all()
    high = series[-60:].max()
    assert not rule.update(1e15 if of == "norms" else 1.0, 1e15 * high)[1]


@pytest.mark.parametrize("of", ["norms", "losses"])
def test_rare_spikes_are_caught_for_as_long_as_they_come(of):
    rng = np.random.default_rng(0)
    spikes = (rng.random(5000) < 0.01) & (np.arange(5000) >= 20)
    series = noisy(5000) * np.where(
        spikes, np.exp(rng.uniform(*np.log([10, 100]), 5000)), 1
    )
    series = series.astype(np.float32)
    given = (series, None) if of == "norms" else (noisy(5000, seed=1), series)
    applied, rule = decided(skips.spikes(), *given)
    assert (~np.array(applied) & spikes).sum() >= 0.95 * spikes.sum()
    assert rule.skipped_by_rule - (~np.array(applied) & spikes).sum() == 0


@pytest.mark.parametrize("noise", [0.0, 0.2, 0.5])
def test_what_rises_slowly_falls_or_warms_up_is_no_spike(noise):
    steps = np.arange(600)
    for shape in (
        2.0 ** (steps / 64),  # twice as much with each window
        2.0 ** (-steps / 10),
        np.minimum(1, (1 + steps) / 100),  # a warm-up from almost nothing
    ):
        norms = (noisy(600, noise) * shape).astype(np.float32)
        assert decided(skips.spikes(), norms)[0].all()


def test_gradients_that_are_all_zero_measure_nothing():
    _, rule = decided(skips.spikes(), noisy(50))
    rule, should_apply = rule.update(0.0)
    assert should_apply
    _, rule = decided(rule, jnp.zeros(500))
    rule, should_apply = rule.update(100.0)
    assert not should_apply
    _, rule = decided(skips.spikes(), jnp.zeros(500))
    assert rule.update(1e-3)[1]
