"""Loss scaling for JAX, as an Optax gradient transformation."""

import importlib
from typing import TYPE_CHECKING

from optax_lossscale import presets, skips
from optax_lossscale._arrays.finite import all_finite
from optax_lossscale._diagnosis.metrics import metrics
from optax_lossscale._diagnosis.stuck import LossScaleError, raise_if_stuck
from optax_lossscale._scales.dynamic import DynamicLossScale
from optax_lossscale._scales.fixed import FixedLossScale
from optax_lossscale._scales.get import get, get_loss_scale
from optax_lossscale._scales.headroom import HeadroomLossScale
from optax_lossscale._scales.loss_scale import LossScale
from optax_lossscale._scales.stateful import state_field
from optax_lossscale._step.gradient import scale_gradient, value_and_scaled_grad
from optax_lossscale._step.master_weights import MasterWeightsState, with_master_weights
from optax_lossscale._step.state import LossScaleState
from optax_lossscale._step.where_applied import where_applied
from optax_lossscale._step.wrapper import LossScaledTransformation, with_loss_scale

# The modules that read programs or draw are imported when they are used.
if TYPE_CHECKING:
    from optax_lossscale import plot as plot
    from optax_lossscale import testing
    from optax_lossscale._autocast.autocast import autocast
    from optax_lossscale._autocast.cast_inputs import cast_inputs
    from optax_lossscale._diagnosis.diagnose import diagnose
    from optax_lossscale._diagnosis.dtypes import dtype_report
else:  # A type checker that saw `__getattr__` would accept every misspelt name.
    _FILES = {
        "autocast": "_autocast.autocast",
        "cast_inputs": "_autocast.cast_inputs",
        "diagnose": "_diagnosis.diagnose",
        "dtype_report": "_diagnosis.dtypes",
    }

    def __getattr__(name):
        if name in ("plot", "testing"):
            return importlib.import_module(f"optax_lossscale.{name}")
        if name in _FILES:
            module = importlib.import_module(f"optax_lossscale.{_FILES[name]}")
            return globals().setdefault(name, getattr(module, name))
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__():
        return sorted({*globals(), *__all__})


__version__ = "0.3.0"

__all__ = [
    "DynamicLossScale",
    "FixedLossScale",
    "HeadroomLossScale",
    "LossScale",
    "LossScaleError",
    "LossScaleState",
    "LossScaledTransformation",
    "MasterWeightsState",
    "all_finite",
    "autocast",
    "cast_inputs",
    "diagnose",
    "dtype_report",
    "get",
    "get_loss_scale",
    "metrics",
    "presets",
    "raise_if_stuck",
    "scale_gradient",
    "skips",
    "state_field",
    "testing",
    "value_and_scaled_grad",
    "where_applied",
    "with_loss_scale",
    "with_master_weights",
]
