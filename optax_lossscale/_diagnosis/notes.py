"""Notes: what is known of each result, and of what it is made.

`Notes` is the table of a run, with a row of figures for each result of each equation in
each round of the loops around it. A row also has the rows that the equation read, so
the table is a graph, which `cause` and `scale` go back along. A `Note` is a row of it.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from optax_lossscale._arrays.names import natural
from optax_lossscale._diagnosis.figures import Figures
from optax_lossscale._diagnosis.text import some
from optax_lossscale._programs.operations import Is, traits_of

THE_LOSS = "the loss"
"""What reports call the loss, among the names of parameters."""

ALL = "all"
"""What they call all parameters, among the names of groups of these."""

A_VALUE_INSIDE = "a value inside"
"""What they call a value that is neither the loss nor a gradient."""

FIFTH = 0.2
"""The share of an array's numbers that may be off or lost."""


@dataclasses.dataclass(eq=False)
class Place:
    """Where a value comes from: a result of an equation, or an argument."""

    primitive: str = ""  # the name of the operation; "" if no equation computes it
    source: str = ""  # the user's line that made the equation
    # The names of the scopes that it is in, as `encoder/layer_3`; "" for none
    scope: str = ""
    name: str = ""  # the path of an argument
    dtype: Any = None
    # Whether it is in the backward pass, or in a derivative inside the loss function
    is_derivative: bool = False
    terms: int = 1  # how many terms each number of a product or sum has
    number: int = -1  # its place in the order of running; -1 for an argument
    # What follows from the values that are read there, once it has run:
    is_backward: bool = False  # whether it depends on the seed of the backward pass
    is_passed: bool = False  # whether float32's was computed in 16 bits as well
    nearest: frozenset[str] = frozenset()  # the parameters the fewest equations before
    steps: int = 0  # how many equations that is

    def follows(self, places: Sequence["Place"]) -> None:
        """Adds what follows from the places of what is read there."""
        self.is_backward = self.is_backward or any(at.is_backward for at in places)
        if not self.nearest:
            named = [at for at in places if at.nearest]
            self.steps = min((at.steps for at in named), default=0) + 1
            names = [at.nearest for at in named if at.steps < self.steps]
            self.nearest = frozenset().union(*names)

    def moved(self) -> "Place":
        """The place of numbers from here that a loop moved."""
        return dataclasses.replace(self, primitive="", terms=1)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Note(Figures):
    """What is known of one result of an equation, in one round of the loops around it.

    Attributes:
      place: the equation, or the argument of the program.
      rounds: the rounds of the loops around it, the outermost first, from 0.
      before: how far the worst of its operands is from float32's, as `error` is.
      reads: the notes of its operands; none in a report.
    """

    place: Place
    rounds: tuple[int, ...] = ()
    before: float = 0.0
    read: Callable[[], tuple["Note", ...]] = dataclasses.field(
        default=tuple, repr=False
    )

    @functools.cached_property
    def reads(self) -> tuple["Note", ...]:
        """The notes of its operands; none in a report."""
        return self.read()

    @property
    def dtype(self) -> Any:
        """The dtype of the result."""
        return self.place.dtype

    @property
    def is_backward(self) -> bool:
        """Whether it is of the backward pass, and so in proportion to the loss scale."""
        return self.place.is_backward

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
        return self.place.scope or some(sorted(self.place.nearest, key=natural))

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
        return dataclasses.replace(self, read=tuple)

    def is_any(self, traits: Is) -> bool:
        """Whether its operation has any of these traits."""
        return bool(traits_of(self.place.primitive) & traits)


class Notes:
    """The table of a run: a row for each result, in the order of running.

    Attributes:
      places: the place of each row.
      rounds: the rounds of the loops around it.
      reads: the rows that its equation read.
    """

    def __init__(self):
        self.places: list[Place] = []
        self.rounds: list[tuple[int, ...]] = []
        self.reads: list[list[int]] = []
        self._figures: list[np.ndarray] = []
        self._notes: dict[int, Note] = {}

    def __len__(self) -> int:
        return len(self.places)

    def add(self, place: Place, rounds: tuple[int, ...], reads: list[int]) -> int:
        """Adds a row, whose figures come later, and returns its number."""
        place.follows([self.places[n] for n in reads])
        self.places.append(place)
        self.rounds.append(rounds)
        self.reads.append(reads)
        return len(self.places) - 1

    def add_figures(self, rows: np.ndarray) -> None:
        """Adds the figures of the last rows."""
        self._figures.append(rows)

    @functools.cached_property
    def figures(self) -> np.ndarray:
        """The figures of all rows, with a column for each; after the run."""
        return np.concatenate(self._figures)

    def of_places(self, function: Callable[[Place], Any]) -> np.ndarray:
        """A column of what a function gives for the place of each row."""
        found = {place: function(place) for place in set(self.places)}
        return np.array([found[place] for place in self.places])

    def __getitem__(self, row: int) -> Note:
        if row not in self._notes:
            reads = self.reads[row]
            self._notes[row] = Note(
                **dict(
                    zip(self.figures.dtype.names, self.figures[row].item(), strict=True)
                ),
                place=self.places[row],
                rounds=self.rounds[row],
                before=max(
                    (float(self.figures["error"][n]) for n in reads), default=0.0
                ),
                read=lambda: tuple(self[n] for n in reads),
            )
        return self._notes[row]

    @functools.cached_property
    def by_turn(self) -> dict[tuple[int, tuple[int, ...]], int]:
        """The rows of equations, by the number of the place and the rounds."""
        return {
            (place.number, self.rounds[row]): row
            for row, place in enumerate(self.places)
            if place.primitive
        }

    def where(self, which: np.ndarray) -> list[Note]:
        """The notes of the rows for which a flag is set."""
        return [self[int(n)] for n in np.flatnonzero(which)]

    def before(self, rows: Iterable[int]) -> np.ndarray:
        """Flags of some rows, what they read, and so on."""
        flags = np.zeros(len(self), bool)
        left = list(rows)
        while left:
            row = left.pop()
            if not flags[row]:
                flags[row] = True
                left.extend(self.reads[row])
        return flags


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


def limits(dtype: Any) -> tuple[float, float]:
    """The least size that a dtype rounds to infinity, and its least normal number."""
    info = jnp.finfo(dtype)
    largest = float(info.max)
    half_step = math.ldexp(float(info.eps), math.frexp(largest)[1] - 2)
    return largest + half_step, float(info.tiny)
