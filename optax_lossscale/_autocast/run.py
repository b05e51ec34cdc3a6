"""A program with its products in 16 bits: what runs in what, and what is kept for its gradient.

Between the products everything runs in float32, in *islands*: a matrix product gives 16 bits, an
island reads them, computes in float32, and rounds once where the next product begins. What one
island leaves for another is kept in 16 bits, if it is of the kind that can be. The backward pass
computes an island anew from what it read, so no float32 array is kept for it.
"""

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from optax_lossscale._arrays.programs import (
    bind,
    dtype_of,
    in_dtype,
)
from optax_lossscale._autocast import holders
from optax_lossscale._autocast.flat import Flat, Step, flat
from optax_lossscale._autocast.kinds import (
    COMMUNICATES,
    FLOAT32,
    MOVES,
    SUMS_OF_TWO,
    Kind,
    has_products,
    is_lowered,
    is_outer_product,
    kept_dtype,
    kind_of,
    kinds,
    why_left,
)
from optax_lossscale._autocast.recomputed import Repeated, is_cheap, read_by

LEFT_WIDE = "autocast leaves {} in float32"
"""The scope around what stays in float32, by which `dtype_report` knows it."""


class Casting(NamedTuple):
    """How a program is run.

    Attributes:
      dtype: of the products.
      recomputes: whether islands are computed anew in the backward pass; where the user's own
        `jax.checkpoint` says what is kept, they are not.
      prevent_cse: as `jax.checkpoint` has it.
    """

    dtype: np.dtype
    recomputes: bool = True
    prevent_cse: bool = True

    def __call__(self, jaxpr: Any, args: Sequence[Any], given: Sequence[Kind]) -> list[Any]:
        """The results of a program that was traced in float32.

        Args:
          jaxpr: the program.
          args: its arguments, float32 ones in that or in `dtype`.
          given: their kinds.

        Returns:
          The results: of float32 ones each `SUM` in `dtype`.
        """
        return _Run(self, flat(jaxpr), args, given).results()


class _Run:
    """One run of a program.

    A value is held under its number as an array for each dtype in which it is read; the first of
    these is how it is kept.
    """

    def __init__(self, how: Casting, program: Flat, args: Sequence[Any], given: Sequence[Kind]):
        self.how, self.program = how, program
        self.kinds = kinds(program, given, how.dtype)
        self.readers = program.readers()
        self.held: dict[int, dict[Any, Any]] = {}
        for i, x in (*program.consts.items(), *zip(program.ins, args, strict=True)):
            self.held[i] = {dtype_of(x): x}
        parameters = (i for i in program.ins if self.kinds[i] == Kind.PARAMETER)
        self.stays = {*parameters, *program.consts}
        self.repeated = Repeated(self._bytes)

    def results(self) -> list[Any]:
        low = self.how.dtype
        made_of_low = {i for i, forms in self.held.items() if low in forms}
        island: list[Step] = []
        made: set[int] = set()
        for step in self.program.steps:
            reads_low = not made_of_low.isdisjoint(step.reads)
            if reads_low:
                made_of_low.update(step.outs)
            if reads_low and is_cheap(step.eqn):
                island.append(step)
                made.update(step.outs)
                continue
            if not made.isdisjoint(step.reads):
                self._run_island(island)
                island, made = [], set()
            self._run_step(step)
            if not reads_low:
                made_of_low.update(i for i in step.outs if low in self.held[i])
            if made_of_low.isdisjoint(step.outs) and is_cheap(step.eqn):
                self.repeated.add(step)
        self._run_island(island)
        return [self._read(i, self._result_dtype(i)) for i in self.program.outs]

    def _run_step(self, step: Step) -> None:
        with step.at_its_line():
            outs = self._computed(step, self._read)
            for i, x in zip(step.outs, outs, strict=True):
                is_low = dtype_of(x) == self.how.dtype  # as of a product, whoever reads it
                x = x if is_low else in_dtype(self._kept_dtype(i), x)
                self.held[i] = {dtype_of(x): x}

    def _run_island(self, island: list[Step]) -> None:
        """Computes an island, and holds what others read of it.

        A sum that is kept in 16 bits, and read here too, comes first and by itself. The rest
        then reads the sum, so that the gradient needs no operands of it beside.
        """
        left = self._left(island)
        low = self.how.dtype
        rounded = {i for i, dtypes in left.items() if low in dtypes and self._is_kept_low(i)}
        read = set().union(*(step.reads for step in island))
        for i in (i for step in island for i in step.outs if i in rounded & read):
            self._run_part(self._needed(i, island), left, rounded)
        self._run_part([s for s in island if not self.held.keys() >= set(s.outs)], left, rounded)

    def _needed(self, wanted: int, island: list[Step]) -> list[Step]:
        """The steps of an island that it takes to have a value."""
        found, needed = [], {wanted}
        for step in reversed(island):
            if not needed.isdisjoint(step.outs):
                found.append(step)
                needed |= step.reads - self.held.keys()
        return found[::-1]

    def _run_part(self, steps: list[Step], left: dict[int, list[Any]], rounded: set[int]) -> None:
        """Computes steps of an island, and holds what is left of them and not held yet."""
        low = self.how.dtype
        known = rounded & self.held.keys()  # by an earlier part of the island
        steps = [*self.repeated.before(steps, known), *steps]
        given = list(read_by(steps))

        def of(xs):
            values = dict(zip(given, xs, strict=True))
            number = lambda i: i.val if isinstance(i, Literal) else values[i]
            read = lambda i, dtype=None: in_dtype(dtype, number(i))
            forms = {}
            for step in steps:
                with step.at_its_line():
                    outs = self._computed(step, read, not rounded.isdisjoint(step.outs))
                    for i, x in zip(step.outs, outs, strict=True):
                        # At once: what reads it here sees what others will.
                        values[i] = in_dtype(low, x) if i in rounded else x
                    new = [i for i in step.outs if i in left and i not in self.held]
                    forms |= {i: [read(i, d) for d in left[i]] for i in new}
            return forms

        if not steps:
            return
        if self.how.recomputes and not all(step.name in MOVES for step in steps):
            of = jax.checkpoint(of, prevent_cse=self.how.prevent_cse)
        for i, forms in of(list(map(self._read, given))).items():
            self.held[i] = {dtype_of(x): x for x in forms}

    def _left(self, island: list[Step]) -> dict[int, list[Any]]:
        """What is to be held of what an island makes, and in which dtypes; first as it is kept."""
        inside = set(map(id, island))
        left: dict[int, list[Any]] = {}
        for step in island:
            readers = {i: self.readers.get(i, ()) for i in step.outs}
            later = {i: [r for r in rs if id(r) not in inside] for i, rs in readers.items()}
            others = {i: [r for r in rs if not _is_operand(i, r)] for i, rs in later.items()}
            if not any(others[i] and self._is_kept_low(i) for i in step.outs):
                self.repeated.add(step)
            for i in step.outs:
                is_repeated = i in self.repeated and all(r and is_cheap(r.eqn) for r in others[i])
                if others[i] and not is_repeated:
                    self.repeated.discard(i)
                if others[i]:
                    unheld = (s for s in self.repeated.sources(i) if s not in self.held)
                    left |= {s: [self._kept_dtype(s)] for s in unheld}
                if len(others[i]) < len(later[i]) and self.how.dtype not in left.get(i, ()):
                    left.setdefault(i, []).append(self.how.dtype)
        return left

    def _computed(self, step: Step, read: Callable[..., Any], is_low: bool = False) -> list[Any]:
        """The results of a step, of operands that `read` gives in a dtype or as they are kept."""
        eqn, low = step.eqn, self.how.dtype
        if is_lowered(eqn):
            operands = [read(i, low) for i in step.ins[:2]]
            return _product(eqn, [*operands, *map(read, step.ins[2:])], low)
        if is_outer_product(eqn):
            return [_outer_product(eqn, *map(read, step.ins))]
        if has_products(eqn):
            of_ins = [kind_of(i, self.kinds, low) for i in step.ins]
            return holders.HOLDERS[step.name](eqn, list(map(read, step.ins)), of_ins, self.how)
        if step.name in MOVES | COMMUNICATES:
            return bind(eqn, list(map(read, step.ins)))
        if is_low and step.name in SUMS_OF_TWO and _are_alike(eqn):
            # Of rounded numbers, so that a compiler has no float32 array to keep.
            return bind(eqn, [read(i, low) for i in step.ins])
        pairs = zip(step.ins, eqn.invars, strict=True)
        why = why_left(eqn)
        with jax.named_scope(LEFT_WIDE.format(why)) if why else contextlib.nullcontext():
            return bind(eqn, [read(i, dtype_of(v.aval)) for i, v in pairs])

    def _bytes(self, i: int) -> int:
        """What it takes to keep a value; parameters and constants stay anyway."""
        if i in self.stays:
            return 0
        dtype = next(iter(self.held[i])) if i in self.held else self._kept_dtype(i)
        return math.prod(self.program.types[i].shape) * dtype.itemsize

    def _kept_dtype(self, i: int) -> Any:
        """The dtype in which a value is kept, where not only products read it."""
        return self.how.dtype if self._is_kept_low(i) else dtype_of(self.program.types[i])

    def _result_dtype(self, i: int | Literal) -> Any:
        if isinstance(i, Literal):
            return None
        return kept_dtype(dtype_of(self.program.types[i]), self.kinds[i], self.how.dtype)

    def _is_kept_low(self, i: int) -> bool:
        if dtype_of(self.program.types[i]) != FLOAT32:
            return False
        if self.kinds[i] == Kind.ROWS:
            steps = [step for step in self.readers.get(i, ()) if step is not None]
            return any(s.name in SUMS_OF_TWO and self.kinds[s.outs[0]] == Kind.SUM for s in steps)
        return self.kinds[i] == Kind.SUM

    def _read(self, i: int | Literal, dtype: Any = None) -> Any:
        if isinstance(i, Literal):
            return i.val
        forms = self.held[i]
        return forms[dtype] if dtype in forms else in_dtype(dtype, next(iter(forms.values())))


def _product(eqn: Any, ins: Sequence[Any], low: np.dtype) -> list[Any]:
    """A matrix product or convolution that takes and gives 16 bits."""
    params = eqn.params | {"precision": None}
    if params.get("preferred_element_type") is not None:
        params["preferred_element_type"] = low
    return bind(eqn.replace(params=params), ins)


def _outer_product(eqn: Any, x: Any, y: Any) -> Any:
    """The same by broadcasting, in float32: its derivatives are sums, and no matrix products."""
    _, (batch_x, batch_y) = eqn.params["dimension_numbers"]
    x, y = (
        jnp.moveaxis(in_dtype(FLOAT32, a), batch, range(len(batch)))
        for a, batch in ((x, batch_x), (y, batch_y))
    )
    end, start = range(x.ndim, eqn.outvars[0].aval.ndim), range(len(batch_x), x.ndim)
    return jnp.expand_dims(x, tuple(end)) * jnp.expand_dims(y, tuple(start))


def _are_alike(eqn: Any) -> bool:
    """Whether operands and result have one shape."""
    return len({v.aval.shape for v in (*eqn.invars, *eqn.outvars)}) == 1


def _is_operand(i: int, step: Step | None) -> bool:
    """Whether a step takes a value in 16 bits, as one of the two operands of a product."""
    return step is not None and is_lowered(step.eqn) and i in step.ins[:2]
