"""Runs a training step at a loss scale of choice, and says what came back.

The step says itself what it *hands on* to the next step: its result i stands for its
argument i where both have the same structure and shapes, as in `lax.scan`, or as
`carry={argument: result}` says. An argument that it changes in place stands for itself.
For example, of

    params, state, loss = train_step(params, state, batch)

`params` and `state` are handed on, and the loss is only returned.

Arrays are known by names such as `result[0]['w']` or, if changed in place,
`args[0].kernel`.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.tree_util import keystr

from optax_lossscale._arrays.precision import dtype_of, is_array_leaf, is_inexact_leaf
from optax_lossscale._arrays.variables import map_leaves, without_variables
from optax_lossscale._scales.loss_scale import LossScale
from optax_lossscale._step.metrics import metrics
from optax_lossscale._step.state import (
    LossScaleState,
    loss_scale_states_in,
    loss_scales_in,
)

_ARRAYS = (jax.Array, np.ndarray, np.generic)
# How many steps to wait for a loss scale to grow; by default, it takes 2000
_MAX_STEPS_TO_GROWTH = 10_000


class Outcome(NamedTuple):
    """What came of one run of the step.

    Attributes:
      values: the arrays that came back, by name, on the host; without loss scales and
        what `metrics` returns of them.
      before: what was given in place of those that a skipped step must not change.
      states: the states that came back, on the device.
      scales: the values of the loss scales that came back, without fixed ones.
      was_applied: whether no state counts a skip; without a state, whether no loss
        scale was lowered.
      handed_on: the positions of the arguments that are handed on.
    """

    values: dict[str, np.ndarray]
    before: dict[str, np.ndarray]
    states: list[LossScaleState]
    scales: list[np.ndarray]
    was_applied: bool
    handed_on: set[int]


def run(
    step: Callable[..., Any],
    args: tuple[Any, ...],
    carry: Mapping[int, int] | None,
    ignore: tuple[str, ...],
    scale: float,
    *,
    before_growth: bool = False,
    nan_in: int | None = None,
) -> Outcome:
    """Runs a step on copies of its arguments.

    Args:
      step: the training step.
      args: its arguments.
      carry: which result stands for which argument; None for those in its place.
      ignore: beginnings of names of arrays that are left out of the outcome.
      scale: every loss scale that adapts is set to it.
      before_growth: whether these are also about to grow.
      nan_in: the position of an argument to put a NaN in, or None.

    Raises:
      AssertionError: if the state does not come back, or devices drift apart.
      ValueError: if `carry` or `ignore` does not fit.
    """
    passed = _copied(args, scale, before_growth, nan_in)
    # They are read now, because the step may donate them or change them in place.
    given = [jax.tree.map(_on_host, without_variables(x)) for x in passed]
    # They are kept alive, or a new array might get the id of an old one.
    leaves = [jax.tree.leaves(x) for x in passed]
    marks = [list(map(_mark, x)) for x in leaves]
    try:
        with jax.debug_nans(False), jax.debug_infs(False):
            returned = jax.block_until_ready(step(*passed))
    except Exception as error:
        error.add_note(f"A test of optax_lossscale set the loss scale to {scale:g}.")
        raise
    if isinstance(returned, tuple) and not hasattr(returned, "_fields"):
        came_back = {f"result[{i}]": x for i, x in enumerate(returned)}
    else:
        came_back = {"result": returned}
    origins = _origins(args, came_back, carry)
    for i, x in enumerate(passed):
        if list(map(_mark, jax.tree.leaves(x))) != marks[i]:
            came_back[f"args[{i}]"] = x
            origins[f"args[{i}]"] = i
    came_back = without_variables(came_back)
    scales = [_on_host(x.loss_scale) for x in adapting_in(came_back)]
    if not scales and adapting_in(args):
        raise AssertionError(_NOT_RETURNED)
    states = loss_scale_states_in(came_back)
    if states:
        was_applied = not any(_on_host(x.skipped_steps).any() for x in states)
    else:
        was_applied = all(np.all(x >= scale) for x in scales)
    arrays = _without(ignore, came_back)
    before = {
        name: x
        for name, x in _kept_in({to: given[i] for to, i in origins.items()}).items()
        if name in arrays and np.shape(arrays[name]) == x.shape
    }
    values = jax.tree.map(_on_host, arrays)
    _check_devices_agree(arrays, values, before, _is_stacked(states))
    return Outcome(values, before, states, scales, was_applied, set(origins.values()))


def adapting_in(tree: Any) -> list[LossScale]:
    """Returns the loss scales that adapt, which have arrays in them."""
    return list(filter(jax.tree.leaves, loss_scales_in(without_variables(tree))))


def float_arrays_in(tree: Any) -> list[Any]:
    """Returns the arrays of floats in a tree; a Python number is none."""
    leaves = jax.tree.leaves(tree)
    return [x for x in leaves if isinstance(x, _ARRAYS) and is_inexact_leaf(x)]


def is_equal(x: Any, y: Any) -> bool:
    """Whether two arrays are equal, where NaN equals NaN."""
    return np.array_equal(x, y, equal_nan=True)


def listed(names: Iterable[str]) -> str:
    """Formats at most eight names as lines."""
    lines = [f"  {name}" for name in names]
    rest = [f"  and {len(lines) - 8} more"] if len(lines) > 8 else []
    return "\n".join(lines[:8] + rest)


def _copied(
    args: tuple[Any, ...], scale: float, before_growth: bool, nan_in: int | None
) -> tuple[Any, ...]:
    """Copies the arguments, with other loss scales, no skips, and NaNs if asked for."""
    copies = map_leaves(lambda x: x.copy() if isinstance(x, _ARRAYS) else x, args)
    # The copies are objects of their own, so each is known by its id.
    changes = {}
    for x in [] if nan_in is None else float_arrays_in(copies[nan_in]):
        changes[id(x)] = _on_host(x)
        changes[id(x)].flat[:1] = np.nan
    for state in loss_scale_states_in(copies):
        changes[id(state.skipped_steps)] = 0 * _on_host(state.skipped_steps)
    steps = _MAX_STEPS_TO_GROWTH if before_growth else 0
    for old in adapting_in(copies):
        given = jax.device_put((jax.device_get(old), np.float32(scale), steps))
        new = jax.tree.leaves(jax.device_get(_changed(*given)))
        changes |= zip(map(id, jax.tree.leaves(old)), new, strict=True)

    def changed(x):
        new = changes.get(id(x), x)
        if new is x or not isinstance(x, jax.Array):
            return new
        return jax.device_put(new, x.sharding if x.committed else None)

    return map_leaves(changed, copies)


@jax.jit
def _changed(loss_scale: LossScale, scale: jax.Array, steps: jax.Array) -> LossScale:
    """Sets a loss scale, and advances it by steps until the next would grow it.

    If it does not grow in so many, its value is as it was.
    """

    def advanced(_, now):
        after = now.adjust(True)
        grows = jnp.any(after() != now())
        return optax.tree.where(grows, now, after)

    start = jnp.full_like(loss_scale(), scale)
    return lax.fori_loop(0, steps, advanced, loss_scale.replace(loss_scale=start))


def _mark(x: Any) -> Any:
    """Returns what tells whether a leaf was changed: NumPy arrays are so in place."""
    return x.tobytes() if isinstance(x, np.ndarray) else id(x)


def _named(trees: Mapping[str, Any], cls: type) -> dict[str, Any]:
    """Returns leaves, and instances of a class, by the name of their tree and path."""
    nodes = jax.tree.leaves_with_path(trees, is_leaf=lambda x: isinstance(x, cls))
    return {f"{path[0].key}{keystr(path[1:])}": x for path, x in nodes}


def _arrays_in(tree: Any) -> dict[str, Any]:
    """Returns the arrays in a tree by name, without loss scales and random keys."""
    return {
        name: x
        for name, x in _named(tree, LossScale).items()
        if is_array_leaf(x) and not jnp.issubdtype(dtype_of(x), jax.dtypes.extended)
    }


def _kept_in(tree: Any) -> dict[str, np.ndarray]:
    """Returns the arrays that a skipped step must not change, by name.

    These are floats, and also integers in what a `LossScaleState` holds of the wrapped
    optimizer and of a skip rule. Elsewhere, integers may be counters of calls, or keys.
    What a state records about its last step is not among them.
    """
    nodes = _named(tree, LossScaleState).items()
    states = [name for name, x in nodes if isinstance(x, LossScaleState)]
    kept = tuple(f"{x}.{of}" for x in states for of in ("inner_state", "skip_rule"))
    records = tuple(f"{x}." for x in states)
    return {
        name: x
        for name, x in _arrays_in(tree).items()
        if name.startswith(kept)
        or (is_inexact_leaf(x) and not name.startswith(records))
    }


def _origins(
    args: tuple[Any, ...], results: Mapping[str, Any], carry: Mapping[int, int] | None
) -> dict[str, int]:
    """Returns the position of the argument that a result stands for, by its name."""
    names = list(results)
    in_place = {i: i for i in range(min(len(args), len(names)))}
    origins = {}
    for i, n in (in_place if carry is None else carry).items():
        if i not in range(len(args)) or n not in range(len(names)):
            raise ValueError(
                f"carry={carry} must lead from positions of the {len(args)} arguments "
                f"to positions of the {len(names)} results, from 0 on. For example, "
                "carry={0: 1} says that result 1 stands for argument 0"
            )
        if _form_of(results[names[n]]) == _form_of(args[i]):
            origins[names[n]] = i
        elif carry is not None:
            raise ValueError(
                f"carry={carry} says that {names[n]} stands for args[{i}], which has "
                "another structure or other shapes"
            )
    return origins


def _form_of(tree: Any) -> Any:
    """Returns the structure of a tree, its shapes, and which leaves are floats."""
    leaves = jax.tree.leaves(tree)
    return jax.tree.structure(tree), [(np.shape(x), is_inexact_leaf(x)) for x in leaves]


def _on_host(x: Any) -> Any:
    """Copies an array to the host, in the dtype that JAX gives it; not a random key."""
    if not is_array_leaf(x) or jnp.issubdtype(dtype_of(x), jax.dtypes.extended):
        return x
    return np.array(jax.device_get(x), dtype_of(x))


def _without(ignore: tuple[str, ...], tree: Any) -> dict[str, Any]:
    """Returns the arrays in a tree, without those that may depend on the loss scale.

    Their names begin as `ignore` says, or they are what `metrics` says of a loss scale,
    in the dicts with it. They may have a prefix there, as in
    `{f"train/{name}": x for name, x in ….items()}`.
    """
    arrays = _arrays_in(tree)
    for beginning in ignore:
        if not any(name.startswith(beginning) for name in arrays):
            names = "\n  ".join(arrays)
            raise ValueError(
                f"ignore={beginning!r} names nothing that comes back. What does is\n"
                f"  {names}"
            )
    end = "log2_loss_scale']"
    logged = {
        f"{name.removesuffix(end)}{entry}']"
        for name in arrays
        if name.endswith(end)
        for loss_scale in adapting_in(tree)
        for entry in jax.eval_shape(metrics, loss_scale)
    }
    left_out = (*ignore, *logged)
    return {name: x for name, x in arrays.items() if not name.startswith(left_out)}


def _is_stacked(states: Iterable[LossScaleState]) -> bool:
    """Whether each device has a state of its own in a stack, as under `pmap`."""
    shapes = [np.shape(x.should_apply) for x in states]
    if (1,) in shapes:
        raise ValueError(
            "whether devices drift apart cannot be checked: the state is a stack of "
            "one, for one device. On a CPU, jax.config.update('jax_num_cpu_devices', 2) "
            "makes two devices"
        )
    return any(shapes)


def _check_devices_agree(
    arrays: Mapping[str, Any],
    values: Mapping[str, np.ndarray],
    before: Mapping[str, np.ndarray],
    is_stacked: bool,
) -> None:
    """Raises an `AssertionError` if devices no longer hold the same.

    Args:
      arrays: what came back, by name, on the devices.
      values: the same on the host.
      before: what was given in its place.
      is_stacked: whether arrays are stacks, with one copy for each device.
    """
    drifting = [
        name
        for name, x in before.items()
        if _drifts(arrays[name], values[name], x, is_stacked)
    ]
    if drifting:
        sharding = arrays[drifting[0]].sharding
        # The first axis of the mesh along which there are copies
        axis = next(
            str(axis)
            for axis in sharding.mesh.axis_names
            if is_stacked or repr(axis) not in str(sharding.spec)
        )
        raise AssertionError(_DRIFTING.format(axis=axis, names=listed(drifting)))


def _drifts(x: Any, value: np.ndarray, before: np.ndarray, is_stacked: bool) -> bool:
    """Whether devices that held the same part of an array no longer do.

    If the array is a stack, each device holds one copy in it. What were equal copies
    before the step are to be so afterwards.
    """
    shards: Any = getattr(x, "addressable_shards", ())
    for shard in shards:
        same = shards[0].index[:is_stacked] + shard.index[is_stacked:]
        was_same = is_equal(before[shard.index], before[same])
        if was_same and not is_equal(_on_host(shard.data), value[same]):
            return True
    return False


_NOT_RETURNED = """\
the step does not return its new state, with the loss scale.
The next step would begin with the old one, and overflow at the same loss scale. Return
the new state, or the new loss scale if you use it without with_loss_scale."""
_DRIFTING = """\
devices drift apart along the axis {axis!r}.
These were the same on all of them before the step, and differ after it:
{names}
Each device applies its own gradients, or decides alone whether to skip the step.
- Under pmap, and under shard_map with check_vma=False, average the gradients:
      grads = jax.lax.pmean(grads, {axis!r})
- Under shard_map otherwise, average the loss, in the loss function:
      loss = jax.lax.pmean(loss, {axis!r})
In both, let them decide together: with_loss_scale(optimizer, axis_name={axis!r}).
What may differ, such as batch statistics of each device, name in ignore=."""
