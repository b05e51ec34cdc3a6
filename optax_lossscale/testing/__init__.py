"""Assertions about training steps, for your own tests.

Each takes a training step and its arguments, and raises an `AssertionError` that says
what is wrong with the step, where, and what to do.
"""

from optax_lossscale._arrays.names import make_public
from optax_lossscale.testing._computes_in import assert_computes_in
from optax_lossscale.testing._overflow import assert_survives_overflow
from optax_lossscale.testing._scale_invariance import assert_scale_invariant

__all__ = ["assert_computes_in", "assert_scale_invariant", "assert_survives_overflow"]

make_public(
    __name__, assert_computes_in, assert_scale_invariant, assert_survives_overflow
)
