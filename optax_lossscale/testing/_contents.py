"""What a step's arguments hold, and what its outputs hold, as arrays on the host.

Only types and paths tell what a number is. The loss scale is what is inside a
`LossScale`, and no other number that has its name or its value, or shares its array.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import DictKey

from optax_lossscale._arrays.precision import dtype_of, is_array_leaf, is_inexact_leaf
from optax_lossscale._arrays.variables import is_variable, without_variables
from optax_lossscale._scales.loss_scale import LossScale
from optax_lossscale._skips.rule import SkipRule
from optax_lossscale._step.nesting import name_in_optax
from optax_lossscale._step.state import LossScaleState

Path = tuple[Any, ...]  # of JAX's keys
Numbers = dict[Path, Any]  # arrays by their paths

RESULT = DictKey("result")  # the first key of what the step returns
_LEFT_OUT = (LossScale, SkipRule)  # no numbers, as they are meant to record overflows
_SAMPLE = 2**16  # how many numbers of an array are compared at most


class Contents(NamedTuple):
    """What a tree of arguments or outputs holds, on the host."""

    numbers: Numbers  # flat; without loss scales and skip rules
    loss_scales: list[LossScale]
    states: list[LossScaleState]
    counts: list[np.ndarray]  # the integers in optimizers' states, flat
    drifted: list[Path]  # numbers and loss scales of which devices' copies differ


def contents(tree: Any, old: Iterable[Any] = ()) -> Contents:
    """What a tree holds: all in its `RESULT`, and elsewhere what is not all `old`.

    `old` are the arrays that the step was given. Those that it did not change it may
    have donated, and then they cannot be read.
    """
    old_ids = set(map(id, old))
    arrays = _made(numbers_in(tree), old_ids)
    loss_scales = _made(parts_of(is_loss_scale, tree), old_ids)
    states = _made(parts_of(_is_state, tree), old_ids)
    optimizer_states = _made(parts_of(_is_optimizer_state, tree), old_ids)
    on_devices = arrays | loss_scales
    return Contents(
        numbers={path: flat(x) for path, x in arrays.items()},
        loss_scales=jax.device_get(list(loss_scales.values())),
        states=jax.device_get(list(states.values())),
        counts=_counts(list(optimizer_states.values())),
        drifted=[path for path, x in on_devices.items() if _copies_differ(x)],
    )


def _made(parts, old_ids):
    """The parts that are in the result, or hold an array whose id is not an old one.

    They are what the step made. One that is not compiled may return what it was given.
    """
    returned = {}
    for path, part in parts.items():
        ids = set(map(id, jax.tree.leaves(part)))
        if path[0] == RESULT or ids - old_ids:
            returned[path] = part
    return returned


def numbers_in(tree: Any) -> Numbers:
    """The numbers and bools of a tree by path, without loss scales and skip rules.

    A variable that occurs several times is at the first of its paths only.
    """

    def is_leaf(x):
        return is_variable(x) or isinstance(x, _LEFT_OUT)

    numbers = {}
    seen = set()
    for path, x in jax.tree.leaves_with_path(tree, is_leaf=is_leaf):
        if isinstance(x, _LEFT_OUT) or id(x) in seen:
            continue
        if is_variable(x):
            seen.add(id(x))
        array = without_variables(x)
        if is_array_leaf(array) and _is_numeric(array):
            numbers[path] = array
    return numbers


def parts_of(is_part: Callable[[Any], bool], tree: Any) -> dict[Path, Any]:
    """The parts of a tree for which `is_part` holds, with arrays for variables."""
    nodes = jax.tree.leaves_with_path(tree, is_leaf=is_part)
    return {path: without_variables(x) for path, x in nodes if is_part(x)}


def is_loss_scale(x: Any) -> bool:
    """Whether this is a loss scale."""
    return isinstance(x, LossScale)


def _is_state(x):
    """Whether this is a state of loss scaling."""
    return isinstance(x, LossScaleState)


def _is_optimizer_state(x):
    """Whether this is a state of loss scaling, or of one of Optax's optimizers.

    An optimizer itself, which Optax defines as well, holds functions and no numbers.
    """
    return _is_state(x) or name_in_optax(x) is not None


def _counts(optimizer_states):
    """The integers in states of optimizers, such as Adam's count, as flat arrays.

    Those of loss scaling itself, such as how many steps were skipped, are left out.
    """
    numbers = numbers_in(_unwrapped(optimizer_states))
    integers = filter(_is_integer, numbers.values())
    return [flat(x) for x in integers]


def _unwrapped(tree):
    """The tree with the inner state in place of each state of loss scaling."""

    def unwrapped(x):
        return _unwrapped(x.inner_state) if _is_state(x) else x

    return jax.tree.map(unwrapped, tree, is_leaf=_is_state)


def _is_integer(x):
    """Whether this is an array of integers; bools are none."""
    return jnp.issubdtype(dtype_of(x), jnp.integer)


def _is_numeric(x):
    """Whether this is an array of numbers or bools, and not of keys, text or objects."""
    dtype = dtype_of(x)
    return dtype == np.bool_ or jnp.issubdtype(dtype, np.number)


def flat(x: Any) -> np.ndarray:
    """The numbers of an array as a vector of float64 or int64, on the host.

    They are rounded to the dtype in which JAX computes with them: a Python float, or a
    float64 array of NumPy's, to float32, unless 64-bit types are enabled. A complex
    number becomes two numbers. Of a large array, it is a sample.
    """
    numbers = np.ravel(jax.device_get(x))
    numbers = numbers[:: 1 + numbers.size // _SAMPLE]
    if not is_inexact_leaf(x):
        return numbers.astype(np.int64)
    numbers = numbers.astype(dtype_of(x))
    if np.iscomplexobj(numbers):
        numbers = numbers.view(numbers.real.dtype)
    return numbers.astype(np.float64)


def is_finite(x: np.ndarray) -> bool:
    """Whether all numbers of an array are finite."""
    return bool(np.isfinite(x).all())


def difference(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The difference of each two numbers; NaN where both are infinite alike."""
    with np.errstate(invalid="ignore"):
        return x - y


def equal(x: np.ndarray, y: np.ndarray) -> bool:
    """Whether two arrays have the same numbers, where NaN equals NaN."""
    return np.array_equal(x, y, equal_nan=True)


def _copies_differ(tree):
    """Whether devices hold copies of an array, or of parts of it, that differ."""
    for x in jax.tree.leaves(tree):
        copies = {}
        for shard in getattr(x, "addressable_shards", ()):
            numbers = flat(shard.data)
            first = copies.setdefault(str(shard.index), numbers)
            if not equal(first, numbers):
                return True
    return False
