"""Assertions about training steps, for your own tests.

A training step that handles dtypes or the loss scale wrongly may raise no error and
still train, but more slowly, to a worse result, or only until the first overflow. To
find such mistakes, call these assertions with the step that you train with, its initial
arguments and a small batch, for example in a test for pytest::

    def test_train_step():
        ols.testing.assert_scale_invariant(train_step, params, state, batch)
        ols.testing.assert_survives_overflow(train_step, params, state, batch, nan_in=2)
        ols.testing.assert_computes_in(train_step, jnp.float16, params, state, batch)

A toy configuration of the model will do, as the mistakes are not in its size. If the
step is wrong, an assertion raises an `AssertionError` that names the results or source
lines concerned, and says what to write instead.

- `assert_scale_invariant` finds results that depend on the loss scale, for example
  because the gradients were never scaled. It needs a loss scale that adapts.
- `assert_survives_overflow` finds what a skipped step changes by mistake, for example
  batch statistics. With `nan_in`, it also accepts a fixed loss scale, or None, as in
  bfloat16.
- `assert_computes_in` finds matrix products and convolutions that do not compute in the
  dtype that you meant, for example because one input is in float32.
"""

from optax_lossscale.testing._assertions import (
    assert_computes_in,
    assert_scale_invariant,
    assert_survives_overflow,
)

__all__ = ["assert_computes_in", "assert_scale_invariant", "assert_survives_overflow"]
