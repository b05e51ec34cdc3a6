"""Runs any function with its products in 16 bits and everything else as it was traced.

Two passes, each of which knows nothing of the other, turn a traced program into a
function:

- `narrow.py` decides what is computed in 16 bits. `products.py` says which products are
  narrowed, and `derivatives.py` runs functions with a custom derivative.
- `recompute.py` decides what the backward pass keeps. It changes no number.

`autocast.py` holds the public function, which traces, narrows and recomputes.
`cast_inputs.py` gives 16 bits to kernels into which `autocast` cannot look.
"""
