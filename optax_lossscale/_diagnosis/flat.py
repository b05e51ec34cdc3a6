"""A program as a list of steps in stretches, each of which is compiled to return all results.

What `jit` and the like hold is put in its place. A step that holds programs to be run one after
the other, as loops and branches do, is a stretch by itself.
"""

import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import Literal

from optax_lossscale._autocast.products import SCOPE
from optax_lossscale._diagnosis.notes import Place
from optax_lossscale._diagnosis.wide import is_narrow
from optax_lossscale._programs.operations import Is, traits, traits_of
from optax_lossscale._programs.values import dtype_in, is_float
from optax_lossscale._programs.versions import constants, open_jaxpr
from optax_lossscale._programs.walk import equations_of_each_call, programs_in
from optax_lossscale._programs.work import terms_of
from optax_lossscale._step.gradient import SCALES

_BYTES = 2**28  # of results in float32 that a stretch may return
_STEPS = 300  # in a stretch, at most
_LOOPS = Is.SCANS | Is.WAITS | Is.BRANCHES | Is.MAPS
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
    def keeps_numbers(self) -> bool:
        """Whether the results are the operand's numbers, in another form or a wider dtype."""
        name = self.eqn.primitive.name
        if name == "convert_element_type":
            (x,) = self.eqn.invars
            (y,) = self.eqn.outvars
            return is_narrow(dtype_in(x)) and is_float(y) and not is_narrow(dtype_in(y))
        moves = Is.MOVES in traits_of(name) and name not in _SELECTS
        return len(self.ins) == 1 and (moves or name in _SAME_NUMBERS)


class Stretch(NamedTuple):
    """Steps that are compiled together; or one that holds programs."""

    steps: tuple[Step, ...]
    reads: tuple[int, ...]  # made before it
    frees: tuple[int, ...]  # that are not read afterwards


class Flat(NamedTuple):
    """A program in stretches."""

    ins: tuple[int, ...]
    outs: tuple[int, ...]
    consts: dict[int, np.ndarray]  # what it closes over, and its literals
    stretches: tuple[Stretch, ...]


def flattened(closed: Any) -> Flat:
    """A closed jaxpr in stretches."""
    return _Flattening(closed).program(closed, "")


class _Flattening:
    """The flattening of a program, which numbers its steps and values."""

    def __init__(self, closed: Any):
        self._count = itertools.count()
        self._equations = equations_of_each_call(open_jaxpr(closed))

    def program(self, closed: Any, scope: str) -> Flat:
        """The whole program, or one that a loop in it holds."""
        consts: dict[int, np.ndarray] = {}
        steps: list[Step] = []
        ins = self._numbers(open_jaxpr(closed).invars)
        outs = self._add(closed, scope, ins, consts, steps)
        return Flat(ins, outs, consts, tuple(_stretches(steps, outs)))

    def _add(
        self,
        closed: Any,
        scope: str,
        ins: Sequence[int],
        consts: dict[int, np.ndarray],
        steps: list[Step],
    ) -> tuple[int, ...]:
        """Adds a program's constants and steps, and returns the numbers of its results."""
        jaxpr = open_jaxpr(closed)
        numbers = dict(zip(jaxpr.invars, ins, strict=True))

        def constant(x):
            number = next(self._count)
            consts[number] = x
            return number

        def read(v):
            is_literal = isinstance(v, Literal)
            return constant(np.asarray(v.val, v.aval.dtype)) if is_literal else numbers[v]

        for v, x in zip(jaxpr.constvars, constants(closed), strict=True):
            numbers[v] = constant(jax.device_get(x))
        for eqn in jaxpr.eqns:
            # In the same order; those inside of what stays one step are passed over.
            source = next(at.source for at in self._equations if at.eqn is eqn)
            operands = tuple(map(read, eqn.invars))
            stack = f"{scope}/{eqn.source_info.name_stack}"
            programs = programs_in(eqn)
            if SCALES in stack and eqn.primitive.name == "mul":
                results = operands[:1]  # the gradient without the scale of `scale_gradient`
            elif _is_call(eqn, programs):
                results = self._add(programs[0], stack, operands, consts, steps)
            else:
                results = self._numbers(eqn.outvars)
                number = next(self._count)
                flats = [self.program(p, stack) for p in programs] if _is_loop(eqn) else []
                place = _place(eqn, source, stack)
                steps.append(Step(eqn, place, number, operands, results, tuple(flats)))
            numbers.update(zip(eqn.outvars, results, strict=True))
        return tuple(map(read, jaxpr.outvars))

    def _numbers(self, variables: Sequence[Any]) -> tuple[int, ...]:
        """New numbers for some values."""
        return tuple(next(self._count) for _ in variables)


def _is_call(eqn: Any, programs: Sequence[Any]) -> bool:
    """Whether an equation is no more than the program that it holds."""
    is_one = Is.INLINED | Is.KEEPS
    return len(programs) == 1 and bool(traits(eqn) & is_one or eqn.primitive.name in _CALLS)


def _is_loop(eqn: Any) -> bool:
    """Whether the programs in an equation are to be run one after the other: those with floats."""
    return bool(traits(eqn) & _LOOPS) and any(map(_has_floats, programs_in(eqn)))


def _has_floats(program: Any) -> bool:
    """Whether any value that a program makes is a float."""
    return any(
        any(map(is_float, eqn.outvars)) or any(map(_has_floats, programs_in(eqn)))
        for eqn in open_jaxpr(program).eqns
    )


def _stretches(steps: Sequence[Step], outs: Sequence[int]) -> Iterator[Stretch]:
    """The stretches of a program, given its steps and results."""
    groups = list(_groups(steps))
    last = dict.fromkeys(outs, len(groups))
    for n, group in reversed(list(enumerate(groups))):
        for step in group:
            for number in (*step.ins, *step.outs):
                last.setdefault(number, n)
    for n, group in enumerate(groups):
        made = {number for step in group for number in step.outs}
        read = dict.fromkeys(number for step in group for number in step.ins)
        reads = tuple(number for number in read if number not in made)
        frees = tuple(number for number in {*reads, *made} if last[number] == n)
        yield Stretch(tuple(group), reads, frees)


def _groups(steps: Sequence[Step]) -> Iterator[list[Step]]:
    """Steps cut before and after each that holds programs, and where results fill the memory."""
    group: list[Step] = []
    room = _BYTES
    for step in steps:
        size = sum(8 * v.aval.size for v in step.eqn.outvars if is_float(v))
        is_full = size > room or len(group) >= _STEPS
        if group and (is_full or step.programs or group[-1].programs):
            yield group
            group = []
            room = _BYTES
        group.append(step)
        room -= size
    if group:
        yield group


def _place(eqn: Any, source: str, stack: str) -> Place:
    sums = traits(eqn) & (Is.PRODUCT | Is.ADDS_MANY)
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
