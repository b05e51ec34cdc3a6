"""The training step: scales the loss, checks the gradients and runs the optimizer.

A step computes the following, and each line has its file::

    scaled_grads = grad(loss * loss_scale)                  # gradient.py
    grads = scaled_grads / loss_scale                       # inputs.py
    should_apply, loss_scale = decide(grads, loss_scale)    # decision.py
    if should_apply:                                        # branch.py
        params, inner_state = inner_step(grads, inner_state, params)    # update.py

`value_and_scaled_grad` is the first line. The others are the optimizer that
`with_loss_scale` in `wrapper.py` returns, and `step.py` puts them together.
`metrics.py`, `stuck.py` and `where_applied.py` read the state that a step returns.

A few words have one meaning in all of these files. The *inner* optimizer is the one
that `with_loss_scale` wraps. Gradients are *scaled* until they are divided by the loss
scale, then *unscaled*. A step is *finite* if its gradients and its loss contain no NaN
and no infinity. With a skip rule, the gradient norm must be finite as well. A step is
*applied* if the inner optimizer may change the parameters, and otherwise *skipped*.
"""
