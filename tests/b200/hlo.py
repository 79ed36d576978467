"""Reads the text of a compiled HLO module: its instructions, and the bytes that each moves."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator

Shape = tuple[str, tuple[int, ...]]  # type and sizes

_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(
    r"\s+(ROOT )?%?([\w.\-]+) = (?P<type>.*?) (?P<op>[a-z][\w\-]*)\((?P<in>[^)]*)\)(?P<rest>.*)"
)
_CALLED = re.compile(
    r"\b(?:calls|to_apply|body|branch_computations|true_computation|false_computation)="
    r"(?:\{([^}]*)\}|%?([\w.\-]+))"
)

# Operations on one array that lies where it is, and those that read a part of their first operand.
_SAME_MEMORY = {"bitcast", "tuple", "get-tuple-element"}
_READS_PART = {"dynamic-slice", "slice", "gather"}
# Those that do what the computation does that they call.
_CONSISTS_OF_CALLED = {"fusion", "fusion-start", "async-start"}


def bytes_of(shapes: list[Shape]) -> int:
    """Size in memory; types of four bits are packed."""

    def bits(dtype: str) -> int:
        digits = re.search(r"\d+", dtype)  # bf16, f8e4m3fn, u8; pred has none
        return 0 if dtype in ("token", "opaque") else int(digits[0]) if digits else 8

    return sum(-(-math.prod(sizes) * bits(dtype) // 8) for dtype, sizes in shapes)


@dataclasses.dataclass(frozen=True, eq=False)
class Instruction:
    """One instruction of a computation.

    Args:
      name: Unique in its computation.
      op: The opcode, "fusion" or "custom-call".
      shapes: Of the leaves of its result.
      operands: The instructions it reads, each with the leaf that it reads, or None for all of it.
      attributes: The rest of its line.
      called: Computations that it runs: of a fusion, a loop's body, branches.
    """

    name: str
    op: str
    shapes: list[Shape]
    operands: list[tuple[Instruction, int | None]]
    attributes: str
    called: list[Computation]

    @functools.cached_property
    def target(self) -> str:
        """Of a custom call."""
        found = re.search(r'custom_call_target="([^"]*)"', self.attributes)
        return found[1] if found else ""

    @property
    def trip_count(self) -> int:
        """Of a loop; an error if XLA does not know it."""
        found = re.search(r'known_trip_count":\{"n":"(\d+)"', self.attributes)
        if found is None:
            raise ValueError(f"the loop {self.name} has no known trip count")
        return int(found[1])

    @property
    def written(self) -> range:
        """Which leaves of its result it writes for others to read."""
        count = len(self.shapes)
        if self.op.endswith("-start") and count > len(self.operands):
            return range(len(self.operands), count)  # before them it repeats its operands
        if self.target.startswith(("nvfp4_matmul", "__cublas", "__cudnn")):
            return range(1)  # then comes the workspace
        return range(count)

    def operand_shapes(self, slot: int) -> list[Shape]:
        """Leaves of one operand."""
        operand, leaf = self.operands[slot]
        return operand.shapes if leaf is None else [operand.shapes[leaf]]

    def reads(self, slot: int) -> int:
        """Bytes that it reads of an operand, which may be a slice of it."""
        if slot == 0 and self.op in _READS_PART:
            return bytes_of(self.shapes)
        if slot == 0 and self.op == "dynamic-update-slice":
            return 0  # updated in place
        whole = bytes_of(self.operand_shapes(slot))
        if self.op in _CONSISTS_OF_CALLED:
            return min(whole, self.called[0].reads_of_parameter(slot))
        return whole

    def writes(self, leaf: int | None = None) -> int:
        """Bytes that it writes, into all of its result or one leaf of it."""
        if self.op == "tuple":
            parts = self.operands if leaf is None else [self.operands[leaf]]
            return sum(i.writes(n) for i, n in parts)
        if self.op in ("bitcast", "get-tuple-element"):
            operand, n = self.operands[0]
            index = re.search(r"index=(\d+)", self.attributes)
            return operand.writes(int(index[1]) if index else n)
        if self.op == "dynamic-update-slice":
            return bytes_of(self.operand_shapes(1))
        if self.op in _CONSISTS_OF_CALLED and leaf is None:
            return self.called[0].root.writes()
        return bytes_of([self.shapes[i] for i in self.written if leaf in (None, i)])

    def work(self) -> Iterator[Instruction]:
        """The instruction itself, or those in the computations that a fusion consists of."""
        if self.op in _CONSISTS_OF_CALLED:
            for inner in self.called[0].instructions.values():
                yield from inner.work()
        else:
            yield self


@dataclasses.dataclass(eq=False)
class Computation:
    """Instructions by name, in the order of the schedule; the last one that was marked is the root."""

    instructions: dict[str, Instruction] = dataclasses.field(default_factory=dict)
    root: Instruction = None  # type: ignore[assignment]

    @functools.cached_property
    def users(self) -> dict[str, list[tuple[Instruction, int]]]:
        """By instruction, the instructions that read it and the operand that it is of each."""
        users: dict[str, list[tuple[Instruction, int]]] = {name: [] for name in self.instructions}
        for user in self.instructions.values():
            for slot, (operand, _) in enumerate(user.operands):
                users[operand.name].append((user, slot))
        return users

    def reads_of_parameter(self, number: int) -> int:
        """Bytes that the computation reads of a parameter."""
        parameters = (i for i in self.instructions.values() if i.op == "parameter")
        parameter = next(p for p in parameters if p.attributes.startswith(f"#{number}"))
        return self._reads_of(parameter)

    def _reads_of(self, instruction: Instruction) -> int:
        return sum(
            self._reads_of(user) if user.op in _SAME_MEMORY else user.reads(slot)
            for user, slot in self.users[instruction.name]
        )


def parse(text: str) -> Computation:
    """The entry computation of a module."""
    computations: dict[str, Computation] = {}
    current = entry = Computation()
    for line in text.splitlines():
        if found := _COMPUTATION.match(line):
            current = computations[found[2]] = Computation()
            entry = current if found[1] else entry
        elif found := _INSTRUCTION.match(re.sub(r"/\*.*?\*/", "", line)):
            instruction = _instruction(found, current, computations)
            current.instructions[instruction.name] = instruction
            if found[1]:
                current.root = instruction
    return entry


def _instruction(
    found: re.Match[str], current: Computation, computations: dict[str, Computation]
) -> Instruction:
    op, inner, rest = found["op"], found["in"], found["rest"]
    operands = [
        (current.instructions[name], int(leaf) if leaf else None)
        for name, leaf in re.findall(r"%([\w.\-]+)(?:#(\d+))?", inner)
    ]
    called = [
        computations[name.strip().lstrip("%")]
        for several, one in _CALLED.findall(rest)
        for name in (several or one).split(",")
    ]
    shapes = [
        (dtype, tuple(int(size.lstrip("<=")) for size in sizes.split(",") if size))
        for dtype, sizes in re.findall(r"([a-z]\w*)\[([\d,<=]*)\]", found["type"])
    ]
    attributes = f"#{inner}{rest}" if op == "parameter" else rest
    return Instruction(found[2], op, shapes, operands, attributes, called)
