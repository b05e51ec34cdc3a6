"""The report of `diagnose`: its page, and its plot."""

import dataclasses
import math
from typing import TYPE_CHECKING, NamedTuple

from optax_lossscale._diagnosis.dtypes import DtypeReport
from optax_lossscale._diagnosis.table import TOLERANCE, Row
from optax_lossscale._diagnosis.text import aligned, percent

if TYPE_CHECKING:
    from optax_lossscale._diagnosis.axes import Axes

_MOST_ROWS = 5
"""The page shows no more suspects, products of one, and parameters than this."""


class GradientFigures(NamedTuple):
    """The gradient of a parameter beside float32's.

    Attributes:
      error: the norm of the difference over that of float32's gradient, at the loss
        scale that fits; infinite if it is not finite though float32's is.
      lost: of the elements that are not zero in float32, the share that is zero at the
        loss scale that fits.
      lost_unscaled: the same share at a loss scale of 1.
      size: the norm of float32's gradient.
    """

    error: float
    lost: float
    lost_unscaled: float
    size: float


@dataclasses.dataclass(frozen=True, eq=False)
class Diagnosis:
    """The report of `diagnose`; print it to see all.

    Attributes:
      is_autocast: whether the loss function was run as `autocast` makes it.
      dtypes: the dtypes of the products, as of `dtype_report`.
      loss: the loss.
      loss_in_float32: the loss in float32.
      loss_error: its relative error.
      gradients: the `GradientFigures` of each parameter, by its name.
      error: the relative error of all gradients together.
      suspects: the rows where the loss or a gradient goes wrong, the worst first, each
        with a `cause`: `overflows`, `vanishes`, `cancels` or `rounds`.
      largest_error: the row in which the largest error arises; None if there is none.
      initial_scale: the loss scale that fits: two bits less than the largest at which
        nothing overflows; 1 if no result of the backward pass is float16.
      overflow: the row that overflows first at a larger scale; None if none does.
      loss_scale: the loss scale in the optimizer's state; None if none was given.
      not_finite: the names of the arguments that hold NaNs or infinities.
      not_compared: the rows that ran as they are, and not in float32.
      table: a row for each equation that ran, at the scale that fits.
    """

    is_autocast: bool
    dtypes: DtypeReport
    loss: float
    loss_in_float32: float
    loss_error: float
    gradients: dict[str, GradientFigures]
    error: float
    suspects: tuple[Row, ...]
    largest_error: Row | None
    initial_scale: float
    overflow: Row | None
    loss_scale: float | None
    not_finite: tuple[str, ...]
    not_compared: tuple[Row, ...]
    table: tuple[Row, ...]

    def plot(self, axes: "Axes | None" = None) -> "Axes":
        """Draws the magnitudes along the program, with float16's range shaded.

        A dot is the largest magnitude of an equation's result in float32, at the loss
        scale that fits, and a line leads from it to the typical one. A dotted line
        marks where the backward pass begins. What float16 rounds to zero or infinity is
        shaded.

        Args:
          axes: matplotlib's axes to draw into. By default, a new figure is created.

        Returns:
          The axes.
        """
        from optax_lossscale._diagnosis.axes import draw_magnitudes

        return draw_magnitudes(self.table, axes)

    def __str__(self) -> str:
        lines = [
            self._dtypes_text(),
            f"Loss: {self.loss:.6g}, in float32 {self.loss_in_float32:.6g}; off by "
            f"{percent(self.loss_error)}.",
            self._gradients_text(),
        ]
        if self.not_finite:
            lines.append(f"Not finite: {_abridged(self.not_finite)}.")
        lines += [*self._suspects_lines(), self._scale_text(), *self._lost_lines()]
        if self.not_compared:
            places = dict.fromkeys(row.place for row in self.not_compared)
            lines.append(f"Not compared with float32: {_abridged([*places])}.")
        return "\n".join(lines)

    def _dtypes_text(self) -> str:
        shares = [
            f"{dtype} ({share:.1%} of the multiplications)"
            for dtype, share in self.dtypes.shares.items()
        ]
        how = ", as autocast makes it" if self.is_autocast else ""
        return f"Products: {', '.join(shares) or 'none'}{how}."

    def _gradients_text(self) -> str:
        counted = self.counted_gradients
        if not counted:
            return "Gradients: none, or all are zero."
        worst = max(counted, key=lambda name: counted[name].error)
        return (
            f"Gradients at a loss scale of {scale_name(self.initial_scale)}: off by "
            f"{percent(self.error)} together, and by {percent(counted[worst].error)} at "
            f"most, that of {worst}."
        )

    @property
    def counted_gradients(self) -> dict[str, GradientFigures]:
        """The gradients that are not negligible beside the others."""
        return counted(self.gradients)

    def _suspects_lines(self) -> list[str]:
        if self.suspects:
            lines = ["Where it goes wrong:"]
            for row in self.suspects[:_MOST_ROWS]:
                also = "" if row.is_finite_in_float32 else ", in float32, too"
                lines.append(f"  {row.cause}{also}: {row.place}")
                lines += [f"    made by {x.place}" for x in row.products[:_MOST_ROWS]]
            return lines
        if self.largest_error is None:
            return []
        error = percent(self.largest_error.error)
        return [
            f"Nothing is off by {TOLERANCE:.0%}. The largest error, {error}, arises in "
            f"{self.largest_error.place}."
        ]

    def _scale_text(self) -> str:
        text = f"Loss scale: {scale_name(self.initial_scale)} fits"
        if any(x.error == math.inf for x in self.gradients.values()):
            text += " where the above is right"
        if self.overflow is not None:
            scale = scale_name(self.initial_scale * OVERFLOWS)
            text += f"; from {scale} on, {self.overflow.place} overflows"
        if self.loss_scale is not None:
            text += f"; the optimizer's state has {scale_name(self.loss_scale)}"
        return f"{text}."

    def _lost_lines(self) -> list[str]:
        lost = {
            name: (figures.lost_unscaled, figures.lost)
            for name, figures in self.counted_gradients.items()
            if max(figures.lost_unscaled, figures.lost) > 0
        }
        if not lost:
            return ["Lost: no element of a gradient becomes zero, scaled or not."]
        rows = [("Lost:", "at 1", f"at {scale_name(self.initial_scale)}")]
        for name in sorted(lost, key=lambda name: max(lost[name]), reverse=True):
            rows.append((f"  {name}", *map(percent, lost[name])))
        return aligned(rows[: _MOST_ROWS + 1])


OVERFLOWS = 8.0
"""Where the first result overflows, over the scale that fits.

That scale is two bits below the largest power of two at which nothing overflows.
"""

_NEGLIGIBLE = 1e-4
"""A gradient that is smaller than this share of all gradients does not count.

A bias before a normalization has a gradient of zero, up to rounding, in any dtype.
"""


def counted(gradients: dict[str, GradientFigures]) -> dict[str, GradientFigures]:
    """Returns the gradients that are not negligible beside the others."""
    whole = math.hypot(*(x.size for x in gradients.values()))
    return {
        name: x
        for name, x in gradients.items()
        if x.error == math.inf or x.size > _NEGLIGIBLE * whole
    }


def scale_name(scale: float) -> str:
    """Writes a loss scale: `2**15` for a power of two other than 1, else a decimal."""
    mantissa, exponent = math.frexp(scale)
    is_power = mantissa == 0.5 and scale != 1
    return f"2**{exponent - 1}" if is_power else f"{scale:g}"


def _abridged(names) -> str:
    shown = ", ".join(names[:_MOST_ROWS])
    n_hidden = len(names) - _MOST_ROWS
    return f"{shown} and {n_hidden} more" if n_hidden > 0 else shown
