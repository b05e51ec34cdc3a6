"""The check: is every number of a tree finite? In the same pass: the largest, and the norm.

Each asks one question of every number, and joins the answers: first to a scalar for each
leaf, then to one. How many times that reads the numbers depends on the platform:

On CPU, XLA compiles a reduction with one output to several passes, through an array of
the leaf's size, and its max loses NaNs. But one with two outputs becomes a single pass
at the speed of memory, in every dtype and with the unscaling fused into it. So there
each question is asked together with another: whether the number is finite.

Elsewhere, a reduction is a single pass, and two of the same numbers share it. Where the
compiler spreads arrays over devices, they agree by one all-reduce of the scalars.

These look at local numbers; `across` makes the answers of all replicas one.
"""

import functools
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from optax_lossscale._arrays.placement import is_partitioned
from optax_lossscale._arrays.precision import at_least_float32, is_inexact
from optax_lossscale._arrays.validation import LARGEST

AxisName = Hashable


def all_finite(tree: Any) -> jax.Array:
    """Whether all numbers of a tree are finite: no NaN, no infinity.

    Args:
      tree: any pytree of arrays and Python numbers. `None`, integer, bool and
        float0 leaves are always finite.

    Returns:
      A bool scalar, shape (); True for an empty tree.

    Example:
      >>> import jax.numpy as jnp
      >>> import optax_lossscale as ols
      >>> bool(ols.all_finite({"w": jnp.ones(3), "b": None, "n": 7}))
      True
      >>> bool(ols.all_finite({"w": jnp.array([1.0, jnp.nan])}))
      False
    """
    _, finite = _ask(tree, _equals_itself, lax.bitwise_and, jnp.all)
    return finite


def largest(tree: Any) -> jax.Array:
    """The largest absolute value, float32; infinity if one is not finite."""
    size, _ = _ask(tree, _size, lax.max, jnp.max)
    return size


def norm_and_all_finite(tree: Any) -> tuple[jax.Array, jax.Array]:
    """The global L2 norm, float32, and what `all_finite` says.

    From 2**64 on, the norm is infinite: the sum of squares is more than float32 holds.
    """
    square, finite = _ask(tree, _square, lax.add, jnp.sum)
    return jnp.sqrt(square), finite


def _ask(
    tree: Any, question: Callable, join: Callable, reduce: Callable
) -> tuple[jax.Array, jax.Array]:
    """The answers of all numbers to a question, joined, and whether all are finite.

    `join` is of two answers, and `reduce` of all those in an array.
    """
    leaves = [jnp.asarray(x) for x in jax.tree.leaves(tree) if is_inexact(x)]
    leaves = [x for x in leaves if x.size] or [jnp.zeros(())]

    def on_cpu(leaves):
        # So many groups of leaves that all cores have work
        most = min(max(len(leaves) // 32, 1), 8)
        return _in_one_pass_on_cpu(_groups(leaves, most), question, join, reduce)

    def elsewhere(leaves, most=1):
        groups = _groups(leaves, most)
        answer = _of_groups(groups, question, join, reduce)
        return answer, _of_groups(groups, jnp.isfinite, lax.bitwise_and, jnp.all)

    if any(is_partitioned(x) for x in leaves):
        return elsewhere(leaves)
    # Leaves share kernels, of which fewer are compiled and launched. In fours, a GPU's
    # compiler still takes the norm of a clip in the same pass. A TPU's would keep more
    # gradients waiting in main memory.
    in_fours = functools.partial(elsewhere, most=4)
    return lax.platform_dependent(leaves, cpu=on_cpu, tpu=elsewhere, default=in_fours)


def _in_one_pass_on_cpu(
    groups: list[list[jax.Array]], question: Callable, join: Callable, reduce: Callable
) -> tuple[jax.Array, jax.Array]:
    """As `_ask`, by a reduction with two outputs for each group."""
    # Such a reduction adds one number after the other, and a float32 sum of 2**24 and
    # more stops growing.
    with jax.enable_x64(True):
        answers = []
        flags = []
        for leaves in groups:
            zeros = functools.reduce(lax.add, map(_zeros, leaves))
            # Of flags, those of the sum answer for all.
            asked = [zeros] if join is lax.bitwise_and else leaves
            answer = functools.reduce(join, map(question, asked))
            if join is lax.add:
                answer = answer.astype(np.float64)
            initial = np.True_ if answer.dtype == bool else answer.dtype.type(0)
            pair = lax.reduce(
                (answer, jnp.isfinite(zeros)),
                (initial, np.True_),
                _beside_and(join),
                range(answer.ndim),
            )
            answers.append(pair[0])
            flags.append(pair[1])
        # The barrier keeps these from being fused with what joins them: a kernel that
        # has an argument for every leaf compiles in quadratic time.
        vectors = (jnp.stack(answers), jnp.stack(flags))
        all_answers, all_flags = lax.optimization_barrier(vectors)
        answer = reduce(all_answers)
        if answer.dtype == np.float64:
            answer = answer.astype(np.float32)
        return answer, all_flags.all()


@functools.cache  # one function is traced once
def _beside_and(join: Callable) -> Callable:
    """`join` of the first of two pairs' members, and a conjunction of the second."""

    def on_pairs(so_far, new):
        return join(so_far[0], new[0]), lax.bitwise_and(so_far[1], new[1])

    return on_pairs


def _groups(leaves: list[jax.Array], most: int) -> list[list[jax.Array]]:
    """Groups of leaves of one type, each of at most `most`."""
    leaves_of_type: dict[Any, list[jax.Array]] = {}
    for x in leaves:
        leaves_of_type.setdefault(jax.typeof(x), []).append(x)
    groups = []
    for alike in leaves_of_type.values():
        for start in range(0, len(alike), most):
            groups.append(alike[start : start + most])
    return groups


def _of_groups(
    groups: list[list[jax.Array]], question: Callable, join: Callable, reduce: Callable
) -> jax.Array:
    """The answers to one question, joined place by place in each group, then to a scalar."""
    scalars = []
    for leaves in groups:
        answers = functools.reduce(join, map(question, leaves))
        scalar = reduce(answers)
        scalars.append(scalar)
    return reduce(jnp.stack(scalars))


# --- questions about each number ---


def _zeros(x: jax.Array) -> jax.Array:
    """0 for each finite number and NaN for others: they add up where flags take longer."""
    wide = at_least_float32(x)
    return lax.sub(wide, wide)


def _equals_itself(x: jax.Array) -> jax.Array:
    """Which numbers are no NaN: the cheapest question to ask beside `jnp.isfinite`."""
    return lax.eq(x, x)


def _square(x: jax.Array) -> jax.Array:
    """The square of the absolute value, as float32."""
    if jnp.iscomplexobj(x):
        return _square(x.real) + _square(x.imag)
    return jnp.square(x.astype(jnp.float32))


def _size(x: jax.Array) -> jax.Array:
    """The absolute value as float32, which is infinite only for what is not finite."""
    if jnp.iscomplexobj(x):
        return jnp.maximum(_size(x.real), _size(x.imag))
    number = jnp.clip(x, -LARGEST, LARGEST) if x.dtype.itemsize > 4 else x
    size = jnp.abs(number.astype(jnp.float32))
    return jnp.where(jnp.isfinite(x), size, jnp.inf)


# --- over replicas ---


def on_all_replicas(flag: jax.Array, axis_name: AxisName | None) -> jax.Array:
    """Whether a flag is True on every replica."""
    if axis_name is None:
        return flag
    number = flag.astype(jnp.int32)
    return across(lax.pmin, number, axis_name).astype(bool)


def across(reduce: Callable, x: jax.Array, axis_name: AxisName | None) -> jax.Array:
    """A reduction over replicas, such as `lax.pmin`; over no axes, what was given."""
    if axis_name in (None, ()):
        return x
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    are_axes = all(_is_axis(name) for name in names)
    if not are_axes or len(set(names)) < len(names):
        raise ValueError(
            f"axis_name={axis_name!r} is not an axis of a pmap or shard_map around "
            "this step, nor a tuple of such axes, each once. Under jit alone, leave "
            "axis_name out: the check already covers all devices"
        )
    return reduce(x, names)


def _is_axis(name: Any) -> bool:
    """Whether a name is that of one mapped axis around what is traced."""
    if isinstance(name, (tuple, list)):
        return False  # JAX would return the product of their sizes
    try:
        lax.axis_size(name)
    except (NameError, TypeError, ValueError):
        return False
    return True
