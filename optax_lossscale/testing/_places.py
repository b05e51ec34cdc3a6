"""Which of a step's arguments come back from it, to be given to the next step.

Parameters, moments, batch statistics: what comes back is in a like place, of the same
size, and a change of what was given comes back, too. Of a loss or a prediction that
does not hold.
"""

import itertools

import numpy as np

from optax_lossscale.testing._runs import Path, Run, Trial, flat

_NUDGE = 2.0**-4  # of a number, or from zero
_ALONG = 0.5  # the cosine between two changes, if one comes from the other
_LEAST = 0.05  # of a change that comes back: in an average, only a part of it does


def what_comes_back(trial: Trial, regimes: list[Run]) -> dict[Path, Path]:
    """Of each float that comes back, its place among the outputs and among the arguments.

    One of several regimes is enough to see it: in others, the step may make NaNs, or
    change numbers by more than they are nudged.
    """
    # What is changed in place comes back in its place.
    back = {path: path for path in regimes[0].outputs if path in trial.floats}
    likeness = _likeness(trial, regimes)

    def rank(pair):
        """Places that are alike for longer come first."""
        path, place = pair
        return min(len(path), len(place)), likeness[pair]

    for path, place in sorted(likeness, key=rank, reverse=True):
        if path not in back and place not in back.values():
            back[path] = place
    return back


def _likeness(trial, regimes):
    """Which outputs change along with floats in like places, which are nudged, and how much."""
    random = np.random.default_rng(0)
    arguments = {}
    for place, x in trial.floats.items():
        numbers = arguments.setdefault(place[:2], {})
        numbers[place] = _nudged(x, random)
    likeness = {}
    for numbers, run in itertools.product(arguments.values(), regimes):
        after = trial.run(run.before, numbers).outputs
        for place, path in itertools.product(numbers, run.outputs):
            if path in after and _are_alike(path, place):
                change = _change(trial.floats[place], numbers[place])
                change_of_output = _change(run.outputs[path], after[path])
                cosine = _cosine(change, change_of_output)
                if cosine > likeness.get((path, place), _ALONG):
                    likeness[path, place] = cosine
    return likeness


def _nudged(x, random):
    """An array, each number of it a little off."""
    wide = x.astype(np.result_type(np.float64, x.dtype))
    nudges = random.choice([-_NUDGE, _NUDGE], x.shape)
    nudged = np.where(wide == 0, nudges, wide * (1 + nudges))
    return nudged.astype(x.dtype)


def _are_alike(path, place):
    """Whether an output and an argument are in the same place of what they are in."""
    inner = min(len(path) - 2, len(place) - 2)
    return inner <= 0 or path[-inner:] == place[-inner:]


def _change(before, after):
    """By how much numbers change; zero for what is or becomes infinite."""
    with np.errstate(invalid="ignore"):
        change = flat(after) - flat(before)
    return np.where(np.isfinite(change), change, 0)


def _cosine(change, change_of_output):
    """The cosine between a change of an argument and an output's, if that is large enough."""
    if change.size != change_of_output.size:
        return 0
    along = change @ change_of_output
    norm = np.linalg.norm(change)
    if along <= _LEAST * norm**2:
        return 0
    return along / (norm * np.linalg.norm(change_of_output))
