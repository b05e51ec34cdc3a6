"""What is repeated or recomputed: keeping it would take more memory and no less time."""

from collections.abc import Callable
from typing import Any, NamedTuple

from optax_lossscale._autocast.flat import Instruction
from optax_lossscale._programs.operations import Is, traits_of
from optax_lossscale._programs.remembered import remembered
from optax_lossscale._programs.values import is_float, is_product, numbers_in
from optax_lossscale._programs.versions import open_jaxpr
from optax_lossscale._programs.walk import programs_in

_LONGEST = 50  # steps
_FEW = 32  # to one


def is_cheap(eqn: Any) -> bool:
    """Whether recomputing it takes no longer than reading it."""
    if eqn.effects or is_product(eqn) or Is.CHEAP not in traits_of(eqn.primitive.name):
        return False
    return all(map(_is_all_cheap, programs_in(eqn)))


@remembered
def _is_all_cheap(program: Any) -> bool:
    return all(map(is_cheap, open_jaxpr(program).eqns))


def is_redone(island: list[Instruction]) -> bool:
    """Whether to recompute an island: it computes something, and does so in one pass."""
    # Each level of an associative scan, which spaces numbers out, is another pass over memory.
    places = lambda s: (Is.MOVES | Is.PLACES) & traits_of(s.name)
    moves = lambda s: places(s) or not is_float(s.eqn.outvars[0])
    spaces = lambda s: any(gap for *_, gap in s.eqn.params.get("padding_config", ()))
    return not all(map(moves, island)) and not any(map(spaces, island))


def is_kept(eqn: Any, largest: int) -> bool:
    """Whether to keep a reduction rather than to recompute it; `largest` is written after it."""
    if "axes" not in eqn.params or not is_float(eqn.outvars[0]):
        return False
    (of,), (result,) = eqn.invars, eqn.outvars
    # A compiler sums over rows, and writes what it makes of these rows, in one kernel.
    is_read_once = eqn.params["axes"] == (of.aval.ndim - 1,) and largest >= numbers_in(of.aval)
    return numbers_in(result.aval) * _FEW <= numbers_in(of.aval) and not is_read_once


class _Repeat(NamedTuple):
    """A step to repeat."""

    step: Instruction
    sources: frozenset[int]  # what it takes to repeat it
    length: int  # of how many steps it is the last


class Repeated:
    """Cheap steps to repeat in each island that reads their results, as those are larger."""

    # Such as a mask or a constant that is broadcast, the rows of an embedding, and the result of a
    # `tanh`: for its gradient, an island keeps what these read instead.
    def __init__(self, size: Callable[[int], int]):
        self._size = size
        self.of: dict[int, _Repeat] = {}

    def sources(self, i: int) -> frozenset[int]:
        """What it takes to compute a value once more."""
        return self.of[i].sources if i in self.of else frozenset((i,))

    def add(self, step: Instruction) -> None:
        """Adds a step, if its results are larger than what it takes to repeat them."""
        sources = frozenset[int]().union(*map(self.sources, step.reads))
        length = 1 + sum(self.of[i].length for i in step.reads if i in self.of)
        is_larger = sum(map(self._size, sources)) <= sum(map(self._size, step.outs))
        if is_larger and length <= _LONGEST:
            self.of |= dict.fromkeys(step.outs, _Repeat(step, sources, length))

    def before(self, island: list[Instruction], known: set[int]) -> list[Instruction]:
        """The steps whose results an island reads, except known ones, and what those read."""
        found: dict[int, Instruction] = {}  # by number, which is the order of the program
        unread = list(read_by(island))
        while unread:
            i = unread.pop()
            if i in self.of and i not in known:
                step = self.of[i].step
                if step.outs[0] not in found:
                    found[step.outs[0]] = step
                    unread += step.reads
        return [found[number] for number in sorted(found)]


def read_by(island: list[Instruction]) -> dict[int, None]:
    """What an island reads from others."""
    made = {i for step in island for i in step.outs}
    read = (i for step in island for i in step.ins if i >= 0)
    return {i: None for i in read if i not in made}
