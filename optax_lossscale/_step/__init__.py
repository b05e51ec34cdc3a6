"""The training step: scaled gradients, the decision about them, and the optimizer."""
