"""Tools that look closer at the numbers of training than `diagnose`, which sees a whole step.

Reports on gradients and dtypes (`underflow_report`, `dtype_report`, `nonfinite_leaves`), taps
inside the model (`tap`, `probe`), the place where numbers stopped being finite (`explain`), and
the loss scale to begin with (`find_initial_scale`).
"""

from optax_lossscale._arrays.names import make_public
from optax_lossscale._diagnosis.accuracy import GradientError
from optax_lossscale._diagnosis.calibration import InitialScale, find_initial_scale
from optax_lossscale._diagnosis.dtypes import DtypeReport, Operation, dtype_report
from optax_lossscale._diagnosis.explain import Explanation, Suspect, explain, nonfinite_leaves
from optax_lossscale._diagnosis.lost import Underflow
from optax_lossscale._diagnosis.moments import Moments
from optax_lossscale._diagnosis.page import Diagnosis
from optax_lossscale._diagnosis.summary import Summary
from optax_lossscale._diagnosis.tap import Probe, probe, tap
from optax_lossscale._diagnosis.underflow import UnderflowReport, underflow_report

__all__ = [
    "Diagnosis",
    "DtypeReport",
    "Explanation",
    "GradientError",
    "InitialScale",
    "Moments",
    "Operation",
    "Probe",
    "Summary",
    "Suspect",
    "Underflow",
    "UnderflowReport",
    "dtype_report",
    "explain",
    "find_initial_scale",
    "nonfinite_leaves",
    "probe",
    "tap",
    "underflow_report",
]

make_public(__name__, *(globals()[name] for name in __all__))
