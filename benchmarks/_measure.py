"""Times of alternatives, taken by turns, so that all of them meet the same machine."""

import gc
import random
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax


class Time(NamedTuple):
    """How long a case takes.

    Attributes:
      seconds: the median.
      ratio: the median of its ratios to the first case, each within a round.
      quartiles: those of the ratios.
    """

    seconds: float
    ratio: float
    quartiles: tuple[float, float]


def alternate(
    cases: dict[str, Callable[[], Any]],
    rounds: int,
    *,
    clock: Callable[[], float] = time.perf_counter,
    before: Callable[[], object] = lambda: None,
) -> dict[str, Time]:
    """Times each case once a round, in an order that changes from round to round.

    Args:
      cases: what to time. Each returns the arrays to wait for.
      rounds: how many, after one that does not count.
      clock: gives the time in seconds.
      before: is called before each case, and not timed.
    """
    order = random.Random(0)
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(1 + rounds):
        for name in order.sample(list(cases), len(cases)):
            before()
            start = clock()
            jax.block_until_ready(cases[name]())
            times[name].append(clock() - start)
    base, *_ = times.values()
    return {name: _time(found[1:], base[1:]) for name, found in times.items()}


def compiling(cases: dict[str, Callable[[], object]], rounds: int) -> dict[str, Time]:
    """The processors' time that each case takes to compile, from cold caches."""

    def forget():
        jax.clear_caches()
        gc.collect()

    return alternate(cases, rounds, clock=time.process_time, before=forget)


def _time(seconds: list[float], base: list[float]) -> Time:
    ratios = [x / y for x, y in zip(seconds, base, strict=True)]
    low, ratio, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return Time(statistics.median(seconds), ratio, (low, high))
