"""The report of `diagnose`: its page, and its plot."""

import dataclasses
import math
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from optax_lossscale._diagnosis.dtypes import DtypeReport
from optax_lossscale._diagnosis.figures import TOLERANCE
from optax_lossscale._diagnosis.table import Row
from optax_lossscale._diagnosis.text import aligned, percent
from optax_lossscale._scales.loss_scale import LARGEST_SCALE

if TYPE_CHECKING:
    from optax_lossscale._diagnosis.axes import Axes

MOST_SHOWN = 5
"""There are no more suspects, and the page shows no more of anything."""


class GradientFigures(NamedTuple):
    """The gradient of a parameter beside float32's.

    Attributes:
      error: the norm of the difference over that of float32's gradient, at the loss
        scale that fits; infinite if it is not finite though float32's is.
      lost: of the elements that are not zero in float32, the share that is zero at the
        loss scale that fits.
      lost_unscaled: the same share at a loss scale of 1.
      size: the norm of float32's gradient; infinite if that is not finite.
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
      suspects: the rows where the loss or a gradient goes wrong, at most five, the worst
        first, each with a `cause`: `overflows`, `vanishes`, `cancels` or `rounds`.
      largest_error: the row in which the largest error arises; None if there is none.
      initial_scale: the loss scale that fits: two bits less than the largest at which
        nothing overflows; 1 if no result of the backward pass is float16.
      overflow: the row that overflows first at a larger scale, as it is at a scale of
        1; None if none does.
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

    @property
    def error(self) -> float:
        """The relative error of all gradients together."""
        gradients = self.gradients.values()
        size = math.hypot(*(x.size for x in gradients))
        if any(x.error == math.inf for x in gradients) or size == math.inf:
            return math.inf
        distance = math.hypot(*(x.error * x.size for x in gradients))
        return distance / size if size else 0.0

    def __str__(self) -> str:
        lines = [
            self._dtypes_text(),
            self._loss_text(),
            self._gradients_text(),
        ]
        if self.not_finite:
            lines.append(f"Not finite as given: {_abridged(self.not_finite)}")
        lines += [*self._suspects_lines(), self._scale_text(), *self._lost_lines()]
        if self.not_compared:
            places = list(dict.fromkeys(row.place for row in self.not_compared))
            lines.append(f"Not compared with float32: {_abridged(places)}")
        return "\n".join(map(_wrapped, lines))

    def _dtypes_text(self) -> str:
        shares = [
            f"{dtype} ({share:.1%} of the multiplications)"
            for dtype, share in self.dtypes.shares.items()
        ]
        how = ", as autocast makes it" if self.is_autocast else ""
        return f"Products: {', '.join(shares) or 'none'}{how}"

    def _loss_text(self) -> str:
        text = f"Loss: {self.loss:.6g}, in float32 {self.loss_in_float32:.6g}"
        if math.isfinite(self.loss_in_float32):
            text += f"; error {percent(self.loss_error)}"
        return text

    def _gradients_text(self) -> str:
        gradients = counted(self.gradients)
        if not gradients:
            return "Gradients: all zero in float32"
        at_scale = f"at a loss scale of {scale_name(self.initial_scale)}"
        infinite = [name for name, x in gradients.items() if x.size == math.inf]
        if infinite:
            return f"Gradients: not finite, in float32, too, in {_abridged(infinite)}"
        infinite = [name for name, x in gradients.items() if x.error == math.inf]
        if infinite:
            return f"Gradients: not finite in {_abridged(infinite)}, {at_scale}"
        worst = max(gradients, key=lambda name: gradients[name].error)
        return (
            f"Gradients: error {percent(self.error)} together, at most "
            f"{percent(gradients[worst].error)} ({worst}), {at_scale}"
        )

    def _suspects_lines(self) -> list[str]:
        if not self.suspects:
            text = f"Where it goes wrong: nowhere by {TOLERANCE:.0%}"
            if self.largest_error is not None:
                error = percent(self.largest_error.error)
                text += f"; most, {error}, in {self.largest_error.place}"
            return [text]
        lines = ["Where it goes wrong:"]
        for row in self.suspects:
            cause = row.cause
            if not row.is_finite_in_float32:
                cause = "not finite, in float32, too"
            lines.append(f"  {cause}: {row.place}")
            lines += [f"    made by {x.place}" for x in row.products[:MOST_SHOWN]]
        return lines

    def _scale_text(self) -> str:
        scale = scale_name(self.initial_scale)
        text = f"Loss scale: {scale} fits"
        if any(math.inf in (x.error, x.size) for x in self.gradients.values()):
            text = (
                f"Loss scale: none makes all finite; in float32's numbers, {scale} fits"
            )
        if self.overflow is None:
            text += f"; nothing overflows up to {scale_name(LARGEST_SCALE)}"
        else:
            larger = scale_name(self.overflow.overflows_at)
            # Then 16 bits overflow earlier than float32's numbers would.
            is_lower = self.initial_scale < self.overflow.overflows_at / 8
            numbers = "in float32's numbers, " if is_lower else ""
            text += f"; {numbers}at {larger}, {self.overflow.place} overflows"
        if self.loss_scale is not None:
            text += f"; the optimizer's state has {scale_name(self.loss_scale)}"
        return text

    def _lost_lines(self) -> list[str]:
        lost = {
            name: (x.lost_unscaled, x.lost)
            for name, x in counted(self.gradients).items()
            if max(x.lost_unscaled, x.lost) >= _LEAST_SHOWN
        }
        if not lost:
            return ["Lost: no gradient at 1"]
        rows = [("Lost", "at 1", f"at {scale_name(self.initial_scale)}")]
        for name in sorted(lost, key=lambda name: max(lost[name]), reverse=True):
            unscaled, scaled = map(percent, lost[name])
            rows.append((f"  {name}", unscaled, scaled))
        return aligned(rows[: MOST_SHOWN + 1])


_NEGLIGIBLE = 1e-4
"""A gradient that is smaller than this share of all gradients does not count.

A bias before a normalization has a gradient of zero, up to rounding, in any dtype.
"""

_LEAST_SHOWN = 0.0005
"""The least share that is not 0.0% when rounded."""


def counted(gradients: dict[str, GradientFigures]) -> dict[str, GradientFigures]:
    """Returns the gradients that are not negligible beside the others."""
    least = _NEGLIGIBLE * math.hypot(*(x.size for x in gradients.values()))
    return {
        name: x
        for name, x in gradients.items()
        if x.error == math.inf or (x.size and x.size >= least)
    }


def scale_name(scale: float) -> str:
    """Writes a loss scale: `2**15` for a power of two other than 1, else a decimal."""
    mantissa, exponent = math.frexp(scale)
    is_power = mantissa == 0.5 and scale != 1
    return f"2**{exponent - 1}" if is_power else f"{scale:g}"


def _abridged(names: Sequence[str]) -> str:
    shown = ", ".join(names[:MOST_SHOWN])
    n_hidden = len(names) - MOST_SHOWN
    return f"{shown} and {n_hidden} more" if n_hidden > 0 else shown


def _wrapped(line: str) -> str:
    return textwrap.fill(
        line,
        width=100,
        subsequent_indent=" " * 8,
        break_long_words=False,
        break_on_hyphens=False,
    )
