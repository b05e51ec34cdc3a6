"""What a plan says: what runs in which dtype, what is kept, and what is recomputed."""

from typing import Any, NamedTuple

import jax
import numpy as np

from optax_lossscale._autocast.flat import Flat, Instruction


class Casting(NamedTuple):
    """How programs are narrowed."""

    dtype: np.dtype  # of the products
    recomputes: bool = True  # unless the user's own `jax.checkpoint` says what is kept
    keeps: bool = True  # some sums, unless in a rule of derivatives: a name has no transpose
    prevent_cse: bool = True  # as `jax.checkpoint` has it


class Part(NamedTuple):
    """An island; or an instruction by itself, such as a product."""

    steps: tuple[Instruction, ...]
    repeated: int  # how many leading steps repeat what other parts computed before
    reads: dict[int, Any]  # from other parts, each in its dtype, or None for as it is kept
    # What other parts read, in all dtypes in which they do, beginning with the one it is kept in.
    writes: dict[int, tuple[Any, ...]]
    is_recomputed: bool  # in the backward pass
    is_spread: bool = False  # whether it sends 16 bits, with the derivative of float32
    kept: frozenset[int] = frozenset()  # what is kept for the backward pass, and not recomputed

    def __str__(self) -> str:
        names = [step.name for step in self.steps]
        repeated, own = names[: self.repeated], names[self.repeated :]
        reads = [str(i) if d is None else f"{i}:{_short(d)}" for i, d in self.reads.items()]
        writes = [f"{i}:{'+'.join(map(_short, ds))}" for i, ds in self.writes.items()]
        how = "island" if self.is_recomputed else "spread" if self.is_spread else "run"
        line = f"{how}: {' '.join(own)} ({', '.join(reads)}) -> {', '.join(writes)}"
        line += f", repeating {' '.join(repeated)}" if repeated else ""
        line += f", keeping {', '.join(map(str, sorted(self.kept)))}" if self.kept else ""
        inside = [str(plan) for step in self.steps for plan in step.plans]
        return "\n".join([line, *("  " + row for text in inside for row in text.splitlines())])


class Plan(NamedTuple):
    """How a program is run; print it."""

    takes: tuple[Any, ...]  # the dtypes of its arguments
    gives: tuple[Any, ...]  # the dtypes of its results
    program: Flat
    parts: tuple[Part, ...]
    fenced: set[int]  # what islands hand to each other in 16 bits, through a barrier
    how: Casting

    def __str__(self) -> str:
        number = lambda i: i if i >= 0 else self.program.literals[i].val
        typed = lambda i, dtype: f"{number(i)}:{_short(dtype)}"
        takes = ", ".join(map(typed, self.program.ins, self.takes))
        gives = ", ".join(map(typed, self.program.outs, self.gives))
        return "\n".join([f"takes {takes}", *map(str, self.parts), f"gives {gives}"])


def _short(dtype: Any) -> str:
    """`f16` for float16, as jaxprs have it."""
    return jax.core.ShapedArray((), dtype).str_short(short_dtypes=True).removesuffix("[]")
