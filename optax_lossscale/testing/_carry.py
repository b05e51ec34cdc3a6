"""The carry of a step: its outputs that come back to it, as the next step's arguments.

A training step takes parameters, moments and batch statistics, and returns new ones,
but nothing says which output is the new value of which argument. So it is found out by
experiment: the arguments are nudged, that is, changed a little. The new value of a
nudged array changes along with it, has its size, and is in a similar place in its tree.
That does not hold for a loss or a prediction.

In its first state, a step may not show it: an average that begins as a copy does not
depend on what it was. So if one array of a tree comes back in a returned tree of the
same form, all of them do, and so do those of other trees of this form, in their order.
"""

from collections import defaultdict
from collections.abc import Iterable
from itertools import product
from typing import NamedTuple

import numpy as np

from optax_lossscale.testing._contents import RESULT, Path, difference, equal
from optax_lossscale.testing._experiment import Experiment
from optax_lossscale.testing._trial import Trial

# The path of each output that comes back, with its place, the path of its argument
Carry = dict[Path, Path]

_NUDGE = 2.0**-4  # the change of a number, relatively, or absolutely if it is zero
_ALONG = 0.5  # an output follows an argument if the cosine of their changes is larger
# The least part of a change that comes back. In a moving average, most of it is lost.
_LEAST = 0.05


class Nudge(NamedTuple):
    """A trial, and its repetition with one of the step's arguments nudged."""

    trial: Trial
    repeated: Trial


def nudges(experiment: Experiment, trials: list[Trial]) -> list[Nudge]:
    """Each of the trials, repeated with each of the arguments nudged.

    An argument is nudged as a whole, all of its floats at once.
    """
    random = np.random.default_rng(0)
    arguments = defaultdict(dict)
    for place, x in experiment.floats.items():
        arguments[place[:2]][place] = _nudged(x, random)
    return [
        Nudge(trial, experiment.repeated(trial, numbers))
        for numbers in arguments.values()
        for trial in trials
    ]


def _nudged(x, random):
    """An array with each number changed a little, up or down at random."""
    sizes = _NUDGE * random.uniform(0.5, 1.5, x.shape)
    factors = 1 + sizes * random.choice([-1, 1], x.shape)
    wide = x.astype(np.result_type(np.float64, x.dtype))
    changed = np.where(wide == 0, sizes, wide * factors)
    return changed.astype(x.dtype)


def find_carry(experiment: Experiment, usual: Trial, nudged: list[Nudge]) -> Carry:
    """The float outputs that come back, each with its argument; raises if none does.

    The outputs are those of `usual`. The nudges are of trials at several loss scales.
    At some of them, the step may make NaNs, or change numbers by far more, so an output
    needs to follow its argument at one of them only.
    """
    floats = experiment.floats
    in_place = {path: path for path in usual.outputs if path in floats}
    carry = _with_closest(_likeness(nudged), in_place)
    carry = _with_trees_alike(usual, floats, carry)
    if not carry and not usual.after.loss_scales:
        raise ValueError(
            "nothing that the step is given comes back from it: let it return its new "
            "parameters and state, or change them in place, so that they can be judged"
        )
    return carry


def within(carry: Carry, outputs: Iterable[Path]) -> Carry:
    """Those of some outputs that come back, each with its argument."""
    return {path: carry[path] for path in outputs if path in carry}


def _likeness(nudged):
    """How closely outputs follow arguments in similar places: cosines, by both paths.

    Of several trials, the one counts in which the output follows most closely. Pairs
    that are too little alike are left out.
    """
    likeness = {}
    for trial, repeated in nudged:
        before = trial.before.numbers
        after = repeated.before.numbers
        moved = [place for place, x in before.items() if not equal(x, after[place])]
        for place, path in product(moved, trial.outputs):
            if path not in repeated.outputs or not _are_alike(path, place):
                continue
            of_argument = difference(after[place], before[place])
            of_output = difference(repeated.outputs[path], trial.outputs[path])
            cosine = _cosine(of_argument, of_output)
            if cosine > likeness.get((path, place), _ALONG):
                likeness[path, place] = cosine
    return likeness


def _are_alike(path, place):
    """Whether the paths of an output and of an argument end in the same keys.

    The first two keys, such as `args` and 0, do not count, nor do those by which one
    path is longer.
    """
    inner = min(len(path) - 2, len(place) - 2)
    return inner <= 0 or path[-inner:] == place[-inner:]


def _cosine(of_argument, of_output):
    """The cosine between the changes of an argument and of an output.

    0 if the sizes differ, or if too little of the argument's change is in the output's.
    """
    if of_argument.size != of_output.size:
        return 0
    are_finite = np.isfinite(of_argument) & np.isfinite(of_output)
    of_argument = of_argument[are_finite]
    of_output = of_output[are_finite]
    along = of_argument @ of_output
    norm = np.linalg.norm(of_argument)
    if along <= _LEAST * norm**2:
        return 0
    return along / (norm * np.linalg.norm(of_output))


def _with_closest(likeness, known):
    """The carry with more outputs, each with the argument that it is most like.

    Pairs of longer paths come first, and of those the ones that are most alike.
    """

    def rank(pair):
        path, place = pair
        return min(len(path), len(place)), likeness[pair]

    carry = dict(known)
    taken = set(known.values())
    for path, place in sorted(likeness, key=rank, reverse=True):
        if path not in carry and place not in taken:
            carry[path] = place
            taken.add(place)
    return carry


def _with_trees_alike(usual, floats, known):
    """The carry with all outputs of its trees, and of other trees of their form.

    Trees of one form are those of as many arguments as results.
    """
    carry = dict(known)
    returned = {path: x for path, x in usual.outputs.items() if path[0] == RESULT}
    arguments = _trees(usual.before.numbers)
    results = _trees(returned)
    for form, places in arguments.items():
        paths = results[form]
        if len(places) != len(paths):
            continue
        pairs = {
            path + inner: place + inner
            for path, place in zip(paths, places, strict=True)
            for inner, _ in form
            if place + inner in floats
        }
        # What one form adds to the carry counts for the next ones.
        if not pairs.items().isdisjoint(carry.items()):
            carry = pairs | carry
    return carry


def _trees(numbers):
    """The paths of all trees by form: the paths and sizes of the arrays inside."""
    trees = defaultdict(list)
    for path, x in numbers.items():
        for depth in range(1, len(path)):
            trees[path[:depth]].append((path[depth:], x.size))
    forms = defaultdict(list)
    for top, arrays in trees.items():
        forms[frozenset(arrays)].append(top)
    return forms
