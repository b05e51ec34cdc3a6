"""What `diagnose` found, and the page that reports it.

`diagnose` fills `Findings` from the runs. A `Diagnosis` has these fields, and further
the verdict and what to do, which `advice` words. Printed, it is the page: sentences
about dtypes, the verdict and the loss scale, tables of what is wrong and what
underflows, and the advice.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from optax_lossscale._arrays.names import scale_name
from optax_lossscale._diagnosis.dtypes import DtypeReport
from optax_lossscale._diagnosis.notes import A_VALUE_INSIDE, THE_LOSS, Note
from optax_lossscale._diagnosis.scale import InitialScale, Underflow
from optax_lossscale._diagnosis.table import Table
from optax_lossscale._diagnosis.text import aligned, percent, some, wrapped
from optax_lossscale._diagnosis.wrong import Wrong
from optax_lossscale._programs.operations import Trait, traits_of

_SHOWN = 8  # how many rows of a table, or sentences about choices, are printed


@dataclasses.dataclass(frozen=True, kw_only=True)
class Findings:
    """What the runs show: the fields of a `Diagnosis` from which its words follow."""

    is_autocast: bool
    dtypes: DtypeReport
    computes_in: tuple[np.dtype, ...]
    loss: float
    loss_in_float32: float
    loss_dtype: np.dtype
    scale: float
    loss_scale: float | None
    wrong: tuple[Wrong, ...]
    off: dict[str, float]
    undetermined: tuple[str, ...]
    off_by_choices: dict[str, float]
    choices: tuple[Note, ...]
    initial_scale: InitialScale | None
    overflow: Note | None
    has_gradients: bool
    is_finite_without: bool
    off_without: dict[str, float]
    underflow: dict[str, Underflow]
    not_compared: tuple[tuple[str, str], ...]
    table: Table

    @property
    def scale_that_fits(self) -> InitialScale | None:
        """The loss scale that fits, if the model computes in float16; else None."""
        is_scaled = np.float16 in self.computes_in and self.has_gradients
        return self.initial_scale if is_scaled else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Diagnosis(Findings):
    """The result of `diagnose`; print it for the page.

    Attributes:
      verdict: whether 16 bits are fine as they are, and if not, what is wrong.
      advice: what to do.
      is_autocast: whether the loss function computes in float32, so that the report is
        about `autocast` of it.
      dtypes: the `dtype_report` of the program that computes the gradients.
      computes_in: the dtypes of 16 bits and fewer that the model computes in.
      loss: the loss, as the program computes it.
      loss_in_float32: the loss in float32, by the choices of the program; by its own
        choices if it is finite by these alone.
      loss_dtype: the dtype of the loss.
      scale: the loss scale at which the gradients were compared.
      loss_scale: the one in the optimizer's state. It is None if no state was given, or
        one without a loss scale.
      wrong: the loss and gradients that are off by more than 5%, and why, the loss
        first and then the worst gradient. If there are none, the first value inside
        that has a fifth of its numbers off by so much.
      off: how far the loss and each gradient are from float32's, relative to those; of
        a loss whose terms cancel, relative to how it changes with the parameters. What
        float32 does not determine, as float64 shows, is left out, such as the gradient
        of a bias before a normalization.
      off_by_choices: how far the loss and gradients are from those of float32 with its
        own choices, such as indices, masks and branches, where that is more than 5%. It
        is empty if any result is wrong already by the choices of the program.
      choices: where float32 would have chosen other indices, masks, branches or
        numbers of iterations: of each line, what differs most.
      initial_scale: the scale that fits. It is None if gradients are finite at none of
        those tried, or if the loss or float32's results are not finite.
      overflow: where gradients become infinite first, at twice the largest scale.
      undetermined: the parameters whose gradients float32 does not determine.
      has_gradients: whether any gradient is not 0 in float32.
      is_finite_without: whether the loss and gradients are finite without a loss scale.
      off_without: how far gradients are off without a loss scale: those that are off by
        more than 5%, and are right at `scale`.
      underflow: how many of the gradients that are not wrong underflow, by the path of
        parameters without its numbers. The group "all" comes first, and then the one
        that loses most. Groups that lose 1% or less are left out.
      not_compared: operations that have no float32 version, each with its line: those
        that run in 16 bits only, such as kernels, and callbacks that run once.
      table: a row for each result that is computed.
    """

    verdict: str
    advice: list[str]

    def plot(self, axes: Any = None) -> Any:
        """Draws the magnitudes along the program, with float16's range shaded.

        Args:
          axes: the matplotlib axes to draw into and to return; by default those of a
            new figure.
        """
        from optax_lossscale._diagnosis.picture import magnitudes

        return magnitudes(self.table, axes)

    def __str__(self) -> str:
        sentences = [
            self._computes(),
            self.verdict,
            *self._off(),
            *self._chosen(),
            *self._not_compared(),
            *self._scales(),
        ]
        scale = scale_name(self.scale)
        wrong = [
            (f"  {result.name}", _how_far_off(result), result.because)
            for result in self.wrong
        ]
        underflow = [
            (f"  {name}", percent(group.lost), percent(group.left), str(group.bits))
            for name, group in self.underflow.items()
        ]
        lines = [
            *map(wrapped, sentences),
            *_section(("Wrong:", "off by", "because"), wrong),
            *_section(
                ("Underflow:", "lost at 1", f"at {scale}", "bits needed"), underflow
            ),
            "What to do:",
            *(wrapped(f"- {remedy}") for remedy in self.advice),
        ]
        return "\n".join(lines)

    def _computes(self) -> str:
        """One sentence about the dtypes that the loss function computes in."""
        how = "Computes"
        if self.is_autocast:
            how = "In float32 as it is; with autocast, it computes"
        products = [
            f"{dtype} ({share:.1%} of the multiplications)"
            for dtype, share in self.dtypes.shares.items()
        ]
        dtypes = " and ".join(products or map(str, self.computes_in)) or "float32"
        return f"{how} in {dtypes}; the loss is {self.loss_dtype}."

    def _off(self) -> Iterator[str]:
        """A sentence about how far the results are from float32's."""
        if not self.computes_in or self.wrong or THE_LOSS not in self.off:
            return
        grads = [off for name, off in self.off.items() if name != THE_LOSS]
        if grads:
            most = f"by at most {max(grads):.1%}"
        else:
            most = "nothing but rounding" if self.has_gradients else "are 0"
        loss = self.off[THE_LOSS]
        others = ""
        if grads and self.undetermined:
            others = (
                f", but for {len(self.undetermined)} that float32 does not determine"
            )
        yield f"Off from float32: the loss by {loss:.1%}, gradients {most}{others}."

    def _chosen(self) -> Iterator[str]:
        """Sentences about choices that float32 would have made otherwise."""
        for choice in self.choices[:_SHOWN]:
            yield (
                f"Chosen otherwise than in float32: {choice.decided:.1%} of "
                f"{choice.count}, in {choice}."
            )
        if self.off_by_choices:
            names = some(list(self.off_by_choices))
            most = percent(max(self.off_by_choices.values()))
            yield (
                f"Off from float32 with its own choices, such as masks: {names}, at "
                f"most by {most}."
            )

    def _not_compared(self) -> Iterator[str]:
        """Sentences about operations that have no float32 version."""
        for operation, source in self.not_compared:
            if Trait.EFFECTFUL in traits_of(operation):
                what = (
                    f"{operation} at {source}, whose results float32 takes as they are"
                )
            else:
                what = f"what {operation} computes in 16 bits at {source}"
            yield f"Not compared: {what}."

    def _scales(self) -> Iterator[str]:
        """Sentences about the loss scale that fits, and the first overflow."""
        fits = self.scale_that_fits
        if fits is None:
            return
        yours = ""
        if self.loss_scale is not None:
            yours = f"yours is {scale_name(self.loss_scale)}. What fits: "
        yield f"Loss scale: {yours}{fits}."
        if self.overflow:
            yield (
                f"Overflow: from {scale_name(2 * fits.largest)} on, first in "
                f"{self.overflow}."
            )


def _how_far_off(wrong: Wrong) -> str:
    """How far a result is off; of a value inside, how many of its numbers are."""
    off = percent(wrong.off)
    is_share = wrong.name == A_VALUE_INSIDE and math.isfinite(wrong.off)
    return f"{off} of its numbers are off" if is_share else off


def _section(title: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    """The first rows of a table, under its title. An empty table has no title either."""
    if not rows:
        return []
    lines = aligned([title, *rows[:_SHOWN]])
    further = len(rows) - _SHOWN
    return [*lines, f"  and {further} more"] if further > 0 else lines
