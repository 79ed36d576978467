"""What the CUDA kernels may reach on a B200, from the instructions that nvcc makes of them.

A kernel that only reads and writes memory is bounded by the memory, or by the rate at which an SM
issues instructions. `python benchmarks/sass_model.py` compiles the kernels for sm_100a, needs no
GPU, and prints for each what it executes for an element of the input and the share of the memory's
bandwidth that this leaves: an upper bound, as nothing ever waits in this model. Beside them stand
the bounds that tests/test_sass.py checks.

Needs nvcc (13.0 or later), and cuobjdump and nvdisasm on PATH, in the toolkit, or from PyPI
(nvidia-cuda-cuobjdump, nvidia-cuda-nvdisasm). Another nvcc, for instance PyPI's (nvidia-cuda-nvcc
nvidia-cuda-crt nvidia-cuda-runtime nvidia-nvvm), is used where its folder comes first on PATH.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
TOOLS = ("nvcc", "cuobjdump", "nvdisasm")


@dataclasses.dataclass(frozen=True)
class Chip:
    """What bounds a kernel."""

    name: str
    sms: int
    clock: float  # Hz
    bandwidth: float  # bytes a second

    @property
    def bytes_per_clock(self) -> float:
        """Of memory, for each SM."""
        return self.bandwidth / self.sms / self.clock


B200 = Chip("B200", 148, 1.9e9, 8.0e12)

# Warp instructions a clock and SM. Pairs of float32 pass their pipe in two steps; integer and logic
# operations, comparisons and conversions run at half rate (CUDA programming guide, arithmetic
# throughput; those of FP4 are not published and taken to be like the others).
ISSUE_RATE = 4.0
PIPE_RATE = {"fma": 4.0, "fma2": 2.0, "imad": 2.0, "alu": 2.0, "convert": 2.0, "memory": 1.0}
PIPES = {
    "fma": "FADD FMUL FFMA FHADD FHFMA HADD2 HMUL2 HFMA2",
    "fma2": "FADD2 FMUL2 FFMA2",
    "imad": "IMAD IDP",
    "convert": "F2FP",
    "memory": "LDG STG LDS STS LDL STL ATOMG ATOMS REDG SHFL REDUX CREDUX",  # of 128 bytes
    "alu": "LOP3 SHF IADD3 IADD VIADD PRMT LEA ISETP FSETP FMNMX FMNMX3 HMNMX2 VHMNMX VIMNMX"
    " VIMNMX3 SEL FSEL PLOP3 LOP MOV",
}
PIPE_OF = {op: pipe for pipe, ops in PIPES.items() for op in ops.split()}


@dataclasses.dataclass(frozen=True)
class Case:
    """A kernel of quantize, found by the template arguments in its mangled name."""

    name: str
    kernel: str
    elements: int  # of the input that a thread has in a turn of the loop over tiles
    bytes: float  # that an element of the input moves
    bar: float  # the share of the bandwidth that instructions must allow


# csrc/ops/quantize_cuda.cu Mode
WANTED, SQUARE, STOCHASTIC, HADAMARD = 1, 2, 4, 8
OUTPUT_BYTES = 0.5 + 1 / 16


def _quantize(name: str, rows: int, columns: int, bar: float) -> Case:
    moved = 2 + OUTPUT_BYTES * ((rows != 0) + (columns != 0))
    kernel = f"QuantizeKernelILNS_9FloatTypeE1ELi{rows}ELi{columns}ELb1E"
    return Case(name, kernel, 64, moved, bar)


CASES = (
    _quantize("rows, RNE", WANTED, 0, 1.0),
    _quantize("rows, SR", WANTED | STOCHASTIC, 0, 1.0),
    _quantize("both, RNE", WANTED, WANTED, 1.0),
    _quantize("both, RNE, 16x16", WANTED | SQUARE, WANTED | SQUARE, 1.0),
    _quantize("both, RNE, RHT on columns", WANTED, WANTED | HADAMARD, 0.9),
    _quantize("both, SR", WANTED | STOCHASTIC, WANTED | STOCHASTIC, 0.85),
    _quantize(
        "both, SR, RHT on columns", WANTED | STOCHASTIC, WANTED | STOCHASTIC | HADAMARD, 0.75
    ),
)

# Two blocks of 256 threads have all registers of an SM.
MOST_REGISTERS = 128
# Instructions for an element, at most, of each release of nvcc that has been looked at. A new one
# gets a column of its own: what the benchmark prints, rounded up.
RELEASES = ("13.0", "13.5")
MOST_SPILLS = (0, 8)  # bytes of local memory: 13.5 moves two registers of one kernel there
MOST_INSTRUCTIONS = {
    "rows, RNE": (3.5, 3.5),
    "rows, SR": (8.1, 8.1),
    "both, RNE": (7.0, 7.3),
    "both, RNE, 16x16": (7.1, 7.1),
    "both, RNE, RHT on columns": (10.1, 10.2),
    "both, SR": (15.6, 15.6),
    "both, SR, RHT on columns": (18.6, 18.7),
}


@dataclasses.dataclass(frozen=True)
class Instruction:
    address: int
    predicate: str
    opcode: str
    operands: str

    @property
    def base(self) -> str:
        return self.opcode.split(".")[0]

    @property
    def bytes(self) -> int:
        """What a load or store moves for each lane: 4, unless the opcode says."""
        sizes = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16, "256": 32}
        return next((sizes[m] for m in self.opcode.split(".") if m in sizes), 4)

    @property
    def target(self) -> int | None:
        """Where a branch goes."""
        match = re.search(r"0x([0-9a-f]+)", self.operands) if self.base == "BRA" else None
        return int(match[1], 16) if match else None


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A compiled kernel."""

    name: str
    registers: int
    spills: int  # bytes of local memory
    instructions: tuple[Instruction, ...]


def find_tools() -> dict[str, str]:
    """Paths of the tools by name, of those that are found."""
    found = {}
    nvcc = shutil.which("nvcc")
    folders = [os.path.dirname(os.path.realpath(nvcc))] if nvcc else []
    folders.append("/usr/local/cuda/bin")
    for entry in sys.path:
        folders += [str(p) for p in pathlib.Path(entry or ".").glob("nvidia/cu*/bin")]
    for tool in TOOLS:
        path = shutil.which(tool) or next(
            (p for f in folders if (p := shutil.which(tool, path=f))), None
        )
        if path is not None:
            found[tool] = path
    return found


def nvcc_version(tools: dict[str, str]) -> str:
    text = subprocess.run([tools["nvcc"], "--version"], check=True, capture_output=True, text=True)
    match = re.search(r"V(\d+\.\d+\.\d+)", text.stdout)
    return match[1] if match else "unknown"


@dataclasses.dataclass(frozen=True)
class Bounds:
    """Of a release of nvcc."""

    spills: int
    instructions: dict[str, float]  # by the name of a case


def bounds_of(version: str) -> Bounds | None:
    """Those of nvcc's version, or None if its release is not known."""
    release = ".".join(version.split(".")[:2])
    if release not in RELEASES:
        return None
    at = RELEASES.index(release)
    return Bounds(MOST_SPILLS[at], {name: row[at] for name, row in MOST_INSTRUCTIONS.items()})


def compile_cubin(
    tools: dict[str, str], source: str, to: str, *, arch: str = "sm_100a", count: bool = True
) -> None:
    """Compiles csrc/ops/`source`_cuda.cu.

    Args:
        tools: From find_tools.
        source: The name of an op.
        to: The file to write.
        arch: The target.
        count: Without the branches that only extreme tensors take, as the model counts; else as it
            is built.
    """
    command = [tools["nvcc"], "-std=c++17", "-I", str(ROOT / "csrc"), "--fmad=false"]
    command += ["-arch=" + arch, "-cubin", "-o", to]
    command += ["-DNVFP4_COUNT_INSTRUCTIONS"] if count else []
    command += [str(ROOT / "csrc" / "ops" / (source + "_cuda.cu"))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"nvcc: {source} for {arch} does not compile: {done.stderr}")


def read_cubin(tools: dict[str, str], cubin: str) -> dict[str, Kernel]:
    """Kernels of a file by mangled name."""
    path = os.pathsep.join({os.path.dirname(p) for p in tools.values()})
    environment = os.environ | {"PATH": path + os.pathsep + os.environ.get("PATH", "")}

    def dump(option: str) -> list[str]:
        command = [tools["cuobjdump"], option, cubin]
        return subprocess.run(
            command, check=True, capture_output=True, text=True, env=environment
        ).stdout.splitlines()

    usage: dict[str, tuple[int, int]] = {}
    name = ""
    for line in dump("-res-usage"):
        if match := re.search(r"Function (\S+):", line):
            name = match[1]
        elif match := re.search(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", line):
            usage[name] = (int(match[1]), int(match[2]) + int(match[3]))
    code: dict[str, list[Instruction]] = {}
    for line in dump("-sass"):
        if match := re.search(r"Function : (\S+)", line):
            name = match[1]
            code[name] = []
        elif match := re.match(
            r"\s+/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)\s*([^;]*);", line
        ):
            code[name].append(
                Instruction(int(match[1], 16), (match[2] or "").strip(), match[3], match[4].strip())
            )
    return {n: Kernel(n, *usage[n], tuple(i)) for n, i in code.items()}


def tile_loop(kernel: Kernel) -> tuple[int, int]:
    """First and last address of the loop over tiles, the longest."""
    ends: dict[int, int] = {}
    for i in kernel.instructions:
        if i.target is not None and i.target < i.address:
            ends[i.target] = max(i.address, ends.get(i.target, 0))
    if not ends:
        raise ValueError(f"{kernel.name}: no loop")
    return max(ends.items(), key=lambda loop: loop[1] - loop[0])


def _cold(instructions: list[Instruction]) -> set[int]:
    """Addresses around calls: the slow path of a division, which a branch before jumps over."""
    cold: set[int] = set()
    for n, i in enumerate(instructions):
        if i.base != "CALL":
            continue
        for before in reversed(instructions[max(0, n - 12) : n]):
            if before.predicate and before.target is not None and before.target > i.address:
                cold |= {
                    x.address for x in instructions if before.address < x.address < before.target
                }
                break
    return cold


@dataclasses.dataclass(frozen=True)
class Result:
    """What a kernel executes."""

    case: Case
    kernel: Kernel
    per_element: float  # instructions, in the loop over tiles
    opcodes: dict[str, float]  # likewise, by opcode without modifiers
    once: int  # instructions outside of the loop
    pipes: dict[str, float]  # clocks an element and SM, for each of the pipes

    @property
    def memory_clocks(self) -> float:
        return self.case.bytes / B200.bytes_per_clock

    @property
    def allowed(self) -> float:
        """Instructions an element that leave the memory as the bound."""
        return self.memory_clocks * 32 * ISSUE_RATE

    @property
    def share(self) -> float:
        """Of the bandwidth, as far as issuing instructions bounds it."""
        return min(1.0, self.allowed / self.per_element)

    @property
    def busiest(self) -> str:
        return max(self.pipes, key=lambda p: self.pipes[p])

    @property
    def share_of_pipes(self) -> float:
        """Of the bandwidth, as far as issuing and the busiest pipe bound it."""
        return min(self.share, self.memory_clocks / self.pipes[self.busiest])


def find(case: Case, kernels: dict[str, Kernel]) -> Kernel:
    (kernel,) = (k for n, k in kernels.items() if case.kernel in n)
    return kernel


def measure(case: Case, kernels: dict[str, Kernel]) -> Result:
    """Counts what `case`'s kernel executes."""
    kernel = find(case, kernels)
    instructions = [i for i in kernel.instructions if i.base != "NOP"]
    last_exit = max(i.address for i in instructions if i.base == "EXIT")
    cold = _cold(instructions)
    main = [i for i in instructions if i.address <= last_exit and i.address not in cold]
    first, last = tile_loop(kernel)
    loop = [i for i in main if first <= i.address <= last]
    counts = collections.Counter(i.base for i in loop)
    pipes = dict.fromkeys(("fma", "alu", "convert", "memory"), 0.0)
    for i in loop:
        if pipe := PIPE_OF.get(i.base):
            shared = "fma" if pipe in ("fma2", "imad") else pipe
            turns = max(1.0, i.bytes * 32 / 128) if pipe == "memory" else 1.0
            pipes[shared] += turns / case.elements / 32 / PIPE_RATE[pipe]
    return Result(
        case,
        kernel,
        len(loop) / case.elements,
        {op: n / case.elements for op, n in counts.most_common()},
        len(main) - len(loop),
        pipes,
    )


def _compiled(tools: dict[str, str], source: str, *, arch: str, count: bool) -> dict[str, Kernel]:
    with tempfile.TemporaryDirectory() as folder:
        cubin = os.path.join(folder, source + ".cubin")
        compile_cubin(tools, source, cubin, arch=arch, count=count)
        return read_cubin(tools, cubin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", default="sm_100a", help="target of nvcc")
    parser.add_argument("--opcodes", action="store_true", help="also the commonest instructions")
    args = parser.parse_args()
    tools = find_tools()
    if missing := [tool for tool in TOOLS if tool not in tools]:
        sys.exit("sass_model: needs " + ", ".join(missing))
    version = nvcc_version(tools)
    bounds = bounds_of(version)
    most = bounds.instructions if bounds else {}
    print(f"nvcc {version}, {args.arch}; {B200.name}: {B200.bytes_per_clock:.1f} bytes a clock, SM")
    print("regs, spill: as built. instr: instructions for an element, without unlikely branches.")
    print("share: of the bandwidth, as issuing them allows it")
    print(
        f"{'quantize':26}{'regs':>5}{'most':>5}{'spill':>6}{'instr':>7}{'most':>6}"
        f"{'share':>7}{'bar':>6}  with the busiest pipe"
    )
    counted, built = (
        _compiled(tools, "quantize", arch=args.arch, count=count) for count in (True, False)
    )
    for case in CASES:
        result, kernel = measure(case, counted), find(case, built)
        print(
            f"{case.name:26}{kernel.registers:5}{MOST_REGISTERS:5}{kernel.spills:6}"
            f"{result.per_element:7.2f}{most.get(case.name, '-'):>6}{result.share:7.1%}"
            f"{case.bar:6.0%}  {result.share_of_pipes:.0%} ({result.busiest})"
        )
        if args.opcodes:
            common = list(result.opcodes.items())[:24]
            print("    " + " ".join(f"{op} {n:.2f}" for op, n in common))


if __name__ == "__main__":
    main()
