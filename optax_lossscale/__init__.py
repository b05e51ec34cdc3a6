"""Loss scaling for JAX, as an Optax gradient transformation."""

import importlib
from typing import TYPE_CHECKING

from optax_lossscale import diagnosis, presets, skips, testing
from optax_lossscale._arrays.finite import all_finite
from optax_lossscale._autocast.autocast import autocast
from optax_lossscale._diagnosis.diagnose import diagnose
from optax_lossscale._diagnosis.metrics import metrics
from optax_lossscale._diagnosis.stuck import LossScaleError, raise_if_stuck
from optax_lossscale._scales.dynamic import DynamicLossScale
from optax_lossscale._scales.fixed import FixedLossScale
from optax_lossscale._scales.get import get, get_loss_scale
from optax_lossscale._scales.headroom import HeadroomLossScale
from optax_lossscale._scales.logmax import LogMaxLossScale
from optax_lossscale._scales.loss_scale import LossScale
from optax_lossscale._scales.stateful import state_field
from optax_lossscale._scales.tolerance import ToleranceLossScale
from optax_lossscale._step.gradient import grad, scale_gradient, value_and_grad
from optax_lossscale._step.master_weights import MasterWeightsState, with_master_weights
from optax_lossscale._step.state import LossScaleState
from optax_lossscale._step.where_applied import where_applied
from optax_lossscale._step.wrapper import LossScaledTransformation, with_loss_scale

if TYPE_CHECKING:
    from optax_lossscale import plot as plot
else:
    # Not imported with the rest, as it needs matplotlib. (A type checker that saw this
    # function would take every misspelt name for a right one.)
    def __getattr__(name):
        if name == "plot":
            return importlib.import_module("optax_lossscale.plot")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__version__ = "0.3.0"

__all__ = [
    "DynamicLossScale",
    "FixedLossScale",
    "HeadroomLossScale",
    "LogMaxLossScale",
    "LossScale",
    "LossScaleError",
    "LossScaleState",
    "LossScaledTransformation",
    "MasterWeightsState",
    "ToleranceLossScale",
    "all_finite",
    "autocast",
    "diagnose",
    "diagnosis",
    "get",
    "get_loss_scale",
    "grad",
    "metrics",
    "presets",
    "raise_if_stuck",
    "scale_gradient",
    "skips",
    "state_field",
    "testing",
    "value_and_grad",
    "where_applied",
    "with_loss_scale",
    "with_master_weights",
]
