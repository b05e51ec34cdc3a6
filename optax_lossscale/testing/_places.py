"""Which of a step's arguments come back from it, to be given to the next step.

Parameters, moments, batch statistics: what comes back is in a like place, of the same size, and a
change of what was given comes back, too. Of a loss or a prediction that does not hold.
"""

import numpy as np

from optax_lossscale.testing._runs import Path, Run, Trial, flat

_NUDGE = 2.0**-4  # of a number, or from zero
_ALONG = 0.5  # the cosine between two changes, if one comes from the other
_LEAST = 0.05  # of a change that comes back: in an average, only a part of it does


def what_comes_back(trial: Trial, regimes: list[Run]) -> dict[Path, Path]:
    """Of each float that comes back, its place among the outputs and among the arguments.

    One of several regimes is enough to see it: in others, the step may make NaNs, or change
    numbers by more than they are nudged.
    """
    nudged = _nudged(trial)
    with np.errstate(invalid="ignore"):  # of infinities
        changes = {path: flat(nudged[path]) - flat(x) for path, x in trial.floats.items()}
    runs = {}
    for argument in {path[:2] for path in nudged}:
        numbers = {path: x for path, x in nudged.items() if path[:2] == argument}
        runs[argument] = [trial.run(run.before, numbers) for run in regimes]

    def likeness(path, place):
        """The cosine between the two changes, in the regime where it is larger."""
        pairs = zip(regimes, runs[place[:2]], strict=True)
        made = [[run.outputs.get(path) for run in pair] for pair in pairs]
        return max(_cosine(changes[place], *x) for x in made)

    found = {
        (path, place): likeness(path, place)
        for path, x in regimes[0].outputs.items()
        for place in changes
        if path not in changes and _are_alike(path, place) and x.size == changes[place].size
    }
    # What is changed in place comes back in its place.
    back = {path: path for path in regimes[0].outputs if path in changes}
    # The places that are alike for longer come first.
    order = sorted(found, key=lambda pair: (min(map(len, pair)), found[pair]), reverse=True)
    for path, place in order:
        if found[path, place] > _ALONG and path not in back and place not in back.values():
            back[path] = place
    return back


def _nudged(trial):
    """The arguments' floats, each a little off."""
    random = np.random.default_rng(0)
    nudged = {}
    for path, x in trial.floats.items():
        sizes = _NUDGE * random.uniform(0.5, 1.5, x.shape)
        factors = 1 + sizes * random.choice([-1, 1], x.shape)
        wide = x.astype(np.result_type(np.float64, x.dtype))
        nudged[path] = np.where(wide == 0, sizes, wide * factors).astype(x.dtype)
    return nudged


def _are_alike(path, place):
    """Whether an output and an argument are in the same place of what they are in."""
    inner = min(len(path) - 2, len(place) - 2)
    return inner <= 0 or path[-inner:] == place[-inner:]


def _cosine(given, before, after):
    """The cosine between a change of an argument and one of an output, if it is large enough."""
    if before is None or after is None:
        return 0
    finite = np.isfinite(given) & np.isfinite(before) & np.isfinite(after)
    given, made = given[finite], after[finite] - before[finite]
    along, norm = given @ made, np.linalg.norm(given)
    return along / norm / np.linalg.norm(made) if along > _LEAST * norm**2 else 0
