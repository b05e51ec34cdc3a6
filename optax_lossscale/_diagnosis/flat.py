"""A program as a list of steps in stretches, each of which is compiled to return all results.

What `jit` and the like hold is put in its place. A step that holds programs to be run one after
the other, as loops and branches do, is a stretch by itself.
"""

import re
from collections.abc import Container, Iterator, Sequence
from typing import Any, NamedTuple

from jax.extend.core import Literal

from optax_lossscale._autocast.products import SCOPE
from optax_lossscale._diagnosis.notes import Place
from optax_lossscale._diagnosis.wide import is_narrow
from optax_lossscale._programs.operations import Is, traits_of
from optax_lossscale._programs.values import dtype_in, is_float
from optax_lossscale._programs.versions import constants, open_jaxpr
from optax_lossscale._programs.walk import Equation, programs_in
from optax_lossscale._programs.walk import equations_of_each_call as equations
from optax_lossscale._programs.work import terms_of
from optax_lossscale._step.gradient import SCALES

_BYTES = 2**28  # of results in float32 that a stretch may return
_STEPS = 300  # in a stretch, at most
_LOOPS = ("scan", "while", "cond", "shard_map")
_CALLS = (
    "custom_jvp_call",
    "custom_vjp_call",
    "custom_vmap_call",
    "composite",
    "xla_metadata_call",
)
_SAME_NUMBERS = ("broadcast_in_dim", "pvary", "pcast")
_SELECTS = ("slice", "dynamic_slice")


class Step(NamedTuple):
    """An equation in its place."""

    eqn: Any
    place: Place
    number: int
    ins: tuple[int, ...]  # the values that it reads, by number
    outs: tuple[int, ...]  # the values that it makes
    programs: tuple["Flat", ...]  # that it holds, if it is a loop or a branch

    @property
    def aliases(self) -> int | None:
        """The operand whose numbers are the result's; None if they are others."""
        return 0 if _keeps_numbers(self.eqn) else None


class Stretch(NamedTuple):
    """Steps that are compiled together; or one that holds programs."""

    steps: tuple[Step, ...]
    reads: tuple[int, ...]  # made before it
    keeps: tuple[int, ...]  # that it makes for later
    frees: tuple[int, ...]  # that are not read afterwards


class Flat(NamedTuple):
    """A program in stretches."""

    ins: tuple[int, ...]
    outs: tuple[int, ...]
    consts: dict[int, Any]
    literals: dict[int, Any]  # of the whole program
    stretches: tuple[Stretch, ...]

    @property
    def is_one_stretch(self) -> bool:
        """Whether it has neither loops nor branches."""
        return len(self.stretches) == 1 and not self.stretches[0].steps[0].programs


def flattened(closed: Any) -> Flat:
    """A closed jaxpr in stretches."""
    inside: dict[int, list[Equation]] = {}
    for at in equations(open_jaxpr(closed)):
        inside.setdefault(id(at.around), []).append(at)
    # By the object, not by its number, which another may get.
    return _Flattening(inside, iter(range(10**9))).program(closed, inside.get(id(None), []), "")


class _Flattening:
    """The flattening of a program, with the equations in each of its equations."""

    def __init__(self, inside: dict[int, list[Equation]], numbers: Iterator[int]):
        self.inside = inside
        self.numbers = numbers
        self.literals: dict[int, Any] = {}

    def program(self, closed: Any, ats: Sequence[Equation], scope: str) -> Flat:
        """A program, of the equations `ats`."""
        jaxpr = open_jaxpr(closed)
        consts: dict[int, Any] = {}
        steps: list[Step] = []
        ins = tuple(next(self.numbers) for _ in jaxpr.invars)
        outs = self._add(closed, ats, scope, ins, (consts, steps))
        stretches = tuple(_stretches(steps, outs, self.literals))
        return Flat(ins, outs, consts, self.literals, stretches)

    def _add(self, closed, ats, scope, ins, to) -> tuple[int, ...]:
        """Adds a program's steps, and returns the numbers of its results."""
        consts, steps = to
        jaxpr = open_jaxpr(closed)
        numbers = dict(zip(jaxpr.invars, ins, strict=True))
        for variable, constant in zip(jaxpr.constvars, constants(closed), strict=True):
            numbers[variable] = next(self.numbers)
            consts[numbers[variable]] = constant

        def read(v):
            if not isinstance(v, Literal):
                return numbers[v]
            literal = next(self.numbers)
            self.literals[literal] = v.val
            return literal

        for eqn, at in zip(jaxpr.eqns, ats, strict=True):
            operands = tuple(map(read, eqn.invars))
            stack = f"{scope}/{eqn.source_info.name_stack}"
            programs = programs_in(eqn)
            held = list(self._held(at, programs))
            if SCALES in stack and eqn.primitive.name == "mul":
                results = operands[:1]  # the gradient without the scale of `scale_gradient`
            elif _is_call(eqn, programs):
                results = self._add(programs[0], held[0], stack, operands, to)
            else:
                results = tuple(next(self.numbers) for _ in eqn.outvars)
                inner = zip(programs, held, strict=True) if _is_loop(eqn, programs) else ()
                flats = tuple(self.program(p, kids, stack) for p, kids in inner)
                place = _place(eqn, at.source, stack)
                steps.append(Step(eqn, place, next(self.numbers), operands, results, flats))
            numbers.update(zip(eqn.outvars, results, strict=True))
        return tuple(map(read, jaxpr.outvars))

    def _held(self, at: Equation, programs: Sequence[Any]) -> Iterator[list[Equation]]:
        """The equations of each program that an equation holds."""
        left = iter(self.inside.get(id(at), ()))
        for program in programs:
            yield [next(left) for _ in open_jaxpr(program).eqns]


def _stretches(
    steps: Sequence[Step], outs: tuple[int, ...], literals: Container[int]
) -> Iterator[Stretch]:
    """Steps cut before and after each that holds programs, and where results fill the memory."""
    groups: list[list[Step]] = []
    room = 0
    for step in steps:
        room -= sum(_size(v) for v in step.eqn.outvars)
        is_cut = not groups or step.programs or groups[-1][-1].programs
        if is_cut or room < 0 or len(groups[-1]) >= _STEPS:
            groups.append([])
            room = _BYTES
        groups[-1].append(step)
    last = {number: len(groups) for number in outs}
    for n, group in reversed(list(enumerate(groups))):
        for number in (i for step in group for i in step.ins):
            last.setdefault(number, n)
    for n, group in enumerate(groups):
        made = {i for step in group for i in step.outs}
        reads = dict.fromkeys(i for step in group for i in step.ins)
        reads = [i for i in reads if i not in made and i not in literals]
        keeps = tuple(i for step in group for i in step.outs if last.get(i, n) > n)
        frees = tuple(i for i in reads if last[i] == n)
        yield Stretch(tuple(group), tuple(reads), keeps, frees)


def _is_call(eqn: Any, programs: Sequence[Any]) -> bool:
    """Whether an equation is no more than the program that it holds."""
    is_one = traits_of(eqn.primitive.name) & (Is.INLINED | Is.KEEPS)
    is_one = is_one or eqn.primitive.name in _CALLS
    return bool(is_one) and len(programs) == 1


def _is_loop(eqn: Any, programs: Sequence[Any]) -> bool:
    """Whether the programs in an equation are to be run one after the other: those with floats."""
    return eqn.primitive.name in _LOOPS and any(map(_has_floats, programs))


def _has_floats(program: Any) -> bool:
    jaxpr = open_jaxpr(program)
    own = any(map(is_float, (v for eqn in jaxpr.eqns for v in eqn.outvars)))
    return own or any(_has_floats(p) for eqn in jaxpr.eqns for p in programs_in(eqn))


def _keeps_numbers(eqn: Any) -> bool:
    """Whether the results are the numbers of the operand, in another form or a wider dtype."""
    name = eqn.primitive.name
    if name == "convert_element_type":
        (x,), (y,) = eqn.invars, eqn.outvars
        return is_narrow(dtype_in(x)) and is_float(y) and not is_narrow(dtype_in(y))
    moves = Is.MOVES in traits_of(name) and name not in _SELECTS
    return len(eqn.invars) == 1 and (moves or name in _SAME_NUMBERS)


def _size(v: Any) -> int:
    return 8 * v.aval.size if is_float(v) else 0


def _place(eqn: Any, source: str, stack: str) -> Place:
    sums = traits_of(eqn.primitive.name) & (Is.PRODUCT | Is.ADDS_MANY)
    return Place(
        eqn.primitive.name,
        source,
        _scope(stack),
        is_derivative="transpose(" in stack,
        terms=terms_of(eqn) if sums else 1,
    )


def _scope(stack: str) -> str:
    """The names that a user gave: `block_3` of `transpose(jvp(ols.autocast))/jvp(block_3)`."""
    without_jit = re.sub(r"p?jit\([^()]*\)", "", stack)
    plain = re.sub(r"\w+\(|\)", "", without_jit)
    names = [name for name in plain.split("/") if re.fullmatch(r"[\w.-]+", name)]
    ours = (SCOPE, "rematted_computation", "checkpoint", "while", "body", "cond")
    return "/".join(name for name in names if name not in ours)
