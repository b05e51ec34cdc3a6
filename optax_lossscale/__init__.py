"""Loss scaling for JAX, as an Optax gradient transformation."""

from optax_lossscale import presets
from optax_lossscale._check import LossScaleError, check
from optax_lossscale._dynamic import DynamicLossScale
from optax_lossscale._finite import all_finite
from optax_lossscale._fixed import FixedLossScale
from optax_lossscale._get import get, get_loss_scale
from optax_lossscale._gradient import grad, scale_loss, value_and_grad
from optax_lossscale._logmax import LogMaxLossScale
from optax_lossscale._loss_scale import LossScale, state
from optax_lossscale._tolerance import ToleranceLossScale
from optax_lossscale._wrapper import LossScaleState, with_loss_scale

__version__ = "0.1.0"

__all__ = [
    "DynamicLossScale",
    "FixedLossScale",
    "LogMaxLossScale",
    "LossScale",
    "LossScaleError",
    "LossScaleState",
    "ToleranceLossScale",
    "all_finite",
    "check",
    "get",
    "get_loss_scale",
    "grad",
    "presets",
    "scale_loss",
    "state",
    "value_and_grad",
    "with_loss_scale",
]
