"""Settings that apply while a function is traced, and that JAX's caches know about.

Each setting is one of JAX's user contexts. `with OVERFLOWS(True):` sets it, and a
function that is being traced can read `OVERFLOWS.value`. The traced program depends on
the value, so JAX makes the value part of its cache keys: a function that was compiled
under one value is not used under another.

Creating a context changes the cache keys, too, so JAX compiles again whatever it has
compiled before. That is why all contexts are created here, when the package is
imported, before the first step is compiled. `jax.extend` is imported here for the same
reason: since jax 0.12 it imports Pallas, which creates another context, and the modules
of this package that use it are imported only later.
"""

import jax
import jax.extend

AUTOCAST_DTYPE = jax.make_user_context(None)
"""The dtype of products in a function that `autocast` is tracing; `None` elsewhere."""

OVERFLOWS = jax.make_user_context(False)
"""Whether every fixed loss scale is infinite, so that the gradients of a step overflow.

`testing` sets it. A compiled step holds a fixed scale as a constant, so the scale
cannot be replaced from outside.
"""

BLANK_METRICS = jax.make_user_context(False)
"""Whether `metrics` returns the initial scale, and zeros for the scale's other state.

`testing` sets it, so that the metrics do not count as outputs that depend on the scale.
"""

DIAGNOSING = jax.make_user_context(False)
"""Whether `diagnose` is tracing the function.

If it is, no warnings are issued, because the report contains them. And `scale_gradient`
scales nothing, because `diagnose` itself tries loss scales.
"""
