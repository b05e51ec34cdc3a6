"""The style that `Diagnosis.plot` and the functions of `ols.plot` share.

Importing this file imports matplotlib, which is optional, so `Diagnosis.plot` imports
this file only when it is called. Without matplotlib, an `ImportError` says how to
install it.
"""

from optax_lossscale._arrays import checks

try:
    import matplotlib.pyplot as plt
    from matplotlib.axes import Axes
except ImportError as error:
    raise ImportError(
        "plot needs matplotlib: pip install 'optax_lossscale[plot]'"
    ) from error

GREY = "#8a8f98"
TEAL = "#00798c"


def axes_for(axes: Axes | None, height: float) -> Axes:
    """Returns the given or new axes, with a pale grid and a frame on two sides only.

    Args:
      axes: one matplotlib `Axes`, or None to make a new figure.
      height: the height of a new figure, in inches.

    Raises:
      TypeError: if `axes` is something else, such as an array of `Axes`.
    """
    if axes is None:
        _, axes = plt.subplots(figsize=(7, height), layout="constrained")
    if not isinstance(axes, Axes):
        got = checks.shown(axes)
        raise TypeError(f"axes must be one matplotlib Axes, got {got}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.2)
    return axes
