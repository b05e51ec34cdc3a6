"""What is noted of a result: how far it is from float32's, and how large its numbers are."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

TOLERANCE = 0.05
"""How far numbers may be from float32's, relative to them, before they count as off."""

_LIFTED = 0.25  # of the mean size: smaller numbers are compared with this


class Place(NamedTuple):
    """An equation of a program, or one of its arguments."""

    primitive: str  # "" for an argument
    source: str  # the line that made it
    scope: str  # the names of the scopes that it is in, as `encoder/layer_3`; "" for none
    name: str = ""  # of an argument: its path
    is_parameter: bool = False
    is_derivative: bool = False  # of the backward pass, or of one that the loss function takes
    is_passed: bool = False  # computed in 16 bits only
    terms: int = 1  # that are summed to one number, of a product or a sum


@dataclasses.dataclass(slots=True, eq=False)
class Note:
    """What was noted of one result, in one round of the loops around it."""

    place: Place
    number: int  # of the place in the program
    rounds: tuple[int, ...]  # of the loops around it, the outermost first
    reads: tuple["Note", ...]  # the notes of its operands
    dtype: Any
    seeded: bool = False  # whether it depends on the seed of the backward pass
    count: int = 1  # of numbers
    error: float = 0.0  # the norm of the difference from float32's, relative to their norm
    off_share: float = 0.0  # of the numbers that are off by more than the tolerance
    bad: bool = False  # not finite where float32's is
    nan: bool = False  # NaN where float32's is finite
    bad_true: bool = False  # float32's is not finite either
    nan_true: bool = False  # float32's is NaN
    lost: float = 0.0  # the share that is zero where float32's is not
    decided: float = 0.0  # of booleans and integers: the share that float32 decides otherwise
    largest: float = 0.0  # of the absolute values of float32's
    typical: float = 0.0  # their root mean square
    exponents: Any = None  # how many of them have each exponent, beginning with 2**-127

    @property
    def off(self) -> float:
        """How far it is off: infinity if it is not finite where float32's is."""
        if self.bad:
            return math.inf
        return max(self.error, TOLERANCE * 1.01 if self.off_share > 0.2 else 0.0)


def measured(low: np.ndarray, true: np.ndarray | None, with_exponents: bool) -> list[dict]:
    """What is to be noted of results in each round of a loop: arrays, shape (rounds, …)."""
    low = _rows(low)
    if low.dtype.kind in "biu":
        decided = (low != _rows(true)).mean(1) if low.size else np.zeros(len(low))
        return [{"count": low.shape[1], "decided": float(share)} for share in decided]
    if not low.shape[1]:
        return [{"count": 0} for _ in low]
    with np.errstate(all="ignore"):
        return _measured(low, low if true is None else _rows(true), with_exponents)


def _measured(low: np.ndarray, true: np.ndarray, with_exponents: bool) -> list[dict]:
    is_same = low is true
    count = low.shape[1]
    sums = np.einsum("ij,ij->i", true, true)
    apart = np.zeros_like(low) if is_same else low - true
    differences = np.einsum("ij,ij->i", apart, apart)
    notes = []
    for n, (total, distance) in enumerate(zip(sums, differences, strict=True)):
        if math.isfinite(total) and math.isfinite(distance):
            note = _of_finite(low[n], true[n], apart[n], total, distance, is_same)
        else:
            note = _of_some_not_finite(low[n], true[n])
        if with_exponents:
            note["exponents"] = exponents_of(true[n])
        notes.append(note | {"count": count})
    return notes


def _of_finite(low, true, apart, total, distance, is_same) -> dict:
    sizes = np.abs(true)
    count = sizes.size
    note: dict[str, Any] = {
        "largest": float(sizes.max()),
        "typical": math.sqrt(total / count),
    }
    if is_same or not distance:
        return note
    # Not a ratio of squares, which underflow.
    note["error"] = math.sqrt(distance) / math.sqrt(total) if total else math.inf
    least = _LIFTED * float(sizes.mean())
    note["lost"] = 1 - np.count_nonzero(low) / max(np.count_nonzero(true), 1)
    note["lost"] = max(note["lost"], 0.0)
    if distance > 0.2 * count * (TOLERANCE * least) ** 2:  # else a fifth cannot be off
        allowed = TOLERANCE * np.maximum(sizes, least)
        note["off_share"] = np.count_nonzero(np.abs(apart) > allowed) / count
    return note


def _of_some_not_finite(low, true) -> dict:
    finite = np.isfinite(low)
    finite_true = np.isfinite(true)
    both = finite & finite_true
    # In float64, as a square may be infinite where the number is not.
    rest = true[both].astype(np.float64)
    apart = low[both].astype(np.float64) - rest
    note = _of_finite(low[both], rest, apart, rest @ rest, apart @ apart, False) if rest.size else {}
    known = np.abs(true[finite_true])
    if not finite_true.all():
        note["bad_true"] = True
        note["nan_true"] = bool(np.isnan(true).any())
    note["largest"] = float(known.max(initial=0))
    note["bad"] = bool((~finite & finite_true).any())
    note["nan"] = bool((np.isnan(low) & finite_true).any())
    return note


def exponents_of(x: np.ndarray) -> np.ndarray:
    """How many numbers have each exponent, from 2**-127, with what is less, to infinity."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return np.bincount((bits.ravel() >> 23) & 0xFF, minlength=256)


def limits(dtype: Any) -> tuple[float, float]:
    """The least size that a dtype rounds to infinity, and the least of its normal numbers."""
    info = jnp.finfo(dtype)
    largest = float(info.max)
    half_step = math.ldexp(float(info.eps), math.frexp(largest)[1] - 2)
    return largest + half_step, float(info.tiny)


def _rows(x: np.ndarray) -> np.ndarray:
    """Results as one row of real numbers for each round."""
    flat = x.reshape(len(x), -1) if x.size else np.zeros((len(x), 0), x.dtype)
    return np.ascontiguousarray(flat).view(x.real.dtype) if x.dtype.kind == "c" else flat
