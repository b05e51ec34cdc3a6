"""The arrays in a step's arguments and outputs, as flat NumPy arrays on the host.

The assertions compare the outputs of a step at different loss scales. The loss scale
itself is meant to differ, and so is the state of a skip rule; `arrays_in` excludes
both. It recognizes them by their types alone: an array elsewhere is included, even if
it has the same value, a similar name or the same buffer.

Because an assertion stores arrays of many runs, it does not store large ones in full.
`sample` returns at most 2**16 elements of an array, which tell by how much the array
changes. `fingerprint` hashes all elements, which tells whether it changes at all.
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
from optax_lossscale.skips import SkipRule

Path = tuple[Any, ...]
"""The keys that lead to a node of a tree, as JAX returns them."""

Arrays = dict[Path, np.ndarray]
"""Flat arrays, by path."""

# The classes whose state is meant to depend on overflows
_EXCLUDED = (LossScale, SkipRule)
# How many elements of an array are stored at most; they take 512 KiB
_MAX_SAMPLE = 2**16


def arrays_in(tree: Any) -> dict[Path, Any]:
    """Returns the arrays of numbers or bools in a tree, by path.

    Arrays inside loss scales and skip rules are excluded. A variable of Flax NNX that
    occurs at several paths is returned under the first one only.
    """

    def is_leaf(x):
        return is_variable(x) or isinstance(x, _EXCLUDED)

    arrays = {}
    seen_variables = set()
    for path, x in jax.tree.leaves_with_path(tree, is_leaf=is_leaf):
        if isinstance(x, _EXCLUDED) or id(x) in seen_variables:
            continue
        if is_variable(x):
            seen_variables.add(id(x))
        array = without_variables(x)
        if is_array_leaf(array) and _is_numeric(array):
            arrays[path] = array
    return arrays


def _is_numeric(x: Any) -> bool:
    """Whether an array holds numbers or bools, not PRNG keys, text or objects."""
    dtype = dtype_of(x)
    return dtype == np.bool_ or jnp.issubdtype(dtype, np.number)


def nodes_in(tree: Any, is_node: Callable[[Any], bool]) -> dict[Path, Any]:
    """Returns the nodes of a tree that satisfy `is_node`, by path.

    Each variable inside a node is replaced with the array that it holds.
    """
    nodes = jax.tree.leaves_with_path(tree, is_leaf=is_node)
    return {path: without_variables(x) for path, x in nodes if is_node(x)}


def flat(x: Any) -> np.ndarray:
    """Copies an array to the host, as a vector of float64 or int64.

    Floats are first rounded to the dtype in which JAX would compute with them: without
    64-bit types, a Python float or a NumPy array of float64 is rounded to float32. A
    complex number becomes two floats.
    """
    vector = np.ravel(jax.device_get(x))
    if not is_inexact_leaf(x):
        return vector.astype(np.int64)
    vector = vector.astype(dtype_of(x))
    if np.iscomplexobj(vector):
        vector = vector.view(vector.real.dtype)
    return vector.astype(np.float64)


def sample(x: Any) -> np.ndarray:
    """Returns the vector that `flat` returns, or at most 2**16 of its elements.

    The elements are at a regular stride, which depends on the array's size alone, so
    samples of an array from different runs hold elements from the same places.
    """
    vector = flat(x)
    stride = -(-vector.size // _MAX_SAMPLE)
    stride |= 1  # at least 1, and odd: an even one would skip all imaginary parts
    return vector[::stride].copy()  # a view would keep the whole array alive


class Fingerprint(NamedTuple):
    """A summary of an array, which is equal for arrays with equal elements.

    Attributes:
      size: the number of elements; a complex element counts as two.
      digest: a hash of all elements, in which NaN equals NaN.
    """

    size: int
    digest: bytes


def fingerprint(x: Any) -> Fingerprint:
    """Computes the fingerprint of an array; its dtype and shape do not matter."""
    vector = flat(x).astype(np.float64)
    vector[vector == 0] = 0  # -0 is equal to 0
    vector[np.isnan(vector)] = np.nan
    digest = hashlib.sha256(vector.data).digest()
    return Fingerprint(vector.size, digest)


def is_finite(x: np.ndarray) -> bool:
    """Whether all elements of an array are finite."""
    return bool(np.isfinite(x).all())


def difference(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Computes x - y, with 0 in place of each infinity and NaN in the result.

    As a result, an element that becomes infinite or NaN does not count as changed.
    """
    with np.errstate(invalid="ignore"):
        return _finite(x - y)


def norm(x: np.ndarray) -> np.ndarray:
    """Computes the L2 norm over the last axis, ignoring infinities and NaNs."""
    return np.linalg.norm(_finite(x), axis=-1)


def _finite(x: np.ndarray) -> np.ndarray:
    """Replaces each infinity and NaN with 0."""
    return np.where(np.isfinite(x), x, 0)


def equal(x: np.ndarray, y: np.ndarray) -> bool:
    """Whether two arrays have equal elements, where NaN equals NaN."""
    return np.array_equal(x, y, equal_nan=True)


def replicas_differ(tree: Any) -> bool:
    """Whether devices hold different copies of an array in a tree, or of a shard."""
    for x in jax.tree.leaves(tree):
        copies = {}
        for shard in getattr(x, "addressable_shards", ()):
            copy = fingerprint(shard.data)
            # The index tells which shard this is. As it consists of slices, which are
            # not hashable in Python 3.11, its text is the key.
            first_copy = copies.setdefault(str(shard.index), copy)
            if copy != first_copy:
                return True
    return False
