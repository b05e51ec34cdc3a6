"""Read what JAX traced, and run it by another rule."""
