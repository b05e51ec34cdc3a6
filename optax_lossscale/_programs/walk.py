"""Every equation of a program: how often it runs, and the user's line that made it."""

import functools
import inspect
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import source_info_util
from jax.extend.core import Literal

from optax_lossscale._arrays.variables import map_leaves
from optax_lossscale._programs.operations import Is, is_exact, operation, traits
from optax_lossscale._programs.values import dtype_in, is_float
from optax_lossscale._programs.versions import (
    is_program,
    mapped_axes,
    name_of,
    open_jaxpr,
    params_of,
    scan_sizes,
)

# Their lines are passed over: they call the user's functions, and are called by them.
_FRAMEWORKS = (
    "einops",
    "equinox",
    "flax",
    "haiku",
    "haliax",
    "keras",
    "optax",
    "optax_lossscale",
)


LIBRARY = "ols.library"
"""The scope of what a library chose to compute, where it has been given the line of its call."""


class Equation(NamedTuple):
    """An equation in its place."""

    eqn: Any
    around: Self | None  # the equation that holds the program that this one is in
    # How often; each branch of a `cond` counts as run, and the body of a `while` once
    runs: int
    source: str  # the line that made it, as `model.py:12 (f)`
    # The dtypes of its operands before they were converted to wider ones
    before: tuple[Any, ...]
    summed: int  # how often it adds to what a `scan` carries: 1, if it does not

    @property
    def name(self) -> str:
        """What JAX calls its operation."""
        return name_of(self.eqn)

    @property
    def holders(self) -> Iterator["Equation"]:
        """The equations around it, the innermost first."""
        if self.around is not None:
            yield self.around
            yield from self.around.holders


class _Visit(NamedTuple):
    """An equation in a program that is read once for several calls."""

    eqn: Any
    key: Any  # of the program that it is in
    around: int | None  # the number of the visit of what holds that program
    inside: frozenset[str]  # the operations around it
    source: str
    before: tuple[Any, ...]
    summed: int


def traced(fun: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """The jaxpr of a call, in which all arrays are traced and everything else is as given."""
    arrays: list[Any] = []

    def noted(x):
        """A leaf as it is, noted if it is an array."""
        if _is_traced(x):
            arrays.append(x)
        return x

    map_leaves(noted, (args, kwargs))

    def of_arrays(arrays):
        following = iter(arrays)

        def replaced(x):
            """The next array for a leaf that is one, and any other leaf as it is."""
            return next(following) if _is_traced(x) else x

        inputs = map_leaves(replaced, (args, kwargs))
        its_args, its_kwargs = inputs
        result = fun(*its_args, **its_kwargs)
        after = jax.tree.leaves((result, *inputs))  # modules are changed in place
        return [x for x in after if isinstance(x, jax.Array)]

    return jax.make_jaxpr(of_arrays)(arrays).jaxpr


def programs_in(eqn: Any) -> list[Any]:
    """The jaxprs that an equation runs, closed or open, as they are."""
    params = params_of(eqn)
    names = operation(eqn).programs
    if names is None:
        parameters = list(params.values())
    else:
        parameters = [_parameter(params, name) for name in names]
    leaves = jax.tree.leaves(parameters, is_leaf=is_program)
    return [leaf for leaf in leaves if is_program(leaf)]


def arguments_of(eqn: Any) -> list[tuple[Any, Sequence[int]]]:
    """The programs in an equation, each with the numbers of the operands that it is given."""
    programs = programs_in(eqn)
    operands = range(len(eqn.invars))
    if Is.WAITS in traits(eqn):
        condition, body = programs
        n_condition = eqn.params["cond_nconsts"]
        of_condition = [*range(n_condition), *carried_by(eqn)]
        return [(condition, of_condition), (body, operands[n_condition:])]
    given: list[tuple[Any, Sequence[int]]] = []
    for program in programs:
        # The last ones: the first of a cond is its index.
        n_before = len(operands) - len(open_jaxpr(program).invars)
        given.append((program, operands[max(n_before, 0) :]))
    return given


def giving_results(eqn: Any) -> list[tuple[Any, Sequence[int]]]:
    """Those of `arguments_of` that give an equation's results: not the condition of a `while`."""
    entered = arguments_of(eqn)
    return entered[1:] if Is.WAITS in traits(eqn) else entered


def carried_by(eqn: Any) -> range:
    """The operands that a loop carries from iteration to iteration, by number."""
    if Is.SCANS in traits(eqn):
        n_consts, n_carry = scan_sizes(eqn)
        return range(n_consts, n_consts + n_carry)
    if Is.WAITS in traits(eqn):
        n_consts = eqn.params["cond_nconsts"] + eqn.params["body_nconsts"]
        return range(n_consts, len(eqn.invars))
    return range(0)


def is_opaque(eqn: Any) -> bool:
    """Whether what an equation runs cannot be looked into: a kernel, or a Python function."""
    params = params_of(eqn)
    holds_functions = params is not eqn.params and any(map(callable, params.values()))
    return Is.OPAQUE in traits(eqn) or (holds_functions and not programs_in(eqn))


def equations(jaxpr: Any) -> Iterator[Equation]:
    """The equations of a jaxpr, and those inside them; of a shared program, once.

    Calls of a program that JAX shares are counted together: a function that calls
    another twice, which calls another twice, and so on, is read in the time that it
    takes to trace it.
    """
    visits: list[_Visit] = []
    # Who enters a program, and how often
    calls: dict[Any, list[tuple[Any, int]]] = {None: []}
    frameworks = _frameworks()

    def visit(jaxpr: Any, key: Any, around: int | None, before: dict[Any, Any]) -> None:
        """Notes the equations of a program, whose arguments had these dtypes before."""
        inside: frozenset[str] = frozenset()
        line = ""
        sums: set[int] = set()
        rounds = 1
        if around is not None:
            holder = visits[around]
            inside = holder.inside | {name_of(holder.eqn)}
            line = holder.source
            sums = _running_sums(holder.eqn, jaxpr)
            rounds = _times(holder.eqn)
        for eqn in jaxpr.eqns:
            operands = tuple(_dtype_before(v, before) for v in eqn.invars)
            summed = rounds if id(eqn) in sums else 1
            source = _source(eqn, line, frameworks)
            one = _Visit(eqn, key, around, inside, source, operands, summed)
            visits.append(one)
            if _keeps_numbers(eqn):
                before |= dict.fromkeys(eqn.outvars, operands[0])
            enter(one, len(visits) - 1)

    def enter(holder: _Visit, number: int) -> None:
        """Visits the programs in an equation that were not visited before."""
        for program, operands in arguments_of(holder.eqn):
            inner = open_jaxpr(program)
            dtypes = _dtypes_inside(holder, inner, operands)
            place = (holder.inside, holder.source, tuple(dtypes.values()))
            key = (id(inner), id(holder.eqn), place)
            is_known = key in calls
            calls.setdefault(key, []).append((holder.key, _times(holder.eqn)))
            if not is_known:
                visit(inner, key, number, dtypes)

    visit(jaxpr, None, None, {})
    return iter(_counted(visits, calls))


def _counted(
    visits: Sequence[_Visit], calls: Mapping[Any, list[tuple[Any, int]]]
) -> list[Equation]:
    """The equations that were visited, with how often each runs."""

    @functools.cache
    def runs(key: Any) -> int:
        if key is None:
            return 1
        return sum(runs(caller) * times for caller, times in calls[key])

    equations: list[Equation] = []
    for one in visits:
        around = None if one.around is None else equations[one.around]
        times = runs(one.key)
        equations.append(
            Equation(one.eqn, around, times, one.source, one.before, one.summed)
        )
    return equations


def _dtype_before(v: Any, before: Mapping[Any, Any]) -> Any:
    """The dtype of a value before it was converted to a wider one, if it was."""
    now = dtype_in(v)
    return now if isinstance(v, Literal) else before.get(v, now)


def _dtypes_inside(
    holder: _Visit, inner: Any, operands: Sequence[int]
) -> dict[Any, Any]:
    """The dtypes that the arguments of a program in an equation had before."""
    carried = carried_by(holder.eqn)  # equal to those operands only in the first round
    pairs = zip(inner.invars, operands, strict=False)
    return {v: holder.before[n] for v, n in pairs if n not in carried}


def line_of(eqn: Any) -> str:
    """The user's line that made an equation, as `model.py:12 (f)`."""
    return _source(eqn, "", _frameworks())


def has_users_line(eqn: Any) -> bool:
    """Whether a user's code made an equation, and not what a framework compiles and caches."""
    frameworks = _frameworks()
    return any(not call.startswith(frameworks) for call in _calls(eqn))


def is_of_a_library(eqn: Any) -> bool:
    """Whether Optax made this outside of its losses, or JAX in the derivative of a QR, say."""
    if LIBRARY in str(eqn.source_info.name_stack):
        return True
    optax = _folder("optax")
    calls = _calls(eqn)
    innermost = calls[-1] if calls else ""
    is_loss = innermost.startswith(os.path.join(optax, "losses"))
    if optax and innermost.startswith(optax) and not is_loss:
        return True
    file = inspect.getsourcefile(inspect.unwrap(jax.lax.linalg.qr))
    frames = getattr(eqn.source_info.traceback, "frames", ())
    return any(frame.file_name == file for frame in frames)


def _is_traced(x: Any) -> bool:
    if isinstance(x, (np.ndarray, np.generic)):
        return x.dtype == np.bool_ or jnp.issubdtype(x.dtype, np.number)
    return isinstance(x, (jax.Array, jax.ShapeDtypeStruct))


def _parameter(params: dict[str, Any], name: str) -> Any:
    """A parameter by its name, or a part of one, such as `jaxprs.solve`."""
    name, _, part = name.partition(".")
    return attrgetter(part)(params[name]) if part else params.get(name)


def _times(eqn: Any) -> int:
    """How often an equation runs the programs in it."""
    if Is.SCANS in traits(eqn):
        return eqn.params["length"]
    if Is.MAPS in traits(eqn):
        mesh = eqn.params["mesh"]
        return math.prod(mesh.shape[axis] for axis in mapped_axes(eqn))
    return eqn.params.get("global_axis_size", 1)


def _running_sums(eqn: Any, body: Any) -> set[int]:
    """The equations of a scan's body, by id, that add to what it carries."""
    if Is.SCANS not in traits(eqn):
        return set()
    carried = carried_by(eqn)
    pairs = zip(body.outvars, body.invars[carried.start : carried.stop], strict=False)
    before = {new: old for new, old in pairs if not isinstance(new, Literal)}
    sums: set[int] = set()
    for inner in body.eqns:
        if Is.ADDS_TWO in traits(inner):
            old = before.get(inner.outvars[0])
            if any(v is old for v in inner.invars):
                sums.add(id(inner))
    return sums


def _keeps_numbers(eqn: Any) -> bool:
    """Whether the result is the one operand, in another form or in a wider dtype."""
    if len(eqn.invars) != 1 or not eqn.outvars:
        return False
    before = dtype_in(eqn.invars[0])
    after = dtype_in(eqn.outvars[0])
    if Is.CASTS not in traits(eqn):
        return is_exact(name_of(eqn))
    are_floats = is_float(eqn.invars[0]) and is_float(eqn.outvars[0])
    return are_floats and before.itemsize < after.itemsize


# --- lines ---


def _source(eqn: Any, around: str, frameworks: tuple[str, ...]) -> str:
    """The innermost line that is not in a framework."""
    calls = _calls(eqn)
    for call in reversed(calls):
        if not call.startswith(frameworks):
            return _short(call)
    # What a framework compiles and caches has only lines of its own: take that of the
    # call around.
    return around or (_short(calls[-1]) if calls else "an unknown line")


def _calls(eqn: Any) -> list[str]:
    """The calls that led to an equation, without JAX's own; the innermost is the last."""
    return source_info_util.summarize(eqn.source_info, num_frames=1000).splitlines()


def _frameworks() -> tuple[str, ...]:
    """The folders of those frameworks that are imported."""
    return tuple(filter(None, map(_folder, _FRAMEWORKS)))


def _folder(package: str) -> str:
    """The folder of an imported package, with which the names of its files begin."""
    path = getattr(sys.modules.get(package), "__file__", None)
    return os.path.join(os.path.dirname(path), "") if path else ""


def _short(call: str) -> str:
    """`model.py:12 (f)` of `/home/me/model.py:12:8 (f)`, in the directory `/home/me`."""
    match = re.fullmatch(r"(.+?):(\d+)(?::\d+)? \((?:.*<locals>\.)?(.+)\)", call)
    if match is None:
        return call
    file, line, function = match.groups()
    return f"{file.removeprefix(os.path.join(os.getcwd(), ''))}:{line} ({function})"
