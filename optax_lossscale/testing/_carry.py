"""The carry of a step: its outputs that come back to it, as the next step's arguments.

A training step takes parameters, moments and batch statistics, and returns new ones,
but nothing says which output is the new value of which argument. So it is found out by
experiment, from trials with perturbed arguments. The new value of an array changes
along with it, has its size, and is in a similar place in its tree. That does not hold
for a loss or a prediction.

At the first step, some arrays do not show it: an average whose first value is a copy
does not depend on its old value. So if one array of a tree comes back in a returned
tree of the same form, all are taken to, and so are those of other trees of this form,
in their order.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable
from itertools import product

import numpy as np

from optax_lossscale.testing._experiment import RESULT, Experiment
from optax_lossscale.testing._numbers import Path, difference, equal

Carry = dict[Path, Path]  # the paths of arguments by those of their new values

# An output follows an argument if the cosine of their changes is larger, and if they are
# more alike than this. In a moving average, most of a change is lost.
_COSINE = 0.5
_FOLLOWS = 0.1


def find_carry(experiment: Experiment) -> Carry:
    """The outputs that come back, each with its argument.

    Raises a `ValueError` if none does.
    """
    baseline = experiment.baseline
    in_place = {path: path for path in baseline.outputs if path in baseline.given}
    carry = _with_closest(in_place, _likeness(experiment.perturbed))
    carry = _with_trees_alike(carry, experiment)
    if not carry and baseline.is_silent:
        raise ValueError(
            "nothing that the step is given comes back from it: let it return its new "
            "parameters and state, or change them in place, so that they can be judged"
        )
    return carry


def within(
    carry: Carry,
    outputs: Iterable[Path],
    arguments: Collection[Path],
) -> Carry:
    """Those of some outputs that come back as new values of some arguments."""
    return {
        output: carry[output]
        for output in outputs
        if output in carry and carry[output] in arguments
    }


def _likeness(perturbed):
    """How much outputs are like the arguments that they follow, by both paths.

    That is the length of the shorter path, and the likeness of their changes. Of
    several pairs of trials, the one counts in which they are most alike: at some loss
    scales, the step may make NaNs, or change numbers by far more.
    """
    likeness = {}
    for trial, other in perturbed:
        moved = [x for x in trial.given if not equal(trial.given[x], other.given[x])]
        for argument, output in product(moved, trial.outputs):
            if output not in other.outputs or not _are_alike(output, argument):
                continue
            of_changes = _likeness_of_changes(
                difference(other.given[argument], trial.given[argument]),
                difference(other.outputs[output], trial.outputs[output]),
            )
            _, most = likeness.get((output, argument), (0, _FOLLOWS))
            if of_changes > most:
                depth = min(len(output), len(argument))
                likeness[output, argument] = depth, of_changes
    return likeness


def _are_alike(output, argument):
    """Whether the paths of an output and of an argument end in the same keys.

    The first two keys, such as `args` and 0, do not count, nor do those by which one
    path is longer.
    """
    inner = min(len(output) - 2, len(argument) - 2)
    return inner <= 0 or output[-inner:] == argument[-inner:]


def _likeness_of_changes(x, y):
    """How alike two changes are: 1 if they are the same.

    It is their cosine if they are of one size, and less otherwise; 0 if the cosine is
    too small.
    """
    if x.size != y.size:
        return 0
    along = x @ y
    x_square = x @ x
    y_square = y @ y
    if along <= _COSINE * np.sqrt(x_square * y_square):
        return 0
    return 2 * along / (x_square + y_square)


def _with_closest(known, likeness):
    """The carry with more outputs, each with the argument that it is most like."""
    carry = dict(known)
    taken = set(known.values())
    for output, argument in sorted(likeness, key=likeness.get, reverse=True):
        if output not in carry and argument not in taken:
            carry[output] = argument
            taken.add(argument)
    return carry


def _with_trees_alike(known, experiment):
    """The carry with all outputs of its trees, and of other trees of their form.

    A form counts only if as many arguments as results have it, which are then paired in
    order, and if one of its pairs is known. Counts in an optimizer's state are: they
    come back with it.
    """
    carry = dict(known)
    baseline = experiment.baseline
    returned = {path: x for path, x in baseline.outputs.items() if path[0] == RESULT}
    results = _trees(returned, shallowest=1)
    for form, arguments in _trees(baseline.given, shallowest=2).items():
        outputs = results[form]
        if len(arguments) != len(outputs):
            continue
        pairs = {
            output + inner: argument + inner
            for output, argument in zip(outputs, arguments, strict=True)
            for inner, _ in form
        }
        has_counts = not experiment.counts.isdisjoint(pairs.values())
        if has_counts or not pairs.items().isdisjoint(known.items()):
            carry = pairs | carry
    return carry


def _trees(arrays, shallowest):
    """The paths of all trees by form: the paths and sizes of the arrays inside."""
    trees = defaultdict(set)
    for path, x in arrays.items():
        for depth in range(shallowest, len(path)):
            trees[path[:depth]].add((path[depth:], x.size))
    forms = defaultdict(list)
    for top, form in trees.items():
        forms[frozenset(form)].append(top)
    return forms
