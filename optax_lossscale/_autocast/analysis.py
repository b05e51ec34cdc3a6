"""What a plan goes by: the kind of each value, and what is done with it afterwards."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from optax_lossscale._autocast import kinds as rules
from optax_lossscale._autocast.flat import Flat, flat
from optax_lossscale._autocast.kinds import Kind
from optax_lossscale._autocast.products import is_narrowed, is_rewritten
from optax_lossscale._autocast.uses import Use, uses_of_operands
from optax_lossscale._programs.operations import Is, traits, traits_of
from optax_lossscale._programs.remembered import remembered
from optax_lossscale._programs.versions import open_jaxpr
from optax_lossscale._programs.walk import arguments_of, carried_by, giving_results, programs_in


class Known(NamedTuple):
    """What is known of the values of a program, by their numbers."""

    program: Flat
    kinds: dict[int, Kind]
    # How many products came before it at most, counted from those before the arguments.
    depths: dict[int, int]
    uses: dict[int, Use]


class Inside(NamedTuple):
    """What is known where an equation enters a program."""

    program: Any
    operands: Sequence[int]  # that it is given, by number
    kinds: tuple[Kind, ...]  # those of its arguments
    depths: tuple[int, ...]
    uses: tuple[Use, ...]  # what is done with its results


class Analysis:
    """Reads programs, and what they hold: each once for the same arguments and results."""

    # It goes forward for kinds and depths, and backward for uses, each by itself.
    def __init__(self, low: np.dtype):
        self.low = low
        self._read: dict[Any, Any] = {}

    def of(
        self, jaxpr: Any, kinds: Sequence[Kind], depths: Sequence[int], uses: Sequence[Use]
    ) -> Known:
        """What is known, given the same of the arguments, and what is done with the results."""
        known_kinds, known_depths = self._kinds(jaxpr, kinds), self._depths(jaxpr, depths)
        known_uses = self._uses(jaxpr, kinds, depths, uses)
        return Known(self._flat(jaxpr), known_kinds, known_depths, known_uses)

    def inside(
        self, eqn: Any, kinds: Sequence[Kind], depths: Sequence[int], uses: Sequence[Use]
    ) -> list[Inside]:
        """What is known in an equation, given the same of its operands and results."""
        kinds = self._kinds_inside(eqn, kinds)
        carried, programs = carried_by(eqn), arguments_of(eqn)
        places = _places(eqn, depths)  # so that layers that are alike are read once
        depths = [places[depth] for depth in depths]
        is_condition = [Is.WAITS in traits(eqn) and n == 0 for n in range(len(programs))]
        # What a scan carries from layer to layer is read in the next one, too. But if no product
        # depends on it in the end, it is rounded there alone: the last result is not.
        goes_on = [
            j
            for j, n in enumerate(carried)
            if kinds[n] != Kind.FLOAT32 and Use.MULTIPLIED in uses[j]
        ]
        while True:
            entered = []
            for (program, numbers), decides in zip(programs, is_condition, strict=True):
                given = tuple(kinds[n] for n in numbers), tuple(depths[n] for n in numbers)
                of_results = (Use.WIDELY,) if decides else tuple(uses)
                entered.append(Inside(program, numbers, *given, of_results))
            operands = self.uses_of_operands_inside(eqn, entered)
            after = list(uses)
            for j in goes_on:
                after[j] |= operands[carried[j]]
            if after == list(uses):
                return entered
            uses = after

    def uses_of_operands_inside(self, eqn: Any, entered: Sequence[Inside]) -> list[Use]:
        """What the programs in an equation do with each of its operands."""
        found = [Use(0)] * len(eqn.invars)
        for it in entered:
            known = self._uses(it.program, it.kinds, it.depths, it.uses)
            for n, i in zip(it.operands, self._flat(it.program).ins, strict=True):
                found[n] |= known[i]
        return found

    def kinds_of_results(self, eqn: Any, operands: Sequence[Kind]) -> list[Kind]:
        """The kinds of the results of an equation that is entered."""
        return self.once("results", eqn, (tuple(operands),), self._read_kinds_of_results)

    def _flat(self, jaxpr: Any) -> Flat:
        return self.once("flat", jaxpr, (), flat)

    def _kinds(self, jaxpr: Any, given: Sequence[Kind]) -> dict[int, Kind]:
        read = lambda jaxpr, given: rules.kinds(
            self._flat(jaxpr), given, self.low, self.kinds_of_results
        )
        return self.once("kinds", jaxpr, (tuple(given),), read)

    def _depths(self, jaxpr: Any, given: Sequence[int]) -> dict[int, int]:
        return self.once("depths", jaxpr, (tuple(given),), self._read_depths)

    def _uses(
        self, jaxpr: Any, kinds: Sequence[Kind], depths: Sequence[int], results: Sequence[Use]
    ) -> dict[int, Use]:
        given = tuple(kinds), tuple(depths), tuple(results)
        return self.once("uses", jaxpr, given, self._read_uses)

    def once(self, what: str, read: Any, given: tuple, how: Callable[..., Any]) -> Any:
        """What was read of a program or an equation before, or is now."""
        key = what, id(read), given
        if key not in self._read:
            self._read[key] = read, how(read, *given)  # which also keeps its `id` from reuse
        return self._read[key][1]

    def _read_kinds_of_results(self, eqn: Any, operands: Sequence[Kind]) -> list[Kind]:
        inside = self._kinds_inside(eqn, operands)
        found = []
        for program, numbers in giving_results(eqn):
            known = self._kinds(program, [inside[n] for n in numbers])
            found.append([known[i] for i in self._flat(program).outs])
        results = [rules.widest(each) for each in zip(*found, strict=True)]
        may_run_no_round = Is.WAITS in traits(eqn) or eqn.params.get("length") == 0
        for j, n in enumerate(carried_by(eqn)):
            if may_run_no_round:
                results[j] = rules.widest((results[j], operands[n]))
            elif inside[n] != Kind.FLOAT32:
                results[j] = inside[n]
        return results

    def _kinds_inside(self, eqn: Any, operands: Sequence[Kind]) -> list[Kind]:
        """The kinds of operands inside of an equation: of what a loop carries, in every round."""
        return self.once("inside", eqn, (tuple(operands),), self._read_kinds_inside)

    def _read_kinds_inside(self, eqn: Any, operands: Sequence[Kind]) -> list[Kind]:
        # If a scan runs over layers, so that each round multiplies by a matrix of its own, it
        # carries what goes from layer to layer, which is kept as it is without a scan. Over time
        # steps it carries what may be a running sum, in float32, and so does a `while`. Over
        # layers, a carry that no product reads stays in float32, too.
        inside, carried = list(operands), carried_by(eqn)
        for i in carried:
            inside[i] = Kind.FLOAT32
        if Is.SCANS not in traits(eqn):
            return inside
        (program,) = programs_in(eqn)
        matrices = self._multiplied(program, Is.MOVES | Is.CASTS)
        own = range(carried.stop, len(operands))
        if not any(matrices[i] and operands[i] == Kind.PARAMETER for i in own):
            return inside
        multiplied = self._multiplied(program, None)
        streams = (Kind.PARAMETER, Kind.ROWS, Kind.PRODUCT, Kind.SUM)
        kept = {i: operands[i] for i in carried if multiplied[i] and operands[i] in streams}
        kept = {i: k if k == Kind.PRODUCT else Kind.SUM for i, k in kept.items()}
        while True:
            given = [kept.get(i, kind) for i, kind in enumerate(inside)]
            known = self._kinds(program, given)
            after = dict(zip(carried, (known[i] for i in self._flat(program).outs), strict=False))
            still = {i: rules.widest((k, after[i])) for i, k in kept.items()}
            still = {i: k for i, k in still.items() if k <= Kind.SUM}
            if still == kept:
                return given
            kept = still

    def _multiplied(self, jaxpr: Any, between: Is | None) -> list[bool]:
        """Which arguments become an operand of a product, by way of `between` alone, if given."""
        return self.once("multiplied", jaxpr, (between,), self._read_multiplied)

    def _read_multiplied(self, jaxpr: Any, between: Is | None) -> list[bool]:
        program = self._flat(jaxpr)
        found: set[int] = set()
        for step in reversed(program.steps):
            goes_on = not between or traits_of(step.name) & between
            if goes_on and not found.isdisjoint(step.outs):
                found.update(step.ins)
            if is_narrowed(step.eqn):
                found.update(step.ins[:2])
            for inner, numbers in arguments_of(step.eqn):
                pairs = zip(numbers, self._multiplied(inner, between), strict=False)
                found.update(step.ins[n] for n, is_it in pairs if is_it)
        return [i in found for i in program.ins]

    def _read_depths(self, jaxpr: Any, given: Sequence[int]) -> dict[int, int]:
        program = self._flat(jaxpr)
        known = dict.fromkeys((*program.consts, *program.literals), 0)
        known |= zip(program.ins, given, strict=True)
        for step in program.steps:
            operands = [known[i] for i in step.ins]
            deepest = max(operands, default=0)
            if is_rewritten(step.eqn):
                known |= zip(step.outs, self._depths_of_results(step.eqn, operands), strict=True)
            else:
                known |= dict.fromkeys(step.outs, deepest + is_narrowed(step.eqn))
        return known

    def _depths_of_results(self, eqn: Any, operands: Sequence[int]) -> list[int]:
        """How many products came before the results of an equation that is entered."""
        places = _places(eqn, operands)
        found = []
        for program, numbers in giving_results(eqn):
            known = self._depths(program, [places[operands[n]] for n in numbers])
            found.append([_depth_at(known[i], places) for i in self._flat(program).outs])
        return [max(each) for each in zip(*found, strict=True)]

    def _read_uses(
        self, jaxpr: Any, kinds: Sequence[Kind], depths: Sequence[int], results: Sequence[Use]
    ) -> dict[int, Use]:
        program = self._flat(jaxpr)
        known_kinds = self._kinds(jaxpr, kinds)
        known_depths = self._depths(jaxpr, depths)
        found = dict.fromkeys(program.types, Use(0))
        for i, use in zip(program.outs, results, strict=True):
            found[i] |= use
        for step in reversed(program.steps):
            after = [found[i] for i in step.outs]
            if is_narrowed(step.eqn):
                operands = [Use.MULTIPLIED] * 2 + [Use(0)] * (len(step.ins) - 2)
            elif is_rewritten(step.eqn):
                of_kinds = [known_kinds[i] for i in step.ins]
                of_depths = [known_depths[i] for i in step.ins]
                entered = self.inside(step.eqn, of_kinds, of_depths, after)
                operands = self.uses_of_operands_inside(step.eqn, entered)
            else:
                operands = uses_of_operands(step, known_kinds, known_depths, after)
            for i, use in zip(step.ins, operands, strict=True):
                found[i] |= use
        return found


def _places(eqn: Any, depths: Sequence[int]) -> dict[int, int]:
    """The depths of operands as the programs in an equation see them: from 0 on, and close."""
    # Whether a value comes before another is all that is asked of depths. So a gap that is wider
    # than all products in a program can bridge is as good as any other, and a function that is
    # called from many depths is read a few times.
    widest_gap = 1 + max(map(_products_in, programs_in(eqn)), default=0)
    places: dict[int, int] = {}
    for depth in sorted(set(depths)):
        if places:
            before = max(places)
            places[depth] = places[before] + min(depth - before, widest_gap)
        else:
            places[depth] = 0
    return places


def _depth_at(place: int, places: Mapping[int, int]) -> int:
    """The depth outside of an equation of a value inside."""
    below = [(start, depth) for depth, start in places.items() if start <= place]
    start, depth = max(below, default=(0, 0))
    return place - start + depth


@remembered
def _products_in(program: Any) -> int:
    """How many products a program has, with those in the programs that it holds."""
    return sum(
        is_narrowed(eqn) + sum(map(_products_in, programs_in(eqn)))
        for eqn in open_jaxpr(program).eqns
    )
