"""Runs a training step on copies of its arguments, and says what came of it.

The step says itself what it *hands on* to the next step: its result i stands for its
argument i where both have the same structure and shapes, as in `lax.scan`, or as
`carry={argument: result}` says. An argument that it changes in place stands for itself.
For example, of

    params, state, loss = train_step(params, state, batch)

`params` and `state` are handed on, and the loss is only returned.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.tree_util import DictKey, GetAttrKey, SequenceKey, keystr

from optax_lossscale._arrays import checks
from optax_lossscale._arrays.precision import dtype_of, is_array_leaf, is_inexact_leaf
from optax_lossscale._arrays.variables import is_variable, without_variables
from optax_lossscale._scales.loss_scale import LossScale
from optax_lossscale._step.metrics import metrics
from optax_lossscale._step.state import LossScaleState

T = TypeVar("T")

Path = tuple[Any, ...]
"""The keys that lead to a leaf or a node, from `args` or `result` on."""

Leaves = dict[Path, Any]

_ARGS = DictKey("args")
_RESULT = DictKey("result")
# What a state records about its last step, and does not hand on
_RECORDS = {
    GetAttrKey("should_apply"),
    GetAttrKey("skipped_steps"),
    GetAttrKey("consecutive_skipped_steps"),
    GetAttrKey("gradient_norm"),
}
# How many steps to wait for a loss scale to grow; by default, it takes 2000
_MAX_STEPS_TO_GROWTH = 10_000


class Number(NamedTuple):
    """An array that the step returned or changed in place.

    Attributes:
      value: the array, on the host.
      before: what was given in its place, if it is handed on; otherwise None.
      is_protected: whether a skipped step must not change it. This holds for floats
        that are handed on, and for integers inside a `LossScaleState`. Elsewhere,
        integers may be counters of calls, or keys.
    """

    value: np.ndarray
    before: np.ndarray | None
    is_protected: bool


class Outcome(NamedTuple):
    """What came of one run of the step.

    Attributes:
      numbers: the arrays by name, such as `result[0]['w']` or, if changed in place,
        `args[0].kernel`; without loss scales and what `metrics` returns.
      scales: the values of the loss scales that came back, without fixed ones.
      norms: the gradient norms in the states that came back.
      was_applied: whether neither a state nor a loss scale shows a skip.
      skips: how many more steps are counted as skipped than before.
      drifting: the axis along which devices drift apart, by the name of an array that
        was the same on all of them.
      lost: the positions of arguments with a `LossScaleState` that are not handed on.
    """

    numbers: dict[str, Number]
    scales: list[np.ndarray]
    norms: list[np.ndarray]
    was_applied: bool
    skips: int
    drifting: dict[str, str]
    lost: list[int]


class Runner:
    """A step and its arguments, which are copied for each run.

    Args:
      name: the name of the assertion, for errors.
      step: the training step.
      args: its arguments.
      carry: which result stands for which argument; None for those in its place.

    Attributes:
      loss_scales: the loss scales that adapt, by their paths in the arguments.
    """

    def __init__(
        self,
        name: str,
        step: Callable[..., Any],
        args: tuple[Any, ...],
        carry: Mapping[int, int] | None,
    ):
        if not callable(step):
            raise TypeError(
                f"the first argument is the training step, got {checks.shown(step)}. "
                f"Write {name}(train_step, params, state, batch)"
            )
        checks.check_concrete(name, args)
        for x in jax.tree.leaves(args):
            if isinstance(x, jax.Array) and not x.is_fully_addressable:
                raise ValueError(
                    f"{name} reads whole arrays, but one of shape {x.shape} lies on "
                    "several processes. Test the step in one process, on several "
                    "devices"
                )
        self._step = step
        self._carry = carry
        self._given = {_ARGS.key: args}
        scales = _adapting_in(self._given)
        self.loss_scales = {path: jax.device_get(x) for path, x in scales.items()}
        states = _states_in(self._given)
        self._with_states = sorted({path[1].idx for path in states})
        self._skips = _count_skips(states)
        # The names that `metrics` gives, for each loss scale and each state
        owners = [*states.values(), *self.loss_scales.values()]
        self._metrics = [set(jax.eval_shape(metrics, x)) for x in owners]

    def at(self, exponent: float, *, before_growth: bool = False) -> Outcome:
        """Runs the step at a loss scale of 2**exponent, perhaps one about to grow."""
        values = {}
        for path, loss_scale in self.loss_scales.items():
            scale = np.full_like(loss_scale.loss_scale, 2.0**exponent)
            changed = loss_scale.replace(loss_scale=scale)
            if before_growth:
                changed = jax.device_get(_before_growth(jax.device_put(changed)))
            for subpath, x in jax.tree.leaves_with_path(changed):
                values[path + subpath] = x
        return self._run(values, f"at a loss scale of 2**{exponent:g}")

    def as_given(self) -> Outcome:
        """Runs the step with its arguments as they are."""
        return self._run({}, "with its arguments as they are")

    def with_nan_in(self, argument: int) -> Outcome:
        """Runs the step with a NaN in each array of floats of an argument."""
        values = {}
        for path, x in _leaves_in(self._given).items():
            is_there = path[1] == SequenceKey(argument) and is_inexact_leaf(x)
            if is_there and np.size(x) and not _is_within(path, self.loss_scales):
                values[path] = np.array(jax.device_get(x))
                values[path].flat[0] = np.nan
        if not values:
            raise ValueError(
                f"nan_in={argument} names no argument with floats. It is the position "
                "of one of the step's arguments, from 0 on, such as that of the batch"
            )
        return self._run(values, f"with a NaN in argument {argument}")

    def _run(self, values: Mapping[Path, Any], situation: str) -> Outcome:
        """Runs the step with some values in place of those in its arguments."""
        tree = _copied(self._given, values)
        given = _leaves_in(tree)
        given_scales = _values(_adapting_in(tree))
        # They are read now, because the step may donate them.
        before = {path: _on_host(x) for path, x in given.items()}
        try:
            with jax.debug_nans(False), jax.debug_infs(False):
                returned = jax.block_until_ready(self._step(*tree[_ARGS.key]))
        except Exception as error:
            error.add_note(f"An assertion of optax_lossscale ran the step {situation}.")
            raise
        tree[_RESULT.key] = returned
        leaves = {
            path: x
            for path, x in _leaves_in(tree).items()
            if path[0] == _RESULT or _has_changed(x, given.get(path), before.get(path))
        }
        states = _containing(leaves, _states_in(tree))
        scales = _containing(leaves, _adapting_in(tree))
        if (self._with_states and not states) or (self.loss_scales and not scales):
            raise AssertionError(_NOT_RETURNED)
        skips = _count_skips(states) - self._skips
        if states:
            flags = [np.all(jax.device_get(x.should_apply)) for x in states.values()]
            was_applied = skips <= 0 and all(flags)
        else:
            # A rule lowers the scale when gradients overflow.
            pairs = zip(_values(scales), given_scales, strict=False)
            was_applied = all(np.all(new >= old) for new, old in pairs)
        handed_on, arguments = self._handed_on(leaves, before, returned)
        return Outcome(
            numbers=self._numbers(leaves, handed_on, states, scales),
            scales=_values(scales),
            norms=jax.device_get([x.gradient_norm for x in states.values()]),
            was_applied=was_applied,
            skips=skips,
            drifting=_drifting(leaves, handed_on, _replica_axis(states)),
            lost=[i for i in self._with_states if i not in arguments],
        )

    def _handed_on(
        self, leaves: Leaves, before: dict[Path, np.ndarray], returned: Any
    ) -> tuple[dict[Path, np.ndarray], set[int]]:
        """Returns what was given in place of each array, and for which arguments."""
        is_tuple = isinstance(returned, tuple) and not hasattr(returned, "_fields")
        results = returned if is_tuple else (returned,)
        arguments = self._given[_ARGS.key]
        if self._carry is None:
            pairs = enumerate(zip(arguments, results, strict=False))
            argument_of = {i: i for i, pair in pairs if _have_same_form(*pair)}
        else:
            _check_carry(self._carry, len(arguments), len(results))
            argument_of = {result: i for i, result in self._carry.items()}
        handed_on = {}
        arguments_found = set()
        for path, x in leaves.items():
            origin = path
            if path[0] == _RESULT:
                result = path[1].idx if is_tuple else 0
                inside = path[2:] if is_tuple else path[1:]
                origin = (_ARGS, SequenceKey(argument_of.get(result, -1)), *inside)
            if origin in before and before[origin].shape == np.shape(x):
                handed_on[path] = before[origin]
                arguments_found.add(origin[1].idx)
        return handed_on, arguments_found

    def _numbers(
        self,
        leaves: Leaves,
        handed_on: Mapping[Path, np.ndarray],
        states: Collection[Path],
        scales: Collection[Path],
    ) -> dict[str, Number]:
        """Returns the arrays that came back, without loss scales and their metrics."""
        left_out = self._metrics_in(leaves)
        numbers = {}
        for path, x in leaves.items():
            if path in left_out or _is_within(path, scales):
                continue
            is_record = path[:-1] in states and path[-1] in _RECORDS
            numbers[_name_of(path)] = Number(
                value=_on_host(x),
                before=None if is_record else handed_on.get(path),
                is_protected=is_inexact_leaf(x) or _is_within(path, states),
            )
        return numbers

    def _metrics_in(self, leaves: Leaves) -> set[Path]:
        """Returns the paths of what `metrics` returned.

        These are the entries of a dict that has all names of `metrics`, perhaps after a
        prefix, as in `{f"train/{name}": x for name, x in metrics(state).items()}`.
        """
        paths = set()
        for path in leaves:
            name = getattr(path[-1], "key", None)
            if not isinstance(name, str) or not name.endswith("log2_loss_scale"):
                continue
            prefix = name.removesuffix("log2_loss_scale")
            for names in self._metrics:
                entries = {(*path[:-1], DictKey(prefix + name)) for name in names}
                if entries <= leaves.keys():
                    paths |= entries
        return paths


def not_ignored(
    named: Mapping[str, T], ignore: str | Collection[str], known: Collection[str]
) -> dict[str, T]:
    """Returns the entries of a dict that `ignore` does not name, singly or as a tree.

    Raises a `ValueError` if `ignore` names none of those that are known.
    """
    trees = [ignore] if isinstance(ignore, str) else ignore
    for tree in trees:
        if not any(_is_in_tree(name, tree) for name in known):
            names = "\n  ".join(known)
            raise ValueError(
                f"ignore={tree!r} names nothing that comes back. What does is\n  {names}"
            )
    return {
        name: x
        for name, x in named.items()
        if not any(_is_in_tree(name, tree) for tree in trees)
    }


def check_no_drift(outcome: Outcome, ignore: str | Collection[str]) -> None:
    """Raises an `AssertionError` if what all devices shared is no longer the same."""
    known = {**outcome.numbers, **outcome.drifting}
    drifting = not_ignored(outcome.drifting, ignore, known)
    if drifting:
        axis = next(iter(drifting.values()))
        raise AssertionError(_DRIFTING.format(axis=axis, names=listed(drifting)))


def listed(names: Iterable[str]) -> str:
    """Formats at most eight names as lines."""
    names = list(names)
    more = len(names) - 8
    if more > 0:
        names[8:] = [f"and {more} more"]
    return "\n".join(f"  {name}" for name in names)


def is_equal(x: np.ndarray, y: np.ndarray) -> bool:
    """Whether two arrays are equal, where NaN equals NaN."""
    return np.array_equal(x, y, equal_nan=is_inexact_leaf(x) and is_inexact_leaf(y))


def _name_of(path: Path) -> str:
    """Formats a path, as in `result[0]['w']` or, for an argument, `args[1].mean`."""
    return f"{path[0].key}{keystr(path[1:])}"


def _is_in_tree(name: str, tree: str) -> bool:
    """Whether a name is that of a tree, or of something in it."""
    rest = name.removeprefix(tree)
    return name.startswith(tree) and rest[:1] in ("", "[", ".")


def _leaves_in(tree: Any) -> Leaves:
    """Returns the arrays of numbers and bools in a tree, by path.

    A variable of Flax NNX is replaced with its array, under its first path alone.
    """
    leaves = {}
    seen = set()
    for path, x in jax.tree.leaves_with_path(tree, is_leaf=is_variable):
        if is_variable(x) and id(x) in seen:
            continue
        seen.add(id(x))
        array = without_variables(x)
        if is_array_leaf(array) and _is_numeric(dtype_of(array)):
            leaves[path] = array
    return leaves


def _is_numeric(dtype: np.dtype) -> bool:
    """Whether a dtype is one of numbers or bools, not of keys, texts or objects."""
    return dtype == np.bool_ or jnp.issubdtype(dtype, np.number)


def _states_in(tree: Any) -> dict[Path, LossScaleState]:
    """Returns every `LossScaleState` in a tree, by path, without variables."""
    return _nodes_in(tree, LossScaleState)


def _adapting_in(tree: Any) -> dict[Path, LossScale]:
    """Returns every loss scale that adapts, which a fixed one does not, by path."""
    nodes = _nodes_in(tree, LossScale)
    return {path: x for path, x in nodes.items() if jax.tree.leaves(x)}


def _nodes_in(tree: Any, cls: type[T]) -> dict[Path, T]:
    """Returns the instances of a class in a tree, by path, without variables."""

    def is_node(x):
        return isinstance(x, cls)

    nodes = jax.tree.leaves_with_path(tree, is_leaf=is_node)
    return {path: without_variables(x) for path, x in nodes if is_node(x)}


def _containing(leaves: Leaves, nodes: Mapping[Path, T]) -> dict[Path, T]:
    """Returns the nodes with at least one of these leaves in them."""
    return {
        node: x
        for node, x in nodes.items()
        if any(path[: len(node)] == node for path in leaves)
    }


def _is_within(path: Path, nodes: Collection[Path]) -> bool:
    """Whether a path leads to one of these nodes or into it."""
    return any(path[: len(node)] == node for node in nodes)


def _values(loss_scales: Mapping[Path, LossScale]) -> list[np.ndarray]:
    """Returns the values of loss scales, on the host."""
    scales = [x.loss_scale for x in loss_scales.values()]
    return list(map(np.asarray, jax.device_get(scales)))


def _count_skips(states: Mapping[Path, LossScaleState]) -> int:
    """Returns how many steps all states together, on all devices, count as skipped."""
    counts = jax.device_get([x.skipped_steps for x in states.values()])
    return int(sum(map(np.sum, counts)))


def _have_same_form(argument: Any, result: Any) -> bool:
    """Whether structures and shapes agree, and floats stand where floats stood."""
    old = jax.tree.leaves(argument)
    new = jax.tree.leaves(result)
    return jax.tree.structure(argument) == jax.tree.structure(result) and all(
        np.shape(x) == np.shape(y) and is_inexact_leaf(x) == is_inexact_leaf(y)
        for x, y in zip(old, new, strict=True)
    )


def _check_carry(carry: Mapping[int, int], arguments: int, results: int) -> None:
    """Raises a `ValueError` unless arguments and results have these positions."""
    are_arguments = set(carry) <= set(range(arguments))
    are_results = set(carry.values()) <= set(range(results))
    if not (are_arguments and are_results):
        raise ValueError(
            f"carry={carry} must lead from positions of the {arguments} arguments to "
            f"positions of the {results} results, from 0 on. For example, carry={{0: 1}} "
            "says that result 1 stands for argument 0"
        )


def _has_changed(x: Any, given: Any, before: np.ndarray | None) -> bool:
    """Whether the step put another array in place of an argument, or changed it."""
    if isinstance(x, np.ndarray) and before is not None:
        return not is_equal(_on_host(x), before)
    return x is not given


def _on_host(x: Any) -> np.ndarray:
    """Copies an array to the host, in the dtype that JAX gives it."""
    return np.array(jax.device_get(x), dtype_of(x))


def _copied(tree: Any, values: Mapping[Path, Any]) -> Any:
    """Copies a tree, with values in place of those at some paths.

    A variable of Flax NNX at several paths is a single variable in the copy, too.
    """
    variables = {}

    def copy_of(path, x):
        value = values.get(path)
        copy = jax.tree.map(lambda leaf: _copied_leaf(leaf, value), x)
        return variables.setdefault(id(x), copy) if is_variable(x) else copy

    return jax.tree.map_with_path(copy_of, tree, is_leaf=is_variable)


def _copied_leaf(x: Any, value: Any) -> Any:
    """Copies a leaf, or converts a value to its type, dtype and sharding."""
    if value is None:
        is_array = isinstance(x, (jax.Array, np.ndarray))
        return x.copy() if is_array else x
    if not hasattr(x, "dtype"):
        return type(x)(value)
    array = np.asarray(value, x.dtype)
    if not isinstance(x, jax.Array):
        return array
    return jax.device_put(array, x.sharding if x.committed else None)


@jax.jit
def _before_growth(loss_scale: LossScale) -> LossScale:
    """Advances a loss scale by steps without an overflow, until the next would grow it.

    The scale of one that does not grow in 10,000 steps is as it was.
    """

    def is_steady(carry):
        n_steps, now = carry
        is_same = jnp.all(now() == now.adjust(True)())
        return is_same & (n_steps < _MAX_STEPS_TO_GROWTH)

    def advanced(carry):
        n_steps, now = carry
        return n_steps + 1, now.adjust(True)

    _, last = lax.while_loop(is_steady, advanced, (0, loss_scale))
    return last


def _replica_axis(states: Mapping[Path, LossScaleState]) -> str | None:
    """Returns the name of the axis along which each device has a state of its own.

    Under `pmap`, arguments are stacks, with one replica for each device.
    """
    for state in states.values():
        sharding = getattr(state.should_apply, "sharding", None)
        if np.ndim(state.should_apply) and isinstance(sharding, NamedSharding):
            return next(iter(sharding.spec), None)
    return None


def _drifting(
    leaves: Leaves, handed_on: Mapping[Path, np.ndarray], axis: str | None
) -> dict[str, str]:
    """Returns what all devices shared before the step and do not share afterwards.

    Args:
      leaves: what came back.
      handed_on: what was given in place of what is handed on.
      axis: the name of the axis of stacks of replicas, as under `pmap`, or None.

    Returns:
      The name of the axis by that of the array.
    """
    drifting = {}
    shared = 0
    for path, old in handed_on.items():
        x = leaves[path]
        if _copies_differ(x):
            drifting[_name_of(path)] = _replicated_axes(x.sharding)
        if axis is not None and old.ndim and all(is_equal(y, old[0]) for y in old):
            shared += len(old) > 1
            new = _on_host(x)
            if not all(is_equal(y, new[0]) for y in new):
                drifting[_name_of(path)] = axis
    if axis is not None and not shared:
        raise ValueError(
            f"whether devices drift apart along the axis {axis!r} cannot be checked: "
            "nothing that is handed on is given to two devices or more, and the same "
            "on all of them. On a CPU, jax.config.update('jax_num_cpu_devices', 2) "
            "makes two devices"
        )
    return drifting


def _copies_differ(x: Any) -> bool:
    """Whether devices hold different copies of the same part of an array."""
    copies = {}
    for shard in getattr(x, "addressable_shards", ()):
        copy = _on_host(shard.data)
        # In Python 3.11, the slices of an index have no hash.
        if not is_equal(copy, copies.setdefault(str(shard.index), copy)):
            return True
    return False


def _replicated_axes(sharding: Any) -> str:
    """Returns the names of the axes of a mesh along which an array is replicated."""
    used = {name for part in sharding.spec for name in np.ravel(part or ())}
    return ", ".join(str(name) for name in sharding.mesh.axis_names if name not in used)


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
