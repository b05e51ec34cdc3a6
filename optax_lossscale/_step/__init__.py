"""The training step: scales the loss, checks the gradients and runs the optimizer.

`value_and_scaled_grad` in `gradient.py` computes gradients of the loss times the loss
scale, and `with_loss_scale` in `wrapper.py` wraps an Optax optimizer that accepts them.
`step.py` is one step of that optimizer from start to end; it calls the other files.
`metrics.py`, `stuck.py` and `where_applied.py` read the state that a step returns.

A few words have one meaning in all of these files. The *inner* optimizer is the one
that `with_loss_scale` wraps. Gradients are *scaled* until they are divided by the loss
scale, then *unscaled*. A step is *finite* if its gradients and its loss contain no NaN
and no infinity. With a skip rule, the gradient norm must be finite as well. A step is
*applied* if the inner optimizer may change the parameters, and otherwise *skipped*.
"""
