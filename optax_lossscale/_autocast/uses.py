"""What is done with each value afterwards, which says whether it is kept in 16 bits."""

import enum
from collections.abc import Mapping, Sequence

from optax_lossscale._autocast.flat import Instruction
from optax_lossscale._autocast.kinds import Kind
from optax_lossscale._autocast.recomputed import is_cheap
from optax_lossscale._programs.operations import Is, traits_of
from optax_lossscale._programs.values import numbers_in


class Use(enum.Flag):
    """What is done with a value; it may be several of these."""

    MULTIPLIED = enum.auto()
    """A product depends on it, directly or by way of others."""
    PAST = enum.auto()
    """It is read again past a product, or kept under a name: it has to be kept until then."""
    WIDELY = enum.auto()
    """An operation reads it for which rounding its operand is not the same as its result."""
    ADDED = enum.auto()
    """It is added to the result of a product."""


KEPT = Use.MULTIPLIED | Use.PAST
"""What is done with what a forward pass saves."""


def is_kept_low(kind: Kind, use: Use) -> bool:
    """Whether a float32 value of a kind is kept in 16 bits, and rounded where it is made."""
    # The result of a product is in 16 bits already. A sum that only products read is rounded by
    # these, and so may be before. A sum that no product depends on is never rounded, and one that
    # is used up before the next product is not rounded either: whatever holds the programs that
    # make it and read it, its digits are the same.
    if kind == Kind.ROWS:
        return KEPT | Use.ADDED in use
    is_sum = kind == Kind.SUM and Use.MULTIPLIED in use
    return kind == Kind.PRODUCT or (is_sum and (Use.PAST in use or Use.WIDELY not in use))


def uses_of_operands(
    step: Instruction,
    kinds: Mapping[int, Kind],
    depths: Mapping[int, int],
    results: Sequence[Use],
) -> list[Use]:
    """What an operation, neither a product nor entered, does with each of its operands."""
    eqn = step.eqn
    after = Use(0)
    for use in results:
        after |= use
    traits = traits_of(step.name)
    is_sum_with_product = Is.ADDS_TWO in traits and kinds[step.outs[0]] == Kind.SUM
    found = []
    for i, operand in zip(step.ins, eqn.invars, strict=True):
        use = after & (Use.MULTIPLIED | Use.WIDELY | Use.ADDED)
        if not _commutes_with_rounding(traits):
            use = (use & Use.MULTIPLIED) | Use.WIDELY
        if is_sum_with_product:
            use |= Use.ADDED
        repeats = (
            Use.PAST in result
            and _is_repeated(step, kinds[out], result)
            and numbers_in(v.aval) >= numbers_in(operand.aval)
            for out, v, result in zip(step.outs, eqn.outvars, results, strict=True)
        )
        is_read_past = any(depths[out] > depths[i] for out in step.outs)
        if is_read_past or Is.NAMES in traits or any(repeats):
            use |= Use.PAST
        found.append(use)
    return found


def _commutes_with_rounding(traits: Is) -> bool:
    """Whether an operation on rounded operands gives the same as rounding its results."""
    if traits & (Is.ADDS_MANY | Is.CASTS):
        return False
    # Sorting is not: with numbers that become equal, indices change.
    is_choice = Is.CHOOSES in traits and Is.CHEAP in traits
    return bool(traits & (Is.MOVES | Is.SENDS)) or is_choice


def _is_repeated(step: Instruction, kind: Kind, use: Use) -> bool:
    """Whether a result may be made once more where it is read, and not be kept itself."""
    if _commutes_with_rounding(traits_of(step.name)):
        return True
    return is_cheap(step.eqn) and not is_kept_low(kind, use)
