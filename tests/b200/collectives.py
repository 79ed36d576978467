"""What devices send to each other in one call of a compiled program."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
from jax.sharding import Mesh

from b200 import audit, hlo

# What a training step sends: weights, and the sums of their gradients; where devices have parts of a product, parts of
# activations, and sums of these; the largest magnitudes, from which scales are made.
PURPOSES = ("weights", "gradients", "activations, gathered", "activations, summed", "scales")
_FEW = 256  # elements: magnitudes of some tensors

# Bytes that a device receives, at least, by those of the result that it has, in a group of n devices. A ring, or a switch that
# adds nothing up by itself: it sends as many.
_RECEIVED = {
    "all-gather": lambda n: (n - 1) / n,
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "reduce-scatter": lambda n: n - 1,  # of the operand, which is n results: (n - 1) / n
    "all-to-all": lambda n: (n - 1) / n,
    "ragged-all-to-all": lambda n: 1,
    "collective-broadcast": lambda n: 1,
    "collective-permute": lambda n: 1,
}


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective instruction; several that XLA has combined count as one.

    Args:
      op: Its opcode.
      results: Types and sizes of what one device has of it.
      axes: The axes of the mesh along which the devices of a group lie.
      devices: In a group.
      times: How often it runs.
    """

    op: str
    results: tuple[hlo.Shape, ...]
    axes: tuple[str, ...]
    devices: int
    times: int

    @property
    def elements(self) -> int:
        """Of what one device has of the results."""
        return sum(math.prod(sizes) for _, sizes in self.results)

    @property
    def dtypes(self) -> set[str]:
        """As HLO spells them."""
        return {dtype for dtype, _ in self.results}

    @property
    def bytes(self) -> float:
        """That a device receives, at least, each time."""
        return _RECEIVED[self.op](self.devices) * hlo.bytes_of(list(self.results))

    def purpose(self, model: str | None) -> str:
        """One of PURPOSES, where `model` is the axis of tensor parallelism and all others divide the batch and the weights."""
        sums = self.op in ("all-reduce", "reduce-scatter")
        if sums and self.elements <= _FEW:
            return "scales"
        if self.axes == (model,):
            return "activations, summed" if sums else "activations, gathered"
        return "gradients" if sums else "weights"


def compiled(function: Any, *arguments: Any, mesh: Mesh) -> list[Collective]:
    """Compiles a jitted function for the devices of the mesh, by the shardings of its arguments, and returns its collectives."""
    lowered = function.trace(*arguments).lower(lowering_platforms=("cuda",))
    return collectives(lowered.compile(compiler_options=audit.OPTIONS).as_text(), mesh)


def collectives(text: str, mesh: Mesh) -> list[Collective]:
    """The collectives of a compiled program, among more than one device, in the order of the schedule.

    Args:
      text: Its optimized HLO.
      mesh: The mesh that it was compiled for.
    """
    found = []
    for instruction, times in _instructions(hlo.parse(text), 1):
        op = instruction.op.removesuffix("-start")
        if op not in _RECEIVED:
            continue
        group = _group(op, instruction.attributes, mesh.size)
        if len(group) == 1:
            continue
        places = np.array(np.unravel_index(group, mesh.axis_sizes))
        axes = tuple(
            a for a, p in zip(mesh.axis_names, places, strict=True) if len(np.unique(p)) > 1
        )
        shapes = tuple(instruction.shapes[i] for i in instruction.written)
        found.append(Collective(op, shapes, axes, len(group), times))
    return found


def _instructions(
    computation: hlo.Computation, times: int
) -> Iterator[tuple[hlo.Instruction, int]]:
    for i in computation.instructions.values():
        if i.op in ("while", "conditional", "call"):  # of branches, all
            count = times * (i.trip_count if i.op == "while" else 1)
            for called in i.called:
                yield from _instructions(called, count)
        elif not i.op.endswith("-done"):
            for work in i.work():
                yield work, times


def _group(op: str, attributes: str, devices: int) -> list[int]:
    """The devices of one group of a collective; XLA has three ways to write the groups."""
    if op == "collective-permute":
        pairs = re.search(r"source_target_pairs=\{(\{[\d,{}]*\})\}", attributes)
        return [int(d) for d in re.findall(r"\d+", pairs[1].partition("}")[0])]
    # {{0,1},{2,3}}; {} is all.
    if found := re.search(r"replica_groups=\{(?:\{([\d,]*)\}[\d,{}]*)?\}", attributes):
        return [int(d) for d in found[1].split(",")] if found[1] else list(range(devices))
    # [2,4]<=[4,2]T(1,0): groups are the rows.
    if found := re.search(
        r"replica_groups=(\[[\d,]*\])<=(\[[\d,]*\])(?:T\(([\d,]*)\))?", attributes
    ):
        return [int(d) for d in _iota(found[2], found[3]).reshape(_numbers(found[1]))[0]]
    # mesh['a'=2,'b'=4], device_ids=([2,4]T(1,0)) {'b'}: groups lie along the axes that are named, or parts of them, 'b':(1)2.
    found = re.search(
        r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\((\[[\d,]*\])(?:T\(([\d,]*)\))?\))? \{([^}]*)\}",
        attributes,
    )
    if found is None:
        raise ValueError(f"the replica groups are written in an unknown way: {attributes}")
    sizes = {n: int(s) for n, s in re.findall(r"'([^']*)'=(\d+)", found[1])}
    ids: Any = _iota(found[2] or str(list(sizes.values())), found[3])
    ids = ids.reshape(list(sizes.values()))
    for n, axis in enumerate(list(sizes)):
        named = re.search(rf"'{axis}'(?::\((\d+)\)(\d+))?", found[4])
        if not named:
            ids = ids.take([0], axis=n)
        elif named[1]:
            before, size = int(named[1]), int(named[2])
            after = sizes[axis] // (before * size)
            ids = ids.take([i * after for i in range(size)], axis=n)
    return [int(d) for d in ids.reshape(-1)]


def _iota(sizes: str, order: str | None) -> np.ndarray:
    shape = _numbers(sizes)
    ids = np.arange(math.prod(shape)).reshape(shape)
    return ids.transpose(_numbers(order)) if order else ids


def _numbers(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", text)]
