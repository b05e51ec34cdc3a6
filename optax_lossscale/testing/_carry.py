"""The carry of a step: its outputs that come back to it, as the next step's arguments.

A training step takes parameters, moments and batch statistics, and returns new ones,
but nothing says which output is the new value of which argument. So it is found out by
experiment, from trials with perturbed arguments.

Three rules find it:
1. An output that changes along with an argument of its size, in a similar place in its
   tree, is its new value. That does not hold for a loss or a prediction.
2. An output that depends on the argument at its own position, and is the same at an
   overflow, is its new value, such as a hidden state that a recurrent layer has turned.
3. If one array of a tree has been matched with one in a tree of the same form, so are
   the others in both, and so are other trees of this form, in order. An average that
   is first set to a copy does not depend on its old value, and is only found like this.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable
from itertools import product
from typing import NamedTuple

import numpy as np

from optax_lossscale.testing._experiment import RESULT, Experiment
from optax_lossscale.testing._numbers import Path, difference, equal, norm

Carry = dict[Path, Path]  # the paths of arguments by those of their new values

_LEAST_COSINE = 0.5  # of the changes of an output and of the argument that it follows
# The least likeness of the two changes. It is low, as a moving average keeps little of
# a change.
_LEAST_LIKENESS = 0.1
_LEAST_DEPENDENCE = 1e-4  # a change that is smaller, relatively, may come from rounding


class Rank(NamedTuple):
    """How well an output and an argument on which it depends match; higher is better.

    Attributes:
      depth: the length of the shorter one of their paths.
      likeness: how alike their changes are, from 0 to 1.
    """

    depth: int
    likeness: float


def find_carry(experiment: Experiment) -> Carry:
    """The outputs that come back, each with its argument.

    Raises a `ValueError` if none does, and no loss scale or state comes back either.
    """
    baseline = experiment.baseline
    ranks = _ranks(experiment.perturbed)
    in_place = {path: path for path in baseline.outputs if path in baseline.given}
    carry = _with_best_matches(in_place, ranks, experiment)
    carry = _with_trees(carry, ranks, experiment)
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
    """The part of `carry` from these outputs to these arguments."""
    return {
        output: carry[output]
        for output in outputs
        if output in carry and carry[output] in arguments
    }


def _ranks(perturbed):
    """The rank of each output with each argument on which it depends, by both paths.

    Of several pairs of trials, the one with the highest rank counts: at some loss
    scales, the step may make NaNs, or change numbers by far more.
    """
    ranks = {}
    for trial, other in perturbed:
        moved = [x for x in trial.given if not equal(trial.given[x], other.given[x])]
        for argument, output in product(moved, trial.outputs):
            if output not in other.outputs or not _may_match(trial, output, argument):
                continue
            of_argument = difference(other.given[argument], trial.given[argument])
            of_output = difference(other.outputs[output], trial.outputs[output])
            if _depends(of_output, of_argument):
                depth = min(len(output), len(argument))
                rank = Rank(depth, _likeness(of_argument, of_output))
                known = ranks.get((output, argument), rank)
                ranks[output, argument] = max(rank, known)
    return ranks


def _may_match(trial, output, argument):
    """Whether an output has the size of an argument, and paths with the same last keys.

    The first two keys, such as `args` and 0, do not count, nor do those by which one
    path is longer.
    """
    size = trial.output_fingerprints[output].size
    if size != trial.given_fingerprints[argument].size:
        return False
    inner = min(len(output) - 2, len(argument) - 2)
    return inner <= 0 or output[-inner:] == argument[-inner:]


def _depends(of_output, of_argument):
    """Whether an output changes with an argument by more than rounding."""
    return norm(of_output) > _LEAST_DEPENDENCE * norm(of_argument)


def _likeness(x, y):
    """How alike two changes are: 2x·y / (x·x + y·y).

    It is 1 for equal changes, and the cosine for changes of equal norm. It is 0 if the
    cosine is not above `_LEAST_COSINE`.
    """
    along = x @ y
    x_square = x @ x
    y_square = y @ y
    if along <= _LEAST_COSINE * np.sqrt(x_square * y_square):
        return 0
    return 2 * along / (x_square + y_square)


def _with_best_matches(known, ranks, experiment):
    """The carry with more outputs, each with the argument that it matches best."""
    carry = dict(known)
    taken = set(known.values())
    for output, argument in sorted(ranks, key=ranks.get, reverse=True):
        follows = ranks[output, argument].likeness > _LEAST_LIKENESS
        comes_back = follows or _is_in_order(output, argument, experiment)
        if comes_back and output not in carry and argument not in taken:
            carry[output] = argument
            taken.add(argument)
    return carry


def _is_in_order(output, argument, experiment):
    """Whether an output has an argument's position, and is the same at an overflow.

    A step returns what it carries in the order in which it takes it, so an output that
    depends on the argument in its position is its new value, if no gradient is in it.
    A single number may be a loss.
    """
    usual = experiment.baseline.output_fingerprints[output]
    at_overflow = experiment.overflowing[-1].output_fingerprints.get(output)
    is_in_order = output[1:] == argument[1:]
    return is_in_order and usual.size > 1 and usual == at_overflow


def _with_trees(known, ranks, experiment):
    """The carry with all arrays of its trees, and of other trees of their form.

    For example, if a step returns `{"mean": …, "var": …}` of batch statistics, and its
    mean is known to come back, so does its variance. Another tree of this form is left
    out if one of its outputs depends on its argument: as it was not matched, it does not
    follow it, and is a prediction or the like. Trees with an optimizer's counts are not.
    """
    baseline = experiment.baseline
    outputs = baseline.output_fingerprints
    returned = {path: x for path, x in outputs.items() if path[0] == RESULT}
    results = _forms(returned, shallowest=1)
    arguments = _forms(baseline.given_fingerprints, shallowest=2)
    matched = {
        output: argument
        for output, argument in _trees_around(known)
        if results.get(output) == arguments.get(argument, ())
    }
    carry = dict(known)
    for output, argument in matched.items():
        carry = _pairs_inside(output, argument, results[output]) | carry
    known_forms = {results[output] for output in matched}
    for output, argument in _others(results, arguments, matched):
        form = results[output]
        pairs = _pairs_inside(output, argument, form)
        is_like_known = form in known_forms and ranks.keys().isdisjoint(pairs.items())
        if is_like_known or _has_counts(pairs, experiment):
            carry = pairs | carry
    return carry


def _pairs_inside(output, argument, form):
    """The arrays of an output tree, each with that of an argument tree in its place."""
    return {output + inner: argument + inner for inner, _ in form}


def _has_counts(pairs, experiment):
    """Whether an optimizer's counts are among the arguments of these pairs."""
    return not experiment.counts.isdisjoint(pairs.values())


def _forms(fingerprints, shallowest):
    """The form of each tree, by its path: the paths and sizes of the arrays inside."""
    trees = defaultdict(set)
    for path, x in fingerprints.items():
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
    """Pairs of the other output and argument trees of one form, in order.

    There must be as many of both.
    """
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
