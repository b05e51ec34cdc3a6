"""An equation of a program in its place: its line, its scope, and the programs that it holds."""

import re
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

from jax.extend.core import Literal

from optax_lossscale._autocast.products import SCOPE
from optax_lossscale._diagnosis.notes import Place
from optax_lossscale._diagnosis.wide import is_narrow
from optax_lossscale._programs.operations import Is, traits
from optax_lossscale._programs.remembered import remembered
from optax_lossscale._programs.values import dtype_in, is_float
from optax_lossscale._programs.versions import open_jaxpr
from optax_lossscale._programs.walk import has_users_line, line_of, programs_in
from optax_lossscale._programs.work import terms_of

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
    number: int  # in the order of running
    programs: Sequence[Any]  # that it holds, if these are run by themselves
    is_call: bool  # whether it is no more than the one that it holds
    # Whether the results are the operand's, in another form or a wider dtype
    keeps_numbers: bool
    size: int  # of its results in float32, in bytes
    key: Hashable  # equal for what computes the same

    @classmethod
    def at(cls, eqn: Any, number: int, around: Place) -> "Step":
        """An equation in a program that the equation at a place holds."""
        place = _place(eqn, around)
        programs = programs_in(eqn)
        is_call = _is_call(eqn, programs)
        is_loop = bool(traits(eqn) & _LOOPS) and any(map(_has_floats, programs))
        return cls(
            eqn,
            place,
            number,
            programs if is_call or is_loop else (),
            is_call,
            _keeps_numbers(eqn),
            sum(8 * v.aval.size for v in eqn.outvars if is_float(v)),
            _key(eqn),
        )


@remembered
def last_reads(jaxpr: Any) -> list[list[Any]]:
    """For each equation of a program, the variables that nothing reads after it."""
    last = {}
    for n, eqn in enumerate(jaxpr.eqns):
        last |= {
            v: n for v in (*eqn.invars, *eqn.outvars) if not isinstance(v, Literal)
        }
    for v in jaxpr.outvars:
        if not isinstance(v, Literal):
            last.pop(v, None)
    frees: list[list[Any]] = [[] for _ in jaxpr.eqns]
    for v, n in last.items():
        frees[n].append(v)
    return frees


def _place(eqn: Any, around: Place) -> Place:
    stack = str(eqn.source_info.name_stack)
    sums = traits(eqn) & (Is.PRODUCT | Is.ADDS_MANY)
    return Place(
        eqn.primitive.name,
        line_of(eqn) if has_users_line(eqn) or not around.source else around.source,
        "/".join(filter(None, (around.scope, _scope(stack)))),
        is_derivative=around.is_derivative or "transpose(" in stack,
        terms=terms_of(eqn) if sums else 1,
    )


def _scope(stack: str) -> str:
    """The names that a user gave: `block_3` of `transpose(jvp(ols.autocast))/jvp(block_3)`."""
    without_jit = re.sub(r"p?jit\([^()]*\)", "", stack)
    plain = re.sub(r"\w+\(|\)", "", without_jit)
    names = [name for name in plain.split("/") if re.fullmatch(r"[\w.-]+", name)]
    ours = (
        SCOPE,
        "rematted_computation",
        "checkpoint",
        "while",
        "body",
        "cond",
    )
    return "/".join(name for name in names if name not in ours)


def _is_call(eqn: Any, programs: Sequence[Any]) -> bool:
    is_one = traits(eqn) & (Is.INLINED | Is.KEEPS) or eqn.primitive.name in _CALLS
    return bool(is_one) and len(programs) == 1


def _has_floats(program: Any) -> bool:
    """Whether any value that a program makes is a float."""
    return any(
        any(map(is_float, eqn.outvars)) or any(map(_has_floats, programs_in(eqn)))
        for eqn in open_jaxpr(program).eqns
    )


def _keeps_numbers(eqn: Any) -> bool:
    name = eqn.primitive.name
    if name == "convert_element_type":
        (x,) = eqn.invars
        (y,) = eqn.outvars
        return is_narrow(dtype_in(x)) and is_float(y) and not is_narrow(dtype_in(y))
    moves = Is.MOVES in traits(eqn) and name not in _SELECTS
    return len(eqn.invars) == 1 and (moves or name in _SAME_NUMBERS)


def _key(eqn: Any) -> Hashable:
    avals = tuple(v.aval for v in (*eqn.invars, *eqn.outvars))
    key = (eqn.primitive, tuple(eqn.params.items()), avals)
    try:
        hash(key)
    except TypeError:  # of a parameter that is compared with no other
        return id(eqn)
    return key
