"""The training step: scales the loss, checks the gradients and runs the optimizer.

Each line of a step has its file::

    gradient.py    scaled_grads = grad(loss * loss_scale)
    inputs.py      grads = scaled_grads / loss_scale
    decision.py    should_apply, loss_scale = decide(grads, loss_scale)
    branch.py      if should_apply:
    update.py          params, inner_state = update(grads, inner_state, params)

The loss scales themselves are in `_scales`, and the skip rules in `skips.py`.
`value_and_scaled_grad` computes the first line. The others are the optimizer that
`with_loss_scale` in `wrapper.py` returns, and `step.py` puts them together.
`metrics.py`, `stuck.py` and `where_applied.py` read the state that a step returns.

All other files help these. `get_loss_scale.py` finds the loss scale that an argument
describes or a state holds. `loss.py` checks the loss, `mask.py` reads the argument
`mask`, and `missing_gradients.py` puts zeros in place of missing gradients. `state.py`
defines the state and checks it. `master_weights.py` wraps an inner optimizer so that it
trains 16-bit parameters in float32.

A few words have one meaning in all of these files. The *inner* optimizer is the one
that `with_loss_scale` wraps. Gradients are *scaled* until they are divided by the loss
scale, then *unscaled*. A step is *finite* if its gradients, their norm and its loss
contain no NaN and no infinity. A step is *applied* if the inner optimizer may change
the parameters; otherwise it is *skipped*.
"""
