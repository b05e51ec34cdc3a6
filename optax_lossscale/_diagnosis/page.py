"""What `diagnose` found, and the page that reports it."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from optax_lossscale._arrays.names import scale_name
from optax_lossscale._diagnosis.dtypes import DtypeReport
from optax_lossscale._diagnosis.moments import Moments
from optax_lossscale._diagnosis.scale import InitialScale, Underflow
from optax_lossscale._diagnosis.table import Table
from optax_lossscale._diagnosis.text import some, table, wrapped

_SHOWN = 8


class Place(NamedTuple):
    """An equation of the gradient.

    Attributes:
      primitive: its name in JAX, such as `dot_general`; of an argument, its path.
      source: the line that made it, as `model.py:12 (f)`.
      layer: the scope that it is in, or else the parameters nearest to it.
      rounds: the rounds of the loops around it, the outermost first, from 0.
      dtype: the dtype of its result.
    """

    primitive: str
    source: str
    layer: str
    rounds: tuple[int, ...]
    dtype: Any

    def __str__(self) -> str:
        inside = [self.layer, *(f"iteration {n}" for n in self.rounds)]
        layer = ", ".join(filter(None, inside))
        at = f"{self.primitive} at {self.source}" if self.source else self.primitive
        return f"{at} [{layer}]" if layer else at


class Wrong(NamedTuple):
    """What is off from float32, and why.

    Attributes:
      name: "the loss", the parameter whose gradient it is, or "a value inside".
      off: how far it is from float32's, relative to it; infinite if it is not finite. Of a value
        inside, the share of its numbers that are off by more than 5%.
      how: what an equation does to the numbers: "overflows", "vanishes", "cancels", "stagnates",
        "saturates", "rounds", "amplifies", "is undefined", "is a kernel", or "adds up" if no one
        is at fault.
      place: that equation.
      products: the products in 16 bits that round what it is sensitive to.
      is_backward: whether it is in the backward pass, where the loss scale reaches.
      is_inner: whether it is in a derivative that the loss function itself takes.
      is_in_float32: whether it is not finite in float32 either.
    """

    name: str
    off: float
    how: str
    place: Place
    products: tuple[Place, ...]
    is_backward: bool
    is_inner: bool
    is_in_float32: bool


class Choice(NamedTuple):
    """Indices, integers or conditions that float32 would have decided otherwise.

    Attributes:
      share: of them.
      count: how many there are.
      place: the equation.
    """

    share: float
    count: int
    place: Place


class Diagnosis(NamedTuple):
    """The result of `diagnose`; print it for the page.

    Attributes:
      verdict: whether 16 bits are fine as they are, and if not, what is wrong.
      advice: what to do, one sentence each.
      is_autocast: whether the loss function computes in float32, so that this is of what
        `autocast` makes of it.
      dtypes: the `dtype_report` of the program that computes the gradients.
      computes_in: the dtypes of 16 bits and fewer that the model computes in.
      loss: the loss, as the program computes it.
      loss_in_float32: the loss in float32.
      loss_dtype: the dtype of the loss.
      scale: the loss scale at which the gradients were compared.
      loss_scale: the one in the optimizer's state, if that was given; else None.
      wrong: the loss and gradients that are off by more than 5%, the worst first, and why; if
        there are none, the first value inside of which a fifth is.
      off: how far the loss and each gradient are from float32's, relative to it; without those
        that float32 does not determine either, such as that of a bias before a normalization.
      choices: where float32 would have chosen other indices, integers or branches.
      initial_scale: the scale that fits; None if none does.
      overflow: where gradients become infinite first, at twice the largest scale.
      is_finite_without: whether gradients are finite without a loss scale.
      underflow: how many gradients underflow, by the path of parameters without its numbers; the
        worst first, and without those that lose next to nothing.
      moments: the state of Adam's second moments, if the optimizer's state was given; else None.
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
    choices: tuple[Choice, ...]
    initial_scale: InitialScale | None
    overflow: Place | None
    is_finite_without: bool
    underflow: dict[str, Underflow]
    moments: Moments | None
    not_compared: tuple[tuple[str, str], ...]
    table: Table

    def plot(self, axes: Any = None) -> Any:
        """Draws the magnitudes along the program, with float16's range shaded.

        Args:
          axes: the matplotlib axes to draw into and to return; by default those of a new figure.
        """
        from optax_lossscale._diagnosis.picture import magnitudes

        return magnitudes(self.table, axes)

    def __str__(self) -> str:
        lines = [self._computes(), self.verdict, *self._compared(), *self._scales()]
        if self.moments:
            dtypes = " and ".join(map(str, self.moments.dtypes))
            lines.append(
                f"Adam: {self.moments.below_eps:.1%} of the gradients are below its eps of "
                f"{self.moments.eps:g}; {self.moments.vanished:.1%} of their squares are zero in "
                f"{dtypes}."
            )
        wrong = [("Wrong:", "off by", "because")]
        for one in self.wrong:
            off = "not finite" if one.off == np.inf or one.is_in_float32 else f"{one.off:.1%}"
            wrong.append((f"  {one.name}", off, _because(one)))
        at = scale_name(self.initial_scale.scale) if self.initial_scale else ""
        lost = [("Underflow:", "lost at 1", f"at {at}", "bits needed")]
        for name, group in self.underflow.items():
            shares = (f"{group.lost:.1%}", f"{group.left:.1%}")
            lost.append((f"  {name}", *shares, str(group.bits)))
        lines = list(map(wrapped, lines))
        lines += [*_table(wrong, text=(0, 2)), *_table(lost), "What to do:"]
        return "\n".join([*lines, *(wrapped(f"- {what}") for what in self.advice)])

    def _computes(self) -> str:
        """What it computes in which dtype, in one sentence or two."""
        products = self.dtypes.products
        loss = f"the loss is {self.loss_dtype}"
        wide = (
            "In float32 as it is; with autocast, it computes" if self.is_autocast else "Computes"
        )
        if not products:
            dtypes = " and ".join(map(str, self.computes_in)) or "float32 or wider"
            return f"{wide} in {dtypes}, without matrix products; {loss}."
        (most, share), *others = self.dtypes.shares.items()
        total = sum(p.count for p in products)
        rest = [p for p in products if p.dtype != most]
        if not others:
            return f"{wide} in {most}: all {total} matrix products; {loss}."
        count = total - sum(p.count for p in rest)
        dtypes = ", ".join(str(dtype) for dtype, _ in others)
        lines = some(list(dict.fromkeys(p.source for p in rest)))
        return (
            f"{wide} in {most}: {count} of {total} matrix products, {share:.1%} of the "
            f"multiplications; the others in {dtypes}, at {lines}; {loss}."
        )

    def _compared(self) -> list[str]:
        """How far it is from float32."""
        lines = []
        if self.computes_in and not self.wrong and "the loss" in self.off:
            grads = [off for name, off in self.off.items() if name != "the loss"]
            at = "" if self.scale == 1 else f", at a scale of {scale_name(self.scale)}"
            lines.append(
                f"Off from float32: the loss by {self.off['the loss']:.1%}, gradients by at most "
                f"{max(grads, default=0):.1%}{at}."
            )
        elif np.isfinite([self.loss, self.loss_in_float32]).all() and self.wrong:
            lines.append(f"The loss is {self.loss:.4g}, in float32 {self.loss_in_float32:.4g}.")
        for choice in self.choices[:_SHOWN]:
            lines.append(
                f"Chosen otherwise than in float32: {choice.share:.1%} of {choice.count}, in "
                f"{choice.place}."
            )
        for operation, source in self.not_compared:
            lines.append(f"Not compared: what {operation} computes in 16 bits at {source}.")
        return lines

    def _scales(self) -> list[str]:
        """Which loss scale fits, and where gradients overflow first."""
        if not self.initial_scale or np.float16 not in self.computes_in:
            return []
        lines = [f"Loss scale: {self.initial_scale}."]
        if self.loss_scale is not None:
            lines[0] = (
                f"Loss scale: yours is {scale_name(self.loss_scale)}. What fits: {lines[0][12:]}"
            )
        if self.overflow:
            top = scale_name(2 * self.initial_scale.largest)
            lines.append(f"Overflow: from {top} on, first in {self.overflow}.")
        return lines


def _because(one: Wrong) -> str:
    if one.how == "adds up":
        return "rounding adds up over many lines"
    return f"{one.how} in {one.place}"


def _table(rows: Sequence[Sequence[str]], text: Sequence[int] = (0,)) -> list[str]:
    """The first rows of a table, under its title; nothing if there are none."""
    left = len(rows) - 1 - _SHOWN
    more = [f"  and {left} more"] if left > 0 else []
    return [*table(rows[: 1 + _SHOWN], text), *more] if len(rows) > 1 else []
