"""Settings that apply while a function is traced and are part of JAX's cache keys.

For example, `diagnose` traces a loss function under `with DIAGNOSING(True):`. A call of
`scale_gradient` inside that function reads `DIAGNOSING.value` and scales nothing.

A traced program depends on these settings, so they are user contexts of JAX rather than
global variables. JAX makes the value of a user context part of its cache keys, so a
program that was compiled under one value never runs under another.

Do not create a context elsewhere: a new context changes the cache keys, so every
function that was compiled before would be compiled again. The contexts here are created
when the package is imported, before the first step is compiled. `jax.extend` is
imported here for the same reason: since jax 0.12 it imports Pallas, which creates
another context, and the modules of this package that use `jax.extend` are imported only
later.
"""

import jax
import jax.extend

AUTOCAST_DTYPE = jax.make_user_context(None)
"""The dtype of products in a function that `autocast` is tracing; `None` elsewhere."""

TESTING_METRICS = jax.make_user_context(False)
"""Whether `metrics` returns the initial scale and zeros for the scale's other state.

`testing` sets this, because `assert_scale_invariant` would otherwise find that the
metrics depend on the loss scale, as they should.
"""

DIAGNOSING = jax.make_user_context(False)
"""Whether `diagnose` is tracing the function.

If it is, this package issues no warnings and `scale_gradient` scales nothing, because
`diagnose` itself reports on dtypes and tries loss scales.
"""
