"""What `diagnose` found, and the page that says it."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from optax_lossscale._arrays.names import scale_name, without_numbers
from optax_lossscale._diagnosis.accuracy import GradientError
from optax_lossscale._diagnosis.calibration import InitialScale
from optax_lossscale._diagnosis.dtypes import DtypeReport
from optax_lossscale._diagnosis.explain import Explanation
from optax_lossscale._diagnosis.lost import Underflow
from optax_lossscale._diagnosis.moments import Moments
from optax_lossscale._diagnosis.text import some, table, wrapped

_SHOWN = 8
_BECAUSE = {
    "stagnates": "{} stagnates",
    "vanishes": "numbers vanish in {}",
    "overflows": "numbers overflow in {}",
    "saturates": "{} saturates",
    "rounding": "{} has too few digits",
}


class Diagnosis(NamedTuple):
    """What `diagnose` found; print it for the page.

    Attributes:
      verdict: whether float16 is fine as it is, and if not what it needs.
      advice: what to do, one sentence each.
      dtypes: in which dtype what is computed, as `dtype_report` says it of the gradients.
      computes_in: the 16-bit dtypes that it computes in.
      loss_dtype: the dtype of the loss.
      errors: of the parameters whose gradients are wrong at the scale that fits, how far they are
        from those in float32 and why, the worst first.
      off: how far each gradient is from float32's there, relative to it; but for those that
        float32 does not know either, as that of a bias before a normalization.
      initial_scale: the scale that fits; None if none does.
      overflow: what `explain` says of the least scale at which gradients overflow; None if they
        do at none. Without a scale that fits, of a scale of 1.
      underflow: what is lost at a scale of 1, under the path of the parameters or of the tapped
        places, numbers aside; the worst first, and what loses next to nothing left out.
      moments: how Adam's second moments stand, if its state was given; else None.
      not_compared: the operations that are computed in 16 bits in either case, as kernels are,
        each with its line; their errors are not in `off`.
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
        scale = "" if self.initial_scale is None else scale_name(self.initial_scale.scale)
        lines = [_computes(self), self.verdict]
        if self.off and not self.errors:
            at = f", at a scale of {scale}" if self.overflow is not None else ""
            lines.append(f"Gradients: within {max(self.off.values()):.1%} of float32's{at}.")
        for operation, source in self.not_compared:
            lines.append(f"Not compared: what {operation} computes in 16 bits at {source}.")
        if self.initial_scale is not None and self.overflow is not None:
            lines.append(f"Loss scale: {self.initial_scale}.")
        if self.overflow is not None and self.overflow.suspects:
            name, finding = self.overflow.suspects[0]
            scales = self.initial_scale
            where = f"from {scale_name(2 * scales.largest)} on" if scales else "at any scale"
            lines.append(f"Overflow: {where}, first at {name}: {finding}.")
        if self.moments is not None:
            eps, below_eps, vanished, dtypes = self.moments
            lines.append(
                f"Adam: {below_eps:.1%} of the gradients are below its eps of {eps:g}; "
                f"{vanished:.1%} of their squares are zero in {' and '.join(map(str, dtypes))}."
            )
        groups: dict[str, list[str]] = {}
        for name in self.errors:
            groups.setdefault(without_numbers(name), []).append(name)
        wrong = []
        for group, (worst, *others) in groups.items():
            off, cause, operation, source = self.errors[worst]
            because = f"{_BECAUSE[cause].format(operation)}, {source}" if operation else "rounding"
            wrong.append((group if others else worst, f"{off:.1%}", because))
        lost = [
            (name, f"{lost:.1%}", f"{left:.1%}", str(bits))
            for name, (lost, left, bits) in self.underflow.items()
        ]
        lines = list(map(wrapped, lines))
        lines += _table(("Wrong:", "off by", "because"), wrong, text=(0, 2))
        lines += _table(("Underflow:", "lost at 1", f"at {scale}", "bits needed"), lost)
        lines += ["What to do:", *(wrapped(f"- {what}") for what in self.advice)]
        return "\n".join(lines)


def _computes(diagnosis: Diagnosis) -> str:
    """In which dtype, in one sentence."""
    report, loss = diagnosis.dtypes, f"the loss is {diagnosis.loss_dtype}"
    if not report.products:
        dtypes = " and ".join(map(str, diagnosis.computes_in)) or "float32 or wider"
        return f"Computes in {dtypes}, without matrix products; {loss}."
    (most, share), *others = report.shares.items()
    total = sum(p.count for p in report.products)
    if not others:
        return f"Computes in {most}: all of {total} matrix products; {loss}."
    count = sum(p.count for p in report.products if p.dtype == most)
    lines = some(list(dict.fromkeys(p.source for p in report.products if p.dtype != most)))
    dtypes = ", ".join(str(dtype) for dtype, _ in others)
    return (
        f"Computes in {most}: {count} of {total} matrix products, {share:.1%} of the "
        f"multiplications; the others in {dtypes}, at {lines}; {loss}."
    )


def _table(
    titles: Sequence[str], rows: Sequence[Sequence[str]], text: Sequence[int] = (0,)
) -> list[str]:
    """The first rows of a table under their titles; nothing without rows."""
    if not rows:
        return []
    shown = [titles, *((f"  {row[0]}", *row[1:]) for row in rows[:_SHOWN])]
    more = [f"  and {len(rows) - _SHOWN} more"] if len(rows) > _SHOWN else []
    return [*table(shown, text), *more]
