"""The training step: scaled gradients, the decision about them, and the optimizer.

`step.py` is the step as a whole, and calls what the other files do in it. `gradient.py`
makes the scaled gradients that a step is given. `metrics.py`, `stuck.py` and
`where_applied.py` read the state that it returns.
"""
