"""Which of a step's outputs come back to it, as arguments of the next step.

A training step takes parameters, moments and batch statistics, and returns new ones,
but nothing says which output is the new value of which argument. So it is found out by
experiment. The new value of an argument has a similar path in its tree and the same
size, and if the argument is changed a little, the new value changes along with it. That
does not hold for a loss or a prediction.

In its first state, a step may not show it: an average that begins as a copy does not
depend on what it was. So if one array of a tree comes back in a returned tree of the
same form, all of them do, and so do those of other trees of this form, in their order.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from jax.tree_util import DictKey

from optax_lossscale.testing._runs import Path, Run, Trial, flat, numbers_in

_NUDGE = 2.0**-4  # the change of a number, relatively, or absolutely if it is zero
_ALONG = 0.5  # an output follows an argument if the cosine of their changes is larger
# The least part of a change that comes back. In a moving average, most of it is lost.
_LEAST = 0.05


def what_comes_back(
    trial: Trial, regimes: list[Run]
) -> tuple[dict[Path, Path], list[Run]]:
    """The paths of the float outputs that come back, each with that of its argument.

    `regimes` are runs at several loss scales, which are repeated with arguments that
    are changed a little. In some of them, the step may make NaNs, or change numbers by
    far more. So an output needs to follow its argument in only one of them. The second
    result are these further runs. Raises if nothing comes back.
    """
    # An argument that the step changes in place is its own output.
    back = {path: path for path in regimes[0].outputs if path in trial.floats}
    likeness, runs = _likeness(trial, regimes)

    def rank(pair):
        """Longer paths come first, and then outputs that follow more closely."""
        path, place = pair
        return min(len(path), len(place)), likeness[pair]

    taken = set(back.values())
    for path, place in sorted(likeness, key=rank, reverse=True):
        if path not in back and place not in taken:
            back[path] = place
            taken.add(place)
    for path, place in _in_trees_alike(trial, regimes[0], back):
        back.setdefault(path, place)
    if not back and not regimes[0].loss_scales:
        raise ValueError(
            "nothing that the step is given comes back from it: let it return its new "
            "parameters and state, or change them in place, so that they can be judged"
        )
    return back, runs


def _in_trees_alike(
    trial: Trial, run: Run, back: Mapping[Path, Path]
) -> Iterator[tuple[Path, Path]]:
    """The outputs that come back because others of their tree, or of its form, do.

    Each with the path of its argument. `back` has the outputs that are known to come
    back. Trees of one form are those of as many arguments as results.
    """
    arguments = _trees(numbers_in(trial.arguments))
    results = _trees(run.outputs)
    for form, places in arguments.items():
        paths = [top for top in results.get(form, []) if top[0] == DictKey("result")]
        if len(places) != len(paths):
            continue
        pairs = [
            (path + inner, place + inner)
            for path, place in zip(paths, places, strict=True)
            for inner, _ in form
        ]
        if any(back.get(path) == place for path, place in pairs):
            yield from (pair for pair in pairs if pair[1] in trial.floats)


def _trees(numbers: Mapping[Path, Any]) -> dict[frozenset, list[Path]]:
    """The paths of all trees, by their form: the paths and sizes of the arrays in it."""
    trees = defaultdict(list)
    for path, x in numbers.items():
        for depth in range(1, len(path)):
            trees[path[:depth]].append((path[depth:], flat(x).size))
    forms = defaultdict(list)
    for top, arrays in trees.items():
        forms[frozenset(arrays)].append(top)
    return forms


def _likeness(trial, regimes):
    """How closely outputs follow arguments in similar places: cosines, by both paths.

    Each argument of the step is nudged as a whole, all of its floats at once. The
    second result are the runs in which one is.
    """
    random = np.random.default_rng(0)
    arguments = {}
    for place, x in trial.floats.items():
        numbers = arguments.setdefault(place[:2], {})
        numbers[place] = _nudged(x, random)
    likeness = {}
    runs = []
    for numbers, run in itertools.product(arguments.values(), regimes):
        nudged = trial.run(run.loss_scale, numbers, run.overflows)
        runs.append(nudged)
        for place, path in itertools.product(numbers, run.outputs):
            if path not in nudged.outputs or not _are_alike(path, place):
                continue
            change = _change(trial.floats[place], numbers[place])
            change_of_output = _change(run.outputs[path], nudged.outputs[path])
            cosine = _cosine(change, change_of_output)
            if cosine > likeness.get((path, place), _ALONG):
                likeness[path, place] = cosine
    return likeness, runs


def _nudged(x, random):
    """An array with each number changed a little, up or down at random."""
    sizes = _NUDGE * random.uniform(0.5, 1.5, x.shape)
    factors = 1 + sizes * random.choice([-1, 1], x.shape)
    wide = x.astype(np.result_type(np.float64, x.dtype))
    nudged = np.where(wide == 0, sizes, wide * factors)
    return nudged.astype(x.dtype)


def _are_alike(path, place):
    """Whether the paths of an output and of an argument end in the same keys.

    The first two keys, such as `args` and 0, do not count, nor do those by which one
    path is longer.
    """
    inner = min(len(path) - 2, len(place) - 2)
    return inner <= 0 or path[-inner:] == place[-inner:]


def _change(before, after):
    """The change of each number; NaN where both numbers are infinite alike."""
    with np.errstate(invalid="ignore"):
        return flat(after) - flat(before)


def _cosine(change, change_of_output):
    """The cosine between the changes of an argument and of an output.

    0 if the sizes differ, or if too little of the argument's change is in the output's.
    """
    if change.size != change_of_output.size:
        return 0
    are_finite = np.isfinite(change) & np.isfinite(change_of_output)
    change = change[are_finite]
    change_of_output = change_of_output[are_finite]
    along = change @ change_of_output
    norm = np.linalg.norm(change)
    if along <= _LEAST * norm**2:
        return 0
    return along / (norm * np.linalg.norm(change_of_output))
