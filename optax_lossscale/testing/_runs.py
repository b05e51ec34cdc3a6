"""The runs of a training step at many loss scales."""

from collections.abc import Callable
from functools import cache
from itertools import islice
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from optax_lossscale._scales.loss_scale import LossScale
from optax_lossscale.testing._run import Run

# The exponents of the loss scales to try, falling. Their distances alternate, as the rounding of
# 1/3, of which every second bit is set, could follow the scale at equal ones.
_EXPONENTS = [5 * i + j for i in range(25, -13, -1) for j in (0, -2)]
_COARSE, _BETWEEN = 6, 15  # so many of them at once on the way down to one at which it is applied
_LOWEST = -125  # all gradients underflow, or nearly
# A step that is applied even here computes in float32 or bfloat16, where nothing underflows at the
# loss scales that matter, which are those from _START down.
_WIDE, _START = 95, 30
_ENOUGH, _MOST = 8, 13  # loss scales at which it is applied
# In float16 there are 40 exponents from overflow to zero. So far below the highest loss scale, few
# gradients underflow, and those are small.
_REACH = 20
_LONGEST_INTERVAL = 100_000  # steps


class Runs(NamedTuple):
    """The runs of a step on the same arguments.

    Attributes:
      falling: those applied, from the highest loss scale down.
      reach: the least exponent at which little underflows, or more than there are if it is unknown
        which steps were applied.
      again: the first of them once more.
      lowest: the run at which all gradients underflow, if there is one and it was applied.
      infinite: the run at an infinite loss scale, or None if the step stopped there by itself.
      growing: the run at which the loss scale grows, if it ever does.
      steady: the run at the same loss scale at which it does not grow.
    """

    falling: list[Run]
    reach: int
    again: Run
    lowest: Run | None
    infinite: Run | None
    growing: Run | None
    steady: Run

    @property
    def compared(self) -> list[Run]:
        """Those in which an output is looked at, or recognized as a loss scale."""
        return [*self.falling, *([self.growing] if self.growing else [])]


def make_runs(run_with: Callable[[LossScale], Run], loss_scale: LossScale) -> Runs:
    """The runs of a step, which is given a loss scale, at falling ones and at some others."""
    at = cache(lambda exponent: run_with(_at(loss_scale, 2.0**exponent)))
    highest = next((k for k in _EXPONENTS[::_COARSE] if at(k).was_applied), _EXPONENTS[-1])
    is_wide = highest >= _WIDE
    start = _START if is_wide else highest + _BETWEEN
    applied = (at(k) for k in _EXPONENTS if k <= start and at(k).was_applied)
    falling = list(islice(applied, _MOST))
    if len(falling) < _ENOUGH:
        raise ValueError(
            f"the step is skipped at all but {len(falling)} loss scales from "
            f"2**{_EXPONENTS[0]} to 2**{_EXPONENTS[-1]}: look for NaN or inf in the arguments, "
            "the loss and the model; explain(nonfinite_leaves(scaled_grads)) says where"
        )
    usual = np.log2(np.max(loss_scale.loss_scale))
    steady = min(falling, key=lambda run: abs(run.exponent - usual))
    about_to_grow = _about_to_grow(_at(loss_scale, 2.0**steady.exponent))
    lowest = None if is_wide or not at(_LOWEST).was_applied else at(_LOWEST)
    reach = _EXPONENTS[-1] if is_wide else falling[0].exponent - _REACH
    return Runs(
        falling,
        reach=reach if falling[0].flags else _EXPONENTS[0],
        again=run_with(_at(loss_scale, 2.0 ** falling[0].exponent)),
        lowest=lowest,
        infinite=_unless_it_stops(run_with, _at(loss_scale, np.inf)),
        growing=run_with(about_to_grow) if about_to_grow else None,
        steady=steady,
    )


def _at(loss_scale: LossScale, scale: float) -> LossScale:
    return loss_scale.replace(loss_scale=jnp.full_like(loss_scale.loss_scale, scale))


def _about_to_grow(loss_scale: LossScale) -> LossScale | None:
    """The loss scale with such counters that the next finite step changes it, if ever one does."""
    steps, advanced = _advanced(jax.tree.map(jnp.asarray, loss_scale))
    return advanced if steps < _LONGEST_INTERVAL else None


@jax.jit
def _advanced(loss_scale: LossScale) -> tuple[jax.Array, LossScale]:
    """The finite steps that change nothing but counters, and the loss scale after them."""

    def goes_on(carry):
        steps, now, after = carry
        return (steps < _LONGEST_INTERVAL) & jnp.all(now() == after())

    def next_step(carry):
        steps, _, after = carry
        return steps + 1, after, after.adjust(True)

    steps, now, _ = lax.while_loop(goes_on, next_step, (0, loss_scale, loss_scale.adjust(True)))
    return steps, now


def _unless_it_stops(run_with: Callable[[LossScale], Run], loss_scale: LossScale) -> Run | None:
    try:
        return run_with(loss_scale)
    except Exception:  # of `raise_if_stuck`, or of a logger that has no integer for infinity
        return None
