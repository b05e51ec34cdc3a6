"""Assertions about training steps, for your own tests.

Each takes a training step and its arguments. If the step is wrong, it raises an
`AssertionError` that says how, names the outputs or source lines concerned, and
suggests a fix.
"""

# Two of the assertions know nothing of the step but what it does. Their evidence is
# trials (`_trial.py`): runs of the step (`_experiment.py`) at other loss scales and with
# other numbers, most of which say whether the step was applied.
# - Where it was skipped, what comes back to the step (`_carry.py`) must be as it was
#   given, and the loss scale must adapt (`_skipping.py`). `assert_survives_overflow`
#   uses only runs like these.
# - Where it was applied, at falling loss scales (`_sweep.py`), the outputs must be the
#   same (`_dependence.py`), but for underflow. `assert_scale_invariant` uses both.
# `assert_computes_in` runs nothing: it reads the traced program.

from optax_lossscale._arrays.names import make_public
from optax_lossscale.testing._computes_in import assert_computes_in
from optax_lossscale.testing._overflow import assert_survives_overflow
from optax_lossscale.testing._scale_invariance import assert_scale_invariant

__all__ = ["assert_computes_in", "assert_scale_invariant", "assert_survives_overflow"]

make_public(
    __name__, assert_computes_in, assert_scale_invariant, assert_survives_overflow
)
