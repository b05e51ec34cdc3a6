"""Loss scaling for JAX, as an Optax gradient transformation."""

from optax_lossscale import presets
from optax_lossscale._calibration import InitialScale, find_initial_scale
from optax_lossscale._check import LossScaleError, check
from optax_lossscale._dynamic import DynamicLossScale
from optax_lossscale._explain import Explanation, Suspect, explain, nonfinite_leaves
from optax_lossscale._finite import all_finite
from optax_lossscale._fixed import FixedLossScale
from optax_lossscale._get import get, get_loss_scale
from optax_lossscale._gradient import grad, scale_loss, value_and_grad
from optax_lossscale._logmax import LogMaxLossScale
from optax_lossscale._loss_scale import LossScale, state
from optax_lossscale._metrics import metrics
from optax_lossscale._summary import Summary
from optax_lossscale._tap import Probe, probe, tap
from optax_lossscale._tolerance import ToleranceLossScale
from optax_lossscale._underflow import UnderflowReport, underflow_report
from optax_lossscale._wrapper import LossScaleState, with_loss_scale

__version__ = "0.1.0"

__all__ = [
    "DynamicLossScale",
    "Explanation",
    "FixedLossScale",
    "InitialScale",
    "LogMaxLossScale",
    "LossScale",
    "LossScaleError",
    "LossScaleState",
    "Probe",
    "Summary",
    "Suspect",
    "ToleranceLossScale",
    "UnderflowReport",
    "all_finite",
    "check",
    "explain",
    "find_initial_scale",
    "get",
    "get_loss_scale",
    "grad",
    "metrics",
    "nonfinite_leaves",
    "presets",
    "probe",
    "scale_loss",
    "state",
    "tap",
    "underflow_report",
    "value_and_grad",
    "with_loss_scale",
]
