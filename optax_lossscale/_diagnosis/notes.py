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


def measured(low: np.ndarray, true: np.ndarray | None) -> dict[str, Any]:
    """What is to be noted of a result beside float32's, which is None if it is the same."""
    low = _numbers(low)
    true = low if true is None else _numbers(true)
    if not low.size:
        return {"count": 0}
    if low.dtype.kind in "biu":
        return {"count": low.size, "decided": float(np.mean(low != true))}
    with np.errstate(all="ignore"):
        noted = _compared(low, true)
        if noted is None:
            noted = _compared_if_finite(low, true)
    return {"count": low.size, **noted}


def _compared(low: np.ndarray, true: np.ndarray) -> dict[str, Any] | None:
    """What is noted of finite numbers; None if some are not, or their squares are out of range."""
    sizes = np.abs(true)
    largest = float(sizes.max(initial=0))
    total = float(true @ true)
    least_total = 2.0**26 * np.finfo(true.dtype).tiny  # so that squares kept their digits
    in_range = math.isfinite(total) and (total > least_total or not largest)
    noted = {"largest": largest, "typical": math.sqrt(total / max(true.size, 1))}
    if low is true:
        return noted if in_range else None
    apart = np.abs(low - true)
    distance = float(apart @ apart)
    if not (in_range and math.isfinite(distance)):
        return None
    noted["largest_low"] = float(np.abs(low).max(initial=0))
    if distance == 0:
        return noted
    noted["error"] = math.sqrt(distance / total) if total else math.inf
    kept = np.count_nonzero(low) / max(np.count_nonzero(true), 1)
    noted["lost"] = max(1 - kept, 0.0)
    least = _LIFTED * float(sizes.mean())
    if distance > FIFTH * true.size * (TOLERANCE * least) ** 2:  # else no fifth can be off
        is_off = apart > TOLERANCE * np.maximum(sizes, least)
        noted["off_share"] = float(is_off.mean())
    return noted


def _compared_if_finite(low: np.ndarray, true: np.ndarray) -> dict[str, Any]:
    """What is noted of numbers some of which are not finite, or have squares out of range."""
    finite = np.isfinite(low)
    finite_true = np.isfinite(true)
    both = finite & finite_true
    # float64 holds the squares.
    noted = _compared(low[both].astype(np.float64), true[both].astype(np.float64)) or {}
    return noted | {
        "off_share": noted.get("off_share", 0.0) * float(both.mean()),
        "largest": float(np.abs(true[finite_true]).max(initial=0)),
        "largest_low": float(np.abs(low[finite]).max(initial=0)),
        "bad": bool((~finite & finite_true).any()),
        "nan": bool((np.isnan(low) & finite_true).any()),
        "bad_true": not finite_true.all(),
        "nan_true": bool(np.isnan(true).any()),
    }


def _numbers(x: np.ndarray) -> np.ndarray:
    """A result as a row of real numbers that NumPy computes with."""
    flat = np.ravel(x)
    if flat.dtype.kind == "c":
        return np.ascontiguousarray(flat).view(flat.real.dtype)
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
