"""What a compiled program does, read from its text: operations, and the bytes that they move.

For GPUs the compiler gives no cost analysis; and where it does, that is an estimate made before
memory is assigned. The text of a compiled program is its schedule: what runs, in which order, on
arrays in which memory.
"""

import math
import operator
import re
from collections.abc import Iterator
from typing import NamedTuple

import jax

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

    def __init__(self, text: str, temp_bytes: int = 0):
        self.temp_bytes = temp_bytes
        self._computations, entry = _parse(text)
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

    def _executed(self, computation: str) -> Iterator[Operation]:
        instructions = self._computations[computation]
        # An asynchronous operation reads when it starts and writes until it is done.
        done = {
            i.operands[0]: i.result
            for i in instructions.values()
            if i.opcode.endswith("-done")
        }
        for name, i in instructions.items():
            is_last_part = i.opcode.endswith(("-done", "-update"))
            if i.opcode in _FREE or is_last_part or _RENAMED in i.attributes:
                continue
            called = _CALLED.findall(i.attributes)
            if found := _BRANCHES.search(i.attributes):
                called += re.findall(r"[\w.-]+", found[1])
            if i.opcode == "conditional":
                ways = [list(self._executed(branch)) for branch in called]
                yield from max(ways, key=lambda way: sum(o.moved for o in way))
            elif i.opcode in ("call", "while"):
                trips = _TRIPS.search(i.attributes)
                for _ in range(int(trips[1]) if trips else 1):
                    yield from self._executed(called[0])
            else:
                opcode = i.opcode.removesuffix("-start")
                i = i._replace(opcode=opcode, result=done.get(name, i.result))
                sizes = [
                    _size(instructions[x].result, on_chip=False) for x in i.operands
                ]
                shares = self._shares_read(i, instructions)
                read = round(sum(map(operator.mul, sizes, shares)))
                yield Operation(opcode, i.result, read, self._written(i, instructions))

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
                shares = self._shares_read(inner, body)
                for x, share in zip(inner.operands, shares, strict=True):
                    needed[x] = min(1.0, needed[x] + needed[name] * share)
            parameters = (x for x in body.items() if x[1].opcode == "parameter")
            numbers = {int(x.attributes): name for name, x in parameters}
            return [needed[numbers[n]] for n in range(len(i.operands))]
        shares = [1.0] * len(i.operands)
        if i.opcode in _TAKES_PARTS:
            whole = max(1, _size(others[i.operands[0]].result))
            shares[0] = min(1.0, _size(i.result) / whole)
        elif i.opcode == _IN_PLACE:
            shares[0] = 0.0
        return shares

    def _written(self, i: _Instruction, others: dict[str, _Instruction]) -> int:
        """The bytes that an instruction writes."""
        if i.opcode == "fusion" and (body := self._body(i)):
            *_, root = body.values()
            is_tuple = root.opcode == "tuple"
            parts = [body[x] for x in root.operands] if is_tuple else [root]
            if any(part.opcode == _IN_PLACE for part in parts):
                return sum(self._written(part, body) for part in parts)
        if i.opcode == _IN_PLACE:
            return _size(others[i.operands[1]].result, on_chip=False)
        return _size(i.result, on_chip=False)


def of(compiled: jax.stages.Compiled) -> Program:
    """What JAX has compiled."""
    memory = compiled.memory_analysis()
    return Program(compiled.as_text(), memory.temp_size_in_bytes)


def _size(result: str, *, on_chip: bool = True) -> int:
    """The bytes of a type, of an array or a tuple of them: in all, or in main memory."""
    return sum(
        _itemsize(dtype) * math.prod(int(n) for n in shape.split(",") if n)
        for dtype, shape, layout in _ARRAY.findall(result)
        if on_chip or not _ON_CHIP.search(layout)
    )


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
