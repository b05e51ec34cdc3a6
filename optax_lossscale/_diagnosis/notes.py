"""Notes: how far a result is from float32's, how large it is, and what it is made of.

A `Note` belongs to one result of one equation, in one round of the loops around it. Its
`reads` are the notes of the operands, so the notes of a run are a graph, which `cause`
and `scale` go back along. `measured` computes the figures in a note from two arrays.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from optax_lossscale._arrays.names import natural
from optax_lossscale._diagnosis.text import some
from optax_lossscale._programs.operations import Is, traits_of

THE_LOSS = "the loss"
"""What reports call the loss, among the names of parameters."""

ALL = "all"
"""What they call all parameters, among the names of groups of these."""

A_VALUE_INSIDE = "a value inside"
"""What they call a value that is neither the loss nor a gradient."""

TOLERANCE = 0.05
"""How far numbers may be from float32's, relative to those, and still be right."""

FIFTH = 0.2
"""The share of an array's numbers that may be off or lost."""

_LIFTED = 0.25  # of the mean size: a smaller number is off relative to this, not itself


class Place(NamedTuple):
    """Where a value comes from: an equation of the program, or one of its arguments."""

    primitive: str = ""  # the name of the equation's operation; "" for an argument
    source: str = ""  # the user's line that made the equation
    # The names of the scopes that it is in, as `encoder/layer_3`; "" for none
    scope: str = ""
    name: str = ""  # the path of an argument
    is_parameter: bool = False
    # Whether it is in the backward pass, or in a derivative inside the loss function
    is_derivative: bool = False
    terms: int = 1  # how many terms each number of a product or sum has
    number: int = -1  # its place in the order of running; -1 for an argument


@dataclasses.dataclass(frozen=True, eq=False)
class Figures:
    """How far a result is from float32's, and how large it is.

    Attributes:
      count: how many numbers the result has; a complex number counts as two.
      error: how far it is from float32's: the norm of the difference, relative to the
        norm of float32's; infinite if it is bad.
      distance: the norm of the difference, not relative; infinite if it is bad.
      off_share: the share of its numbers that are off by more than 5%.
      bad: whether a number is not finite where float32's is.
      nan: whether a number is NaN where float32's is finite.
      is_finite: whether float32's result is finite.
      nan_true: whether a number of float32's is NaN.
      lost: of the numbers that are not zero in float32, the share that is zero.
      decided: of indices and conditions, the share that float32 decides otherwise.
      largest: the largest finite absolute value, of the program or in float32.
      typical: the root mean square of the finite numbers in float32.
    """

    count: int = 1
    error: float = 0.0
    distance: float = 0.0
    off_share: float = 0.0
    bad: bool = False
    nan: bool = False
    is_finite: bool = True
    nan_true: bool = False
    lost: float = 0.0
    decided: float = 0.0
    largest: float = 0.0
    typical: float = 0.0


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Note(Figures):
    """What is known of one result of an equation, in one round of the loops around it.

    Attributes:
      place: the equation, or the argument of the program.
      rounds: the rounds of the loops around it, the outermost first, from 0.
      dtype: the dtype of the result.
      is_backward: whether it is of the backward pass, and so in proportion to the loss
        scale.
      is_passed: whether float32's was computed in 16 bits as well.
      reads: the notes of its operands; left out in a report.
      before: how far the worst of its operands is from float32's, as `error` is.
      nearest: the parameters that are the fewest equations before it.
      steps: how many equations that is.
    """

    place: Place
    dtype: Any
    rounds: tuple[int, ...] = ()
    is_backward: bool = False
    is_passed: bool = False
    reads: tuple["Note", ...] = dataclasses.field(default=(), repr=False)
    before: float = 0.0
    nearest: frozenset[str] = frozenset()
    steps: int = 0

    @property
    def primitive(self) -> str:
        """Its name in JAX, such as `dot_general`; of an argument, its path."""
        return self.place.primitive or self.place.name

    @property
    def source(self) -> str:
        """The line that made it, with its file and function; "" of an argument."""
        return self.place.source

    @property
    def layer(self) -> str:
        """The scope that it is in, or else the parameters nearest to it."""
        return self.place.scope or some(sorted(self.nearest, key=natural))

    @property
    def line(self) -> str:
        """The operation and its line, as reports name it."""
        return f"{self.primitive} at {self.source}" if self.source else self.primitive

    def __str__(self) -> str:
        inside = [self.layer, *(f"iteration {n}" for n in self.rounds)]
        layer = ", ".join(filter(None, inside))
        return f"{self.line} [{layer}]" if layer else self.line

    @property
    def row(self) -> "Note":
        """The same without the notes before it, to be kept in a report."""
        return dataclasses.replace(self, reads=())

    def is_any(self, traits: Is) -> bool:
        """Whether its operation has any of these traits."""
        return bool(traits_of(self.place.primitive) & traits)


def note_of(
    figures: Figures,
    place: Place,
    dtype: Any,
    reads: tuple[Note, ...] = (),
    rounds: tuple[int, ...] = (),
    is_backward: bool = False,
    is_passed: bool = False,
) -> Note:
    """The note of a result that has these figures, with what follows from `reads`."""
    named = [read for read in reads if read.nearest]
    steps = min((read.steps for read in named), default=0)
    names = [read.nearest for read in named if read.steps == steps]
    if place.is_parameter:
        names = [frozenset([place.name])]
    return Note(
        **vars(figures),
        place=place,
        dtype=dtype,
        rounds=rounds,
        is_backward=is_backward or any(read.is_backward for read in reads),
        is_passed=is_passed,
        reads=reads,
        before=max((read.error for read in reads), default=0.0),
        nearest=names[0].union(*names[1:]) if names else frozenset(),
        steps=steps + 1,
    )


def all_before(
    notes: Iterable[Note], reads: Callable[[Note], Iterable[Note]]
) -> Iterator[Note]:
    """Some notes, what they read, and so on, each once; `reads` says what that is."""
    left = list(notes)
    seen: set[Note] = set()
    while left:
        note = left.pop()
        if note not in seen:
            seen.add(note)
            left.extend(reads(note))
            yield note


def worst(notes: Iterable[Note | None]) -> Note | None:
    """One note for several values: of the one that is off the most.

    If any of the values is not finite in float32, neither is it, and it reads both.
    """
    noted = [note for note in notes if note is not None]
    most = max(noted, key=lambda note: note.error, default=None)
    infinite = next((note for note in noted if not note.is_finite), None)
    if most is None or infinite is None or not most.is_finite:
        return most
    nan = any(note.nan_true for note in noted)
    return dataclasses.replace(
        most, reads=(most, infinite), is_finite=False, nan_true=nan
    )


def measured(low: Any, true: Any) -> Figures:
    """The figures of a result.

    Args:
      low: the result, as the program computes it.
      true: the same in float32; None if both are the same.
    """
    low = _numbers(low)
    true = low if true is None else _numbers(true)
    if not low.size:
        return Figures(count=0)
    if low.dtype.kind in "biu":
        return Figures(low.size, decided=float((low != true).mean()))
    # Differences of large numbers, and squares, may leave float32's range.
    with np.errstate(all="ignore"):
        largest = np.abs(low).max(), np.abs(true).max()  # NaN if a number is
        are_finite = all(map(math.isfinite, largest))
        compare = _figures_of_finite if are_finite else _figures
        return compare(low, true)


def _figures_of_finite(low: np.ndarray, true: np.ndarray) -> Figures:
    """The figures of a result all of whose floats are finite, in one row."""
    sizes = np.abs(true)
    norm = _norm(true)
    figures = Figures(
        low.size, largest=float(sizes.max()), typical=norm / math.sqrt(low.size)
    )
    if low is true:
        return figures
    apart = np.abs(low - true)
    distance = _norm(apart)
    if not distance:
        return figures
    least = _LIFTED * float(sizes.sum()) / low.size
    may_be_off = apart > TOLERANCE * least
    is_off = apart[may_be_off] > TOLERANCE * sizes[may_be_off]
    lost = np.count_nonzero(true[low == 0]) / max(np.count_nonzero(true), 1)
    return Figures(
        low.size,
        error=distance / norm if norm else math.inf,
        distance=distance,
        off_share=float(np.count_nonzero(is_off) / low.size),
        lost=float(lost),
        largest=max(figures.largest, float(np.abs(low).max())),
        typical=figures.typical,
    )


def _figures(low: np.ndarray, true: np.ndarray) -> Figures:
    """The figures of any result of floats: of what is finite, and what is not."""
    is_finite = np.isfinite(true)
    is_finite_low = np.isfinite(low)
    bad = is_finite & ~is_finite_low
    finite = np.where(is_finite, true, 0)
    finite_low = np.where(is_finite_low, low, 0)
    compared = np.where(is_finite & is_finite_low, low, finite)
    figures = _figures_of_finite(compared, finite)
    is_bad = bool(bad.any())
    count = int(np.count_nonzero(is_finite))
    return dataclasses.replace(
        figures,
        error=math.inf if is_bad else figures.error,
        distance=math.inf if is_bad else figures.distance,
        bad=is_bad,
        nan=bool(np.isnan(low[bad]).any()),
        is_finite=count == low.size,
        nan_true=bool(np.isnan(true).any()),
        largest=max(figures.largest, float(np.abs(finite_low).max())),
        typical=figures.typical * math.sqrt(low.size / max(count, 1)),
    )


def _norm(x: np.ndarray) -> float:
    """The root of the sum of squares, in float64 if float32 does not hold it."""
    total = float(x @ x)
    if not 2.0**-100 < total < math.inf:
        total = float(np.square(x, dtype=np.float64).sum())
    return math.sqrt(total)


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
