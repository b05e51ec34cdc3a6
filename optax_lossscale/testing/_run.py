"""A training step, run on copies of its arguments with a loss scale of one's choice."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import keystr

from optax_lossscale._arrays.variables import is_variable, plain
from optax_lossscale._diagnosis.summary import Summary
from optax_lossscale._scales.get import get_loss_scale
from optax_lossscale._scales.loss_scale import LossScale
from optax_lossscale._step.state import wrapper_states

_SAMPLE = 2**16  # numbers of an output


class Run(NamedTuple):
    """What a step made of its arguments at one loss scale.

    Attributes:
      before: the loss scale it was given, of host arrays.
      after: those it returned or wrote in place.
      flags: what says whether the step was applied: the `should_apply` of each wrapper in what
        it returned or changed, or how each loss scale without one has adapted; and of each
        `optax.MultiSteps` that skips by a rule of its own.
      outputs: all else, by name, of one dimension: floating-point numbers as float64, integers
        and bools as int64.
    """

    before: LossScale
    after: list[LossScale]
    flags: list[bool]
    outputs: dict[str, np.ndarray]

    @property
    def exponent(self) -> int:
        """Of the loss scale given, where that is a power of two."""
        return int(np.log2(np.max(self.before.loss_scale)))

    @property
    def was_applied(self) -> bool:
        """As far as can be seen."""
        return all(self.flags)


def the_loss_scale(arguments: Any) -> LossScale:
    """The one among the arguments. Of `nnx` variables that are aliases, all are one."""
    places = _nodes(LossScale, arguments)
    if not places:
        raise ValueError(
            "expected exactly one loss scale among the arguments of the step, found none: give it "
            "the optimizer's state as an argument. Of a function that makes its state itself, or "
            "takes several steps, call the assertion inside, at the first step"
        )
    return get_loss_scale(list({_identity(path, x): x for path, x in places.items()}.values()))


def run(step: Callable[..., Any], arguments: Any, loss_scale: LossScale) -> Run:
    """The step on a copy of its arguments, `(args, kwargs)`, with this loss scale among them."""
    args, kwargs = _with_loss_scale(arguments, loss_scale)
    given = jax.tree.leaves((args, kwargs))  # kept alive, so that no other array has their ids
    was_given = {id(x) for x in given}
    skipped = [np.asarray(s.skipped_steps) for s in wrapper_states((args, kwargs))]
    with jax.debug_nans(False), jax.debug_infs(False):  # overflows are expected here
        result = step(*args, **kwargs)

    # Arguments may have been changed in place; those that were not are no outputs.
    after = {"result": result, "args": args, "kwargs": kwargs}
    states = [s for s in wrapper_states(after) if id(s.should_apply) not in was_given]
    new = [plain(x) for x in _nodes(LossScale, after).values()]
    new = [jax.tree.map(np.asarray, x) for x in new if id(x.loss_scale) not in was_given]
    if states:
        flags = [bool(np.all(s.should_apply)) for s in states]
        if len(states) == len(skipped) == 1:  # a step may be several, the last of which applied
            flags += [np.array_equal(states[0].skipped_steps, skipped[0])]
    else:
        flags = [not _has_overflowed(loss_scale, x) for x in new]
    rules = [plain(s.skip_state) for s in _nodes(optax.MultiStepsState, after).values()]
    flags += [not np.any(x["should_skip"]) for x in rules if "should_skip" in x]
    return Run(
        before=jax.tree.map(np.asarray, loss_scale),
        after=new,
        flags=flags,
        outputs=dict(_outputs(after, was_given)),
    )


def same(x: LossScale, y: LossScale) -> bool:
    """Whether two loss scales of one kind have the same state."""
    equal = lambda a, b: np.array_equal(a, b, equal_nan=True)
    return all(map(equal, jax.tree.leaves(x), jax.tree.leaves(y)))


def _has_overflowed(before: LossScale, after: LossScale) -> bool:
    """Whether a loss scale has adapted as to gradients that are not finite."""
    return same(after, before.adjust(False)) and not same(after, before.adjust(True))


def _with_loss_scale(arguments: Any, loss_scale: LossScale) -> Any:
    """A copy with another loss scale."""
    new = {}
    for path, node in _nodes(LossScale, arguments).items():
        leaves = jax.tree.leaves_with_path(node, is_leaf=is_variable)
        for (rest, leaf), value in zip(leaves, jax.tree.leaves(loss_scale), strict=True):
            new[_identity((*path, *rest), leaf)] = value
    copies: dict[Any, Any] = {}

    def copied(path, leaf):
        key = _identity(path, leaf)

        def copy(x):
            if key in new:
                return jnp.asarray(x).at[...].set(new[key])
            return x.copy() if isinstance(x, (jax.Array, np.ndarray)) else x

        if key not in copies:  # what is shared stays shared
            copies[key] = jax.tree.map(copy, leaf)
        return copies[key]

    return jax.tree.map_with_path(copied, arguments, is_leaf=is_variable)


def _outputs(after: Any, was_given: set[int]) -> Iterator[tuple[str, np.ndarray]]:
    """What there is to compare, by name; of large arrays a sample."""
    left_out = (LossScale, Summary)
    is_leaf = lambda x: isinstance(x, left_out) or is_variable(x)
    seen = set()
    for path, leaf in jax.tree.leaves_with_path(after, is_leaf=is_leaf):
        x, key = plain(leaf), _identity(path, leaf)
        if isinstance(leaf, left_out) or id(x) in was_given or key in seen or not _is_numeric(x):
            continue
        seen.add(key)
        numbers = np.ravel(np.asarray(x))
        numbers = numbers[:: -(-numbers.size // _SAMPLE) or 1]
        parts = (numbers.real, numbers.imag) if np.iscomplexobj(numbers) else (numbers,)
        kind = np.float64 if jnp.issubdtype(numbers.dtype, jnp.inexact) else np.int64
        numbers = np.concatenate([part.astype(kind) for part in parts])
        yield f"{path[0].key}{keystr(path[1:])}", numbers


def _is_numeric(x: Any) -> bool:
    dtype = getattr(x, "dtype", type(x))
    return jnp.issubdtype(dtype, np.number) or jnp.issubdtype(dtype, np.bool_)


def _identity(path: tuple, x: Any) -> Any:
    """What tells a leaf or a loss scale from others: of variables themselves, else the place."""
    variables = [id(v) for v in jax.tree.leaves(x, is_leaf=is_variable) if is_variable(v)]
    return tuple(variables) or path


def _nodes(kind: Any, tree: Any) -> dict[tuple, Any]:
    """All of a kind in a tree, by path."""
    is_kind = lambda x: isinstance(x, kind)
    leaves = jax.tree.leaves_with_path(tree, is_leaf=is_kind)
    return {path: x for path, x in leaves if is_kind(x)}
