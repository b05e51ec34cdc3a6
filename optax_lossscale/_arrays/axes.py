"""The look that all plots share: their axes, their colours and names of styles."""

from typing import Any

from optax_lossscale._arrays import messages

try:
    import matplotlib.pyplot as plt
    from matplotlib import cbook
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D
except ImportError as error:
    raise ImportError(
        "plot needs matplotlib: pip install 'optax_lossscale[plot]'"
    ) from error

GREY = "#8a8f98"
TEAL = "#00798c"


def axes_for(axes: Axes | None, height: float) -> Axes:
    """The given axes, or new ones, with a pale grid and no frame at the top and right.

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


def style_of(style: dict[str, Any]) -> dict[str, Any]:
    """The style of a line under matplotlib's full names, such as `color` for `c`."""
    return cbook.normalize_kwargs(style, Line2D)
