"""What `diagnose` found, and the page that reports it.

`diagnose` collects a `Diagnosis` from its runs, and `advice.py` derives the verdict and
the advice from the other fields. Printing a `Diagnosis` prints the page: sentences
about the dtypes, the verdict and the loss scale, tables of what is wrong and of what
underflows, and the advice. A shortened example:

    Computes in float16 (100.0% of the multiplications); the loss is float32.
    Without a loss scale, float16 loses 95.7% of the gradients to underflow.
    The loss differs from float32 by 0.0%, the gradients by at most 0.1%.
    Loss scale: 2**25, with 2 bits to spare before gradients overflow.
    Underflow:       lost at 1  at 2**25  bits needed
      all            95.7%      0.0%      12
    What to do:
    - Wrap the optimizer: with_loss_scale(optimizer).
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from optax_lossscale._diagnosis.names import scale_name
from optax_lossscale._diagnosis.notes import AN_INTERMEDIATE_VALUE, THE_LOSS, Note
from optax_lossscale._diagnosis.old_dtypes import DtypeReport
from optax_lossscale._diagnosis.old_operations import Trait, traits_of
from optax_lossscale._diagnosis.scale import InitialScale, Underflow
from optax_lossscale._diagnosis.table import Table
from optax_lossscale._diagnosis.text import abridged, aligned, listed, percent, wrapped
from optax_lossscale._diagnosis.wrong import Wrong

# How many rows of a table, or sentences about choices, are printed.
_SHOWN_ROWS = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The result of `diagnose`: print it and do what its last lines say.

    Its attributes hold what is printed and more. For example, `initial_scale.scale` is
    the loss scale to begin with, and a test of a model can require that `wrong` is
    empty.

    Attributes:
      verdict: whether 16 bits are fine as they are, and if not, what is wrong.
      advice: what to do, in order of importance; `["Nothing."]` if all is fine.
      is_autocast: whether the report is about `autocast(loss_fn)`, because the loss
        function itself computes in float32.
      dtypes: the `dtype_report` of the program that computes the gradients.
      computes_in: the dtypes of 16 bits or fewer that the model computes in.
      loss: the loss, as the program computes it.
      loss_in_float32: the loss in float32. It is computed with the program's choices,
        such as indices, masks and branches, or if it is not finite with these, with the
        choices of float32.
      loss_dtype: the dtype of the loss.
      scale: the loss scale at which the gradients were compared.
      loss_scale: the loss scale in the optimizer's state, or None if there is no state
        or no loss scale in it.
      is_scale_fixed: whether that loss scale is a `FixedLossScale`.
      wrong: what is wrong, and why: first the loss, then gradients, the worst first. A
        result is wrong if it is off by more than 5%, not finite even in float32, or not
        in proportion to the loss scale. If the loss and all gradients are right, at
        most one intermediate value is listed: a value in `aux` that is finite in
        float32 only, or else the first value of which more than a fifth of the elements
        are off by more than 5%, if this error persists in a later value.
      off: the relative error of the loss and of each gradient against float32. A loss
        whose terms cancel is instead compared with how much it changes with the
        parameters. For a gradient that is not in proportion to the loss scale, it is
        the deviation from that proportion. Constant gradients and results that are not
        finite in float32 are left out, and so are results that are not judged:
        differences of two equal values, and results that float32 does not determine,
        because it differs from float64 as well, such as the gradient of a bias before a
        normalization.
      off_by_choices: how far the loss and gradients are from those of float32 with its
        own choices, such as indices, masks and branches. Only errors above 5% are
        listed. It is empty if any result is wrong already with the program's choices.
      choices: where float32 would have chosen other indices, masks, branches or numbers
        of iterations. Each line is listed once, with the choice that differs most. A
        mask is listed if more than a fifth of it differs, any other choice if more than
        5% of it does. But if `off_by_choices` holds the loss, or an error above a
        fifth, all choices that differ are listed.
      initial_scale: the loss scale that fits. It is None if gradients are finite at
        none of the scales tried, or if the loss or float32's results are not finite.
      overflow: the result to blame for an overflow at twice `initial_scale.largest`;
        None if nothing overflows. It is the first result to overflow as the scale
        grows, or, if some equation before it enlarged the values 1024 times or more,
        the result of that equation.
      undetermined: the parameters whose gradients were not judged. Either float32 does
        not determine the gradient, or the gradient is the difference of two equal
        values, which is 0 in float32.
      has_gradients: whether any gradient is not 0 in float32.
      is_finite_unscaled: whether the loss and gradients are finite without a loss
        scale.
      off_unscaled: the relative errors of the gradients that need a loss scale: those
        that are off by more than 5% without one, and right at `scale`.
      underflow: how many elements of the gradients underflow, by groups of parameters.
        Parameters whose paths differ only in numbers form a group, such as
        `blocks/*/up`. The group "all" comes first, then the group that loses most.
        Gradients that are wrong or not judged do not count. Groups that lose 1% or
        less, both without a loss scale and at `scale`, are left out.
      not_compared: operations that have no float32 version, each with its line. These
        are kernels and others that run in 16 bits only, and callbacks that run once.
        The rounding errors that these operations themselves make are not found.
      table: a row for each computed result.
    """

    is_autocast: bool
    dtypes: DtypeReport
    computes_in: tuple[np.dtype, ...]
    loss: float
    loss_in_float32: float
    loss_dtype: np.dtype
    scale: float
    loss_scale: float | None
    is_scale_fixed: bool
    wrong: tuple[Wrong, ...]
    off: dict[str, float]
    undetermined: tuple[str, ...]
    off_by_choices: dict[str, float]
    choices: tuple[Note, ...]
    initial_scale: InitialScale | None
    overflow: Note | None
    has_gradients: bool
    is_finite_unscaled: bool
    off_unscaled: dict[str, float]
    underflow: dict[str, Underflow]
    not_compared: tuple[tuple[str, str], ...]
    table: Table
    verdict: str = ""
    advice: list[str] = dataclasses.field(default_factory=list)

    @property
    def scale_that_fits(self) -> InitialScale | None:
        """The loss scale that fits, or None.

        It is None if none fits, if nothing is in float16, or if all gradients are 0.
        """
        is_scaled = np.float16 in self.computes_in and self.has_gradients
        return self.initial_scale if is_scaled else None

    def plot(self, axes: Any = None) -> Any:
        """Draws the magnitude of each result and shades what float16 cannot hold.

        Look for dots in the shaded ranges, and for where the dots begin to rise or
        fall. There is a dot for each row of `table.rows` whose `largest` is not 0, in
        the order of the program.

        Args:
          axes: the matplotlib axes to draw into; by default those of a new figure.

        Returns:
          The axes.

        Raises:
          ImportError: if matplotlib is not installed.
          TypeError: if `axes` are not matplotlib's.
        """
        from optax_lossscale._diagnosis.picture import magnitudes

        return magnitudes(self.table, axes)

    def __str__(self) -> str:
        sentences = [
            self._dtypes_sentence(),
            self.verdict,
            *self._off_sentences(),
            *self._choice_sentences(),
            *self._not_compared_sentences(),
            *self._scale_sentences(),
        ]
        scale = scale_name(self.scale)
        wrong_title = ("Wrong:", "off by", "because")
        wrong_rows = [
            (f"  {result.name}", _how_far_off(result), result.because)
            for result in self.wrong
        ]
        underflow_title = ("Underflow:", "lost at 1", f"at {scale}", "bits needed")
        underflow_rows = [
            (f"  {name}", percent(group.lost), percent(group.left), str(group.bits))
            for name, group in self.underflow.items()
        ]
        lines = [
            *map(wrapped, sentences),
            *_section(wrong_title, wrong_rows),
            *_section(underflow_title, underflow_rows),
            "What to do:",
            *(wrapped(f"- {remedy}") for remedy in self.advice),
        ]
        return "\n".join(lines)

    def _dtypes_sentence(self) -> str:
        """Says which dtypes the loss function computes in."""
        how = "Computes"
        if self.is_autocast:
            how = (
                "The loss function computes in float32, so this report is about "
                "autocast(loss_fn), which computes"
            )
        products = [
            f"{dtype} ({share:.1%} of the multiplications)"
            for dtype, share in self.dtypes.shares.items()
        ]
        dtypes = listed(products or self.computes_in) or "float32"
        return f"{how} in {dtypes}; the loss is {self.loss_dtype}."

    def _off_sentences(self) -> Iterator[str]:
        """Says how far the results are from float32's, unless a result is wrong."""
        if not self.computes_in or self.wrong or THE_LOSS not in self.off:
            return
        loss = self.off[THE_LOSS]
        grads = [off for name, off in self.off.items() if name != THE_LOSS]
        if grads:
            gradients = f"the gradients by at most {max(grads):.1%}"
            if self.undetermined:
                n = len(self.undetermined)
                gradients += f", apart from {n} that float32 does not determine"
        elif self.has_gradients:
            gradients = "and the gradients are nothing but rounding error"
        else:
            gradients = "and all gradients are 0"
        yield f"The loss differs from float32 by {loss:.1%}, {gradients}."

    def _choice_sentences(self) -> Iterator[str]:
        """Names choices that float32 makes differently, and how much they change."""
        for choice in self.choices[:_SHOWN_ROWS]:
            where = "its choice"
            if choice.count > 1:
                where = f"{choice.differing:.1%} of its {choice.count} choices"
            yield f"{choice} differs from float32 in {where}."
        if self.off_by_choices:
            names = abridged(list(self.off_by_choices))
            most = percent(max(self.off_by_choices.values()))
            yield (
                "With float32's own choices, such as masks, results differ by up to "
                f"{most} ({names})."
            )

    def _not_compared_sentences(self) -> Iterator[str]:
        """Names the operations that have no float32 version."""
        for operation, source in self.not_compared:
            why = "runs in 16 bits only"
            if Trait.EFFECTFUL in traits_of(operation):
                why = "runs once, and gives float32 the same results"
            yield f"Not compared with float32: {operation} at {source}, which {why}."

    def _scale_sentences(self) -> Iterator[str]:
        """Says which loss scale fits, and what causes an overflow at larger ones."""
        fits = self.scale_that_fits
        if fits is None:
            return
        yours = ""
        if self.loss_scale is not None:
            yours = f" (yours is {scale_name(self.loss_scale)})"
        yield f"Loss scale: {fits}{yours}."
        if self.overflow:
            yield (
                f"Overflow: from {scale_name(2 * fits.largest)} on, caused by "
                f"{self.overflow}."
            )


def _how_far_off(wrong: Wrong) -> str:
    """Formats how far a result is off.

    For an intermediate value, this is the share of its elements that are off.
    """
    off = percent(wrong.off)
    is_share = wrong.name == AN_INTERMEDIATE_VALUE and math.isfinite(wrong.off)
    return f"{off} of its elements are off" if is_share else off


def _section(title: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Formats the first rows of a table under its title; without rows, no lines."""
    if not rows:
        return []
    lines = aligned([title, *rows[:_SHOWN_ROWS]])
    n_hidden = len(rows) - _SHOWN_ROWS
    if n_hidden > 0:
        lines.append(f"  and {n_hidden} more")
    return lines
