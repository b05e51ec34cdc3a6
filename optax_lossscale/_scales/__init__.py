"""Loss scales: how the number that multiplies the loss adapts to the gradients.

`loss_scale.py` defines the base class, and explains why the loss is scaled. Each other
file defines one loss scale.
"""
