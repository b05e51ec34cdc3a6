"""Notes: what is known of each result, and of what it is made.

A `Note` belongs to one result of one equation, in one iteration of the loops around it. Its
`reads` are the notes of the operands, so the notes of a run are a graph, which `cause`
and `scale` go back along. What is the same in all iterations is in its `Origin`.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter

import jax.numpy as jnp
import numpy as np

from optax_lossscale._arrays.names import natural_sort_key
from optax_lossscale._diagnosis.figures import Figures
from optax_lossscale._diagnosis.text import abridged
from optax_lossscale._programs.operations import Trait, traits_of
from optax_lossscale._programs.values import is_inexact_dtype

THE_LOSS = "the loss"
"""What reports call the loss. No parameter has this name or one of the two below."""

ALL = "all"
"""What they call the group of all parameters."""

A_VALUE_INSIDE = "a value inside"
"""What they call a value that is neither the loss nor a gradient."""

SUMS = Trait.ADDS_TWO | Trait.ADDS_MANY
"""The traits of an operation that adds."""


@dataclasses.dataclass(frozen=True, eq=False)
class Origin:
    """Where values come from: an argument of the program, an equation, or a loop.

    What a loop takes apart or joins has the origin of the equation that computed it, but
    without the `primitive`, and without `stays_narrow`.
    """

    name: str = ""  # the path of an argument
    is_parameter: bool = False  # whether it is an argument by which JAX differentiates
    primitive: str = ""  # the name of the operation that computes them
    source: str = ""  # the user's line that made the equation
    # The names of the scopes that it is in, as `encoder/layer_3`; "" for none
    scope: str = ""
    # Whether JAX transposed it: in the backward pass of the loss, or in a derivative
    # that the loss function takes itself, of which `Note.is_backward` is False
    is_derivative: bool = False
    terms: int = 1  # how many terms make each number of a product or sum
    stays_narrow: bool = False  # whether it computes in 16 bits if given wider floats
    # Whether it adds or multiplies by a constant that may have been lost to rounding
    has_lost_constant: bool = False

    @property
    def moved(self) -> "Origin":
        """The origin of what a loop takes from, or makes of, the results of this equation."""
        return dataclasses.replace(self, primitive="", stays_narrow=False)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Note(Figures):
    """What is known of one result of an equation, in one iteration of the loops around it.

    Attributes:
      origin: the equation, or the argument of the program.
      dtype: the dtype of the result.
      position: which of the equation's results it is, from 0.
      rounds: the number of the iteration of each loop around it, from 0, the outermost
        loop first.
      is_backward: whether it is of the backward pass, and so in proportion to the loss
        scale, unless the pass is not linear.
      reads: the notes of its operands, which are left out in a report.
      before: how far the worst of its operands is from the reference, as `error` is.
      nearest: the parameters that are the fewest equations before it, in a report.
    """

    origin: Origin
    dtype: np.dtype
    position: int = 0
    rounds: tuple[int, ...] = ()
    is_backward: bool = False
    reads: Sequence["Note"] = dataclasses.field(default=(), repr=False)
    before: float = 0.0
    nearest: tuple[str, ...] = ()

    @property
    def is_computed(self) -> bool:
        """Whether it is the result of an equation, neither an argument nor moved."""
        return self.origin.primitive != ""

    @property
    def is_argument(self) -> bool:
        """Whether it is of an argument of the program, moved or not."""
        return self.origin.name != ""

    @property
    def stays_narrow(self) -> bool:
        """Whether the reference was computed in 16 bits as well."""
        return self.origin.stays_narrow and is_inexact_dtype(self.dtype)

    @property
    def is_shared(self) -> bool:
        """Whether the reference takes its floats as the program computes them.

        It does if the equation runs once, as an `io_callback` has to.
        """
        return is_inexact_dtype(self.dtype) and self.is_any(Trait.EFFECTFUL)

    @property
    def result(self) -> tuple[Origin, int, tuple[int, ...]]:
        """A key of the result, which is equal in every run of the program if computed."""
        return self.origin, self.position, self.rounds

    @property
    def primitive(self) -> str:
        """The name of the operation in JAX, as `dot_general`; of an argument, its path."""
        return self.origin.primitive or self.origin.name

    @property
    def source(self) -> str:
        """The line that made it, with its file and function; "" of an argument."""
        return self.origin.source

    @property
    def layer(self) -> str:
        """The scope that it is in, or else the parameters nearest to it."""
        return self.origin.scope or abridged(self.nearest)

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
        """The same note without those that it reads, to be kept in a report."""
        return dataclasses.replace(self, reads=(), nearest=_nearest_to(self))

    def is_any(self, traits: Trait) -> bool:
        """Whether its operation has any of these traits."""
        return bool(traits_of(self.origin.primitive) & traits)


def note_of(
    figures: Figures,
    origin: Origin,
    dtype: np.dtype,
    reads: Sequence[Note],
    rounds: tuple[int, ...],
    position: int = 0,
) -> Note:
    """The note of a result that has these figures, with what follows from `reads`."""
    before = max((read.error for read in reads), default=0.0)
    return Note(
        **vars(figures),
        origin=origin,
        dtype=dtype,
        position=position,
        rounds=rounds,
        is_backward=any(read.is_backward for read in reads),
        reads=reads,
        before=before,
    )


def _nearest_to(note: Note) -> tuple[str, ...]:
    """The parameters that are the fewest equations before a result."""
    level = {note}
    seen: set[Note] = set()
    while level:
        names = {member.origin.name for member in level if member.origin.is_parameter}
        if names:
            return tuple(sorted(names, key=natural_sort_key))
        seen |= level
        level = {read for member in level for read in member.reads} - seen
    return ()


def back_from(
    notes: Iterable[Note], reads: Callable[[Note], Iterable[Note]] = attrgetter("reads")
) -> Iterator[Note]:
    """Notes themselves, what they read, and so on, each once, the last one given first.

    Args:
      notes: where to begin.
      reads: gives what a note reads, by default all of its operands.
    """
    pending = list(notes)
    seen: set[Note] = set()
    while pending:
        note = pending.pop()
        if note not in seen:
            seen.add(note)
            pending.extend(reads(note))
            yield note


def least_infinite(dtype: np.dtype | type[np.generic]) -> float:
    """The least size that a dtype rounds to infinity."""
    info = jnp.finfo(dtype)
    largest = float(info.max)
    half_step = math.ldexp(float(info.eps), math.frexp(largest)[1] - 2)
    return largest + half_step


def least_normal(dtype: np.dtype | type[np.generic]) -> float:
    """The least normal number of a dtype."""
    return float(jnp.finfo(dtype).tiny)
