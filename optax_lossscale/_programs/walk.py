"""Every equation of a program: how often it runs, and the user's line that made it."""

import inspect
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import source_info_util
from jax.extend.core import Literal

from optax_lossscale._arrays.variables import map_leaves
from optax_lossscale._programs.operations import PROGRAMS, TABLE, Is, is_exact, traits_of
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
_FRAMEWORKS = ("einops", "equinox", "flax", "haiku", "haliax", "keras", "optax", "optax_lossscale")


LIBRARY = "ols.library"
"""The scope of what a library chose to compute, where it has been given the line of its call."""


class Equation(NamedTuple):
    """An equation in its place."""

    eqn: Any
    around: Self | None  # the equation that holds the program that this one is in
    runs: int  # how often; each branch of a `cond` counts as run, and the body of a `while` once
    source: str  # the line that made it, as `model.py:12 (f)`
    before: tuple[Any, ...]  # the dtypes of its operands before they were converted to wider ones
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


def traced(fun: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """The jaxpr of a call, in which all arrays are traced and everything else is as given."""
    arrays: list[Any] = []
    map_leaves(lambda x: arrays.append(x) or x if _is_traced(x) else x, (args, kwargs))

    def of_arrays(arrays):
        next_array = iter(arrays).__next__
        of_leaf = lambda x: next_array() if _is_traced(x) else x
        given, options = map_leaves(of_leaf, (args, kwargs))
        result = fun(*given, **options)
        after = jax.tree.leaves((result, given, options))  # modules are changed in place
        return [x for x in after if isinstance(x, jax.Array)]

    return jax.make_jaxpr(of_arrays)(arrays).jaxpr


def programs_in(eqn: Any) -> list[Any]:
    """The jaxprs that an equation runs, closed or open, as they are."""
    params, name = params_of(eqn), name_of(eqn)
    if name in TABLE:
        found = [_parameter(params, parameter) for parameter in PROGRAMS.get(name, ())]
    else:
        found = list(params.values())
    return list(filter(is_program, jax.tree.leaves(found, is_leaf=is_program)))


def arguments_of(eqn: Any) -> list[tuple[Any, Sequence[int]]]:
    """The programs in an equation, each with the numbers of the operands that it is given."""
    programs, n = programs_in(eqn), len(eqn.invars)
    if eqn.primitive.name == "while":
        condition, body = programs
        n_cond = eqn.params["cond_nconsts"]
        return [(condition, [*range(n_cond), *carried_by(eqn)]), (body, range(n_cond, n))]
    # The last ones: the first of a cond is its index.
    return [(p, range(n)[max(n - len(open_jaxpr(p).invars), 0) :]) for p in programs]


def carried_by(eqn: Any) -> range:
    """The operands that a loop carries from iteration to iteration, by number."""
    if eqn.primitive.name == "scan":
        n_consts, n_carry = scan_sizes(eqn)
        return range(n_consts, n_consts + n_carry)
    if eqn.primitive.name == "while":
        return range(eqn.params["cond_nconsts"] + eqn.params["body_nconsts"], len(eqn.invars))
    return range(0)


def is_opaque(eqn: Any) -> bool:
    """Whether what an equation runs cannot be looked into: a kernel, or a Python function."""
    params = params_of(eqn)
    holds_functions = params is not eqn.params and any(map(callable, params.values()))
    is_known_so = Is.OPAQUE in traits_of(name_of(eqn))
    return is_known_so or (holds_functions and not programs_in(eqn))


def equations(jaxpr: Any) -> Iterator[Equation]:
    """The equations of a jaxpr, and those inside them."""
    frameworks = _frameworks()

    def within(jaxpr: Any, around: Equation | None, before: dict[Any, Any]) -> Iterator[Equation]:
        was = lambda v: dtype_in(v) if isinstance(v, Literal) else before.get(v, dtype_in(v))
        runs, rounds, sums, line = 1, 1, set(), ""
        if around is not None:
            rounds, sums = _times(around.eqn), _running_sums(around.eqn, jaxpr)
            runs, line = around.runs * rounds, around.source
        for eqn in jaxpr.eqns:
            operands = tuple(map(was, eqn.invars))
            summed = rounds if id(eqn) in sums else 1
            source = _source(eqn, line, frameworks)
            at = Equation(eqn, around, runs, source, operands, summed)
            yield at
            if _keeps_numbers(eqn):
                before |= dict.fromkeys(eqn.outvars, operands[0])
            carried = carried_by(eqn)  # equal to those operands only in the first round
            for program, given in arguments_of(eqn):
                inner = open_jaxpr(program)
                pairs = zip(inner.invars, given, strict=False)
                of_operands = {v: operands[i] for v, i in pairs if i not in carried}
                yield from within(inner, at, of_operands)

    return within(jaxpr, None, {})


def has_users_line(eqn: Any) -> bool:
    """Whether a user's code made an equation, and not what a framework compiles and caches."""
    frameworks = _frameworks()
    return any(not call.startswith(frameworks) for call in _calls(eqn))


def is_of_a_library(eqn: Any) -> bool:
    """Whether Optax made this outside of its losses, or JAX in the derivative of a QR, say."""
    if LIBRARY in str(eqn.source_info.name_stack):
        return True
    optax, calls = _folder("optax"), _calls(eqn)
    losses = os.path.join(optax, "losses")
    if optax and calls and calls[-1].startswith(optax) and not calls[-1].startswith(losses):
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
    name, params = eqn.primitive.name, eqn.params
    if name == "scan":
        return params["length"]
    if name == "xla_pmap":
        return params["global_axis_size"]
    if name == "shard_map":
        return math.prod(params["mesh"].shape[axis] for axis in mapped_axes(eqn))
    return 1


def _running_sums(eqn: Any, body: Any) -> set[int]:
    """The equations of a scan's body, by id, that add to what it carries."""
    if eqn.primitive.name != "scan":
        return set()
    carried = carried_by(eqn)
    pairs = zip(body.outvars, body.invars[carried.start : carried.stop], strict=False)
    old_of = {new: old for new, old in pairs if not isinstance(new, Literal)}
    adds = [e for e in body.eqns if e.primitive.name in ("add", "add_any")]
    return {id(e) for e in adds if any(v is old_of.get(e.outvars[0]) for v in e.invars)}


def _keeps_numbers(eqn: Any) -> bool:
    """Whether the result is the one operand, in another form or in a wider dtype."""
    (x, *more), y = eqn.invars or [None], eqn.outvars[:1]
    if more or not y:
        return False
    if eqn.primitive.name == "convert_element_type":
        return is_float(x) and is_float(y[0]) and dtype_in(x).itemsize < dtype_in(y[0]).itemsize
    return is_exact(eqn.primitive.name)


# --- lines ---


def _source(eqn: Any, around: str, frameworks: tuple[str, ...]) -> str:
    """The innermost line that is not in a framework."""
    calls = _calls(eqn)
    for call in reversed(calls):
        if not call.startswith(frameworks):
            return _short(call)
    # What a framework compiles and caches has only lines of its own: take that of the call around.
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
