"""Which of a step's arguments come back from it, to be given to the next step.

Parameters, moments, batch statistics: what comes back is in a like place, of the same
size, and a change of what was given comes back, too. Of a loss or a prediction that
does not hold.
"""

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
    outputs = regimes[0].outputs
    # What is changed in place comes back in its place.
    back = {path: path for path in outputs if path in trial.floats}
    elsewhere = [path for path in outputs if path not in back]
    likeness = _likeness(trial, regimes, elsewhere)

    def rank(pair):
        """Places that are alike for longer come first."""
        path, place = pair
        return min(len(path), len(place)), likeness[pair]

    for pair in sorted(likeness, key=rank, reverse=True):
        path, place = pair
        is_taken = path in back or place in back.values()
        if likeness[pair] > _ALONG and not is_taken:
            back[path] = place
    return back


def _likeness(trial, regimes, outputs):
    """How far outputs change along with floats in like places, which are nudged."""
    random = np.random.default_rng(0)
    arguments = {}
    for place, x in trial.floats.items():
        numbers = arguments.setdefault(place[:2], {})
        numbers[place] = _nudged(x, random)
    likeness = {}
    for numbers in arguments.values():
        pairs = [(run, trial.run(run.before, numbers)) for run in regimes]
        for place, x in numbers.items():
            with np.errstate(invalid="ignore"):  # of infinities
                change = flat(x) - flat(trial.floats[place])
            for path in outputs:
                if _are_alike(path, place):
                    cosines = [_cosine(change, path, *pair) for pair in pairs]
                    likeness[path, place] = max(cosines)
    return likeness


def _nudged(x, random):
    """An array, each number of it a little off."""
    sizes = _NUDGE * random.uniform(0.5, 1.5, x.shape)
    factors = 1 + sizes * random.choice([-1, 1], x.shape)
    wide = x.astype(np.result_type(np.float64, x.dtype))
    nudged = np.where(wide == 0, sizes, wide * factors)
    return nudged.astype(x.dtype)


def _are_alike(path, place):
    """Whether an output and an argument are in the same place of what they are in."""
    inner = min(len(path) - 2, len(place) - 2)
    return inner <= 0 or path[-inner:] == place[-inner:]


def _cosine(change, path, before, after):
    """The cosine between a change of an argument and an output's, if that is large enough."""
    old = before.outputs.get(path)
    new = after.outputs.get(path)
    if old is None or new is None or not old.size == new.size == change.size:
        return 0
    with np.errstate(invalid="ignore"):  # of infinities
        change_of_output = new - old
    are_finite = np.isfinite(change) & np.isfinite(change_of_output)
    change = change[are_finite]
    change_of_output = change_of_output[are_finite]
    along = change @ change_of_output
    norm = np.linalg.norm(change)
    if along <= _LEAST * norm**2:
        return 0
    return along / (norm * np.linalg.norm(change_of_output))
