"""Assertions about training steps, for your own tests.

A training step that handles dtypes or the loss scale wrongly may raise no error and
still train, but more slowly, to a worse result, or only until the first overflow. To
find such mistakes, call these assertions with the step that you train with, its initial
arguments and a small batch, for example in a test for pytest::

    def test_train_step():
        ols.testing.assert_scale_invariant(train_step, params, state, batch)
        ols.testing.assert_survives_overflow(train_step, params, state, batch)
        ols.testing.assert_computes_in(train_step, jnp.float16, params, state, batch)

If the step is wrong, the assertion raises an `AssertionError` that explains the
mistake, names the outputs or source lines concerned, and suggests a fix.

- `assert_scale_invariant` finds outputs that depend on the loss scale, for example
  because the gradients were never scaled. It needs a loss scale that adapts.
- `assert_survives_overflow` finds what a skipped step changes by mistake, for example
  batch statistics. It also accepts a fixed loss scale, or None, as in bfloat16.
- `assert_computes_in` finds matrix products and convolutions that do not compute in the
  dtype that you meant, for example because one input is in float32.
"""

# `assert_computes_in` reads the step's traced program and runs nothing.
#
# The other two run the step without looking into it. An experiment (`_experiment.py`)
# runs it at other loss scales and with perturbed arguments, or, if the loss scale is
# fixed, with NaNs in them. Only one thing inside the step differs from training:
# `metrics` returns the same scale in each run. Each run is a trial (`_trial.py`), whose
# outputs usually show whether the step was skipped.
# - If it was skipped, the loss scale must adapt (`_skipping.py`). The carry, that is,
#   whatever the step passes on to the next step (`_carry.py`), must stay as it was.
# - If it was applied, the outputs must be equal at all loss scales, except where
#   gradients underflow. A sweep (`_sweep.py`) collects the outputs at falling scales,
#   and `_dependence.py` finds differences that underflow does not explain.
# `assert_scale_invariant` checks both, and also master weights and a step at which the
# loss scale grows. `assert_survives_overflow` checks the first only, with a NaN in the
# batch too, and also that devices hold equal copies and that the step returns the state
# and counts the skip in it.
#
# Each check is a function that returns the text of an error, or "" if it finds nothing.
# The text says in its first line what was found; the next ones name the outputs
# concerned and suggest a fix. Several checks often find consequences of one mistake, so
# an assertion raises only the first text that is not empty. A new check goes into
# `_first_fault` or `assert_survives_overflow`, before the checks that may find
# consequences of its fault.

from optax_lossscale.testing._computes_in import assert_computes_in
from optax_lossscale.testing._overflow import assert_survives_overflow
from optax_lossscale.testing._scale_invariance import assert_scale_invariant

__all__ = ["assert_computes_in", "assert_scale_invariant", "assert_survives_overflow"]
