"""What works, and may still change: rescaling inside a model, where no single loss scale fits."""

from optax_lossscale.experimental._rescale import Rescaled, enter, leave, rescale, rescale_model

__all__ = ["Rescaled", "enter", "leave", "rescale", "rescale_model"]
