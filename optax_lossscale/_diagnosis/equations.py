"""Every equation of a program: how often it runs, and the line of the user's that made it."""

import math
import os
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import source_info_util
from jax.extend.core import Literal

from optax_lossscale._arrays.programs import (
    is_float,
    is_program,
    mapped_axes,
    open_jaxpr,
    params_of,
    programs_in,
)
from optax_lossscale._arrays.variables import map_leaves

# What runs a program that no jaxpr shows; and sparse products, whose sizes no shape tells.
_OPAQUE = {
    "bcoo_dot_general",
    "bcsr_dot_general",
    "call_exported",
    "call_tf",
    "dot_product_attention_bwd_wrapper",
    "dot_product_attention_fwd_wrapper",
    "ffi_call",
    "io_callback",
    "mosaic_gpu_call",
    "pallas_call",
    "pure_callback",
    "tpu_custom_call",
    "triton_kernel_call",
}
# What holds functions that are not all run, and those that are.
_RUN = {
    "custom_linear_solve": lambda params: params["jaxprs"].solve,
    "linear_call": lambda params: params["callee"],
}
_SAME_NUMBERS = {
    "broadcast_in_dim",
    "copy",
    "name",
    "reshape",
    "rev",
    "sharding_constraint",
    "slice",
    "squeeze",
    "transpose",
}
# Whose lines are nobody's fault: they call the user's functions, and are called by them.
_FRAMEWORKS = ("einops", "equinox", "flax", "haiku", "haliax", "keras", "optax", "optax_lossscale")


class Equation(NamedTuple):
    """An equation in its place.

    Attributes:
      eqn: as it is in the jaxpr.
      runs: how often it runs. Each branch of a `cond` counts as run, and the body of a `while`,
        whose rounds nobody knows before, as run once.
      source: the line that made it, as `model.py:12 (f)`.
      in_while: the line of the `while` around it, or "".
      before: the dtypes that its operands had before they were converted to wider ones.
      summed: how often it adds to what a `scan` carries: 1, if it does not.
      scopes: the names around it, outermost first, as profiles have them.
    """

    eqn: Any
    runs: int
    source: str
    in_while: str
    before: tuple[Any, ...]
    summed: int
    scopes: str


def traced(fun: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """The jaxpr of a call, in which all arrays are traced and everything else is as given."""
    arrays: list[Any] = []
    map_leaves(lambda x: arrays.append(x) or x if _is_array(x) else x, (args, kwargs))

    def of_arrays(arrays):
        next_array = iter(arrays).__next__
        of_leaf = lambda x: next_array() if _is_array(x) else x
        given, options = map_leaves(of_leaf, (args, kwargs))
        result = fun(*given, **options)
        after = jax.tree.leaves((result, given, options))  # modules are changed in place
        return [x for x in after if isinstance(x, jax.Array)]

    return jax.make_jaxpr(of_arrays)(arrays).jaxpr


def equations(jaxpr: Any) -> Iterator[Equation]:
    """Those of a jaxpr, and those inside them."""
    frameworks = tuple(filter(None, map(_folder, _FRAMEWORKS)))

    def within(jaxpr: Any, around: Equation | None, before: dict[Any, Any]) -> Iterator[Equation]:
        rounds, sums = 1, set()
        runs, line, in_while, scopes = 1, "", "", ""
        if around is not None:
            rounds, sums = _rounds(around.eqn), _running_sums(around.eqn, jaxpr)
            runs, line, scopes = around.runs * rounds, around.source, around.scopes
            in_while = line if around.eqn.primitive.name == "while" else around.in_while
        for eqn in jaxpr.eqns:
            operands = tuple(_before(v, before) for v in eqn.invars)
            summed = rounds if id(eqn) in sums else 1
            at = Equation(
                eqn,
                runs,
                _source(eqn, line, frameworks),
                in_while,
                operands,
                summed,
                f"{scopes}/{eqn.source_info.name_stack}",
            )
            yield at
            if _keeps_numbers(eqn):
                before[eqn.outvars[0]] = operands[0]
            for inner in _functions(eqn):
                last = operands[len(operands) - len(inner.invars) :]  # the first is a cond's index
                yield from within(inner, at, dict(zip(inner.invars, last, strict=False)))

    return within(jaxpr, None, {})


def is_opaque(eqn: Any) -> bool:
    """Whether nothing can look into what an equation runs: a kernel, or a Python function."""
    params = params_of(eqn)
    holds_functions = params is not eqn.params and any(map(callable, params.values()))
    return eqn.primitive.name in _OPAQUE or (holds_functions and not programs_in(eqn))


def is_of_the_optimizer(eqn: Any) -> bool:
    """Whether Optax made this by itself, and not in a loss function."""
    folder, calls = _folder("optax"), _calls(eqn)
    if not folder or not calls:
        return False
    return calls[-1].startswith(folder) and not calls[-1].startswith(
        os.path.join(folder, "losses")
    )


def is_of_a_decomposition(eqn: Any) -> bool:
    """Whether JAX made this by itself, in the derivative of a QR decomposition, say."""
    frames = getattr(eqn.source_info.traceback, "frames", ())
    file = os.path.join(os.path.dirname(jax.__file__), "_src", "lax", "linalg.py")
    return any(frame.file_name == file for frame in frames)


def _is_array(x: Any) -> bool:
    if isinstance(x, (np.ndarray, np.generic)):
        return x.dtype == np.bool_ or jnp.issubdtype(x.dtype, np.number)
    return isinstance(x, (jax.Array, jax.ShapeDtypeStruct))


def _functions(eqn: Any) -> list[Any]:
    """The jaxprs that an equation runs, wherever they are in its parameters."""
    if is_opaque(eqn):
        return []
    run = _RUN.get(eqn.primitive.name, lambda params: list(params.values()))
    found = jax.tree.leaves(run(params_of(eqn)), is_leaf=is_program)
    return [open_jaxpr(x) for x in found if is_program(x)]


def _rounds(eqn: Any) -> int:
    """How often an equation runs the functions in it."""
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
    is_whole = lambda outer, inner: len(outer.aval.shape) == len(inner.aval.shape)  # not stacked
    new = [v for o, v in zip(eqn.outvars, body.outvars, strict=True) if is_whole(o, v)]
    kept = [v for o, v in zip(eqn.invars, body.invars, strict=True) if is_whole(o, v)]
    pairs = zip(kept[len(kept) - len(new) :], new, strict=True)  # constants come first
    carried = {v: old for old, v in pairs if not isinstance(v, Literal)}
    return {
        id(e)
        for e in body.eqns
        if e.primitive.name in ("add", "add_any")
        and any(v is carried.get(e.outvars[0]) for v in e.invars)
    }


def _before(v: Any, before: dict[Any, Any]) -> Any:
    own = getattr(v.aval, "dtype", None)
    return own if isinstance(v, Literal) else before.get(v, own)


def _keeps_numbers(eqn: Any) -> bool:
    """Whether the result is the first operand, in another form or in a wider dtype."""
    if eqn.primitive.name == "convert_element_type":
        (x,), (y,) = eqn.invars, eqn.outvars
        return is_float(x) and is_float(y) and x.aval.dtype.itemsize < y.aval.dtype.itemsize
    return eqn.primitive.name in _SAME_NUMBERS


def _source(eqn: Any, around: str, frameworks: tuple[str, ...]) -> str:
    """The innermost line that is no framework's.

    What a framework compiles and keeps has no line but its own: that of the call around it then.
    """
    calls = _calls(eqn)
    for call in reversed(calls):
        if not call.startswith(frameworks):
            return _short(call)
    return around or (_short(calls[-1]) if calls else "an unknown line")


def _calls(eqn: Any) -> list[str]:
    """The calls that led to an equation, but for JAX's own; the innermost is the last."""
    return source_info_util.summarize(eqn.source_info, num_frames=1000).splitlines()


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
