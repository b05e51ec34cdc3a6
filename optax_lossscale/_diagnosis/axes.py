"""The look that the picture of a diagnosis and those of `plot` share."""

from optax_lossscale._arrays import messages

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
    """The given axes, or new ones; both get a pale grid, and no frame at top and right.

    `height` is that of a new figure, in inches.
    """
    if axes is None:
        _, axes = plt.subplots(figsize=(7, height), layout="constrained")
    if not isinstance(axes, Axes):
        got = messages.shown(axes)
        raise TypeError(f"axes must be one matplotlib Axes, got {got}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.2)
    return axes
