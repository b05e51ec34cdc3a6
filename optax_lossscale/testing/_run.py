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

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.tree_util import keystr

from optax_lossscale._arrays.precision import dtype_of, is_array_leaf, is_inexact_leaf
from optax_lossscale._arrays.variables import is_variable, without_variables
from optax_lossscale._scales.loss_scale import LossScale
from optax_lossscale._step.metrics import metrics
from optax_lossscale._step.state import LossScaleState

T = TypeVar("T")

# How many steps to wait for a loss scale to grow; by default, it takes 2000
_MAX_STEPS_TO_GROWTH = 10_000


class Number(NamedTuple):
    """An array that the step returned or changed in place.

    Attributes:
      value: the array, on the host.
      before: what was given in its place, if it is handed on; otherwise None.
      drift: the axis along which devices no longer hold the same, or None.
    """

    value: np.ndarray
    before: np.ndarray | None
    drift: str | None


class Outcome(NamedTuple):
    """What came of one run of the step.

    Attributes:
      numbers: the arrays by name, without loss scales and what `metrics` returns.
      states: the states that came back, on the device.
      scales: the values of the loss scales that came back, without fixed ones.
      was_applied: whether no state counts a skip; without a state, whether no loss
        scale was lowered.
      handed_on: the arguments that are handed on, such as `args[0]`.
    """

    numbers: dict[str, Number]
    states: list[LossScaleState]
    scales: list[np.ndarray]
    was_applied: bool
    handed_on: set[str]


def run(
    step: Callable[..., Any],
    args: tuple[Any, ...],
    carry: Mapping[int, int] | None,
    ignore: str | Collection[str],
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
      ValueError: if `carry`, `ignore` or `nan_in` does not fit.
    """
    passed = _copied(args, _changes(args, scale, before_growth, nan_in))
    # They are read now, because the step may donate them or change them in place.
    before = _handed_on(passed)
    leaves = [list(map(_snapshot, jax.tree.leaves(x))) for x in passed]
    try:
        with jax.debug_nans(False), jax.debug_infs(False):
            returned = jax.block_until_ready(step(*passed))
    except Exception as error:
        error.add_note(f"A test of optax_lossscale set the loss scale to {scale:g}.")
        raise
    came_back = _results_by_name(returned)
    origins = _origins(args, came_back, carry)
    for i, x in enumerate(passed):
        if not all(map(_is_kept, jax.tree.leaves(x), leaves[i])):
            name = f"args[{i}]"
            came_back[name] = x
            origins[name] = name
    states = list(nodes_in(LossScaleState, came_back).values())
    scales = [_on_host(x.loss_scale) for x in nodes_in(LossScale, came_back).values()]
    if not scales and nodes_in(LossScale, args):
        raise AssertionError(_NOT_RETURNED)
    if states:
        was_applied = _count_skips(came_back) <= _count_skips(args)
    else:
        was_applied = all(np.all(x >= scale) for x in scales)
    is_stacked = _is_stacked(states)
    numbers = {}
    for name, tree in came_back.items():
        for place, x in _numbers_in(tree).items():
            old = before.get(origins.get(name, "") + place)
            if old is not None and old.shape != np.shape(x):
                old = None
            drift = None if old is None else _drift(x, old, is_stacked)
            numbers[name + place] = Number(_on_host(x), old, drift)
    numbers = _without(ignore, numbers, _metrics_in(numbers, came_back))
    drifting = {name: x.drift for name, x in numbers.items() if x.drift is not None}
    if drifting:
        axis = next(iter(drifting.values()))
        raise AssertionError(_DRIFTING.format(axis=axis, names=listed(drifting)))
    return Outcome(numbers, states, scales, was_applied, set(origins.values()))


def nodes_in(cls: type[T], tree: Any) -> dict[str, T]:
    """Returns the instances of a class with arrays in them, by name."""
    nodes = jax.tree.leaves_with_path(tree, is_leaf=lambda x: isinstance(x, cls))
    return {
        keystr(path): without_variables(x)
        for path, x in nodes
        if isinstance(x, cls) and jax.tree.leaves(x)
    }


def is_equal(x: np.ndarray, y: np.ndarray) -> bool:
    """Whether two arrays are equal, where NaN equals NaN."""
    return np.array_equal(x, y, equal_nan=is_inexact_leaf(x) and is_inexact_leaf(y))


def listed(names: Iterable[str]) -> str:
    """Formats at most eight names as lines."""
    lines = [f"  {name}" for name in names]
    rest = [f"  and {len(lines) - 8} more"] if len(lines) > 8 else []
    return "\n".join(lines[:8] + rest)


def _changes(
    args: tuple[Any, ...], scale: float, before_growth: bool, nan_in: int | None
) -> dict[str, np.ndarray]:
    """Returns what a run changes in the arguments, by name."""
    changes = {}
    for place, loss_scale in nodes_in(LossScale, args).items():
        old = jax.device_get(loss_scale)
        new = old.replace(loss_scale=np.full_like(old.loss_scale, scale))
        if before_growth:
            new = jax.device_get(_before_growth(jax.device_put(new)))
        for path, x in jax.tree.leaves_with_path(new):
            changes[place + keystr(path)] = x
    if nan_in is None:
        return changes
    spoiled = {
        place: _on_host(x)
        for place, x in _numbers_in(args).items()
        if place.startswith(f"[{nan_in}]") and is_inexact_leaf(x)
    }
    if not spoiled:
        raise ValueError(
            f"nan_in={nan_in} names no argument with floats. It is the position of one "
            "of the step's arguments, from 0 on, such as that of the batch"
        )
    for x in spoiled.values():
        x.flat[:1] = np.nan
    return changes | spoiled


@jax.jit
def _before_growth(loss_scale: LossScale) -> LossScale:
    """Advances a loss scale by steps without an overflow, until the next would grow it.

    If it does not grow in 10,000 steps, its value is as it was.
    """

    def advanced(_, now):
        after = now.adjust(True)
        grows = jnp.any(after() != now())
        return optax.tree.where(grows, now, after)

    return lax.fori_loop(0, _MAX_STEPS_TO_GROWTH, advanced, loss_scale)


def _copied(tree: Any, changes: Mapping[str, np.ndarray]) -> Any:
    """Copies a tree with some changes.

    A variable of Flax NNX at several places is a single variable in the copy, too.
    """
    variables = {}

    def copied(path, x):
        change = changes.get(keystr(path))
        copy = jax.tree.map(lambda leaf: _copied_leaf(leaf, change), x)
        return variables.setdefault(id(x), copy) if is_variable(x) else copy

    return jax.tree.map_with_path(copied, tree, is_leaf=is_variable)


def _copied_leaf(x: Any, change: np.ndarray | None) -> Any:
    """Copies a leaf, or puts a change where it is."""
    if change is None:
        return x.copy() if isinstance(x, (jax.Array, np.ndarray)) else x
    if not isinstance(x, jax.Array):
        return change
    return jax.device_put(change, x.sharding if x.committed else None)


def _snapshot(x: Any) -> Any:
    """Copies a NumPy array, which a step may change in place; returns others as is."""
    return x.copy() if isinstance(x, np.ndarray) else x


def _is_kept(x: Any, snapshot: Any) -> bool:
    """Whether a leaf of an argument is as it was before the step."""
    return x is snapshot or (isinstance(x, np.ndarray) and is_equal(x, snapshot))


def _numbers_in(tree: Any) -> dict[str, Any]:
    """Returns the arrays in a tree by name, without loss scales and random keys."""
    scales = tuple(f"{place}." for place in nodes_in(LossScale, tree))
    leaves = jax.tree.leaves_with_path(tree, is_leaf=is_variable)
    arrays = {keystr(path): without_variables(x) for path, x in leaves}
    return {
        place: x
        for place, x in arrays.items()
        if is_array_leaf(x)
        and not jnp.issubdtype(dtype_of(x), jax.dtypes.extended)
        and not place.startswith(scales)
    }


def _handed_on(args: tuple[Any, ...]) -> dict[str, np.ndarray]:
    """Returns the arrays in the arguments that a skipped step must not change.

    These are floats, and also integers in what a `LossScaleState` holds of the wrapped
    optimizer and of a skip rule. Elsewhere, integers may be counters of calls, or keys.
    What a state records about its last step is not among them.
    """
    states = nodes_in(LossScaleState, args)
    records = tuple(f"{place}." for place in states)
    kept = tuple(
        f"{place}.{name}" for place in states for name in ("inner_state", "skip_rule")
    )
    return {
        f"args{place}": _on_host(x)
        for place, x in _numbers_in(args).items()
        if place.startswith(kept)
        or (is_inexact_leaf(x) and not place.startswith(records))
    }


def _results_by_name(returned: Any) -> dict[str, Any]:
    """Names what a step returned: the elements of a tuple, or a single result."""
    if not isinstance(returned, tuple) or hasattr(returned, "_fields"):
        return {"result": returned}
    return {f"result[{i}]": x for i, x in enumerate(returned)}


def _origins(
    args: tuple[Any, ...], results: Mapping[str, Any], carry: Mapping[int, int] | None
) -> dict[str, str]:
    """Returns which argument a result stands for, by their names."""
    names = [f"args[{i}]" for i in range(len(args))]
    if carry is None:
        pairs = zip(results.items(), names, args, strict=False)
        return {
            result: name
            for (result, new), name, old in pairs
            if _form_of(new) == _form_of(old)
        }
    origins = {}
    for i, n in carry.items():
        if i not in range(len(args)) or n not in range(len(results)):
            raise ValueError(
                f"carry={carry} must lead from positions of the {len(args)} arguments "
                f"to positions of the {len(results)} results, from 0 on. For example, "
                "carry={0: 1} says that result 1 stands for argument 0"
            )
        result = list(results)[n]
        if _form_of(results[result]) != _form_of(args[i]):
            raise ValueError(
                f"carry={carry} says that {result} stands for {names[i]}, which has "
                "another structure or other shapes"
            )
        origins[result] = names[i]
    return origins


def _form_of(tree: Any) -> Any:
    """Returns the structure of a tree, its shapes, and which leaves are floats."""
    leaves = jax.tree.leaves(tree)
    return jax.tree.structure(tree), [(np.shape(x), is_inexact_leaf(x)) for x in leaves]


def _on_host(x: Any) -> np.ndarray:
    """Copies an array to the host, in the dtype that JAX gives it."""
    return np.array(jax.device_get(x), dtype_of(x))


def _count_skips(tree: Any) -> int:
    """Returns how many steps all states together, on all devices, count as skipped."""
    states = nodes_in(LossScaleState, tree).values()
    return sum(int(_on_host(x.skipped_steps).sum()) for x in states)


def _metrics_in(names: Iterable[str], tree: Any) -> set[str]:
    """Returns the names of what `metrics` says of loss scales, in the dicts with it.

    They may have a prefix, as in `{f"train/{name}": x for name, x in ….items()}`.
    """
    end = "log2_loss_scale']"
    starts = [name.removesuffix(end) for name in names if name.endswith(end)]
    return {
        f"{start}{name}']"
        for owner in nodes_in(LossScale, tree).values()
        for name in jax.eval_shape(metrics, owner)
        for start in starts
    }


def _without(
    ignore: str | Collection[str], numbers: dict[str, Number], logged: Iterable[str]
) -> dict[str, Number]:
    """Leaves out what is logged, and names that begin as `ignore` says."""
    beginnings = (ignore,) if isinstance(ignore, str) else tuple(ignore)
    for beginning in beginnings:
        if not any(name.startswith(beginning) for name in numbers):
            names = "\n  ".join(numbers)
            raise ValueError(
                f"ignore={beginning!r} names nothing that comes back. What does is\n"
                f"  {names}"
            )
    left_out = (*beginnings, *logged)
    return {name: x for name, x in numbers.items() if not name.startswith(left_out)}


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


def _drift(x: Any, before: np.ndarray, is_stacked: bool) -> str | None:
    """Returns the axis along which devices no longer hold the same, or None.

    Devices hold copies of the same part of an array, unless the array is a stack; then,
    each holds one copy in it. What were equal copies before the step, by `before`, are
    to be so afterwards.
    """
    copies = {}
    for shard in getattr(x, "addressable_shards", ()):
        # In Python 3.11, the slices of an index have no hash.
        part = str(shard.index[is_stacked:])
        copy = (before[shard.index], _on_host(shard.data))
        first = copies.setdefault(part, copy)
        if is_equal(copy[0], first[0]) and not is_equal(copy[1], first[1]):
            # The first axis of the mesh along which there are copies
            return next(
                str(axis)
                for axis in x.sharding.mesh.axis_names
                if is_stacked or repr(axis) not in str(x.sharding.spec)
            )
    return None


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
