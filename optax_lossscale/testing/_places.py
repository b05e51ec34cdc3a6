"""Which of a step's arguments come back from it, to be given to the next step.

Parameters, moments, batch statistics: what comes back is in a like place, of the same size, and a
change of what was given comes back, too. Of a loss or a prediction that does not hold.
"""

import collections
import itertools

import numpy as np

from optax_lossscale.testing._runs import Path, Run, Trial, flat

_NUDGE = 2.0**-4  # of a number, or from zero
_ALONG = 0.5  # the cosine between two changes, if one comes from the other
_LEAST = 0.05  # of a change that comes back: in an average, only a part of it does


def what_comes_back(trial: Trial, runs: list[Run]) -> dict[Path, Path]:
    """Of each float that comes back, its place among the outputs and among the arguments.

    One of several runs is enough to see it: others may make NaNs, or change numbers by more than
    they are nudged.
    """
    # What is changed in place comes back in its place.
    back = {path: path for path in runs[0].outputs if path in trial.floats}
    likeness = collections.defaultdict(float)
    for run, numbers in itertools.product(runs, _nudged(trial)):
        nudged = trial.run(run.before, numbers)
        for pair in itertools.product(run.outputs.keys() - back.keys(), numbers):
            path, place = pair
            if path in nudged.outputs and _are_alike(path, place):
                given = flat(trial.floats[place]), flat(numbers[place])
                made = run.outputs[path], nudged.outputs[path]
                likeness[pair] = max(likeness[pair], _cosine(given, made))
    # The places that are alike for longer come first.
    order = sorted(likeness, key=lambda pair: (min(map(len, pair)), likeness[pair]), reverse=True)
    for path, place in order:
        is_new = path not in back and place not in back.values()
        if likeness[path, place] > _ALONG and is_new:
            back[path] = place
    return back


def _nudged(trial):
    """The floats of each argument, a little off."""
    random = np.random.default_rng(0)
    nudged = collections.defaultdict(dict)
    for path, x in trial.floats.items():
        sizes = _NUDGE * random.uniform(0.5, 1.5, x.shape)
        factors = 1 + sizes * random.choice([-1, 1], x.shape)
        wide = x.astype(np.result_type(np.float64, x.dtype))
        nudged[path[:2]][path] = np.where(wide == 0, sizes, wide * factors).astype(x.dtype)
    return nudged.values()


def _are_alike(path, place):
    """Whether an output and an argument are in the same place of what they are in."""
    inner = min(len(path) - 2, len(place) - 2)
    return inner <= 0 or path[-inner:] == place[-inner:]


def _cosine(given, made):
    """The cosine between a change of an argument and one of an output, if it is large enough."""
    if given[0].size != made[0].size:
        return 0
    numbers = np.stack([*given, *made])
    numbers = numbers[:, np.isfinite(numbers).all(axis=0)]
    change = numbers[1] - numbers[0]
    response = numbers[3] - numbers[2]
    along = change @ response
    norm = np.linalg.norm(change)
    return along / norm / np.linalg.norm(response) if along > _LEAST * norm**2 else 0
