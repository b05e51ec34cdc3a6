"""Notes: how far a result is from float32's, how large it is, and what it is made of.

A `Note` belongs to one result of one equation, in one round of the loops around it. Its
`reads` are the notes of the operands, so the notes of a run are a graph, which `cause`
and `scale` go back along. `measured` computes the figures in a note from two arrays.
"""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

TOLERANCE = 0.05
"""How far numbers may be from float32's, relative to those, and still be right."""

FIFTH = 0.2
"""The share of an array's numbers that may be off or lost."""

_LIFTED = 0.25  # of the mean size: a smaller number is off relative to this, not itself


class Place(NamedTuple):
    """Where a value comes from: an equation of the program, or one of its arguments."""

    primitive: str  # the name of the equation's operation; "" for an argument
    source: str  # the user's line that made the equation
    # The names of the scopes that it is in, as `encoder/layer_3`; "" for none
    scope: str
    name: str = ""  # the path of an argument
    is_parameter: bool = False
    # Whether it is in the backward pass, or in a derivative inside the loss function
    is_derivative: bool = False
    terms: int = 1  # how many terms each number of a product or sum has
    number: int = -1  # its place in the order of running; -1 for an argument


@dataclasses.dataclass(slots=True, eq=False)
class Note:
    """What is known of one result, in one round of the loops around it."""

    place: Place
    rounds: tuple[int, ...]  # the rounds of the loops around it, the outermost first
    reads: tuple["Note", ...]  # the notes of its operands
    dtype: Any  # of the program's result
    seeded: bool = False  # whether it depends on the seed of the backward pass
    is_passed: bool = False  # whether float32's was computed in 16 bits as well
    count: int = 1  # how many numbers it has
    distance: float = 0.0  # the norm of the difference from float32's
    error: float = 0.0  # the distance, relative to the norm of float32's
    off_share: float = 0.0  # the share that is off by more than the tolerance
    bad: bool = False  # whether a number is not finite where float32's is
    nan: bool = False  # whether a number is NaN where float32's is finite
    bad_true: bool = False  # whether a number of float32's is not finite
    nan_true: bool = False  # whether a number of float32's is NaN
    lost: float = 0.0  # the share that is zero where float32's is not
    # For booleans and integers, the share that float32 decides otherwise
    decided: float = 0.0
    largest: float = 0.0  # the largest finite absolute value of either
    typical: float = 0.0  # the root mean square of float32's

    @property
    def off(self) -> float:
        """The relative distance from float32's; infinity if the result is bad."""
        return math.inf if self.bad else self.error

    @property
    def apart(self) -> float:
        """The absolute distance from float32's; infinity if the result is bad."""
        return math.inf if self.bad else self.distance


def worst(notes: Iterable[Note | None]) -> Note | None:
    """One note for several values: of the one that is off the most.

    It is also bad in float32 if any of the values is, and then reads both notes.
    """
    noted = [note for note in notes if note is not None]
    most = max(noted, key=lambda note: note.off, default=None)
    in_float32 = next((note for note in noted if note.bad_true), None)
    if most is None or in_float32 is None or most.bad_true:
        return most
    nan = any(note.nan_true for note in noted)
    return dataclasses.replace(
        most, reads=(most, in_float32), bad_true=True, nan_true=nan
    )


def measured(low: Any, true: Any) -> dict[str, Any]:
    """The figures in the note of a result.

    Args:
      low: the result, as the program computes it.
      true: the same in float32; None if both are the same.
    """
    low = _numbers(low)
    true = low if true is None else _numbers(true)
    if not low.size:
        return {"count": 0}
    if low.dtype.kind in "biu":
        return {"count": low.size, "decided": float((low != true).mean())}
    with np.errstate(all="ignore"):
        return {"count": low.size, **_compared(low, true)}


def _compared(low: np.ndarray, true: np.ndarray) -> dict[str, Any]:
    """The figures for floats."""
    sizes = np.abs(true)
    largest = float(sizes.max())
    total = float(true @ true)
    # Smaller squares are subnormal, and have lost digits.
    in_range = total > 2.0**26 * np.finfo(true.dtype).tiny or not largest
    if not (math.isfinite(total) and in_range):
        return _compared_where_finite(low, true)
    noted = {"largest": largest, "typical": math.sqrt(total / true.size)}
    if low is true:
        return noted
    apart = np.abs(low - true)
    distance = float(apart @ apart)
    if not math.isfinite(distance):
        return _compared_where_finite(low, true)
    if not distance:
        return noted
    noted["largest"] = max(largest, float(np.abs(low).max()))
    noted["distance"] = math.sqrt(distance)
    noted["error"] = math.sqrt(distance / total) if total else math.inf
    kept = np.count_nonzero(low) / max(np.count_nonzero(true), 1)
    noted["lost"] = max(1 - kept, 0.0)
    least = _LIFTED * float(sizes.mean())
    if distance > FIFTH * true.size * (TOLERANCE * least) ** 2:  # else no fifth is off
        is_off = apart > TOLERANCE * np.maximum(sizes, least)
        noted["off_share"] = float(is_off.mean())
    return noted


def _compared_where_finite(low: np.ndarray, true: np.ndarray) -> dict[str, Any]:
    """The figures for floats that are not all finite, or have squares out of range."""
    finite = np.isfinite(low)
    finite_true = np.isfinite(true)
    both = finite & finite_true
    noted: dict[str, Any] = {
        "bad": bool((~finite & finite_true).any()),
        "nan": bool((np.isnan(low) & finite_true).any()),
        "bad_true": not finite_true.all(),
        "nan_true": bool(np.isnan(true).any()),
    }
    sizes = [np.abs(x[np.isfinite(x)]).max(initial=0) for x in (low, true)]
    if both.any() and not (both.all() and true.dtype == np.float64):
        # In float64 the squares are in range.
        noted |= _compared(low[both].astype(float), true[both].astype(float))
        noted["off_share"] = noted.get("off_share", 0.0) * float(both.mean())
    return noted | {"largest": float(max(sizes))}


def _numbers(x: Any) -> np.ndarray:
    """The numbers of a result in one row, in a dtype that NumPy computes with."""
    flat = np.asarray(x).ravel()
    if flat.dtype.kind == "c":
        return flat.view(flat.real.dtype)
    if jnp.issubdtype(flat.dtype, jnp.integer) and flat.dtype.kind == "V":
        return flat.astype(np.int8)  # int4 and the like are not NumPy's own
    is_narrow = jnp.issubdtype(flat.dtype, jnp.floating) and flat.dtype.itemsize < 4
    return flat.astype(np.float32) if is_narrow else flat


def limits(dtype: Any) -> tuple[float, float]:
    """The least size that a dtype rounds to infinity, and its least normal number."""
    info = jnp.finfo(dtype)
    largest = float(info.max)
    half_step = math.ldexp(float(info.eps), math.frexp(largest)[1] - 2)
    return largest + half_step, float(info.tiny)
