"""The fourth pass: what each region stores, in which dtype, and what is recomputed.

The pass goes backward, from the regions that read a value to the one that makes it. An
island stores a value in 16 bits if no later region needs it in float32: a product needs
16 bits, another island the dtype that `facts` has for the value. If a cheap step has
results no smaller than the values that they are computed from, the islands that read
these results repeat the step instead. What no region reads, and has no effects, is in
none. Most islands are recomputed in the backward pass from the values that they read,
so that none of their float32 arrays has to be kept.

Some rules below say what they are worth: how much memory a model takes, and how many
bytes it moves, without the rule, over the same model with it. This was measured on
programs compiled for an H100 with jax 0.12, which `python -m benchmarks rules` does.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jax.extend.core import JaxprEqn, Var

from optax_lossscale._autocast.cheap import is_cheap
from optax_lossscale._autocast.classify import Kind
from optax_lossscale._autocast.facts import Facts
from optax_lossscale._autocast.partition import partition
from optax_lossscale._autocast.products import is_narrowed
from optax_lossscale._programs.operations import Is, traits
from optax_lossscale._programs.values import (
    FLOAT32,
    dtype_in,
    dtypes_in,
    is_float,
    numbers_in,
    shape_in,
    variables,
)

if TYPE_CHECKING:
    from optax_lossscale._autocast.plan import Plan

_FEW = 32  # the least terms of a reduction whose result is worth keeping

Eqns = Sequence[JaxprEqn]
Dtypes = Mapping[Var, Any]
Makers = Mapping[Var, JaxprEqn]
"""For a value, the equation that computes it in the region that reads it."""


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """An equation in a region."""

    eqn: JaxprEqn
    # The dtype to which each operand is cast; None where it is read as it is stored
    takes: Sequence[Any]
    plans: Sequence["Plan"] = ()  # for the programs that it holds


@dataclasses.dataclass(frozen=True, eq=False)
class Region:
    """An island or a part of one, or a step that runs by itself, such as a product."""

    steps: Sequence[Step]
    reads: Dtypes  # the values from outside, with the dtypes in which it needs them
    stores: Dtypes  # the values for outside, with their dtypes
    is_recomputed: bool = False  # whether the backward pass recomputes its steps
    kept: frozenset[Var] = frozenset()  # the results that it keeps nevertheless


def store(facts: Facts, held: Mapping[JaxprEqn, Step]) -> tuple[Region, ...]:
    """The regions of a program; an island may become several.

    Args:
      facts: the facts about the program.
      held: a step for each equation that holds products.
    """
    repeated = _repeated(facts)
    # The values that later regions read, or that are results, with their dtypes
    wanted = {v: facts.dtypes[v] for v in variables(facts.program.outs)}
    from_last: list[Region] = []
    for part in reversed(partition(facts.program.eqns, of_products(facts))):
        if isinstance(part, list):
            regions = _of_island(facts, part, repeated, wanted)
        elif part.effects or any(v in wanted for v in part.outvars):
            regions = [_alone(facts, part, held.get(part), wanted)]
        else:
            regions = []
        from_last += reversed(regions)
        for region in regions:
            for v, dtype in region.reads.items():
                _need(facts, wanted, v, dtype)
    return tuple(reversed(from_last))


def of_products(facts: Facts) -> set[Var]:
    """The values in 16 bits, and SUMs: with them islands begin."""
    return {
        v
        for v, dtype in facts.dtypes.items()
        if dtype == facts.low or facts.kinds[v] == Kind.SUM
    }


def _alone(facts: Facts, eqn: JaxprEqn, held: Step | None, wanted: Dtypes) -> Region:
    """The region of an equation that runs by itself.

    What is sent, gets a name or is held by a barrier is in 16 bits if only products
    read it. So devices send each other 16 bits, as in a model cast by hand. Without
    this, they send 1.59 times the weights and activations in a ring, and 1.33 times
    with a sequence gathered, as compiled for eight H100s with jax 0.12.
    """
    low = facts.low
    results = {v: wanted.get(v, low) for v in eqn.outvars}
    is_sent = _only_moves(eqn, results, low) and Is.CHEAP not in traits(eqn)
    step = held or Step(eqn, _takes(facts, eqn, is_sent))
    stores = {v: _rounded(facts, v) if is_sent else facts.dtypes[v] for v in results}
    return Region((step,), _reads(facts, [step], results), stores)


def _takes(facts: Facts, eqn: JaxprEqn, is_rounded: bool) -> list[Any]:
    """The dtype to which an equation casts each operand; None for as it is stored.

    Args:
      facts: the facts about the program.
      eqn: the equation.
      is_rounded: whether its result is in 16 bits, and it rounds its operands.
    """
    low = facts.low
    its_traits = traits(eqn)
    as_traced = dtypes_in(eqn.invars)
    if is_narrowed(eqn):
        return [low, low] + [None] * len(eqn.invars[2:])
    if is_rounded and Is.SPREADS in its_traits:
        return as_traced  # `_spread` in `run` rounds it, as its derivative is a sum
    if is_rounded:
        return [low if dtype == FLOAT32 else dtype for dtype in as_traced]
    if its_traits & (Is.MOVES | Is.SENDS):
        return [None] * len(eqn.invars)
    return as_traced


def _of_island(
    facts: Facts, island: Eqns, repeated: Makers, wanted: Dtypes
) -> list[Region]:
    """The regions of an island, in order.

    Args:
      facts: the facts about the program.
      island: its equations.
      repeated: the equations that islands repeat, by their results.
      wanted: the values that are read later, with the dtypes for storing them.
    """
    made = made_by(island)
    makers = {v: eqn for v, eqn in repeated.items() if v not in made}
    makers |= made
    stores = {v: wanted[v] for v in made if v in wanted}
    regions: list[Region] = []
    for v in _sums_read_here(facts, island, stores):
        regions.append(_region(facts, {v: stores.pop(v)}, makers))
        del makers[v]  # what follows reads it
    if stores:
        regions.append(_region(facts, stores, makers))
    return regions


def _sums_read_here(facts: Facts, eqns: Eqns, stores: Dtypes) -> list[Var]:
    """The values that are stored in 16 bits and also read in the island that computes them.

    Such as a sum of a residual stream. Each gets a region of its own, which comes before
    the steps that read it. They then read the stored sum, and the gradient does not
    need its operands as well. Without this, a transformer takes 1.04 of the memory and
    moves 1.01 of the bytes, BERT 1.06 and 1.03; but Mamba moves 0.97 of the bytes, and a
    recommender takes 0.90 of the memory, though it moves 1.09 of the bytes.
    """
    read_here = {v for eqn in eqns for v in variables(eqn.invars)}
    low = facts.low
    return [v for v in stores if stores[v] == facts.dtypes[v] == low and v in read_here]


def _region(facts: Facts, stores: Dtypes, makers: Makers) -> Region:
    """The region that computes `stores`: the equations that these depend on.

    It reads whatever no equation in `makers` computes.
    """
    needed: set[JaxprEqn] = set()
    unread = list(stores)
    while unread:
        eqn = makers.get(unread.pop())
        if eqn is not None and eqn not in needed:
            needed.add(eqn)
            unread += variables(eqn.invars)
    eqns = [eqn for eqn in dict.fromkeys(makers.values()) if eqn in needed]
    steps = tuple(_steps(facts, eqns, stores))
    reads = _reads(facts, steps, stores)
    if not facts.casting.recomputes or not _is_one_pass(eqns):
        return Region(steps, reads, stores)
    return Region(steps, reads, stores, True, _kept(facts, eqns, stores))


def _reads(facts: Facts, steps: Sequence[Step], results: Dtypes) -> Dtypes:
    """The values that a region reads from outside, with the dtypes it needs them in."""
    low = facts.low
    needed = dict(results)
    for step in reversed(steps):
        is_low = _only_moves(step.eqn, needed, low)
        for v, taken in zip(step.eqn.invars, step.takes, strict=True):
            if isinstance(v, Var):
                is_rounded = is_low or taken == low
                dtype = _rounded(facts, v) if is_rounded else facts.dtypes[v]
                _need(facts, needed, v, dtype)
    made = made_by([step.eqn for step in steps])
    return {v: dtype for v, dtype in needed.items() if v not in made}


def _need(facts: Facts, needed: dict[Var, Any], v: Var, dtype: Any) -> None:
    """Adds to the values that are needed one in a dtype; in two, it is in its own."""
    needed[v] = dtype if needed.get(v, dtype) == dtype else facts.dtypes[v]


def _rounded(facts: Facts, v: Var) -> Any:
    """The dtype in which products need a value."""
    return facts.low if dtype_in(v) == FLOAT32 else facts.dtypes[v]


def _only_moves(eqn: JaxprEqn, needed: Dtypes, low: np.dtype) -> bool:
    """Whether an equation only moves numbers, all of which are needed in 16 bits."""
    its_traits = traits(eqn)
    moves = its_traits & (Is.MOVES | Is.SENDS | Is.SPREADS)
    if not moves or Is.ADDS_MANY in its_traits:
        return False
    return all(needed.get(v, low) == low for v in eqn.outvars)


def _steps(facts: Facts, eqns: Eqns, stores: Dtypes) -> Iterator[Step]:
    """The steps of a region.

    A sum that is stored in 16 bits, or from which such a value is chosen, adds rounded numbers,
    so that the compiler need not store an operand in float32. Without this, a ResNet
    takes 1.08 of the memory and moves 1.03 of the bytes.
    """
    low = facts.low
    rounded = {v for v in stores if stores[v] == facts.dtypes[v] == low}
    from_last: list[Step] = []
    for eqn in reversed(eqns):
        is_rounded = False
        if not rounded.isdisjoint(eqn.outvars):
            operands = variables(eqn.invars)
            rounded.update(v for v in operands if facts.kinds[v] == Kind.SUM)
            is_rounded = Is.ADDS_TWO in traits(eqn) and _is_of_one_shape(eqn)
        from_last.append(Step(eqn, _takes(facts, eqn, is_rounded)))
    return reversed(from_last)


def _is_of_one_shape(eqn: JaxprEqn) -> bool:
    """Whether no operand is broadcast; the gradient of one that is would be a sum."""
    return len(set(map(shape_in, (*eqn.invars, *eqn.outvars)))) == 1


def _repeated(facts: Facts) -> Makers:
    """The equations that islands repeat, by their results.

    They are cheap, and their results take no fewer bytes than the stored values that
    they are computed from: a constant that is broadcast, a mask, or the `tanh` of a
    product's result, of which an island keeps the operand for its gradient instead.
    Without this, attention over long sequences takes 1.78 of the memory and moves 1.35
    of the bytes, BERT 1.19 and 1.21, a transformer 1.15 and 1.17.
    """
    repeated: dict[Var, JaxprEqn] = {}
    sources: dict[Var, set[Var]] = {}  # of each, the values that are read to repeat it
    are_stored = of_products(facts)
    for eqn in facts.program.eqns:
        is_stored = not are_stored.isdisjoint(eqn.outvars)
        # The gradient of rows of an embedding would be summed for each island.
        if is_stored or not is_cheap(eqn) or Is.PICKS in traits(eqn):
            continue
        read: set[Var] = set()
        for v in variables(eqn.invars):
            read |= sources.get(v, {v})
        if _bytes(facts, read) <= _bytes(facts, eqn.outvars):
            repeated |= dict.fromkeys(eqn.outvars, eqn)
            sources |= dict.fromkeys(eqn.outvars, read)
    return repeated


def _bytes(facts: Facts, values: Iterable[Var]) -> int:
    """How many bytes values take in the dtypes in which they are stored."""
    return sum(numbers_in(v.aval) * facts.dtypes[v].itemsize for v in values)


def _is_one_pass(eqns: Eqns) -> bool:
    """Whether equations compute floats, and take one pass over memory to do so.

    Each level of an associative scan, which pads with gaps between numbers, is a pass
    of its own: without this rule, Mamba moves 1.10 of the bytes, with 0.62 of the
    memory. Equations that only move numbers compute nothing, and to recompute them only
    costs: a recommender then moves 1.09 of the bytes.
    """
    computes = False
    for eqn in eqns:
        padding = eqn.params.get("padding_config", ())
        if any(gap for *_, gap in padding):
            return False
        moves = traits(eqn) & (Is.MOVES | Is.PLACES)
        if not moves and is_float(eqn.outvars[0]):
            computes = True
    return computes


def _kept(facts: Facts, eqns: Eqns, stores: Dtypes) -> frozenset[Var]:
    """The reductions of a region that other equations in it read, and that are kept.

    To recompute one would take another pass over its operand. Without this, a large
    vocabulary moves 1.12 of the bytes, and a ResNet 1.05.
    """
    if not facts.casting.keeps:
        return frozenset()
    largest = max(numbers_in(v.aval) for v in stores)
    read_here: set[Var] = set()
    reductions: set[Var] = set()
    for eqn in eqns:
        read_here.update(variables(eqn.invars))
        if _takes_a_pass(eqn, largest):
            reductions.update(eqn.outvars)
    return frozenset(reductions & read_here)


def _takes_a_pass(eqn: Any, largest: int) -> bool:
    """Whether an equation is a reduction that takes a pass over memory for itself.

    `largest` is the size of the largest array that its region stores.
    """
    if "axes" not in eqn.params or dtype_in(eqn.outvars[0]) != FLOAT32:
        return False
    operand = eqn.invars[0].aval
    n_before = numbers_in(operand)
    n_left = numbers_in(eqn.outvars[0].aval)
    # A compiler sums over rows, and computes from the sums what is stored for these
    # rows, in one kernel. If such sums were kept as well, attention over long sequences
    # would move 1.28 of the bytes.
    is_over_rows = eqn.params["axes"] == (operand.ndim - 1,)
    is_read_once = is_over_rows and largest >= n_before
    return n_left * _FEW <= n_before and not is_read_once


def made_by(eqns: Eqns) -> dict[Var, JaxprEqn]:
    """The equation that makes each result of some equations, in order."""
    return {v: eqn for eqn in eqns for v in eqn.outvars}
