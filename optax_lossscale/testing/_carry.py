"""Finds the carry of a step: the outputs that the next step gets as its arguments.

As in `jax.lax.scan`, the carry is what a loop passes from one step to the next, such as
parameters, moments and batch statistics. A step does not say which output is the new
value of which argument. In

    params, state, loss = step(params, state, batch)

`result[0]` is the new `args[0]`, whereas `result[2]` is the new value of no argument.
The carry is therefore found by perturbing one argument at a time and comparing the
outputs. If the step changes an argument in place, the changed argument is its new
value. Four rules find other new values. The first two match an output array with an
argument array:

1. The output changes much as the argument does, has as many elements, and has a similar
   place in its tree. Losses and predictions rarely meet all three conditions. A loss
   that is multiplied by an argument may, and so may an autoencoder's prediction.
2. The output depends on the argument in the same position, has as many elements (more
   than one), and is not changed by an overflow. This finds the hidden state of a
   recurrent layer, which the layer may rotate, so that the two changes are not alike.

The other two match an output tree with an argument tree of the same structure, that is,
with arrays of the same sizes in the same places:

3. If an output in one tree was matched with the argument in the same place of the other
   tree, all outputs in the first tree are new values.
4. The two trees have the structure of trees that rule 3 matched, or hold the counts of
   an optimizer. An example is an average of parameters whose first update replaces it
   with a copy of the parameters. Rules 1 and 2 do not find this copy, because it does
   not depend on the old average.

A wrong match can make an assertion reject a correct step; the user then lists the
output in `ignore`. A missing match can make it accept a wrong step. For example, rules
1 and 2 do not find a running maximum that the batch exceeds, because it does not depend
on its old value.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from itertools import product
from typing import NamedTuple

import numpy as np

from optax_lossscale.testing._experiment import RESULT, Experiment
from optax_lossscale.testing._numbers import Fingerprint, Path, difference, equal, norm
from optax_lossscale.testing._trial import Trial

Carry = dict[Path, Path]
"""Maps outputs to the arguments of which they are new values."""

# Three heuristic thresholds apply to the change of an argument and the change of an
# output that it causes.

# The cosine of the angle between the two changes must be above this; that is, the angle
# must be below 60 degrees.
_MIN_COSINE = 0.5
# The result of `_similarity` must be above this. For a moving average that keeps the
# share d of its old value, the result is 2d / (1 + d²), which is above 0.1 for each d
# from 0.06 on.
_MIN_SIMILARITY = 0.1
# The norm of the output's change, divided by that of the argument's, must be above
# this. Rounding to float32 changes elements by up to 2**-24 of their magnitude, and an
# experiment changes those of an argument by about 2**-4 of theirs. If both arrays have
# similar magnitudes, rounding alone makes a ratio of about 1e-6, and the threshold is
# 100 times as much.
_MIN_DEPENDENCE = 1e-4


class Score(NamedTuple):
    """How well an output matches an argument on which it depends; higher is better.

    Scores are compared by depth first: the longer the paths, the more keys match.

    Attributes:
      depth: the length of the shorter of the two paths.
      similarity: how similar the changes of the two are, from 0 to 1.
    """

    depth: int
    similarity: float


# The scores of outputs with arguments, by the paths of both
_Scores = dict[tuple[Path, Path], Score]
# The paths and sizes of all arrays in a tree
_Structure = frozenset[tuple[Path, int]]


def find_carry(experiment: Experiment) -> Carry:
    """Finds all outputs that are new values of arguments.

    Raises a `ValueError` if there are none and the step is silent (see
    `Trial.is_silent`).
    """
    baseline = experiment.baseline
    scores = _scores(experiment.perturbed_pairs)
    # An output among the arguments was changed in place.
    carry = {path: path for path in baseline.outputs if path in baseline.arguments}
    carry = _with_best_matches(carry, scores, experiment)
    carry = _with_trees(carry, scores, experiment)
    if not carry and baseline.is_silent:
        raise ValueError(
            "no output of the step is the new value of an argument. Return the new "
            "parameters and state, or change them in place, so that they can be checked"
        )
    return carry


def within(
    carry: Carry,
    outputs: Iterable[Path],
    arguments: Collection[Path],
) -> Carry:
    """Restricts a carry to some of its outputs and arguments."""
    return {
        output: carry[output]
        for output in outputs
        if output in carry and carry[output] in arguments
    }


def _scores(perturbed_pairs: Iterable[tuple[Trial, Trial]]) -> _Scores:
    """Scores each output with each argument on which it depends; keyed by both paths.

    The best score over all pairs of trials counts, because the step may produce NaNs or
    much larger changes at some loss scales.
    """
    scores: _Scores = {}
    for trial, perturbed in perturbed_pairs:
        before = trial.arguments
        after = perturbed.arguments
        moved = [path for path in before if not equal(before[path], after[path])]
        outputs = [path for path in trial.outputs if path in perturbed.outputs]
        for argument, output in product(moved, outputs):
            score = _score(trial, perturbed, output, argument)
            if score is not None:
                best = scores.get((output, argument), score)
                scores[output, argument] = max(score, best)
    return scores


def _score(
    trial: Trial,
    perturbed: Trial,
    output: Path,
    argument: Path,
) -> Score | None:
    """Scores an output with an argument that differs between two trials.

    Returns None if the two cannot match or the output does not depend on the argument.
    """
    if not _may_match(trial, output, argument):
        return None
    argument_change = difference(
        perturbed.arguments[argument], trial.arguments[argument]
    )
    output_change = difference(perturbed.outputs[output], trial.outputs[output])
    if norm(output_change) <= _MIN_DEPENDENCE * norm(argument_change):
        return None
    depth = min(len(output), len(argument))
    return Score(depth, _similarity(argument_change, output_change))


def _may_match(trial: Trial, output: Path, argument: Path) -> bool:
    """Whether an output has the size of an argument and a similar path.

    Paths are compared from their ends, over the length of the shorter one, except for
    its first two keys, such as `args` and 0.
    """
    size = trial.output_fingerprints[output].size
    if size != trial.argument_fingerprints[argument].size:
        return False
    depth = min(len(output), len(argument)) - 2
    return depth <= 0 or output[-depth:] == argument[-depth:]


def _similarity(x: np.ndarray, y: np.ndarray) -> float:
    """Computes how similar two changes are: 2x·y / (x·x + y·y).

    The similarity is 1 for equal changes; for changes of equal norm, it is the cosine
    of the angle between them. But if the cosine is at most `_MIN_COSINE`, the
    similarity is 0, whatever the norms.
    """
    dot = x @ y
    x_square = x @ x
    y_square = y @ y
    if dot <= _MIN_COSINE * np.sqrt(x_square * y_square):
        return 0
    return float(2 * dot / (x_square + y_square))


def _with_best_matches(
    carry: Carry,
    scores: _Scores,
    experiment: Experiment,
) -> Carry:
    """Extends a carry by rules 1 and 2, pairing the best matches first."""
    carry = dict(carry)
    matched_arguments = set(carry.values())
    for output, argument in sorted(scores, key=scores.__getitem__, reverse=True):
        is_similar = scores[output, argument].similarity > _MIN_SIMILARITY
        is_new_value = is_similar or _is_in_position(output, argument, experiment)
        is_free = output not in carry and argument not in matched_arguments
        if is_new_value and is_free:
            carry[output] = argument
            matched_arguments.add(argument)
    return carry


def _is_in_position(output: Path, argument: Path, experiment: Experiment) -> bool:
    """Whether an output has an argument's position and is not changed by an overflow.

    Steps usually return their carry in the order of their arguments, so an output that
    depends on the argument in its position is taken for that argument's new value. Two
    kinds of outputs are excluded: those that an overflow changes, which shows that they
    are computed from gradients, and single elements, which may be losses.
    """
    without_overflow = experiment.baseline.output_fingerprints[output]
    overflow_trial = experiment.overflow_trials[-1]
    at_overflow = overflow_trial.output_fingerprints.get(output)
    is_in_position = output[1:] == argument[1:]
    is_unchanged = without_overflow == at_overflow
    return is_in_position and is_unchanged and without_overflow.size > 1


def _with_trees(
    carry: Carry,
    scores: _Scores,
    experiment: Experiment,
) -> Carry:
    """Extends a carry by rules 3 and 4, from single arrays to whole trees.

    For example, a step accepts and returns batch statistics `{"mean": …, "var": …}`. If
    their mean is in the carry, rule 3 adds their variance. If the step accepts and
    returns a second tree with the same structure, rule 4 adds that tree, unless one of
    its outputs depends on the argument in its place: rules 1 and 2 compared such a pair
    and did not match it, so the output may be a prediction. A tree that holds an
    optimizer's counts is added in any case.
    """
    outputs = experiment.baseline.output_fingerprints
    returned = {path: x for path, x in outputs.items() if path[0] == RESULT}
    results = _structures(returned, min_depth=1)
    arguments = _structures(experiment.baseline.argument_fingerprints, min_depth=2)
    matched = {
        output: argument
        for output, argument in _enclosing_trees(carry)
        if output in results and results[output] == arguments.get(argument)
    }
    # Below, `… | carry` keeps what is in the carry already.
    for output, argument in matched.items():
        carry = _leaf_pairs(output, argument, results[output]) | carry
    known_structures = {results[output] for output in matched}
    for output, argument in _unmatched_trees(results, arguments, matched):
        structure = results[output]
        pairs = _leaf_pairs(output, argument, structure)
        has_counts = not experiment.counts.isdisjoint(pairs.values())
        is_independent = scores.keys().isdisjoint(pairs.items())
        if has_counts or (structure in known_structures and is_independent):
            carry = pairs | carry
    return carry


def _leaf_pairs(output: Path, argument: Path, structure: _Structure) -> Carry:
    """Pairs each array in an output tree with that in its place in an argument tree."""
    return {output + subpath: argument + subpath for subpath, _ in structure}


def _structures(
    fingerprints: Mapping[Path, Fingerprint],
    min_depth: int,
) -> dict[Path, _Structure]:
    """Returns the structure of each tree that contains some of the arrays, by path.

    A structure is the set of the paths and sizes of all arrays in a tree. `min_depth`
    is the length of the shortest path of a tree: 1 for the whole result, and 2 for one
    argument, such as `args[0]`.
    """
    trees = defaultdict(set)
    for path, x in fingerprints.items():
        for depth in range(min_depth, len(path)):
            array = (path[depth:], x.size)
            trees[path[:depth]].add(array)
    return {tree: frozenset(arrays) for tree, arrays in trees.items()}


def _enclosing_trees(carry: Carry) -> list[tuple[Path, Path]]:
    """Returns pairs of trees that hold an output and its argument in the same place."""
    trees = {}
    for output, argument in carry.items():
        for depth in range(1, min(len(output), len(argument))):
            if output[-depth:] == argument[-depth:]:
                trees[output[:-depth], argument[:-depth]] = True
    return list(trees)


def _unmatched_trees(
    results: Mapping[Path, _Structure],
    arguments: Mapping[Path, _Structure],
    matched: Carry,
) -> list[tuple[Path, Path]]:
    """Pairs the remaining output and argument trees of each structure, in their order.

    Structures that occur more often on one side than on the other are left out, because
    it is not clear which trees belong together.
    """
    outputs_by_structure = _by_structure(results, matched)
    arguments_by_structure = _by_structure(arguments, matched.values())
    pairs = []
    for structure, argument_trees in arguments_by_structure.items():
        output_trees = outputs_by_structure[structure]
        if len(output_trees) == len(argument_trees):
            pairs += zip(output_trees, argument_trees, strict=True)
    return pairs


def _by_structure(
    structures: Mapping[Path, _Structure],
    excluded: Collection[Path],
) -> dict[_Structure, list[Path]]:
    """Returns the paths of the trees of each structure, without the excluded ones."""
    trees = defaultdict(list)
    for tree, structure in structures.items():
        if tree not in excluded:
            trees[structure].append(tree)
    return trees
