"""Notes: the error and magnitude of each result, and what it was computed from.

A `Note` belongs to one result of one equation, in one iteration of the loops around the
equation. Its `reads` are the notes of the operands, so the notes of a run form a graph:
for `y = exp(x)`, the note of `x` is in the `reads` of the note of `y`. `fault`, `cause`
and `scale` follow this graph back from a result that is off or overflows. All
iterations of an equation share an `Origin`, which holds the equation's source line and
scope.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter

import jax.numpy as jnp
import numpy as np

from optax_lossscale._diagnosis.figures import Figures
from optax_lossscale._diagnosis.names import natural_sort_key
from optax_lossscale._diagnosis.old_operations import Trait, traits_of
from optax_lossscale._diagnosis.text import abridged
from optax_lossscale._programs.values import is_inexact_dtype

THE_LOSS = "the loss"
"""The name of the loss in reports.

An argument whose path is this name or one of the next two gets a number after it, as in
`all (argument 2)`.
"""

ALL = "all"
"""The name of the group of all parameters."""

AN_INTERMEDIATE_VALUE = "an intermediate value"
"""The name of any value that is neither the loss nor a gradient."""

SUMS = Trait.ADDS_TWO | Trait.ADDS_MANY
"""The traits of operations that add or subtract."""


@dataclasses.dataclass(frozen=True, eq=False)
class Origin:
    """What values come from: an equation, or an argument of the program.

    If a loop or branch only moves values, such as the rows of a stack, their origin is
    still that of the equation that computed them, as changed by `moved`.

    Attributes:
      name: the path of an argument; "" for an equation.
      is_parameter: whether the gradient is with respect to this argument.
      primitive: JAX's name of the operation; "" for an argument or a moved value.
      source: the user's line that made the equation.
      scope: the equation's scopes, such as `encoder/layer_3`.
      is_derivative: whether JAX transposed the equation. JAX does so for the backward
        pass of the loss, and for a derivative inside the loss function, where
        `Note.is_backward` is False.
      terms: how many terms are added up in each element of a product or sum.
      stays_narrow: whether it computes in 16 bits even on wider floats.
      has_lost_constant: whether it adds 0 or an infinity in 16 bits, or multiplies by
        an infinity. The user may have written another constant, which was rounded.
    """

    name: str = ""
    is_parameter: bool = False
    primitive: str = ""
    source: str = ""
    scope: str = ""
    is_derivative: bool = False
    terms: int = 1
    stays_narrow: bool = False
    has_lost_constant: bool = False

    @property
    def moved(self) -> "Origin":
        """The origin of the same values after a loop or branch has moved them."""
        return dataclasses.replace(self, primitive="", stays_narrow=False)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Note(Figures):
    """The error and magnitude of an equation's result, in one iteration of its loops.

    Print it to see its operation, line, layer and iteration, such as
    `exp at model.py:12 (f) [encoder/layer_3, iteration 2]`.

    Attributes:
      origin: the equation that computed the result, or the argument of the program.
      dtype: the dtype of the result.
      position: the position of the result among the results of its equation.
      iterations: the iteration of each loop around the equation, counted from 0, the
        outermost loop first; empty outside loops.
      is_backward: whether the result belongs to the backward pass, that is, depends on
        the loss scale. If this pass is linear, the result is proportional to the scale.
      reads: the notes of the operands. In a report they are empty, because with them,
        a note would keep all earlier notes in memory.
      worst_operand_error: the largest `error` of an operand. If `error` is far larger,
        the equation itself is to blame.
      nearest: the parameters from which the fewest equations lead to the result. They
        tell the layer where no scope does. They are set only in a report.
    """

    origin: Origin
    dtype: np.dtype
    position: int = 0
    iterations: tuple[int, ...] = ()
    is_backward: bool = False
    reads: Sequence["Note"] = dataclasses.field(default=(), repr=False)
    worst_operand_error: float = 0.0
    nearest: tuple[str, ...] = ()

    @property
    def is_computed(self) -> bool:
        """Whether an equation computed it, so it is neither an argument nor moved."""
        return self.origin.primitive != ""

    @property
    def is_argument(self) -> bool:
        """Whether it is an argument of the program, moved or not."""
        return self.origin.name != ""

    @property
    def stays_narrow(self) -> bool:
        """Whether the reference was computed in 16 bits, too, as by a kernel."""
        return self.origin.stays_narrow and is_inexact_dtype(self.dtype)

    @property
    def is_shared(self) -> bool:
        """Whether the reference is a copy of what the program computed.

        An equation with effects, such as an `io_callback`, runs once for both.
        """
        return is_inexact_dtype(self.dtype) and self.has_any(Trait.EFFECTFUL)

    @property
    def result(self) -> tuple[Origin, int, tuple[int, ...]]:
        """The key of a computed result, the same in all runs of the program."""
        return self.origin, self.position, self.iterations

    @property
    def primitive(self) -> str:
        """JAX's name of the operation, such as `dot_general`, or an argument's path."""
        return self.origin.primitive or self.origin.name

    @property
    def source(self) -> str:
        """The user's line that made it, with file and function; "" for an argument."""
        return self.origin.source

    @property
    def layer(self) -> str:
        """The scope of the equation, or if it has none, the nearest parameters."""
        return self.origin.scope or abridged(self.nearest)

    @property
    def line(self) -> str:
        """The operation and its source line.

        An example is `exp at model.py:12 (f)`.
        """
        return f"{self.primitive} at {self.source}" if self.source else self.primitive

    def __str__(self) -> str:
        parts = [self.layer, *(f"iteration {n}" for n in self.iterations)]
        place = ", ".join(filter(None, parts))
        return f"{self.line} [{place}]" if place else self.line

    @property
    def row(self) -> "Note":
        """This note for a report, without its `reads` and with its `nearest`."""
        return dataclasses.replace(self, reads=(), nearest=_nearest_to(self))

    def has_any(self, traits: Trait) -> bool:
        """Whether the operation has any of these traits."""
        return bool(traits_of(self.origin.primitive) & traits)


def note_of(
    figures: Figures,
    origin: Origin,
    dtype: np.dtype,
    reads: Sequence[Note] = (),
    iterations: tuple[int, ...] = (),
    position: int = 0,
    is_seed: bool = False,
) -> Note:
    """Builds the note of a result or an argument.

    Args:
      figures: its error and magnitude.
      origin: the equation or the argument.
      dtype: its dtype.
      reads: the notes of the operands, from which `is_backward` and
        `worst_operand_error` follow.
      iterations: the current iteration of each loop, the outermost first.
      position: the position of the result among the results of its equation.
      is_seed: whether it is the seed of the backward pass.
    """
    worst_operand_error = max((read.error for read in reads), default=0.0)
    return Note(
        **vars(figures),
        origin=origin,
        dtype=dtype,
        position=position,
        iterations=iterations,
        is_backward=is_seed or any(read.is_backward for read in reads),
        reads=reads,
        worst_operand_error=worst_operand_error,
    )


def _nearest_to(note: Note) -> tuple[str, ...]:
    """Finds the parameters from which the fewest equations lead to a result."""
    frontier = {note}  # the notes at one distance from the result
    seen: set[Note] = set()
    while frontier:
        origins = [member.origin for member in frontier]
        names = {origin.name for origin in origins if origin.is_parameter}
        if names:
            return tuple(sorted(names, key=natural_sort_key))
        seen |= frontier
        frontier = {read for member in frontier for read in member.reads} - seen
    return ()


def back_from(
    notes: Iterable[Note], reads: Callable[[Note], Iterable[Note]] = attrgetter("reads")
) -> Iterator[Note]:
    """Yields notes, then those of their operands, and so on, each note once.

    The search is depth-first, and of several notes or operands takes the last first.

    Args:
      notes: the notes to begin with.
      reads: returns the notes to visit after a note, by default those of all operands.
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
    """Returns the smallest number that rounds to infinity: 65520 for float16."""
    info = jnp.finfo(dtype)
    largest = float(info.max)
    _, exponent = math.frexp(largest)
    # This is half the distance between the two largest numbers. If a number exceeds the
    # largest by less than this, it is rounded down to the largest.
    half_step = math.ldexp(float(info.eps), exponent - 2)
    return largest + half_step


def least_normal(dtype: np.dtype | type[np.generic]) -> float:
    """Returns the smallest normal number of a dtype: 2**-14 for float16."""
    return float(jnp.finfo(dtype).tiny)
