"""The carry of a step: its outputs that come back to it, as the next step's arguments.

A training step takes parameters, moments and batch statistics, and returns new ones,
but nothing says which output is the new value of which argument. So it is found out by
experiment, from trials with perturbed arguments. The new value of an array changes
along with it, has its size, and is in a similar place in its tree. That does not hold
for a loss or a prediction.

Some arrays do not show it. A hidden state that a recurrent layer has turned is known by
its position. And at the first step, an average whose first value is a copy does not
depend on its old value. So if one array of a tree comes back in a returned tree of the
same form, all are taken to, and so are those of other trees of this form, in their
order.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable
from itertools import product

import numpy as np

from optax_lossscale.testing._experiment import RESULT, Experiment
from optax_lossscale.testing._numbers import Path, difference, equal, norm

Carry = dict[Path, Path]  # the paths of arguments by those of their new values

# An output follows an argument if the cosine of their changes is larger, and if they are
# more alike than this. In a moving average, most of a change is lost.
_COSINE = 0.5
_FOLLOWS = 0.1
_ROUNDING = 1e-4  # a change that is smaller, relatively, may come from rounding


def find_carry(experiment: Experiment) -> Carry:
    """The outputs that come back, each with its argument.

    Raises a `ValueError` if none does.
    """
    baseline = experiment.baseline
    likeness = _likeness(experiment.perturbed)
    in_place = {path: path for path in baseline.outputs if path in baseline.given}
    carry = _with_closest(in_place, likeness, experiment)
    carry = _with_trees_alike(carry, likeness, experiment)
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
    """How much outputs are like the arguments on which they depend, by both paths.

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
            of_argument = difference(other.given[argument], trial.given[argument])
            of_output = difference(other.outputs[output], trial.outputs[output])
            if of_argument.size == of_output.size and _depends(of_output, of_argument):
                depth = min(len(output), len(argument))
                rank = depth, _likeness_of_changes(of_argument, of_output)
                known = likeness.get((output, argument), rank)
                likeness[output, argument] = max(rank, known)
    return likeness


def _are_alike(output, argument):
    """Whether the paths of an output and of an argument end in the same keys.

    The first two keys, such as `args` and 0, do not count, nor do those by which one
    path is longer.
    """
    inner = min(len(output) - 2, len(argument) - 2)
    return inner <= 0 or output[-inner:] == argument[-inner:]


def _depends(of_output, of_argument):
    """Whether an output changes with an argument by more than rounding."""
    return norm(of_output) > _ROUNDING * norm(of_argument)


def _likeness_of_changes(x, y):
    """How alike two changes are: 1 if they are the same.

    It is their cosine if they are of one size, and less otherwise; 0 if the cosine is
    too small.
    """
    along = x @ y
    x_square = x @ x
    y_square = y @ y
    if along <= _COSINE * np.sqrt(x_square * y_square):
        return 0
    return 2 * along / (x_square + y_square)


def _with_closest(known, likeness, experiment):
    """The carry with more outputs, each with the argument that it is most like."""
    carry = dict(known)
    taken = set(known.values())
    for output, argument in sorted(likeness, key=likeness.get, reverse=True):
        _, of_changes = likeness[output, argument]
        comes_back = of_changes > _FOLLOWS or _is_in_order(output, argument, experiment)
        if comes_back and output not in carry and argument not in taken:
            carry[output] = argument
            taken.add(argument)
    return carry


def _is_in_order(output, argument, experiment):
    """Whether an output has the position of an argument, and no gradient is in it.

    A step returns what it carries in the order in which it takes it, so an output that
    depends on the argument in its position is its new value. A single number may be a
    loss.
    """
    numbers = experiment.baseline.outputs[output]
    at_overflow = experiment.overflowing[-1].outputs.get(output)
    is_in_order = output[1:] == argument[1:]
    return is_in_order and numbers.size > 1 and np.array_equal(numbers, at_overflow)


def _with_trees_alike(known, likeness, experiment):
    """The carry with all outputs of its trees, and of other trees of their form.

    A result that depends on an argument, but does not follow it, is not its new value.
    Counts in an optimizer's state come back with it.
    """
    baseline = experiment.baseline
    returned = {path: x for path, x in baseline.outputs.items() if path[0] == RESULT}
    results = _forms(returned, shallowest=1)
    arguments = _forms(baseline.given, shallowest=2)
    matched = {
        output: argument
        for output, argument in _trees_around(known)
        if results.get(output) == arguments.get(argument, ())
    }
    known_forms = {results[output] for output in matched}
    carry = dict(known)
    for output, argument in [*matched.items(), *_others(results, arguments, matched)]:
        form = results[output]
        pairs = {output + inner: argument + inner for inner, _ in form}
        has_counts = not experiment.counts.isdisjoint(pairs.values())
        depends = not likeness.keys().isdisjoint(pairs.items())
        is_alike = form in known_forms and not depends
        if output in matched or has_counts or is_alike:
            carry = pairs | carry
    return carry


def _forms(arrays, shallowest):
    """The form of each tree, by its path: the paths and sizes of the arrays inside."""
    trees = defaultdict(set)
    for path, x in arrays.items():
        for depth in range(shallowest, len(path)):
            trees[path[:depth]].add((path[depth:], x.size))
    return {top: frozenset(tree) for top, tree in trees.items()}


def _trees_around(carry):
    """The paths of trees in which pairs of the carry have the same place."""
    trees = {}
    for output, argument in carry.items():
        for inner in range(1, min(len(output), len(argument))):
            if output[-inner:] == argument[-inner:]:
                trees[output[:-inner], argument[:-inner]] = True
    return list(trees)


def _others(results, arguments, matched):
    """Pairs of the other trees of one form, in order, if there are as many of both."""
    outputs_of = defaultdict(list)
    for top, form in results.items():
        if top not in matched:
            outputs_of[form].append(top)
    taken = set(matched.values())
    arguments_of = defaultdict(list)
    for top, form in arguments.items():
        if top not in taken:
            arguments_of[form].append(top)
    pairs = []
    for form, tops in arguments_of.items():
        if len(tops) == len(outputs_of[form]):
            pairs += zip(outputs_of[form], tops, strict=True)
    return pairs
