"""Flags that are set by `with` while a function is traced; part of JAX's cache keys.

JAX traces and compiles anew whatever it did before a context was made. So the package
makes all of them when it is imported, which is before the first step, and none in a
module imported later. With jax 0.12, `jax.extend` imports Pallas, which makes one, too.
"""

import jax
import jax.extend

AUTOCAST_DTYPE = jax.make_user_context(None)
"""What `autocast` computes in, while it traces a function; `None` elsewhere."""

OVERFLOWS = jax.make_user_context(False)
"""Whether a fixed loss scale is infinite: for `testing`, in whose steps gradients overflow."""

BLANK_METRICS = jax.make_user_context(False)
"""Whether `metrics` give the first scale, and zeros for its other state: for `testing`."""

IS_REPORTED = jax.make_user_context(False)
"""Whether a report is made: it says itself what is warned of, and tries loss scales of its own."""
