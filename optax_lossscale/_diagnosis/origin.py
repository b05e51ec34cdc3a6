"""The place of the model where numbers stopped being finite, as far as the evidence goes."""

import itertools
import re
from collections import Counter
from typing import Any, NamedTuple

import numpy as np

from optax_lossscale._arrays.names import natural, without_numbers
from optax_lossscale._diagnosis.places import places
from optax_lossscale._diagnosis.summary import Summary
from optax_lossscale._diagnosis.tap import Probe

Place = tuple[str, Probe]

_NAMED = 4  # branches in one finding


class Suspect(NamedTuple):
    """A place of the model, and what speaks against it.

    Attributes:
      name: the place: the path of a leaf or a probe.
      finding: what speaks against it, in words.
    """

    name: str
    finding: str


def recorded_places(taps: Any) -> list[Place]:
    """The places that recorded something, in the order in which they ran."""
    return [(name, record) for name, record in places(taps) if record.value.size]


def origin(recorded: list[Place], leaves: dict[str, Summary], loss: Any) -> Suspect | None:
    """The place where it began, so far as taps, gradients and the loss can tell."""
    forward = _first_value(recorded, loss)
    if forward is not None:
        return forward
    if loss is not None and not np.isfinite(loss).all():
        return Suspect("the loss", f"it is {loss}{_before(recorded, len(recorded))}")
    return _last_gradient(recorded, leaves)


def ranked(leaves: dict[str, Summary]) -> list[str]:
    """The leaves that are not finite, those nearest to where it began first.

    Infinities come before the NaNs that they turn into, and few before many.
    """

    def remoteness(name):
        leaf = leaves[name]
        return leaf.nans / leaf.nonfinite, leaf.nonfinite / leaf.size, natural(name)

    return sorted((name for name, leaf in leaves.items() if leaf.nonfinite), key=remoteness)


def count(summary: Summary) -> str:
    """What of it is not finite, in words."""
    return f"{summary.infinities:.0f} inf and {summary.nans:.0f} NaN of {summary.size:.0f}"


def _first_value(recorded: list[Place], loss: Any) -> Suspect | None:
    """The first place in the forward pass, but for infinities that are meant, as a mask's are."""
    meant = _meant_infinities(recorded, loss)
    bad = [i for i, (_, record) in enumerate(recorded) if record.value.nonfinite]
    first = next((i for i in bad if i not in meant), None)
    if first is None:
        return None
    if not _is_finite(loss):
        first = _in_a_branch_before(recorded, meant, first)
    name, record = recorded[first]
    finding = f"{count(record.value)} in its value{_before(recorded, first)}"
    if may_be_masked(record.value) and first + 1 < len(recorded):
        after, next_record = recorded[first + 1]
        if next_record.value.nans:
            finding += f"; if these are meant, as a mask's are, it began between it and {after}"
    return Suspect(name, finding)


def _meant_infinities(recorded: list[Place], loss: Any) -> set[int]:
    """Places with infinities and no NaN that go no further, or are those of a mask."""
    infinite = [i for i, (_, r) in enumerate(recorded) if r.value.infinities and not r.value.nans]
    if _is_finite(loss):
        return set(infinite)
    kinds = [_kind(*place) for place in recorded]
    meant: set[int] = set()
    for i in reversed(infinite):
        earlier = [kind for kind in kinds[:i] if kind[:2] == kinds[i][:2]]
        if any(kind != kinds[i] for kind in earlier):
            continue  # a mask is the same in every layer
        following = recorded[i + 1 : i + 2]
        ends_here = any(not record.value.nonfinite for _, record in following)
        goes_on = any(kind[1:] == kinds[i][1:] for kind in kinds[i + 1 : i + 2])
        is_repeated = kinds.count(kinds[i]) > 1 and not goes_on
        if ends_here or is_repeated or i + 1 in meant:
            meant.add(i)
    return meant


def _is_finite(loss: Any) -> bool:
    """Whether the loss is known to be finite."""
    return loss is not None and bool(np.isfinite(loss).all())


def may_be_masked(value: Summary) -> bool:
    """Whether infinities are all that is not finite, as a mask's, which leaves something, are."""
    return bool(0 < value.infinities < value.size and not value.nans)


def _kind(name: str, record: Probe) -> tuple[str, float, float]:
    """The same of each layer's mask: its name but for numbers, its size, how many it masks."""
    value = record.value
    alike = without_numbers(name) if re.search("[a-zA-Z]", name) else name
    return alike, float(value.size), float(value.infinities)


def _in_a_branch_before(recorded: list[Place], meant: set[int], first: int) -> int:
    """The branch that ran before others and whose infinities the first place adds to theirs.

    Its neighbor is finite, and so it looks like a mask. But a mask leaves something; and where
    branches join, elementwise, there are as many numbers, and at least as many infinities.
    """
    kinds = Counter(_kind(*place) for place in recorded)
    here, joined = _kind(*recorded[first]), recorded[first][1].value
    for i in sorted(i for i in meant if i < first):
        kind, value = _kind(*recorded[i]), recorded[i][1].value
        is_joined = value.size == joined.size and value.infinities <= joined.nonfinite
        fits = value.size > 1 and (is_joined or not may_be_masked(value))
        if fits and kind[0] != here[0] and kinds[kind] == 1:
            return i
    return first


def _before(recorded: list[Place], i: int) -> str:
    """What is known of the last finite value before a place."""
    for name, record in reversed(recorded[:i]):
        if not record.value.nonfinite:
            return f"; the value of {name} is finite, at most {record.value.largest:.3g}"
    return ""


def _last_gradient(recorded: list[Place], leaves: dict[str, Summary]) -> Suspect | None:
    """The place in the backward pass whose gradient arrives finite and leaves not.

    If the model is a chain it is the place after the last one whose gradient is not finite.
    Where branches run in parallel it may be any of those that follow: the one of which a
    parameter's own gradient is not finite.
    """
    last = max((i for i, (_, r) in enumerate(recorded) if r.cotangent.nonfinite), default=-1)
    finite = recorded[last + 1 :]
    passed = ""
    if last >= 0:
        name, record = recorded[last]
        passed = f"{count(record.cotangent)} in the gradient that it passes to {name}"
    if not finite:
        return Suspect("the loss", passed) if passed else None

    modules = _modules(leaves)
    own = _own_gradients(recorded, leaves, modules)
    guilty = [i for i, (name, _) in enumerate(finite) if own.get(name)]
    if passed:
        # In a chain the others come later than one whose parameters' gradients are finite.
        is_cleared = [own.get(name) == [] for name, _ in finite]
        guilty = [i for i in guilty if i == 0 or any(is_cleared[:i])]
    if not passed and not guilty:
        return None
    if passed and (0 in guilty or not guilty):
        # The first of a stack may be the first turn of a loop, or the first of parallel branches.
        name = finite[0][0]
        is_certain = guilty and (_words(name) in modules or not name.endswith("/0"))
        doubt = "" if is_certain else _between(recorded, last, "; if branches run in parallel, ")
        return Suspect(name, f"{passed}{_arrives(finite[0])}{doubt}")
    rank = ranked(leaves)
    first = min(guilty, key=lambda i: rank.index(own[finite[i][0]][0]))
    leaf = own[finite[first][0]][0]
    where = _between(recorded, last, "; ", first) if passed else ""
    finding = f"{count(leaves[leaf])} in the gradient of its own {leaf}"
    return Suspect(finite[first][0], f"{finding}{_arrives(finite[first])}{where}")


def _arrives(place: Place) -> str:
    return f"; the one that reaches it is finite, at most {place[1].cotangent.largest:.3g}"


def _between(recorded: list[Place], last: int, introduction: str, first: int = 0) -> str:
    """The last common place, the next one, and the branches between, as their names go."""
    names = [name for name, _ in recorded[last + 1 :]]
    container = lambda name: name.rpartition("/")[0] or without_numbers(name)
    is_beside = lambda name: container(name) == container(names[first])
    beside = len(list(itertools.takewhile(is_beside, names[first:])))
    branches = names[: first + beside]
    if len(branches) == 1:
        branches = names
    if len(branches) == 1:
        return ""
    after = names[len(branches)] if len(branches) < len(names) else "the loss"
    shown = ", ".join(branches[:_NAMED]) + (", …" if len(branches) > _NAMED else "")
    return f"{introduction}between {recorded[last][0]} and {after}, in one of {shown}"


def _own_gradients(
    recorded: list[Place], leaves: dict[str, Summary], modules: dict[tuple[str, ...], set[str]]
) -> dict[str, list[str]]:
    """Of each place with parameters of its own, those with gradients that are not finite.

    Its own are those under the one path that ends in its name. Those of a stack are stacked:
    they speak against the first turn whose gradient arrives finite, where more of them is not
    finite than the turns before it explain.
    """
    rank = ranked(leaves)
    share = {leaf: leaves[leaf].nonfinite / leaves[leaf].size for leaf in rank}
    own = {}
    stacks: dict[str, list[Place]] = {}
    for name, record in recorded:
        if mine := modules.get(_words(name)):
            own[name] = [leaf for leaf in rank if leaf in mine]
        elif stack := _stack(name):
            stacks.setdefault(stack, []).append((name, record))
    for stack, turns in stacks.items():
        if mine := modules.get(_words(stack)):
            own |= {name: [] for name, _ in turns}
            bad = sum(bool(record.cotangent.nonfinite) for _, record in turns)
            if bad < len(turns):
                known = bad / len(turns)
                own[turns[bad][0]] = [
                    leaf for leaf in rank if leaf in mine and known < share[leaf]
                ]
    return own


def _modules(leaves: dict[str, Summary]) -> dict[tuple[str, ...], set[str]]:
    """The leaves of each module, under what the path to it ends in, if no other path does.

    Leaves of one container may go by the same ending too: `w_mean` and `b_mean`.
    """
    paths: dict[tuple, dict[tuple, set[str]]] = {}
    for leaf in leaves:
        words = _words(leaf)
        for start, end in itertools.combinations(range(len(words) + 1), 2):
            is_leaf = start and end == len(words)
            path = (_words(leaf.rpartition("/")[0]), "leaves") if is_leaf else words[:end]
            paths.setdefault(words[start:end], {}).setdefault(path, set()).add(leaf)
    return {ending: next(iter(of.values())) for ending, of in paths.items() if len(of) == 1}


def _words(name: str) -> tuple[str, ...]:
    """`experts/2` and `expert_2` alike."""
    return tuple(word.rstrip("s") for word in re.findall(r"[a-z]+|\d+", name.lower()))


def _stack(name: str) -> str:
    """The stack that a place is a turn of, if it is one; else nothing."""
    stack, _, turn = name.rpartition("/")
    return stack if turn.isdecimal() else ""
