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
    # The names of the scopes that it is in, as `encoder/layer_3`; "" for none
    scope: str
    name: str = ""  # of an argument: its path
    is_parameter: bool = False
    # Of the backward pass, or of one that the loss function takes
    is_derivative: bool = False
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
    distance: float = 0.0  # the norm of the difference from float32's
    error: float = 0.0  # the same, relative to the norm of float32's
    off_share: float = 0.0  # of the numbers that are off by more than the tolerance
    bad: bool = False  # not finite where float32's is
    nan: bool = False  # NaN where float32's is finite
    bad_true: bool = False  # float32's is not finite either
    nan_true: bool = False  # float32's is NaN
    lost: float = 0.0  # the share that is zero where float32's is not
    # Of booleans and integers: the share that float32 decides otherwise
    decided: float = 0.0
    largest: float = 0.0  # of the absolute values of float32's
    # Of those of the program; None if they are the same
    largest_low: float | None = None
    typical: float = 0.0  # their root mean square

    def add(self, numbers: dict[str, Any]) -> None:
        """Adds what was measured."""
        for name, value in numbers.items():
            setattr(self, name, value)

    @property
    def off(self) -> float:
        """How far it is off: infinity if it is not finite where float32's is."""
        return math.inf if self.bad else self.error

    @property
    def apart(self) -> float:
        """How far its numbers are from float32's, as numbers."""
        return math.inf if self.bad else self.distance


def measured(low: np.ndarray, true: np.ndarray | None) -> list[dict[str, Any]]:
    """What is to be noted of results, a row for each, beside float32's; None if it is the same."""
    low = _numbers(low)
    true = low if true is None else _numbers(true)
    rows, count = low.shape
    if not count:
        return [{"count": 0}] * rows
    if low.dtype.kind in "biu":
        columns = {"decided": (low != true).mean(1)}
    else:
        with np.errstate(all="ignore"):
            columns = _compared(low, true)
    columns["count"] = np.full(rows, count)
    values = zip(*(column.tolist() for column in columns.values()), strict=True)
    return [dict(zip(columns, row, strict=True)) for row in values]


def _compared(low: np.ndarray, true: np.ndarray) -> dict[str, np.ndarray]:
    """What is to be noted of floats, an entry for each row."""
    sizes = np.abs(true)
    total = np.einsum("ij,ij->i", true, true)
    noted = {"largest": sizes.max(1), "typical": np.sqrt(total / true.shape[1])}
    # So that squares kept their digits
    least_total = 2.0**26 * np.finfo(true.dtype).tiny
    in_range = np.isfinite(total) & ((total > least_total) | (noted["largest"] == 0))
    if low is true and in_range.all():
        return noted
    apart = np.abs(low - true)
    distance = np.einsum("ij,ij->i", apart, apart)
    noted["largest_low"] = np.abs(low).max(1)
    noted["distance"] = np.sqrt(distance)
    noted["error"] = np.where(distance > 0, np.sqrt(distance) / np.sqrt(total), 0)
    kept = np.count_nonzero(low, 1) / np.maximum(np.count_nonzero(true, 1), 1)
    noted["lost"] = np.where(distance > 0, np.maximum(1 - kept, 0), 0)
    least = _LIFTED * sizes.mean(1, keepdims=True)
    noted["off_share"] = np.zeros(len(low))
    may_be = distance > FIFTH * true.shape[1] * (TOLERANCE * least[:, 0]) ** 2
    if may_be.any():  # else no fifth can be off
        noted["off_share"] = (apart > TOLERANCE * np.maximum(sizes, least)).mean(1)
    for name in ("bad", "nan", "bad_true", "nan_true"):
        noted[name] = np.zeros(len(low), bool)
    for n in np.flatnonzero(~(in_range & np.isfinite(distance))):
        for name, value in _compared_if_finite(low[n], true[n]).items():
            noted[name][n] = value
    return noted


def _compared_if_finite(low: np.ndarray, true: np.ndarray) -> dict[str, Any]:
    """What is noted of numbers some of which are not finite, or have squares out of range."""
    finite = np.isfinite(low)
    finite_true = np.isfinite(true)
    both = finite & finite_true
    noted = {
        "largest": np.abs(true[finite_true]).max(initial=0),
        "largest_low": np.abs(low[finite]).max(initial=0),
        "bad": (~finite & finite_true).any(),
        "nan": (np.isnan(low) & finite_true).any(),
        "bad_true": not finite_true.all(),
        "nan_true": np.isnan(true).any(),
    }
    if not both.any() or (both.all() and true.dtype == np.float64):
        return noted
    # float64 holds the squares.
    of_both = _compared(low[None, both].astype(float), true[None, both].astype(float))
    rest = {name: column[0] for name, column in of_both.items()} | noted
    rest["off_share"] = rest["off_share"] * both.mean()
    return rest


def _numbers(x: np.ndarray) -> np.ndarray:
    """Results as rows of real numbers that NumPy computes with."""
    flat = x.reshape(len(x), -1) if x.size else np.zeros((len(x), 0), np.float32)
    if flat.dtype.kind == "c":
        return np.ascontiguousarray(flat).view(flat.real.dtype)
    if jnp.issubdtype(flat.dtype, jnp.integer) and flat.dtype.kind == "V":
        return flat.astype(np.int8)  # of int4 and the like, which are not NumPy's own
    is_narrow = jnp.issubdtype(flat.dtype, jnp.floating) and flat.dtype.itemsize < 4
    return flat.astype(np.float32) if is_narrow else flat


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
