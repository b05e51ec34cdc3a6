"""Settings that hold while a function is traced, and that JAX's caches know about.

Each is one of JAX's user contexts: `with OVERFLOWS(True):` sets it, and
`OVERFLOWS.value` reads it, also from a function that is being traced. What is traced
depends on the value, so JAX makes the value part of the key of its caches: a function
that was compiled under one value is not used under another.

Creating a context changes the keys, too, and whatever JAX compiled before is compiled
again. So all contexts are made here, when the package is imported, which comes before
the first step. `jax.extend` is imported here for the same reason: some modules of this
package import it later, and from jax 0.12 on it imports Pallas, which makes a context
of its own.
"""

import jax
import jax.extend

AUTOCAST_DTYPE = jax.make_user_context(None)
"""The dtype of products in a function that `autocast` is tracing; `None` elsewhere."""

OVERFLOWS = jax.make_user_context(False)
"""Whether every fixed loss scale is infinite, so that the gradients of a step overflow.

`testing` sets it, as a compiled step holds a fixed scale as a constant.
"""

BLANK_METRICS = jax.make_user_context(False)
"""Whether `metrics` returns the initial scale, and zeros for the scale's other state.

`testing` sets it, so that metrics do not count as outputs that depend on the scale.
"""

IS_REPORTED = jax.make_user_context(False)
"""Whether `diagnose` is tracing the function.

Then no warning is given, as the report contains it; and `scale_gradient` scales
nothing, as the report tries loss scales of its own.
"""
