"""The numbers that a step's arguments or outputs hold, flat and on the host.

Numbers are told apart by type and path only: a loss scale is what a `LossScale` holds,
and an array elsewhere with the same value, name or buffer is not one.

Of a large array, only a sample of the numbers is kept, with a fingerprint of them all.
The sample shows by how much the array changes, the fingerprint whether it changes.
"""

import hashlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale._arrays.precision import dtype_of, is_array_leaf, is_inexact_leaf
from optax_lossscale._arrays.variables import is_variable, without_variables
from optax_lossscale._scales.loss_scale import LossScale
from optax_lossscale._skips.rule import SkipRule

Path = tuple[Any, ...]  # of JAX's keys
Numbers = dict[Path, np.ndarray]  # flat arrays by their paths

_LEFT_OUT = (LossScale, SkipRule)  # their state is meant to depend on overflows
_SAMPLE = 2**16  # how many numbers of an array are kept at most


def arrays_in(tree: Any) -> dict[Path, Any]:
    """The arrays of numbers or bools in a tree, outside loss scales and skip rules.

    A variable that occurs several times is at the first of its paths only.
    """

    def is_leaf(x):
        return is_variable(x) or isinstance(x, _LEFT_OUT)

    arrays = {}
    seen = set()
    for path, x in jax.tree.leaves_with_path(tree, is_leaf=is_leaf):
        if isinstance(x, _LEFT_OUT) or id(x) in seen:
            continue
        if is_variable(x):
            seen.add(id(x))
        array = without_variables(x)
        if is_array_leaf(array) and _is_numeric(array):
            arrays[path] = array
    return arrays


def _is_numeric(x):
    """Whether this is an array of numbers or bools, and not of keys, text or objects."""
    dtype = dtype_of(x)
    return dtype == np.bool_ or jnp.issubdtype(dtype, np.number)


def nodes_in(tree: Any, is_node: Callable[[Any], bool]) -> dict[Path, Any]:
    """The nodes of a tree for which `is_node` holds, with arrays for variables."""
    nodes = jax.tree.leaves_with_path(tree, is_leaf=is_node)
    return {path: without_variables(x) for path, x in nodes if is_node(x)}


def flat(x: Any) -> np.ndarray:
    """The numbers of an array as a vector of float64 or int64, on the host.

    They are rounded to the dtype in which JAX computes with them: a Python float, or a
    float64 array of NumPy's, to float32, unless 64-bit types are enabled. A complex
    number becomes two numbers.
    """
    numbers = np.ravel(jax.device_get(x))
    if not is_inexact_leaf(x):
        return numbers.astype(np.int64)
    numbers = numbers.astype(dtype_of(x))
    if np.iscomplexobj(numbers):
        numbers = numbers.view(numbers.real.dtype)
    return numbers.astype(np.float64)


def sample(x: Any) -> np.ndarray:
    """The flat numbers of an array; of more than 2**16, every k-th, so as to keep fewer.

    The odd number k depends on the size alone.
    """
    numbers = flat(x)
    every = -(-numbers.size // _SAMPLE) | 1  # odd, as imaginary parts are at odd places
    return numbers[::every].copy()  # a view would keep them all


class Fingerprint(NamedTuple):
    """Two arrays have the same fingerprint if they have the same numbers.

    Attributes:
      size: how many numbers the array has; a complex one counts as two.
      digest: a hash of all numbers, in which NaN equals NaN.
    """

    size: int
    digest: bytes


def fingerprint(x: Any) -> Fingerprint:
    """The fingerprint of an array, which does not depend on its dtype or shape."""
    numbers = flat(x).astype(np.float64)
    numbers[numbers == 0] = 0  # -0 is equal to 0
    numbers[np.isnan(numbers)] = np.nan
    return Fingerprint(numbers.size, hashlib.sha256(numbers.data).digest())


def is_finite(x: np.ndarray) -> bool:
    """Whether all numbers of an array are finite."""
    return bool(np.isfinite(x).all())


def difference(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The difference x - y, with 0 wherever that is infinite or NaN.

    A number that becomes NaN therefore shows no change.
    """
    with np.errstate(invalid="ignore"):
        return _finite(x - y)


def norm(x: np.ndarray) -> np.ndarray:
    """The L2 norm of the finite numbers of an array, over its last axis."""
    return np.linalg.norm(_finite(x), axis=-1)


def _finite(x):
    """The array, with 0 for each number that is not finite."""
    return np.where(np.isfinite(x), x, 0)


def equal(x: np.ndarray, y: np.ndarray) -> bool:
    """Whether two arrays have the same numbers, where NaN equals NaN."""
    return np.array_equal(x, y, equal_nan=True)


def replicas_differ(tree: Any) -> bool:
    """Whether devices hold copies of an array, or of parts of it, that differ."""
    for x in jax.tree.leaves(tree):
        copies = {}
        for shard in getattr(x, "addressable_shards", ()):
            copy = fingerprint(shard.data)
            if copies.setdefault(str(shard.index), copy) != copy:
                return True
    return False
