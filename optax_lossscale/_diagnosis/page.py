"""What `diagnose` found, and the page that reports it."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from optax_lossscale._arrays.names import scale_name
from optax_lossscale._diagnosis.accuracy import GradientError
from optax_lossscale._diagnosis.calibration import InitialScale
from optax_lossscale._diagnosis.dtypes import DtypeReport
from optax_lossscale._diagnosis.explain import Explanation
from optax_lossscale._diagnosis.lost import Underflow
from optax_lossscale._diagnosis.moments import Moments
from optax_lossscale._diagnosis.text import some, table, wrapped

_SHOWN = 8


class Diagnosis(NamedTuple):
    """The result of `diagnose`; print it for the page.

    Attributes:
      verdict: whether float16 is fine as it is, and if not, what it needs.
      advice: what to do, one sentence each.
      dtypes: the `dtype_report` of the program that computes the gradients.
      computes_in: the 16-bit dtypes that the model computes in.
      loss_dtype: the dtype of the loss.
      errors: the gradients that are wrong at the scale that fits, and why, the worst first.
      off: how far each gradient is from float32's at that scale, relative to it; without those
        that float32 cannot determine either, such as that of a bias before a normalization.
      initial_scale: the scale that fits; None if none does.
      overflow: the report of `explain` at the least scale at which gradients overflow; None if
        there is none. If no scale fits, its report at a scale of 1.
      underflow: how many gradients underflow, by the path of parameters or of tapped places,
        without its numbers; the worst first, and without those that lose next to nothing.
      moments: the state of Adam's second moments, if the optimizer's state was given; else None.
      not_compared: operations left in 16 bits, each with its line; their errors are not in `off`.
    """

    verdict: str
    advice: list[str]
    dtypes: DtypeReport
    computes_in: tuple[np.dtype, ...]
    loss_dtype: np.dtype
    errors: dict[str, GradientError]
    off: dict[str, float]
    initial_scale: InitialScale | None
    overflow: Explanation | None
    underflow: dict[str, Underflow]
    moments: Moments | None
    not_compared: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        fits, overflow, moments = self.initial_scale, self.overflow, self.moments
        scale = scale_name(fits.scale) if fits else ""
        lines = [self._computes(), self.verdict]
        if self.off and not self.errors:
            at = f", at a scale of {scale}" if overflow else ""
            lines.append(f"Gradients: within {max(self.off.values()):.1%} of float32's{at}.")
        for operation, source in self.not_compared:
            lines.append(f"Not compared: what {operation} computes in 16 bits at {source}.")
        if fits and overflow:
            lines.append(f"Loss scale: {fits}.")
        if overflow and overflow.suspects:
            name, finding = overflow.suspects[0]
            where = f"from {scale_name(2 * fits.largest)} on" if fits else "at any scale"
            lines.append(f"Overflow: {where}, first at {name}: {finding}.")
        if moments:
            dtypes = " and ".join(map(str, moments.dtypes))
            lines.append(
                f"Adam: {moments.below_eps:.1%} of the gradients are below its eps of "
                f"{moments.eps:g}; {moments.vanished:.1%} of their squares are zero in {dtypes}."
            )
        wrong = [("Wrong:", "off by", "because")]
        for name, (off, cause, operation, source) in self.errors.items():
            because = f"{cause} in {operation}, {source}" if operation else cause
            wrong.append((f"  {name}", f"{off:.1%}", because))
        lost = [("Underflow:", "lost at 1", f"at {scale}", "bits needed")]
        for name, of in self.underflow.items():
            lost.append((f"  {name}", f"{of.lost:.1%}", f"{of.left:.1%}", str(of.bits)))
        lines = list(map(wrapped, lines))
        lines += [*_table(wrong, text=(0, 2)), *_table(lost), "What to do:"]
        return "\n".join([*lines, *(wrapped(f"- {what}") for what in self.advice)])

    def _computes(self) -> str:
        """What it computes in which dtype, in one sentence."""
        products, loss = self.dtypes.products, f"the loss is {self.loss_dtype}"
        if not products:
            dtypes = " and ".join(map(str, self.computes_in)) or "float32 or wider"
            return f"Computes in {dtypes}, without matrix products; {loss}."
        (most, share), *others = self.dtypes.shares.items()
        total, rest = sum(p.count for p in products), [p for p in products if p.dtype != most]
        if not others:
            return f"Computes in {most}: all {total} matrix products; {loss}."
        count = total - sum(p.count for p in rest)
        dtypes = ", ".join(str(dtype) for dtype, _ in others)
        lines = some(list(dict.fromkeys(p.source for p in rest)))
        return (
            f"Computes in {most}: {count} of {total} matrix products, {share:.1%} of the "
            f"multiplications; the others in {dtypes}, at {lines}; {loss}."
        )


def _table(rows: Sequence[Sequence[str]], text: Sequence[int] = (0,)) -> list[str]:
    """The first rows of a table, under its title; nothing if there are none."""
    left = len(rows) - 1 - _SHOWN
    more = [f"  and {left} more"] if left > 0 else []
    return [*table(rows[: 1 + _SHOWN], text), *more] if len(rows) > 1 else []
