"""What the functions that are traced inside of a `with` are told, and JAX's caches of them heed.

JAX traces and compiles anew whatever it did before a context was made. So the package
makes all of them when it is imported, which is before the first step, and none in a
module imported later.
"""

import jax

AUTOCAST_DTYPE = jax.make_user_context(None)
"""What `autocast` computes in, while it traces a function; `None` elsewhere."""

OVERFLOWS = jax.make_user_context(False)
"""Whether a fixed loss scale is infinite: for `testing`, in whose steps gradients overflow."""

BLANK_METRICS = jax.make_user_context(False)
"""Whether `metrics` are of a loss scale at its start: for `testing`, which compares the rest."""

IS_REPORTED = jax.make_user_context(False)
"""Whether a report is made: it says itself what is warned of, and tries loss scales of its own."""
