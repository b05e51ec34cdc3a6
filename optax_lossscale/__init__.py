"""float16 training in JAX with Optax: autocast and loss scaling.

    import optax, optax_lossscale as ols

    tx = ols.with_loss_scale(optax.adamw(1e-3))
    state = tx.init(params)
    loss, params, state = tx.minimize(ols.autocast(loss_fn), state, params, batch)

Each function and each loss scale has an example in its docstring, as in
`help(ols.with_loss_scale)`.

Take a step:
    with_loss_scale          wraps an optimizer to accept gradients of a scaled loss
    skip_nonfinite           wraps one to skip steps that are not finite, for bfloat16
    value_and_scaled_grad    computes the loss and the gradients of the scaled loss
    scale_gradient           scales gradients that NNX, Equinox or a trainer computes
    where_applied            restores batch statistics and the like after a skipped step
    with_master_weights      wraps an optimizer to train 16-bit parameters as float32
    all_finite               tells whether every element of a tree is finite

Compute in 16 bits:
    autocast                 runs a function's matrix products in float16 or bfloat16
    cast_inputs              casts the inputs of a kernel to 16 bits under autocast

Choose a loss scale:
    DynamicLossScale         "dynamic", the default: grows, and backs off on overflow
    HeadroomLossScale        "headroom": measures gradients and stays below overflow
    FixedLossScale           a constant, also written as a number; None is a scale of 1
    LossScale                the base class of your own loss scale
    state_field              declares the state of your own loss scale or skip rule
    get_loss_scale           finds the loss scale in an optimizer state

Choose what to skip:
    skips                    rules that skip finite steps with too large a norm or loss

Diagnose, log and test:
    diagnose                 compares a loss and its gradients with float32, line by line
    metrics                  returns what to log at each step
    raise_if_stuck           raises LossScaleError if training cannot continue
    dtype_report             lists which products compute in which dtype, line by line
    plot                     plots loss scales and gradients, with matplotlib
    testing                  assertions about a training step, for your tests

Types of results:
    LossScaledTransformation, LossScaleState, Diagnosis
"""

import importlib
from typing import TYPE_CHECKING

from optax_lossscale import skips
from optax_lossscale._arrays.finite import all_finite
from optax_lossscale._arrays.stateful import state_field
from optax_lossscale._scales.dynamic import DynamicLossScale
from optax_lossscale._scales.fixed import FixedLossScale
from optax_lossscale._scales.headroom import HeadroomLossScale
from optax_lossscale._scales.loss_scale import LossScale
from optax_lossscale._step.get_loss_scale import get_loss_scale
from optax_lossscale._step.gradient import scale_gradient, value_and_scaled_grad
from optax_lossscale._step.master_weights import with_master_weights
from optax_lossscale._step.metrics import metrics
from optax_lossscale._step.state import LossScaleState
from optax_lossscale._step.stuck import LossScaleError, raise_if_stuck
from optax_lossscale._step.where_applied import where_applied
from optax_lossscale._step.wrapper import (
    LossScaledTransformation,
    skip_nonfinite,
    with_loss_scale,
)

# The modules that read programs or draw are imported only when they are used.
if TYPE_CHECKING:
    from optax_lossscale import plot as plot
    from optax_lossscale import testing
    from optax_lossscale._autocast.autocast import autocast
    from optax_lossscale._autocast.cast_inputs import cast_inputs
    from optax_lossscale._diagnosis.diagnose import diagnose
    from optax_lossscale._diagnosis.dtypes import dtype_report
    from optax_lossscale._diagnosis.report import Diagnosis
else:  # If a type checker saw `__getattr__`, it would accept every misspelled name.
    _MODULES = {
        "Diagnosis": "_diagnosis.report",
        "autocast": "_autocast.autocast",
        "cast_inputs": "_autocast.cast_inputs",
        "diagnose": "_diagnosis.diagnose",
        "dtype_report": "_diagnosis.dtypes",
    }

    def __getattr__(name):
        if name in ("plot", "testing"):
            return importlib.import_module(f"optax_lossscale.{name}")
        if name in _MODULES:
            module = importlib.import_module(f"optax_lossscale.{_MODULES[name]}")
            return getattr(module, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__():
        return sorted({*globals(), *__all__, "plot"})


__version__ = "0.5.0"

# `plot` is left out because it needs an extra, which `import *` should not require.
__all__ = [
    "Diagnosis",
    "DynamicLossScale",
    "FixedLossScale",
    "HeadroomLossScale",
    "LossScale",
    "LossScaleError",
    "LossScaleState",
    "LossScaledTransformation",
    "all_finite",
    "autocast",
    "cast_inputs",
    "diagnose",
    "dtype_report",
    "get_loss_scale",
    "metrics",
    "raise_if_stuck",
    "scale_gradient",
    "skip_nonfinite",
    "skips",
    "state_field",
    "testing",
    "value_and_scaled_grad",
    "where_applied",
    "with_loss_scale",
    "with_master_weights",
]
