"""A program with its products in 16 bits: what runs in what, and what is kept for its gradient.

Between the products everything runs in float32, in *islands*: a matrix product gives 16 bits, an
island reads them, computes in float32, and rounds once where the next product begins. What one
island leaves for another is kept in 16 bits, if it is of the kind that can be. The backward pass
computes an island anew from what it read, so no float32 array is kept for it.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
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
    Kind,
    follows,
    has_products,
    is_lowered,
    kind_of,
    kinds,
)
from optax_lossscale._autocast.recomputed import Repeated, is_cheap, read_by


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
          The results: of float32 ones those in `dtype` that are kept so.
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
        self.only_read_wide = _only_read_wide(program, how.dtype)
        self.held: dict[int, dict[Any, Any]] = {}
        for i, x in (*program.consts.items(), *zip(program.ins, args, strict=True)):
            self.held[i] = {dtype_of(x): x}
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
        return list(map(self._read, self.program.outs))

    def _run_step(self, step: Step) -> None:
        outs = self._computed(step, self._read)
        for i, v, x in zip(step.outs, step.eqn.outvars, outs, strict=True):
            is_low = dtype_of(x) == self.how.dtype  # as of a product, whoever reads it
            self._hold(i, None if is_low else self._kept_dtype(i, v), x)

    def _run_island(self, island: list[Step]) -> None:
        """Computes an island, and holds what others read of it."""
        if not island:
            return
        left = self._left(island)
        island = [*self.repeated.before(island), *island]
        given = list(read_by(island))
        low = self.how.dtype
        # Rounded as soon as it is made: what reads it here sees what others will.
        rounded = {i for i, _ in left} - {i for i, dtype in left if dtype != low}

        def of(xs):
            values = dict(zip(given, xs, strict=True))
            number = lambda i: i.val if isinstance(i, Literal) else values[i]
            read = lambda i, dtype=None: in_dtype(dtype, number(i))
            for step in island:
                is_rounded = not rounded.isdisjoint(step.outs)
                outs = self._computed(step, read, is_rounded)
                for i, x in zip(step.outs, outs, strict=True):
                    values[i] = in_dtype(low, x) if i in rounded else x
            return [in_dtype(dtype, values[i]) for i, dtype in left]

        if self.how.recomputes and not all(step.name in MOVES for step in island):
            of = jax.checkpoint(of, prevent_cse=self.how.prevent_cse)
        for (i, dtype), x in zip(left, of(list(map(self._read, given))), strict=True):
            self._hold(i, dtype, x)

    def _left(self, island: list[Step]) -> list[tuple[int, Any]]:
        """What is read after an island of what it made, and in which dtype."""
        inside = set(map(id, island))
        found: dict[tuple[int, Any], None] = {}
        for step in island:
            for i, v in zip(step.outs, step.eqn.outvars, strict=True):
                later = [r for r in self.readers.get(i, ()) if id(r) not in inside]
                is_operand = [r is not None and i in _operands(r) for r in later]
                if not all(is_operand):
                    found[i, self._kept_dtype(i, v)] = None
                if any(is_operand):
                    found[i, self.how.dtype] = None
        return list(found)

    def _computed(
        self, step: Step, read: Callable[..., Any], is_rounded: bool = False
    ) -> list[Any]:
        """The results of a step, of operands that `read` gives in a dtype or as they are kept."""
        eqn, low = step.eqn, self.how.dtype
        with step.at_its_line():
            if is_lowered(eqn):
                operands = [read(i, low) for i in step.ins[:2]]
                return _product(eqn, [*operands, *map(read, step.ins[2:])], low)
            if (held := holders.HOLDERS.get(step.name)) and has_products(eqn):
                of_ins = [kind_of(i, self.kinds, low) for i in step.ins]
                return held(eqn, list(map(read, step.ins)), of_ins, self.how)
            kept = list(map(read, step.ins))
            if step.name in MOVES | COMMUNICATES:
                return bind(eqn, kept)
            if is_rounded and _is_sum_of_two(eqn) and all(dtype_of(x) == low for x in kept):
                # The same number, and no float32 array of it for a compiler to keep.
                return bind(eqn, kept)
            pairs = zip(step.ins, eqn.invars, strict=True)
            return bind(eqn, [read(i, dtype_of(v.aval)) for i, v in pairs])

    def _bytes(self, i: int) -> int:
        """What it takes to keep a value; parameters and constants stay anyway."""
        is_parameter = i in self.program.ins and self.kinds[i] == Kind.PARAMETER
        if is_parameter or i in self.program.consts:
            return 0
        x = next(iter(self.held[i].values()))
        return math.prod(x.shape) * x.dtype.itemsize

    def _kept_dtype(self, i: int, v: Any) -> Any:
        """The dtype in which a value is kept, where not only products read it."""
        traced = dtype_of(v.aval)
        is_low = self.kinds[i] == Kind.NARROW and i not in self.only_read_wide
        return self.how.dtype if is_low and traced == FLOAT32 else traced

    def _hold(self, i: int, dtype: Any, x: Any) -> None:
        x = in_dtype(dtype, x)
        self.held.setdefault(i, {})[dtype_of(x)] = x

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


def _only_read_wide(program: Flat, low: np.dtype) -> set[int]:
    """What only operations in float32 read, in the end; the results of a program are not."""
    wide: dict[int, bool] = {i: False for i in program.outs if not isinstance(i, Literal)}
    for step in reversed(program.steps):
        if is_lowered(step.eqn) or has_products(step.eqn):
            is_wide = False
        else:
            is_wide = not follows(step, low) or all(wide.get(i, True) for i in step.outs)
        for i in step.reads:
            wide[i] = wide.get(i, True) and is_wide
    return {i for i, is_wide in wide.items() if is_wide}


def _is_sum_of_two(eqn: Any) -> bool:
    """Whether this adds two arrays, number by number."""
    alike = {v.aval.shape for v in (*eqn.invars, *eqn.outvars)}
    return eqn.primitive.name in ("add", "add_any", "sub") and len(alike) == 1


def _operands(step: Step) -> tuple[int | Literal, ...]:
    """What a step takes in 16 bits, as the two operands of a product are."""
    return step.ins[:2] if is_lowered(step.eqn) else ()
