"""Compiles a JAX function for a B200 and reports what runs: launches, bytes, temporaries, copies, collectives."""

from __future__ import annotations

import collections
import dataclasses
import math
import pathlib
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from b200 import hlo, plugin

# Of a B200, dense: bytes and operations a second. float32 products run as TF32.
MEMORY_RATE = 7.67e12
PEAK = {"nvfp4": 9e15, "bf16": 2.25e15, "f32": 1.1e15}

# What moves data and computes nothing.
_MOVES = {"copy", "transpose", "pad", "slice", "concatenate", "reverse"}
_MOVES |= {"dynamic-slice", "dynamic-update-slice"}
_NO_WORK = {"parameter", "constant", "bitcast", "tuple", "get-tuple-element", "broadcast", "iota"}
_COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")

# Without a GPU nothing can be tuned: products of XLA's own go to cuBLAS, not to a Triton kernel of any tiling.
OPTIONS = {"xla_gpu_enable_triton_gemm": False}


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What one instruction launches.

    Args:
      name: Of the instruction, behind the loops it is in.
      ops: Opcodes of what it computes or moves; the target of a custom call.
      times: How often it runs.
      launches: Each time.
      read: Bytes, each time, of its operands as far as it touches them; nothing is taken to be in a cache.
      written: Likewise, without workspaces.
      flops: Of a product, each time; `precision` is a key of PEAK.
      graphed: Whether it is in a command buffer (a CUDA graph).
    """

    name: str
    ops: frozenset[str]
    times: int
    launches: int
    read: int
    written: int
    flops: int
    precision: str
    graphed: bool

    @property
    def seconds(self) -> float:
        """At least, each time."""
        return max((self.read + self.written) / MEMORY_RATE, self.flops / PEAK[self.precision])

    @property
    def moves(self) -> bool:
        """Whether it only moves data; a constant that is written everywhere does not count, nor do scalars."""
        return bool(self.ops) and self.ops <= _MOVES and self.read > 1024


@dataclasses.dataclass(frozen=True, repr=False)
class Report:
    """What runs on a B200 in one call of a compiled function; bytes and seconds are of one device.

    Args:
      kernels: In the order of the schedule.
      temporaries: Bytes, the most at once beside arguments and results.
      aliased: Bytes of results that lie in donated arguments.
      compile_seconds: To trace, lower and compile.
      text: The optimized HLO.
    """

    kernels: list[Kernel]
    temporaries: int
    aliased: int
    compile_seconds: float
    text: str

    def _total(self, count: Callable[[Kernel], Any]) -> Any:
        return sum(k.times * count(k) for k in self.kernels)

    @property
    def launches(self) -> int:
        """Kernels, copies and calls of FFI handlers; a handler launches one kernel, or a memset too."""
        return self._total(lambda k: k.launches)

    @property
    def bytes(self) -> int:
        """Read and written."""
        return self._total(lambda k: k.read + k.written)

    @property
    def seconds(self) -> float:
        """At least: the sum over the kernels of the time for the bytes, or for the operations."""
        return self._total(lambda k: k.seconds)

    @property
    def outside_graphs(self) -> list[Kernel]:
        """Kernels that are launched one by one."""
        return [k for k in self.kernels if not k.graphed]

    @property
    def moves(self) -> list[Kernel]:
        """Kernels that only copy, transpose, pad or slice."""
        return [k for k in self.kernels if k.moves]

    def calls(self, target: str) -> int:
        """How often custom calls run whose target begins like this."""
        return self._total(lambda k: any(op.startswith(target) for op in k.ops))

    @property
    def collectives(self) -> dict[str, int]:
        """Bytes of the results of collectives, by opcode."""
        found: collections.Counter[str] = collections.Counter()
        for kernel in self.kernels:
            for op in kernel.ops & {*_COLLECTIVES}:
                found[op] += kernel.times * kernel.written
        return dict(found)

    def __repr__(self) -> str:
        lines = [f"{'times':>5} {'read MB':>9} {'written MB':>10} {'us':>8} graph  what"]
        lines += [
            f"{k.times * k.launches:>5} {k.read / 1e6:>9.3f} {k.written / 1e6:>10.3f} "
            f"{k.seconds * 1e6:>8.2f} {'yes' if k.graphed else 'no':<6} {k.name}: {' '.join(sorted(k.ops))}"
            for k in self.kernels
        ]
        lines.append(
            f"{self.launches} launches, {self.bytes / 1e6:.1f} MB, {self.temporaries / 2**20:.1f} MiB of temporaries, "
            f"{self.aliased / 1e6:.1f} MB donated, at least {self.seconds * 1e6:.1f} us"
        )
        return "\n".join(lines)


def audit(
    function: Callable[..., Any],
    *arguments: Any,
    donate: tuple[int, ...] = (),
    devices: int = 1,
    options: dict[str, Any] | None = None,
) -> Report:
    """Compiles `function(*arguments)` for B200s, and reports.

    Args:
      function: Any function of JAX.
      *arguments: Pytrees of `jax.ShapeDtypeStruct`; those without a sharding are whole on each device.
      donate: Numbers of the arguments that are donated.
      devices: How many B200s; `plugin.mesh(devices)` is their mesh.
      options: Of XLA's compiler.

    Returns:
      The report.
    """
    replicated = NamedSharding(plugin.mesh(devices), PartitionSpec())
    arguments = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding or replicated),
        arguments,
    )
    with tempfile.TemporaryDirectory() as folder:
        dump = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        start = time.perf_counter()
        lowered = (
            jax.jit(function, donate_argnums=donate)
            .trace(*arguments)
            .lower(lowering_platforms=("cuda",))
        )
        compiled = lowered.compile(compiler_options=OPTIONS | dump | (options or {}))
        seconds = time.perf_counter() - start
        launches, graphed = _thunks(pathlib.Path(folder))
    text = compiled.as_text()
    memory = compiled.memory_analysis()
    kernels = list(_kernels(hlo.parse(text), launches, graphed, 1, ""))
    return Report(kernels, memory.temp_size_in_bytes, memory.alias_size_in_bytes, seconds, text)


def _thunks(folder: pathlib.Path) -> tuple[collections.Counter[str], set[str]]:
    """XLA's dump of what it launches: how often each instruction, and which ones in command buffers."""

    (metadata_file,) = folder.glob("*.thunk_metadata.txt")
    metadata = re.findall(
        r'profile_annotation: "([^"]*)"\s*thunk_id: (\d+)', metadata_file.read_text()
    )
    names = {int(number): name for name, number in metadata}
    # Nested by indentation: all that is deeper than a command buffer is in it. There is no file if nothing became one.
    graphed, depth = set(), math.inf
    for file in folder.glob("*.thunk_sequence_after_thunk_passes.txt"):
        for indent, number, kind in re.findall(
            r"^( *)(\d+): (\w+)", file.read_text(), re.MULTILINE
        ):
            if len(indent) > depth:
                graphed.add(names.get(int(number), ""))
            else:
                depth = len(indent) if kind == "kCommandBuffer" else math.inf
    return collections.Counter(name for name, _ in metadata), graphed


def _kernels(
    computation: hlo.Computation,
    launches: collections.Counter[str],
    graphed: set[str],
    times: int,
    where: str,
) -> Iterator[Kernel]:
    for i in computation.instructions.values():
        if i.op in ("while", "conditional", "call"):  # of branches, all
            count = times * (i.trip_count if i.op == "while" else 1)
            for called in i.called:
                yield from _kernels(called, launches, graphed, count, f"{where}{i.name}/")
        elif launches[i.name] and not i.op.endswith("-done"):
            work = list(i.work())
            flops, precision = max((_flops(w) for w in work), default=(0, "f32"))
            yield Kernel(
                where + i.name,
                frozenset(w.target or w.op.removesuffix("-start") for w in work) - _NO_WORK,
                times,
                launches[i.name],
                sum(i.reads(slot) for slot in range(len(i.operands))),
                i.writes(),
                flops,
                precision,
                i.name in graphed,
            )


def _flops(instruction: hlo.Instruction) -> tuple[int, str]:
    """Operations of a product, and the type that bounds it."""
    if instruction.target.startswith("nvfp4_matmul"):
        k, precision = 2 * instruction.operand_shapes(0)[0][1][-1], "nvfp4"  # two codes a byte
    elif instruction.target.startswith("__cudnn$blockScaledDot"):
        k, precision = instruction.operand_shapes(0)[0][1][-1], "nvfp4"
    elif instruction.target.startswith("__cublas"):
        dtype, sizes = instruction.operand_shapes(0)[0]
        axes = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', instruction.attributes)
        k = math.prod(sizes[int(axis)] for axis in re.findall(r"\d+", axes[1]))
        precision = dtype if dtype in PEAK else "f32"
    else:
        return 0, "f32"
    return 2 * math.prod(instruction.shapes[0][1]) * k, precision
