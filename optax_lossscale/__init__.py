"""Loss scaling for JAX, as an Optax gradient transformation."""

import importlib
from typing import TYPE_CHECKING

from optax_lossscale import presets, skips, testing
from optax_lossscale._arrays.finite import all_finite
from optax_lossscale._autocast.autocast import autocast
from optax_lossscale._diagnosis.accuracy import GradientError
from optax_lossscale._diagnosis.calibration import InitialScale, find_initial_scale
from optax_lossscale._diagnosis.check import LossScaleError, check
from optax_lossscale._diagnosis.diagnose import diagnose
from optax_lossscale._diagnosis.dtypes import DtypeReport, Operation, dtype_report
from optax_lossscale._diagnosis.explain import Explanation, explain, nonfinite_leaves
from optax_lossscale._diagnosis.metrics import metrics
from optax_lossscale._diagnosis.moments import Moments
from optax_lossscale._diagnosis.origin import Suspect
from optax_lossscale._diagnosis.page import Diagnosis, Underflow
from optax_lossscale._diagnosis.summary import Summary
from optax_lossscale._diagnosis.tap import Probe, probe, tap
from optax_lossscale._diagnosis.underflow import UnderflowReport, underflow_report
from optax_lossscale._scales.dynamic import DynamicLossScale
from optax_lossscale._scales.fixed import FixedLossScale
from optax_lossscale._scales.get import get, get_loss_scale
from optax_lossscale._scales.headroom import HeadroomLossScale
from optax_lossscale._scales.logmax import LogMaxLossScale
from optax_lossscale._scales.loss_scale import LossScale
from optax_lossscale._scales.stateful import state
from optax_lossscale._scales.tolerance import ToleranceLossScale
from optax_lossscale._step.gradient import grad, scale_gradient, scale_loss, value_and_grad
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


__version__ = "0.2.0"

__all__ = [
    "Diagnosis",
    "DtypeReport",
    "DynamicLossScale",
    "Explanation",
    "FixedLossScale",
    "GradientError",
    "HeadroomLossScale",
    "InitialScale",
    "LogMaxLossScale",
    "LossScale",
    "LossScaleError",
    "LossScaleState",
    "LossScaledTransformation",
    "MasterWeightsState",
    "Moments",
    "Operation",
    "Probe",
    "Summary",
    "Suspect",
    "ToleranceLossScale",
    "Underflow",
    "UnderflowReport",
    "all_finite",
    "autocast",
    "check",
    "diagnose",
    "dtype_report",
    "explain",
    "find_initial_scale",
    "get",
    "get_loss_scale",
    "grad",
    "metrics",
    "nonfinite_leaves",
    "presets",
    "probe",
    "scale_gradient",
    "scale_loss",
    "skips",
    "state",
    "tap",
    "testing",
    "underflow_report",
    "value_and_grad",
    "where_applied",
    "with_loss_scale",
    "with_master_weights",
]
