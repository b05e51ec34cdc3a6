"""What a compiled program does, read from its text: kernels, copies, collectives, bytes moved.

For GPUs the compiler gives no cost analysis; and where it does, that is an estimate made before
memory is assigned. The text of a compiled program is its schedule: what runs, in which order, on
arrays in which memory.
"""

import math
import operator
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

# Names for what is already there.
_FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "opt-barrier",
    "add-dependency", "partition-id", "replica-id",
}  # fmt: skip
_COLLECTIVES = (
    "all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-permute",
    "collective-broadcast", "ragged-all-to-all",
)  # fmt: skip
_COPIES = ("copy", "slice", "dynamic-slice")  # alone, they move what is there
_TAKES_PARTS = (*_COPIES, "gather")
_IN_PLACE = "dynamic-update-slice"
_RENAMED = 'custom_call_target="ConcatBitcast"'  # slices that lie side by side
_ON_CHIP = re.compile(r"T\(.*S\([1-9]")  # a TPU's layouts alone have tiles
_SCALAR_MEMORY = "S(6)"

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^ +(?:ROOT )?%?([\w.-]+) = (.*)$")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\](\{[^}]*\})?")
_CALLED = re.compile(
    r"(?:to_apply|body|true_computation|false_computation)=%?([\w.-]+)"
)
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_CALLS = re.compile(r"calls=%?([\w.-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')


class Operation(NamedTuple):
    """Something that a program does when it runs.

    Attributes:
      opcode: the HLO's name for it, without the `-start` of an asynchronous one.
      result: the type of its result, as the HLO has it.
      read: bytes of operands in the device's main memory.
      written: bytes of results there.
    """

    opcode: str
    result: str
    read: int
    written: int

    @property
    def moved(self) -> int:
        """Bytes read and written."""
        return self.read + self.written

    @property
    def nbytes(self) -> int:
        """Bytes of the result, in whatever memory."""
        return _size(self.result)


class _Instruction(NamedTuple):
    opcode: str
    result: str
    operands: list[str]
    attributes: str


class Program:
    """What a compiled program does.

    A conditional is assumed to take the branch that moves more, which is that of an applied step.
    Where a kernel only takes slices or rows of an operand, these count, and where it writes into a
    part of an array, that part. On a TPU only its main memory counts, not what stays on the chip.

    Attributes:
      operations: what runs, in order; a loop's body as many times as it is known to.
      temp_bytes: what the compiler allocates besides arguments and results.
    """

    def __init__(self, compiled: Any):
        self.temp_bytes: int = compiled.memory_analysis().temp_size_in_bytes
        self._computations, entry = _parse(compiled.as_text())
        self.operations = list(self._executed(entry))

    @property
    def bytes_moved(self) -> int:
        """Bytes of the operands and results of all that runs."""
        return sum(o.moved for o in self.operations)

    @property
    def collectives(self) -> list[Operation]:
        """What devices send to each other."""
        return [o for o in self.operations if o.opcode in _COLLECTIVES]

    @property
    def copies(self) -> list[Operation]:
        """What is only copied, from main memory to main memory."""
        found = (o for o in self.operations if o.opcode in _COPIES)
        return [o for o in found if o.read and o.written]

    @property
    def kernels(self) -> list[Operation]:
        """What computes; a TPU's scalar instructions do not count."""
        others = (*_COLLECTIVES, *_COPIES)
        found = (o for o in self.operations if o.opcode not in others)
        return [o for o in found if _SCALAR_MEMORY not in o.result]

    def _executed(self, computation: str) -> Iterator[Operation]:
        instructions = self._computations[computation]
        # An asynchronous operation reads when it starts and writes until it is done.
        done = {
            i.operands[0]: i.result
            for i in instructions.values()
            if i.opcode.endswith("-done")
        }
        for name, i in instructions.items():
            called = _CALLED.findall(i.attributes)
            if found := _BRANCHES.search(i.attributes):
                called += re.findall(r"[\w.-]+", found[1])
            if i.opcode in _FREE or i.opcode.endswith(("-done", "-update")):
                continue
            if _RENAMED in i.attributes:
                continue
            if i.opcode == "conditional":
                ways = [list(self._executed(branch)) for branch in called]
                yield from max(ways, key=lambda way: sum(o.moved for o in way))
            elif i.opcode in ("call", "while"):
                trips = _TRIPS.search(i.attributes)
                for _ in range(int(trips[1]) if trips else 1):
                    yield from self._executed(called[0])
            else:
                i = i._replace(
                    opcode=i.opcode.removesuffix("-start"),
                    result=done.get(name, i.result),
                )
                operands = [_main_memory(instructions[x].result) for x in i.operands]
                read = sum(
                    map(operator.mul, operands, self._shares_read(i, instructions))
                )
                written = self._written(i, instructions)
                yield Operation(i.opcode, i.result, round(read), written)

    def _body(self, fusion: _Instruction) -> dict[str, _Instruction]:
        found = _CALLS.search(fusion.attributes)
        return self._computations[found[1]] if found else {}

    def _shares_read(
        self, i: _Instruction, others: dict[str, _Instruction]
    ) -> list[float]:
        """The share of each operand that an instruction reads."""
        if i.opcode == "fusion" and (body := self._body(i)):
            *_, root = body
            needed = dict.fromkeys(body, 0.0) | {root: 1.0}
            for name, inner in reversed(body.items()):
                for x, share in zip(
                    inner.operands, self._shares_read(inner, body), strict=True
                ):
                    needed[x] = min(1.0, needed[x] + needed[name] * share)
            numbers = {
                int(x.attributes): name
                for name, x in body.items()
                if x.opcode == "parameter"
            }
            return [needed[numbers[n]] for n in range(len(i.operands))]
        shares = [1.0] * len(i.operands)
        if i.opcode in _TAKES_PARTS:
            shares[0] = min(
                1.0, _size(i.result) / max(1, _size(others[i.operands[0]].result))
            )
        elif i.opcode == _IN_PLACE:
            shares[0] = 0.0
        return shares

    def _written(self, i: _Instruction, others: dict[str, _Instruction]) -> int:
        """The bytes that an instruction writes."""
        if i.opcode == "fusion" and (body := self._body(i)):
            *_, root = body.values()
            parts = (
                [body[x] for x in root.operands] if root.opcode == "tuple" else [root]
            )
            if any(part.opcode == _IN_PLACE for part in parts):
                return sum(self._written(part, body) for part in parts)
        if i.opcode == _IN_PLACE:
            return _main_memory(others[i.operands[1]].result)
        return _main_memory(i.result)


def _size(result: str) -> int:
    return sum(map(_nbytes, _arrays(result)))


def _main_memory(result: str) -> int:
    """The bytes that a type, of an array or a tuple of them, has in main memory."""
    return sum(
        _nbytes(array) for array in _arrays(result) if not _ON_CHIP.search(array[2])
    )


def _arrays(result: str) -> list[tuple[str, str, str]]:
    """Dtype, shape and layout of each array in a type."""
    return _ARRAY.findall(result)


def _nbytes(array: tuple[str, str, str]) -> int:
    dtype, shape, _ = array
    return _itemsize(dtype) * math.prod(int(n) for n in shape.split(",") if n)


def _itemsize(dtype: str) -> int:
    bits = re.search(r"\d+", dtype)
    return max(1, int(bits[0]) // 8) if bits else dtype != "token"  # pred has none


def _parse(text: str) -> tuple[dict[str, dict[str, _Instruction]], str]:
    """The instructions of each computation by their names, and the entry's name."""
    computations, entry, current = {}, "", {}
    for line in text.splitlines():
        if found := _COMPUTATION.match(line):
            current = computations[found[2]] = {}
            entry = found[2] if found[1] else entry
        elif found := _INSTRUCTION.match(line):
            current[found[1]] = _instruction(found[2])
    return computations, entry


def _instruction(text: str) -> _Instruction:
    """Takes `f32[2]{0} fusion(%a, %b), calls=%c` apart."""
    end = _closing(text) if text.startswith("(") else text.index(" ")
    result, rest = text[:end], text[end:].lstrip()
    opcode, rest = rest.split("(", 1)
    end = _closing("(" + rest) - 1
    operands = re.findall(r"%([\w.-]+)", rest[:end])
    attributes = rest[: end - 1] if opcode == "parameter" else rest[end:]  # its number
    return _Instruction(opcode, result, operands, attributes)


def _closing(text: str) -> int:
    """Where the parenthesis that the text begins with is closed."""
    depth = 0
    for i, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return i + 1
    raise ValueError(f"no closing parenthesis in {text[:80]}")
