"""Plans what runs in which dtype, what is kept for the gradient, and what is recomputed.

Between the products everything runs in float32, in *islands*: a matrix product gives 16 bits, an
island reads them, computes in float32, and rounds once where the next product begins. What one
island computes for another is kept in 16 bits, if its kind can be. The backward pass recomputes an
island from what it read, so no float32 array is kept for it.
"""

from collections import ChainMap
from collections.abc import Mapping, Sequence
from typing import Any

from optax_lossscale._autocast.analysis import Analysis
from optax_lossscale._autocast.flat import Flat, Instruction
from optax_lossscale._autocast.kinds import Kind
from optax_lossscale._autocast.plan import Casting, Part, Plan
from optax_lossscale._autocast.products import holds_products, is_narrowed, is_outer_product
from optax_lossscale._autocast.recomputed import Repeated, is_cheap, is_kept, is_redone, read_by
from optax_lossscale._autocast.uses import Use, is_kept_low
from optax_lossscale._programs.operations import Is, traits, traits_of
from optax_lossscale._programs.values import FLOAT32, dtype_in, dtypes_in, numbers_in
from optax_lossscale._programs.versions import open_jaxpr
from optax_lossscale._programs.walk import carried_by


def plan(
    jaxpr: Any,
    takes: Sequence[Any],
    given: Sequence[Kind],
    how: Casting,
    uses: Sequence[Use] | None = None,
) -> Plan:
    """The plan for a program traced in float32; `uses` says what is done with its results."""
    if uses is None:
        uses = [Use.WIDELY] * len(open_jaxpr(jaxpr).outvars)
    analysis = Analysis(how.dtype)
    return _Planner(jaxpr, takes, given, [0] * len(given), uses, how, analysis).plan(None)


class _Planner:
    """Makes a plan."""

    def __init__(
        self,
        jaxpr: Any,
        takes: Sequence[Any],
        given: Sequence[Kind],
        depths: Sequence[int],
        uses: Sequence[Use],
        how: Casting,
        analysis: Analysis,
    ):
        self.how, self.takes, self.analysis = how, tuple(takes), analysis
        self.known = analysis.of(jaxpr, given, depths, uses)
        self.program = program = self.known.program
        self.kinds, self.uses = self.known.kinds, self.known.uses
        self.readers = program.readers()
        self.sent = _sent_to_products(program, self.readers)
        # The dtypes in which each value is available, beginning with the one it is kept in.
        self.held = {i: (dtype,) for i, dtype in zip(program.ins, takes, strict=True)}
        self.held |= {i: (dtype_in(x),) for i, x in program.consts.items()}
        self.held |= {i: (dtype_in(x),) for i, x in program.literals.items()}
        parameters = (i for i in program.ins if self.kinds[i] == Kind.PARAMETER)
        self.stays = {*parameters, *program.consts}
        self.repeated = Repeated(self._bytes)
        self.parts: list[Part] = []

    def plan(self, gives: Sequence[Any] | None) -> Plan:
        low, program = self.how.dtype, self.program
        made_of_low = {i for i, dtypes in self.held.items() if low in dtypes}
        made_of_low.update(i for i in program.ins if self.kinds[i] == Kind.SUM)
        island: list[Instruction] = []
        made: set[int] = set()
        for step in program.steps:
            reads_low = not made_of_low.isdisjoint(step.reads)
            if reads_low:
                made_of_low.update(step.outs)
            if reads_low and is_cheap(step.eqn) and not self._is_sent(step):
                island.append(step)
                made.update(step.outs)
                continue
            if not made.isdisjoint(step.reads):
                self._add_island(island)
                island, made = [], set()
            self._add_by_itself(step)
            if not reads_low:
                is_of_product = lambda i: low in self.held[i] or self.kinds[i] == Kind.SUM
                made_of_low.update(filter(is_of_product, step.outs))
            if made_of_low.isdisjoint(step.outs) and is_cheap(step.eqn):
                self.repeated.add(step)
        self._add_island(island)
        if gives is None:
            gives = [self._kept_dtype(i) for i in program.outs]
        # A compiler would leave out the casts to 16 bits and back, and keep float32 as well.
        islands = [part for part in self.parts if part.is_recomputed and self.how.prevent_cse]
        read = {i for part in islands for i in part.reads}
        fenced = {i for part in islands for i in part.writes if self.held[i][0] == low} & read
        return Plan(self.takes, tuple(gives), program, tuple(self.parts), fenced, self.how)

    def _add_by_itself(self, step: Instruction) -> None:
        planned = self._planned(step, self.held)
        # A product gives 16 bits, whoever reads it.
        kept = lambda i, dtype: dtype if dtype == self.how.dtype else self._kept_dtype(i)
        gives = tuple(map(kept, step.outs, planned.gives))
        # What is moved after being spread still has the derivative of float32.
        is_sum = traits_of(step.name) & (Is.SENDS | Is.SPREADS) != Is.SENDS
        is_wide = any(FLOAT32 in self.held[i] for i in step.reads)
        is_spread = self._is_sent(step) and is_sum and is_wide
        beside = (FLOAT32,) if is_spread else ()  # for its derivative
        writes = {i: (dtype, *beside) for i, dtype in zip(step.outs, gives, strict=True)}
        reads = {i: d for i, d in zip(step.ins, planned.takes, strict=True) if i >= 0}
        self._add(Part((planned._replace(gives=gives),), 0, reads, writes, False, is_spread))

    def _add_island(self, island: list[Instruction]) -> None:
        wanted, low = self._wanted(island), self.how.dtype
        # Whether others read it here or not: how a program is divided changes no digits.
        kept = {i for step in island for i in step.outs if self._is_kept_low(i)}
        rounded = {i for i in kept if low in wanted.get(i, ()) or self._is_read_past(i)}
        read = set().union(*(step.reads for step in island)) & wanted.keys()
        # A sum that is kept in 16 bits, and read here too, comes first and by itself. The rest
        # then reads the sum, so that the gradient does not need its operands as well.
        for i in (i for step in island for i in step.outs if i in rounded & read):
            self._add_part(self._needed(i, island), wanted, rounded)
        rest = [step for step in island if not self.held.keys() >= set(step.outs)]
        self._add_part(rest, wanted, rounded)

    def _needed(self, value: int, island: list[Instruction]) -> list[Instruction]:
        """The steps of an island that it takes to compute a value."""
        found, needed = [], {value}
        for step in reversed(island):
            if not needed.isdisjoint(step.outs):
                found.append(step)
                needed |= step.reads - self.held.keys()
        return found[::-1]

    def _add_part(
        self, steps: list[Instruction], wanted: dict[int, tuple[Any, ...]], rounded: set[int]
    ) -> None:
        """Adds a part of some steps of an island; it writes what others read and is not held."""
        if not steps:
            return
        low, known = self.how.dtype, rounded & self.held.keys()  # by an earlier part of it
        before = self.repeated.before(steps, known)
        steps = [*before, *steps]
        reads = dict.fromkeys(read_by(steps))
        values = ChainMap({}, self.held)
        planned = []
        for step in steps:
            one = self._planned(
                step, values, any(map(self._is_read_past, rounded & set(step.outs)))
            )
            # Steps that read it here see what others will.
            pairs = zip(step.outs, one.gives, strict=True)
            one = one._replace(gives=tuple(low if i in rounded else dtype for i, dtype in pairs))
            values |= {i: (dtype,) for i, dtype in zip(step.outs, one.gives, strict=True)}
            planned.append(one)
        new = wanted.keys() - self.held.keys()
        writes = {i: wanted[i] for step in steps for i in step.outs if i in new}
        if not writes:  # others repeat it
            return
        is_recomputed = self.how.recomputes and is_redone(steps)
        part = Part(tuple(planned), len(before), reads, writes, is_recomputed)
        if is_recomputed and self.how.keeps:
            largest = max(numbers_in(self.program.types[i]) for i in writes)
            read_here = set().union(*(step.reads for step in steps))
            reduced = {step.outs[0] for step in steps if is_kept(step.eqn, largest)}
            part = part._replace(kept=frozenset(reduced & read_here))
        self._add(part)

    def _add(self, part: Part) -> None:
        self.parts.append(part)
        self.held |= part.writes

    def _wanted(self, island: list[Instruction]) -> dict[int, tuple[Any, ...]]:
        """The dtypes in which others need an island's values, beginning with the one kept."""
        # A cheap step that only islands read is repeated in them. They need its operands instead.
        inside = set(map(id, island))
        wanted: dict[int, tuple[Any, ...]] = {}
        for step in island:
            readers = {i: self.readers.get(i, ()) for i in step.outs}
            later = {i: [r for r in rs if id(r) not in inside] for i, rs in readers.items()}
            others = {i: [r for r in rs if not _is_operand(i, r)] for i, rs in later.items()}
            if not any(others[i] and self._is_kept_low(i) for i in step.outs):
                self.repeated.add(step)
            for i in step.outs:
                if others[i]:
                    if not all(r and is_cheap(r.eqn) and not self._is_sent(r) for r in others[i]):
                        self.repeated.of.pop(i, None)
                    unheld = (s for s in self.repeated.sources(i) if s not in self.held)
                    wanted |= {s: (self._kept_dtype(s),) for s in unheld}
                is_read_low = any(_is_operand(i, r) or self._is_sent(r) for r in later[i])
                if is_read_low and self.how.dtype not in wanted.get(i, ()):
                    wanted[i] = (*wanted.get(i, ()), self.how.dtype)
        return wanted

    def _planned(
        self, step: Instruction, values: Mapping[int, tuple[Any, ...]], is_low: bool = False
    ) -> Instruction:
        """How a step is run on operands in some dtypes; a sum of two in 16 bits, if `is_low`."""
        eqn, low = step.eqn, self.how.dtype
        there = tuple(values[i][0] for i in step.ins)
        results, as_they_come = tuple(dtypes_in(eqn.outvars)), (None,) * len(step.ins)
        if is_narrowed(eqn):
            return step._replace(takes=(low, low, *as_they_come[2:]), gives=(low,))
        if is_outer_product(eqn):
            return step._replace(takes=(FLOAT32, FLOAT32), gives=results)
        if holds_products(eqn):
            return self._entered(step, there)
        if self._is_sent(step):
            takes = tuple(low if dtype == FLOAT32 else dtype for dtype in dtypes_in(eqn.invars))
            return step._replace(takes=takes, gives=(low,) * len(results))
        if traits_of(step.name) & (Is.MOVES | Is.SENDS):
            gives = there if len(there) == len(results) else there[:1] * len(results)
            return step._replace(takes=as_they_come, gives=gives)
        is_sum = is_low and Is.ADDS_TWO in traits_of(step.name)
        if is_sum and len({v.aval.shape for v in (*eqn.invars, *eqn.outvars)}) == 1:
            # Of rounded numbers, so that a compiler has no float32 array to keep.
            return step._replace(takes=(low,) * len(step.ins), gives=(low,))
        return step._replace(takes=tuple(dtypes_in(eqn.invars)), gives=results)

    def _entered(self, step: Instruction, there: Sequence[Any]) -> Instruction:
        """How a step that holds products is run: each program in it by a plan of its own."""
        eqn, how, carried = step.eqn, self.how, carried_by(step.eqn)
        given = tuple(self.kinds[i] for i in step.ins)
        depths = [self.known.depths[i] for i in step.ins]
        uses = tuple(self.uses[i] for i in step.outs)
        entered = self.analysis.inside(eqn, given, depths, uses)
        takes, gives = list(there), [self._kept_dtype(i) for i in step.outs]
        if Is.SCANS in traits(eqn):
            # What every round reads gets a gradient from each of them: a sum of many numbers.
            takes[: carried.start] = dtypes_in(eqn.invars[: carried.start])
            how = how._replace(prevent_cse=False)
        if Is.KEEPS in traits(eqn):
            how = how._replace(recomputes=False)
        of_operands = self.analysis.uses_of_operands_inside(eqn, entered)
        for it in entered:
            for n, kind in zip(it.operands, it.kinds, strict=True):
                if n in carried:
                    is_low = is_kept_low(kind, of_operands[n])
                    takes[n] = how.dtype if is_low else dtype_in(eqn.invars[n])
        as_told = tuple(gives) if Is.BRANCHES in traits(eqn) else None
        plans = [
            self.analysis.once(
                "plan",
                it.program,
                (tuple(takes[n] for n in it.operands), it.kinds, it.depths, it.uses, how, as_told),
                self._plan_of_held,
            )
            for it in entered
        ]
        if Is.SCANS in traits(eqn):
            (each_round,) = plans
            for j, n in enumerate(carried):
                is_low = takes[n] == each_round.gives[j] == how.dtype
                gives[j] = how.dtype if is_low else gives[j]
        return step._replace(
            takes=(None,) * len(step.ins), gives=tuple(gives), kinds=given, uses=uses, plans=plans
        )

    def _plan_of_held(
        self,
        program: Any,
        takes: Sequence[Any],
        kinds: Sequence[Kind],
        depths: Sequence[int],
        uses: Sequence[Use],
        how: Casting,
        gives: Sequence[Any] | None,
    ) -> Plan:
        """The plan of a program that an equation holds."""
        planner = _Planner(program, takes, kinds, depths, uses, how, self.analysis)
        return planner.plan(gives)

    def _is_sent(self, step: Instruction | None) -> bool:
        return step is not None and not self.sent.isdisjoint(step.outs)

    def _bytes(self, i: int) -> int:
        """The bytes that it takes to keep a value; parameters and constants are kept anyway."""
        if i in self.stays:
            return 0
        dtype = self.held[i][0] if i in self.held else self._kept_dtype(i)
        return numbers_in(self.program.types[i]) * dtype.itemsize

    def _kept_dtype(self, i: int) -> Any:
        """The dtype in which a value is kept, if not only products read it."""
        return self.how.dtype if self._is_kept_low(i) else dtype_in(self.program.types[i])

    def _is_kept_low(self, i: int) -> bool:
        if dtype_in(self.program.types[i]) != FLOAT32:
            return False
        return is_kept_low(self.kinds[i], self.uses[i])

    def _is_read_past(self, i: int) -> bool:
        """Whether a value is read again past a product."""
        return Use.PAST in self.uses[i]


def _sent_to_products(
    program: Flat, readers: Mapping[int, Sequence[Instruction | None]]
) -> set[int]:
    """What goes from device to device, or is kept under a name, and then goes only to products."""
    # Perhaps after further moves. Products round it, and rounding commutes with moving.
    for_products: set[int] = set()
    for step in reversed(program.steps):
        moves = traits_of(step.name) & (Is.MOVES | Is.SENDS | Is.SPREADS)
        goes_on = lambda r: r is not None and not for_products.isdisjoint(r.outs)
        is_all = all(
            dtype_in(program.types[i]) == FLOAT32
            and all(_is_operand(i, r) or goes_on(r) for r in readers.get(i, ()))
            for i in step.outs
        )
        if moves and is_all and Is.ADDS_MANY not in traits_of(step.name):
            for_products.update(step.outs)
    sent: set[int] = set()
    for step in program.steps:
        is_local = traits_of(step.name) & (Is.SENDS | Is.CHEAP) == Is.CHEAP
        if not is_local or not sent.isdisjoint(step.reads):
            sent.update(for_products.intersection(step.outs))
    return sent


def _is_operand(i: int, step: Instruction | None) -> bool:
    """Whether a step takes a value in 16 bits, as one of the two operands of a product."""
    return step is not None and is_narrowed(step.eqn) and i in step.ins[:2]
