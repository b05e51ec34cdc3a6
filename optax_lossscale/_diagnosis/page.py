"""What `diagnose` found, and the page that reports it."""

from collections.abc import Container, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from optax_lossscale._arrays.names import scale_name
from optax_lossscale._diagnosis.dtypes import DtypeReport
from optax_lossscale._diagnosis.scale import InitialScale, Underflow
from optax_lossscale._diagnosis.table import Row, Table
from optax_lossscale._diagnosis.text import lines_of, some, table, wrapped

_SHOWN = 8


class Wrong(NamedTuple):
    """What is off from float32, and why.

    Attributes:
      name: "the loss", the parameter whose gradient it is, or "a value inside".
      off: how far it is from float32's, relative to it; infinite if it is not finite.
        Of a value inside, the share of its numbers that are off by more than 5%.
      how: what an equation does to the numbers: "overflows", "vanishes", "cancels",
        "stagnates", "saturates", "rounds", "amplifies", "is undefined", "is a kernel",
        or "adds up" if no one is at fault.
      place: that equation.
      rounded: what it is sensitive to, and is rounded to 16 bits: the nearest products,
        and what lies between these and the equation.
      is_inner: whether it is in a derivative that the loss function itself takes.
    """

    name: str
    off: float
    how: str
    place: Row
    rounded: tuple[Row, ...]
    is_inner: bool

    @property
    def is_in_float32(self) -> bool:
        """Whether it is not finite in float32 either."""
        return not self.place.is_finite


class Diagnosis(NamedTuple):
    """The result of `diagnose`; print it for the page.

    Attributes:
      verdict: whether 16 bits are fine as they are, and if not, what is wrong.
      advice: what to do.
      is_autocast: whether the loss function computes in float32, so that this is of
        what `autocast` makes of it.
      dtypes: the `dtype_report` of the program that computes the gradients.
      computes_in: the dtypes of 16 bits and fewer that the model computes in.
      loss: the loss, as the program computes it.
      loss_in_float32: the loss in float32.
      loss_dtype: the dtype of the loss.
      scale: the loss scale at which the gradients were compared.
      loss_scale: the one in the optimizer's state, if that was given; else None.
      wrong: the loss and gradients that are off by more than 5%, the worst first, and
        why; if there are none, the first value inside of which a fifth is.
      off: how far the loss and each gradient are from float32's, relative to it;
        without those that float32 does not determine either, such as that of a bias
        before a normalization.
      off_by_choices: how far the loss and those gradients are that are off by more than
        5% from float32's where float32 makes choices of its own, such as indices, masks
        and branches; the other fields are of a float32 that makes those of the program.
      choices: where float32 would have chosen other indices, integers or branches.
      initial_scale: the scale that fits; None if none does.
      overflow: where gradients become infinite first, at twice the largest scale.
      has_gradients: whether any gradient is not 0 in float32.
      is_finite_without: whether gradients are finite without a loss scale.
      underflow: how many gradients underflow, by the path of parameters without its
        numbers; the worst first, and without those that lose next to nothing.
      not_compared: operations that compute in 16 bits only, each with its line.
      table: a row for each equation.
    """

    verdict: str
    advice: list[str]
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
    off_by_choices: dict[str, float]
    choices: tuple[Row, ...]
    initial_scale: InitialScale | None
    overflow: Row | None
    has_gradients: bool
    is_finite_without: bool
    underflow: dict[str, Underflow]
    not_compared: tuple[tuple[str, str], ...]
    table: Table

    def plot(self, axes: Any = None) -> Any:
        """Draws the magnitudes along the program, with float16's range shaded.

        Args:
          axes: the matplotlib axes to draw into and to return; by default those of a
            new figure.
        """
        from optax_lossscale._diagnosis.picture import magnitudes

        return magnitudes(self.table, axes)

    def __str__(self) -> str:
        sentences = [self._computes(), self.verdict, *self._compared(), *self._scales()]
        lines = [
            *map(wrapped, sentences),
            *_first_rows(
                [("Wrong:", "off by", "because"), *map(_cells, self.wrong)], text=(0, 2)
            ),
            *_first_rows(self._underflow()),
            "What to do:",
            *(wrapped(f"- {what}") for what in self.advice),
        ]
        return "\n".join(lines)

    def _computes(self) -> str:
        """What it computes in which dtype, in one sentence."""
        how = (
            "In float32 as it is; with autocast, it computes"
            if self.is_autocast
            else "Computes"
        )
        return f"{how} in {self._dtypes()}; the loss is {self.loss_dtype}."

    def _dtypes(self) -> str:
        """The dtypes of its products, and of which lines the others are."""
        products = self.dtypes.products
        if not products:
            dtypes = " and ".join(map(str, self.computes_in)) or "float32 or wider"
            return f"{dtypes}, without matrix products"
        (most, share), *others = self.dtypes.shares.items()
        rest = [p for p in products if p.dtype != most]
        total = sum(p.count for p in products)
        if not rest:
            return f"{most}: all {total} matrix products"
        count = total - sum(p.count for p in rest)
        dtypes = ", ".join(str(dtype) for dtype, _ in others)
        return (
            f"{most}: {count} of {total} matrix products, {share:.1%} of the "
            f"multiplications; the others in {dtypes}, at {some(lines_of(rest))}"
        )

    def _compared(self) -> Iterator[str]:
        """How far it is from float32."""
        if self.wrong and np.isfinite([self.loss, self.loss_in_float32]).all():
            yield f"The loss is {self.loss:.4g}, in float32 {self.loss_in_float32:.4g}."
        elif self.computes_in and not self.wrong and "the loss" in self.off:
            grads = [off for name, off in self.off.items() if name != "the loss"]
            at = f", at a scale of {scale_name(self.scale)}" if self.scale != 1 else ""
            at += ", with the same choices" if self.choices else ""
            most = f"by at most {max(grads):.1%}" if grads else "nothing but rounding"
            yield (
                f"Off from float32: the loss by {self.off['the loss']:.1%}, gradients "
                f"{most}{at}."
            )
        chosen = []
        for choice in self.choices:
            chosen.append(f"{choice.decided:.1%} of {choice.count}, in {choice}")
        for what in list(dict.fromkeys(chosen))[:_SHOWN]:
            yield f"Chosen otherwise than in float32: {what}."
        for operation, source in self.not_compared:
            yield f"Not compared: what {operation} computes in 16 bits at {source}."

    def _scales(self) -> Iterator[str]:
        """Which loss scale fits, and where gradients overflow first."""
        is_scaled = np.float16 in self.computes_in and self.has_gradients
        if not self.initial_scale or not is_scaled:
            return
        theirs = ""
        if self.loss_scale is not None:
            theirs = f"yours is {scale_name(self.loss_scale)}. What fits: "
        yield f"Loss scale: {theirs}{self.initial_scale}."
        if self.overflow:
            top = scale_name(2 * self.initial_scale.largest)
            yield f"Overflow: from {top} on, first in {self.overflow}."

    def _underflow(self) -> Iterator[tuple[str, ...]]:
        """The share of gradients that each group of parameters loses."""
        at = scale_name(self.initial_scale.scale) if self.initial_scale else ""
        yield "Underflow:", "lost at 1", f"at {at}", "bits needed"
        for name, group in self.underflow.items():
            yield f"  {name}", f"{group.lost:.1%}", f"{group.left:.1%}", str(group.bits)


def _cells(one: Wrong) -> tuple[str, str, str]:
    is_finite = one.off < np.inf and not one.is_in_float32
    because = f"{one.how} in {one.place}"
    if one.how == "adds up":
        because = "rounding adds up over many lines"
    return f"  {one.name}", f"{one.off:.1%}" if is_finite else "not finite", because


def _first_rows(
    rows: Iterable[tuple[str, ...]], text: Container[int] = (0,)
) -> list[str]:
    """The first rows of a table, under its title; nothing if there are none."""
    title, *rest = rows
    if not rest:
        return []
    lines = table([title, *rest[:_SHOWN]], text)
    left = len(rest) - _SHOWN
    return [*lines, f"  and {left} more"] if left > 0 else lines
