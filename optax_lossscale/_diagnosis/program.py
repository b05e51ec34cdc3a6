"""The traced program as a list of steps, in pieces to compile together.

A `Step` is an equation with the numbers of the values that it reads and makes, and the
places of these. What `jit` and the like call is put where it is called. Consecutive
steps without loops are one piece, which is compiled as a whole; outside of loops, a
piece ends at each product, so that the layers of a model, which are alike, share what is
compiled for one. A loop or branch that computes floats is a piece by itself, whose
programs are divided in turn.
"""

import dataclasses
import itertools
import re
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, NamedTuple

from jax.extend.core import Literal

from optax_lossscale._autocast.products import SCOPE
from optax_lossscale._diagnosis.notes import Place
from optax_lossscale._programs.alike import hashable, key_of, key_of_literal
from optax_lossscale._programs.operations import Is, traits
from optax_lossscale._programs.values import (
    dtype_in,
    is_float,
    is_inexact,
    numbers_in,
)
from optax_lossscale._programs.versions import constants, name_of, open_jaxpr
from optax_lossscale._programs.walk import (
    dtypes_within,
    keeps_numbers,
    line_of,
    programs_in,
)
from optax_lossscale._programs.work import terms_of

_LOOPS = Is.SCANS | Is.WAITS | Is.BRANCHES | Is.MAPS
_MANY = 2**20  # numbers that a round of a loop may have in one piece
# Scopes that JAX and autocast make
_NOT_THE_USERS = f"{SCOPE}|rematted_computation|checkpoint|while|body|cond"


class Step(NamedTuple):
    """An equation in its place of the program."""

    eqn: Any
    reads: Sequence[Any]  # the numbers of its operands; literals as they are
    makes: Sequence[int]  # the numbers of its results
    # The place of each result; None of one that is not noted, as it holds no floats and
    # does not depend on any, or has all numbers of the operand
    places: Sequence[Place | None]
    programs: Sequence["Program"]  # those of a loop, to be run round by round

    @property
    def values(self) -> list[int]:
        """The operands without literals."""
        return [n for n in self.reads if not isinstance(n, Literal)]


class Piece(NamedTuple):
    """Consecutive steps."""

    steps: Sequence[Step]
    reads: Sequence[int]  # the values from earlier pieces or arguments
    leaves: Sequence[int]  # those that it makes for later pieces or as results
    frees: Sequence[int]  # those that no later piece reads
    key: Hashable  # equal for pieces that compute the same


class Program:
    """A program in pieces.

    Attributes:
      takes: the numbers of its arguments.
      gives: those of its results, or literals.
      constants: its constants, by their numbers.
      pieces: in the order of running.
    """

    def __init__(self, program: Any, around: Place, numbers: Iterator[int], limit: int):
        self._numbers = numbers
        self.constants: dict[int, Any] = {}
        self.takes = [next(numbers) for _ in open_jaxpr(program).invars]
        steps: list[Step] = []
        self.gives = self._add(program, self.takes, around, steps)
        self.pieces = _pieces(steps, self.gives, limit)

    def _add(
        self, program: Any, takes: Sequence[Any], around: Place, steps: list[Step]
    ) -> list[Any]:
        """Adds the steps of a program, with the numbers of its arguments."""
        jaxpr = open_jaxpr(program)
        env = dict(zip(jaxpr.invars, takes, strict=True))
        for v, x in zip(jaxpr.constvars, constants(program), strict=True):
            env[v] = next(self._numbers)
            self.constants[env[v]] = x

        def read(v):
            return v if isinstance(v, Literal) else env[v]

        for eqn in jaxpr.eqns:
            reads = list(map(read, eqn.invars))
            place = _place_of(eqn, around)
            if Is.CALLS in traits(eqn):
                (called,) = programs_in(eqn)
                makes = self._add(called, reads, place, steps)
            else:
                steps.append(self._step(eqn, reads, place))
                makes = steps[-1].makes
            env.update(zip(eqn.outvars, makes, strict=True))
        return list(map(read, jaxpr.outvars))

    def _step(self, eqn: Any, reads: Sequence[Any], place: Place) -> Step:
        programs = [
            Program(program, place, self._numbers, _MANY)
            for program in _programs_to_run(eqn)
        ]
        makes = [next(self._numbers) for _ in eqn.outvars]
        places = [
            dataclasses.replace(place, dtype=dtype_in(v), number=n)
            if not programs and _is_noted(eqn, v)
            else None
            for n, v in zip(makes, eqn.outvars, strict=True)
        ]
        return Step(eqn, reads, makes, places, programs)


def program_of(jaxpr: Any) -> Program:
    """A whole program in pieces."""
    return Program(jaxpr, Place(), itertools.count(), limit=0)


def _programs_to_run(eqn: Any) -> Sequence[Any]:
    """The programs of a loop or branch that computes floats; none of a `scan` of none."""
    programs = programs_in(eqn)
    has_rounds = eqn.params.get("length") != 0
    has_floats = any(map(is_inexact, frozenset().union(*map(dtypes_within, programs))))
    is_run = traits(eqn) & _LOOPS and has_floats and has_rounds
    return programs if is_run else ()


def _is_noted(eqn: Any, v: Any) -> bool:
    """Whether a result of an equation has a note of its own."""
    if not _size(v):
        return False
    if keeps_numbers(eqn) and Is.SELECTS not in traits(eqn):
        return False
    return is_float(v) or any(map(is_float, eqn.invars))


def _size(v: Any) -> int:
    """How many numbers a variable has; a token has none."""
    return 0 if dtype_in(v) is None else numbers_in(v.aval)


def _pieces(steps: Sequence[Step], gives: Sequence[Any], limit: int) -> list[Piece]:
    """Divides steps into pieces, with what each reads and leaves to the next."""
    pieces = []
    needed = {n for n in gives if not isinstance(n, Literal)}
    for part in reversed(list(_parts(steps, limit))):
        made = dict.fromkeys(n for step in part for n in step.makes)
        read = dict.fromkeys(n for step in part for n in step.values)
        leaves = [n for n in made if n in needed]
        reads = [n for n in read if n not in made]
        frees = [n for n in reads if n not in needed]
        needed.update(reads)
        pieces.append(Piece(part, reads, leaves, frees, _key(part, reads, leaves)))
    return pieces[::-1]


def _parts(steps: Sequence[Step], limit: int) -> Iterator[list[Step]]:
    """The steps of each piece: up to a product after more than `limit` numbers."""
    part: list[Step] = []
    numbers = 0
    for step in steps:
        if step.programs and part:
            yield part
            part = []
            numbers = 0
        part.append(step)
        numbers += sum(map(_size, step.eqn.outvars))
        is_end = Is.PRODUCT in traits(step.eqn) and numbers > limit
        if step.programs or is_end:
            yield part
            part = []
            numbers = 0
    if part:
        yield part


def _key(
    steps: Sequence[Step], reads: Sequence[int], leaves: Sequence[int]
) -> Hashable:
    """A key that is equal for steps that compute the same."""
    numbers = {n: i for i, n in enumerate(reads)}
    key: list[Hashable] = []
    for step in steps:
        operands = [
            key_of_literal(n) if isinstance(n, Literal) else numbers[n]
            for n in step.reads
        ]
        numbers.update({n: len(numbers) + i for i, n in enumerate(step.makes)})
        types = tuple(v.aval for v in step.eqn.invars)
        key.append((key_of(step.eqn), tuple(operands), types))
    key.append(tuple(numbers[n] for n in leaves))
    return hashable(tuple(key), steps)


# --- places ---


def _place_of(eqn: Any, around: Place) -> Place:
    """Where an equation is: its line, and the names of the scopes that it is in.

    The names come from the stack that JAX keeps for profiles, without what JAX and
    autocast add to it: `transpose(jvp(ols.autocast))/jvp(block_3)` becomes `block_3`.
    """
    stack = str(eqn.source_info.name_stack)
    plain = re.sub(r"\w+\(|\)", "", re.sub(r"p?jit\([^()]*\)", "", stack))
    scopes = [
        name
        for name in plain.split("/")
        if re.fullmatch(r"[\w.-]+", name) and not re.fullmatch(_NOT_THE_USERS, name)
    ]
    return Place(
        name_of(eqn),
        line_of(eqn, around.source),
        "/".join(filter(None, [around.scope, *scopes])),
        is_derivative=around.is_derivative or "transpose(" in stack,
        terms=terms_of(eqn),
    )
