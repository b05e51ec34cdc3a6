"""What is noted of a result: how far it is from float32's, and how large its numbers are."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

TOLERANCE = 0.05
"""How far numbers may be from float32's, relative to them, before they count as off."""

FIFTH = 0.2
"""The share of an array's numbers that may be off."""

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
    largest_low: float | None = None  # of those of the program; None if they are the same
    typical: float = 0.0  # their root mean square

    @property
    def off(self) -> float:
        """How far it is off: infinity if it is not finite where float32's is."""
        return math.inf if self.bad else self.error

    @property
    def apart(self) -> float:
        """How far its numbers are from float32's, as numbers."""
        return self.off * self.typical * math.sqrt(self.count)


def measured(low: np.ndarray, true: np.ndarray | None) -> list[dict[str, Any]]:
    """What is to be noted of a result in each round of a loop, of arrays, shape (rounds, …)."""
    low = _rows(low)
    count = low.shape[1]
    if not count:
        return [{"count": 0}] * len(low)
    if low.dtype.kind in "biu":
        decided = (low != _rows(low if true is None else true)).mean(1).tolist()
        return [{"count": count, "decided": share} for share in decided]
    with np.errstate(all="ignore"):
        columns = _columns(low, low if true is None else _rows(true))
    columns["count"] = np.full(len(low), count)
    rows = zip(*(column.tolist() for column in columns.values()), strict=True)
    return [dict(zip(columns, row, strict=True)) for row in rows]


def _columns(low: np.ndarray, true: np.ndarray) -> dict[str, np.ndarray]:
    """The numbers to note, an array over the rounds of each."""
    sizes = np.abs(true)
    total = np.einsum("ij,ij->i", true, true)
    columns = {"largest": sizes.max(1), "typical": np.sqrt(total / true.shape[1])}
    if low is true and np.isfinite(total).all():
        return columns
    apart = np.abs(low - true)
    distance = np.einsum("ij,ij->i", apart, apart)
    error = np.sqrt(distance) / np.sqrt(total)  # not of the ratio, which may underflow
    columns["largest_low"] = np.abs(low).max(1)
    columns["error"] = np.where(distance > 0, error, 0)
    zeros = np.count_nonzero(low, 1) / np.maximum(np.count_nonzero(true, 1), 1)
    columns["lost"] = np.where(distance > 0, np.maximum(1 - zeros, 0), 0)
    least = _LIFTED * sizes.mean(1, keepdims=True)
    columns["off_share"] = np.zeros(len(low))
    may_be = distance > FIFTH * true.shape[1] * (TOLERANCE * least[:, 0]) ** 2
    if may_be.any():  # else no fifth can be off
        is_off = apart > TOLERANCE * np.maximum(sizes, least)
        columns["off_share"] = is_off.mean(1)
    is_finite = np.isfinite(total) & np.isfinite(distance)
    for name in ("bad", "nan", "bad_true", "nan_true"):
        columns[name] = np.zeros(len(low), bool)
    for n in np.flatnonzero(~is_finite):
        for name, value in _of_some_not_finite(low[n], true[n]).items():
            columns[name][n] = value
    return columns


def _of_some_not_finite(low: np.ndarray, true: np.ndarray) -> dict[str, Any]:
    """What is to be noted of numbers of which some are not finite, or their squares are not."""
    finite = np.isfinite(low)
    finite_true = np.isfinite(true)
    both = finite & finite_true
    rest = np.zeros((1, max(np.count_nonzero(both), 1)))  # in float64, which holds the squares
    rest_true = rest.copy()
    rest[0, : both.sum()] = low[both]
    rest_true[0, : both.sum()] = true[both]
    known = _columns(rest, rest_true)
    share = both.mean()
    return {name: column[0] for name, column in known.items()} | {
        "off_share": known["off_share"][0] * share,
        "largest": np.abs(true[finite_true]).max(initial=0),
        "largest_low": np.abs(low[finite]).max(initial=0),
        "bad": (~finite & finite_true).any(),
        "nan": (np.isnan(low) & finite_true).any(),
        "bad_true": not finite_true.all(),
        "nan_true": np.isnan(true).any(),
    }


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
