"""Loss scales: how the number that multiplies the loss adapts to the gradients.

Start with `loss_scale.py`, which defines the base class and explains why the loss is
scaled. Each other file defines one loss scale; `dynamic.py` has the default.
"""
