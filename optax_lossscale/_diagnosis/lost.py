"""What gradients lose to underflow, at the scale that fits and without one."""

import bisect
import collections
import functools
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from optax_lossscale._arrays.names import without_numbers
from optax_lossscale._diagnosis.calibration import InitialScale
from optax_lossscale._diagnosis.places import recorded_places
from optax_lossscale._diagnosis.program import Evidence, Program

_NOTABLE = 0.01  # a share of gradients that is worth mentioning
_TINY = float(jnp.finfo(jnp.float16).tiny)
_REACH = 2.0**-40  # from the largest float16 to the smallest: no single scale holds more
_HIGH_ENOUGH = 30  # 2**30 brings gradients from 2**-54 on into float16's range
_STRIDE = 4  # from one scale to the next, to see what underflows


class Underflow(NamedTuple):
    """How many gradients of one kind of parameter, or at one kind of place, underflow.

    Attributes:
      lost: the share that is zero or subnormal at a loss scale of 1, but not zero in float32.
      left: the same share at the scale that fits.
      bits: the exponent of the least power of two at which next to nothing is lost.
    """

    lost: float
    left: float
    bits: int


def find_underflow(
    program: Program, truth: Evidence, known: set[str], fits: InitialScale
) -> dict[str, Underflow]:
    """What each group loses, compared with the scale at which it loses least; the worst first."""
    in_16_bits = {name for name in known if _is_of_float16(program.at(0).grads[name])}
    shares = functools.cache(lambda e: _shares(program.at(e), truth, known, in_16_bits))
    fitting, largest = (round(math.log2(scale)) for scale in (fits.scale, fits.largest))
    sweep = {0, fitting, *range(largest, max(largest, _HIGH_ENOUGH) + 1, _STRIDE)}
    found = {}
    for name in shares(fitting):
        of_all = {e: shares(e)[name] for e in sorted(sweep) if name in shares(e)}
        best = min(of_all, key=of_all.__getitem__)
        least = of_all[best]
        lost, left = (of_all.get(e, least) - least for e in (0, fitting))
        if max(lost, left) > _NOTABLE:
            is_kept = lambda e, name=name, most=least + _NOTABLE: shares(e).get(name, 1.0) <= most
            bits = bisect.bisect_left(range(best), True, key=is_kept)
            found[name] = Underflow(lost, left, bits)
    return dict(sorted(found.items(), key=lambda item: (item[0] != "all", -item[1].lost)))


def _shares(
    evidence: Evidence, truth: Evidence, known: set[str], in_16_bits: set[str]
) -> dict[str, float]:
    """The share of each group that underflows, without the groups that overflow."""
    counts: Any = collections.defaultdict(lambda: np.zeros(2))  # how many are lost, of how many
    for name in filter(known.__contains__, evidence.grads):
        size, true = np.abs(evidence.grads[name]), np.abs(truth.grads[name])
        gone = (size < _TINY) if name in in_16_bits else (size == 0)
        lost = np.count_nonzero(gone & (true > true.max(initial=0) * _REACH))
        for group in ("all", without_numbers(name)):
            counts[group] += lost if np.isfinite(size).all() else np.nan, size.size
    for name, record in recorded_places(evidence.taps):
        gradient = record.cotangent
        lost = np.nan if gradient.nonfinite else gradient.zeros + gradient.subnormals
        counts[f"arriving at {without_numbers(name)}"] += lost, gradient.size
    shares = {group: float(lost / max(size, 1)) for group, (lost, size) in counts.items()}
    return {group: share for group, share in shares.items() if not math.isnan(share)}


def _is_of_float16(x: np.ndarray) -> bool:
    """Whether these are numbers of float16, whatever dtype they have since been cast to."""
    if x.dtype == jnp.bfloat16 or np.iscomplexobj(x):
        return False
    with np.errstate(over="ignore"):
        return bool((x == x.astype(np.float16)).all())
