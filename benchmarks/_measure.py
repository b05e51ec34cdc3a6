"""How things are measured: compiled once, run interleaved in random order, medians."""

import gc
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax

from benchmarks import _hlo


def compile_(function: Callable[..., Any], *args: Any, donate: tuple[int, ...] = ()):
    """Compiles from cold caches; returns the program and its costs.

    Returns:
      `(compiled, costs)`: seconds to trace, lower and compile, by the clock and of the
      processors; bytes allocated for temporaries, and bytes accessed by the compiler's analysis,
      if it has one; bytes moved, copies, kernels and collectives of the program.
    """
    jax.clear_caches()
    start, processors = time.perf_counter(), time.process_time()
    compiled = jax.jit(function, donate_argnums=donate).lower(*args).compile()
    seconds, processors = time.perf_counter() - start, time.process_time() - processors
    program = _hlo.Program(compiled)
    account = compiled.cost_analysis() or {}
    costs = {
        "compile_s": seconds,
        "compile_cpu_s": processors,
        "temp_bytes": program.temp_bytes,
        "bytes_accessed": account.get("bytes accessed", program.bytes_moved),
        "bytes_moved": program.bytes_moved,
        "copies": len(program.copies),
        "kernels": len(program.kernels),
        "collectives": [o.result for o in program.collectives],
    }
    return compiled, costs


def interleave_compiling(
    cases: dict[str, tuple[Callable[..., Any], tuple]], rounds: int, base: str
) -> dict[str, Any]:
    """Compiles each case once a round, from cold caches, in an order that changes.

    Args:
      cases: functions and their arguments, the first two of which are donated.
      rounds: how many.
      base: the case that the others are compared to.

    Returns:
      For each case the processor's seconds to trace, and to trace, lower and compile, and the
      ratios of both to `base`; medians.
    """
    order, times = random.Random(0), {name: [] for name in cases}
    for _ in range(rounds):
        for name in order.sample(list(cases), len(cases)):
            function, args = cases[name]
            jax.clear_caches()
            gc.collect()
            start = time.process_time()
            traced = jax.jit(function, donate_argnums=(0, 1)).trace(*args)
            in_between = time.process_time()
            traced.lower().compile()
            times[name].append((in_between - start, time.process_time() - start))
    medians = {
        k: list(map(statistics.median, zip(*v, strict=True))) for k, v in times.items()
    }
    names = ("trace", "compile")
    return {
        name: {f"{what}_cpu_s": x for what, x in zip(names, found, strict=True)}
        | {
            f"{what}_ratio": x / y
            for what, x, y in zip(names, found, medians[base], strict=True)
        }
        for name, found in medians.items()
    }


def interleave(
    cases: dict[str, Callable[[], Any]], rounds: int, base: str
) -> dict[str, Any]:
    """Times each case once a round, in an order that changes from round to round.

    Args:
      cases: what to time; each returns what to wait for.
      rounds: how many, after two that are not counted.
      base: the case that the others are compared to, within each round.

    Returns:
      For each case the median milliseconds, the median of the ratios to `base` and their
      quartiles.
    """
    order, times = random.Random(0), {name: [] for name in cases}
    for _ in range(rounds + 2):
        for name in order.sample(list(cases), len(cases)):
            start = time.perf_counter()
            jax.block_until_ready(cases[name]())
            times[name].append(time.perf_counter() - start)
    times = {name: values[2:] for name, values in times.items()}
    result = {}
    for name, values in times.items():
        ratios = [t / b for t, b in zip(values, times[base], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        result[name] = {
            "ms": 1e3 * statistics.median(values),
            "ratio": middle,
            "quartiles": [low, high],
        }
    return result
