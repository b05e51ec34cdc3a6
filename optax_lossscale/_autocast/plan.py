"""What a plan says: what of a program runs in what, what is kept, and what is taken again."""

from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import Literal

from optax_lossscale._autocast.flat import Instruction
from optax_lossscale._autocast.kinds import Kind


class Casting(NamedTuple):
    """How programs are narrowed.

    Attributes:
      dtype: of the products.
      recomputes: whether islands are computed anew in the backward pass; where the user's own
        `jax.checkpoint` says what is kept, they are not.
      prevent_cse: as `jax.checkpoint` has it.
    """

    dtype: np.dtype
    recomputes: bool = True
    prevent_cse: bool = True


class Planned(NamedTuple):
    """An instruction, and how it is run.

    Attributes:
      step: the instruction.
      takes: the dtype to which each operand is cast, or None for as it comes.
      gives: the dtypes to which its results are rounded at once.
      kinds: those of its operands.
      plans: for the programs that it holds, if they are narrowed.
    """

    step: Instruction
    takes: tuple[Any, ...]
    gives: tuple[Any, ...]
    kinds: tuple[Kind, ...] = ()
    plans: tuple["Plan", ...] = ()


class Part(NamedTuple):
    """An island; or an instruction by itself, as a product is.

    Attributes:
      steps: in order.
      again: how many leading steps are computed again, as other parts computed them before.
      reads: what it reads of other parts, each in its dtype, or None for as it is kept.
      leaves: what it leaves for other parts, each in all dtypes in which these read it; the first
        is that in which it is kept.
      is_recomputed: whether the backward pass computes it anew.
    """

    steps: tuple[Planned, ...]
    again: int
    reads: dict[int, Any]
    leaves: dict[int, tuple[Any, ...]]
    is_recomputed: bool

    def __str__(self) -> str:
        names = [planned.step.name for planned in self.steps]
        again, own = names[: self.again], names[self.again :]
        reads = [str(i) if d is None else f"{i}:{_short(d)}" for i, d in self.reads.items()]
        leaves = [f"{i}:{'+'.join(map(_short, ds))}" for i, ds in self.leaves.items()]
        line = f"{' '.join(own)} ({', '.join(reads)}) -> {', '.join(leaves)}"
        line = f"{'island' if self.is_recomputed else 'run'}: {line}"
        if again:
            line += f", with {' '.join(again)} again"
        inside = [str(plan) for planned in self.steps for plan in planned.plans]
        return "\n".join([line, *("  " + row for text in inside for row in text.splitlines())])


class Plan(NamedTuple):
    """How a program is run; print it.

    Attributes:
      takes: the dtypes of its arguments.
      gives: the dtypes of its results.
      ins: the numbers of its arguments.
      outs: those of its results, or `Literal`s.
      consts: what it closes over, under its numbers.
      parts: in order.
      how: what it was made for.
    """

    takes: tuple[Any, ...]
    gives: tuple[Any, ...]
    ins: tuple[int, ...]
    outs: tuple[int | Literal, ...]
    consts: dict[int, Any]
    parts: tuple[Part, ...]
    how: Casting

    def __str__(self) -> str:
        number = lambda i: str(i.val) if isinstance(i, Literal) else str(i)
        typed = lambda ns, ds: ", ".join(
            f"{number(i)}:{_short(d)}" for i, d in zip(ns, ds, strict=True)
        )
        first, last = f"takes {typed(self.ins, self.takes)}", typed(self.outs, self.gives)
        return "\n".join([first, *map(str, self.parts), f"gives {last}"])


def _short(dtype: Any) -> str:
    """`f16` for float16, as programs have it."""
    return jax.core.ShapedArray((), dtype).str_short(short_dtypes=True).removesuffix("[]")
