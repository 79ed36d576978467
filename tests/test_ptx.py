"""The CUDA kernels as nvcc compiles them, without a GPU: their PTX, interpreted, has the right bits.

tests/ptx/interpreter.py executes what nvcc made for each target, and refuses what it does not know.
The results are the oracle's, and changes in the PTX, of the kind that a compiler or a kernel may
have wrong, are noticed.

The nvcc is the first on PATH. For another, without a toolkit: `pip install nvidia-cuda-nvcc
nvidia-cuda-crt nvidia-cuda-runtime nvidia-nvvm` in an environment of its own, then put its
site-packages/nvidia/cu13/bin first on PATH and run `pytest tests/test_ptx.py tests/test_sass.py`.
"""

from __future__ import annotations

import ctypes
import dataclasses
import fractions
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
from collections.abc import Callable

import ml_dtypes
import native
import numpy as np
import oracle
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent / "ptx"))
import interpreter

NVCC = shutil.which("nvcc")
if NVCC is None and os.environ.get("NVFP4_REQUIRE_NVCC") != "1":
    pytest.skip("nvcc of CUDA 13.0 or later is not on PATH", allow_module_level=True)

TARGETS = ("100a", "103a", "120f", "90", "80")
OPS = ("amax", "dequantize", "quantize")
TYPES = {"f32": (0, np.float32), "bf16": (1, ml_dtypes.bfloat16), "f16": (2, np.float16)}
# Bits of a mode (csrc/ops/quantize_cuda.cu).
WANTED, TILE16, STOCHASTIC, HADAMARD = 1, 2, 4, 8
KEY = (0x12345678, 0x9ABCDEF0)
SIGNS = 0xD7E8


@pytest.fixture(scope="session")
def ptx(tmp_path_factory):
    """`ptx(op, target)`: the text that nvcc makes; workers of a test run share it."""
    folder = native.shared_folder(tmp_path_factory, "ptx")

    def compile_one(op: str, target: str) -> str:
        to = folder / f"{op}_{target}.ptx"
        with native._lock(to.with_suffix(".lock")):
            if not to.exists():
                assert NVCC is not None, "NVFP4_REQUIRE_NVCC=1, and nvcc is not on PATH"
                command = [NVCC, "-std=c++17", "-O3", "--fmad=false", f"-arch=sm_{target}", "-ptx"]
                command += [f"-I{native.ROOT / 'csrc'}", f"csrc/ops/{op}_cuda.cu"]
                part = to.with_suffix(".part")
                done = subprocess.run(
                    [*command, "-o", part], cwd=native.ROOT, capture_output=True, text=True
                )
                assert done.returncode == 0, done.stderr
                part.rename(to)
        return to.read_text()

    return compile_one


@pytest.fixture(scope="session")
def recorder(tmp_path_factory):
    """`recorder(op, args)`: what the op's function for CUDA enqueues, as dictionaries."""
    folder = native.shared_folder(tmp_path_factory, "ptx")
    return Recorder(folder)


class Recorder:
    def __init__(self, folder: pathlib.Path):
        compiler = os.environ.get("CXX", "g++")
        here = native.ROOT / "tests/ptx/recorder"
        flags = ["-std=c++20", "-Wall", "-Wextra", "-Wno-unknown-pragmas", f"-I{here}"]
        flags += [f"-I{native.ROOT / 'csrc'}"]
        sources = [native.ROOT / f"csrc/ops/{op}_cuda.cu" for op in OPS]
        sources += [here / "main.cc", native.ROOT / "csrc/testing/cuda_on_cpu.cc"]
        self.program = folder / "recorder"
        with native._lock(folder / "recorder.lock"):
            if not self.program.exists():
                objects = [folder / f"{s.name}.o" for s in sources]
                for source, to in zip(sources, objects, strict=True):
                    self.run([compiler, *flags, "-x", "c++", "-c", source, "-o", to])
                self.run([compiler, *objects, "-o", self.program])
        names = [line.split() for line in self.run(["nm", self.program]).splitlines()]
        places = {words[2]: int(words[0], 16) for words in names if len(words) == 3}
        # The part of a kernel's name that does not depend on the compiler.
        self.names = {
            place - places["main"]: match[0]
            for name, place in places.items()
            if (match := re.search(r"[A-Z][A-Za-z]*Kernel(I.*|E.*)$", name))
        }

    def run(self, command: list, data: bytes = b"") -> str:
        done = subprocess.run(list(map(str, command)), input=data, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr.decode()
        return done.stdout.decode()

    def __call__(self, op: str, args: ctypes.Structure) -> list[dict]:
        return [json.loads(line) for line in self.run([self.program, op], bytes(args)).splitlines()]


def execute(
    text: str, op: str, args: ctypes.Structure, memory: interpreter.Memory, recorder: Recorder
) -> interpreter.Result:
    """Does what the op's function enqueues: at most a memset, and one kernel."""
    *memsets, kernel = recorder(op, args)
    assert len(memsets) <= 1
    for memset in memsets:
        buffer = memory.find(memset["memset"])
        first = memset["memset"] - buffer.address
        assert first + memset["size"] <= buffer.data.size
        buffer.data[first : first + memset["size"]] = memset["value"]
        buffer.written[first : first + memset["size"]] = True
    name = recorder.names[kernel["kernel"]]
    (found,) = interpreter.parse(text, name).values()
    return interpreter.launch(
        found,
        tuple(kernel["grid"]),
        kernel["threads"],
        bytes.fromhex(kernel["parameters"]),
        memory,
        kernel["shared"],
    )


# ---- The arguments of ops, as the structs in csrc/ops/ lie in memory


KINDS = {"p": ctypes.c_uint64, "q": ctypes.c_int64, "i": ctypes.c_int32, "I": ctypes.c_uint32,
         "B": ctypes.c_uint8}  # fmt: skip


def struct(name: str, fields: str, **types: type) -> type[ctypes.Structure]:
    """A type with "name:kind" fields; kinds are those of KINDS and `types`."""
    pairs = [field.split(":") for field in fields.split()]
    kinds = {**KINDS, **types}
    return type(name, (ctypes.Structure,), {"_fields_": [(n, kinds[k]) for n, k in pairs]})


Output = struct(
    "Output",
    "tile16:B stochastic:B hadamard:B amax:p partner:p codes:p scales:p global_scale:p",
)
QuantizeArgs = struct(
    "QuantizeArgs",
    "x:p type:B examples:q batch:q rows:q k:q amax_stride:q key:p origin:p segment:q signs:I along_rows:Output"
    " along_columns:Output",
    Output=Output,
)
AmaxArgs = struct(
    "AmaxArgs",
    "x:p type:B examples:q batch:q rows:q k:q signs:I stride:q plain:p along_rows:p"
    " along_columns:p",
)
DequantizeArgs = struct(
    "DequantizeArgs",
    "codes:p scales:p global_scale:p examples:q batch:q rows:q k:q type:B x:p",
)


def tensor(shape: tuple[int, int], dtype, seed: int = 0) -> np.ndarray:
    """Normal numbers, rows of different sizes, some zeros and ties."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * np.exp2(rng.integers(-6, 6, (shape[0], 1)))
    x[:, : shape[1] // 3] = np.round(x[:, : shape[1] // 3] * 4) / 4
    x[rng.random(shape) < 0.05] *= 0.0
    return x.astype(dtype)


@dataclasses.dataclass(frozen=True)
class Quantization:
    """A call of the quantize kernel. Modes are 0, or WANTED | options."""

    shape: tuple[int, int]
    dtype: str
    rows: int
    columns: int

    def run(self, text: str, recorder: Recorder) -> interpreter.Result:
        """Executes it, and compares all it writes with the oracle."""
        type_index, dtype = TYPES[self.dtype]
        x = tensor(self.shape, dtype)
        memory = interpreter.Memory()
        args = QuantizeArgs(
            x=memory.input("x", x).address,
            type=type_index, examples=1, batch=1, rows=self.shape[0], k=self.shape[1],
            amax_stride=1, key=memory.input("key", np.array(KEY, np.uint32)).address, signs=SIGNS,
        )  # fmt: skip
        expected = []
        for mode, axis, out in (
            (self.rows, -1, args.along_rows),
            (self.columns, -2, args.along_columns),
        ):
            if not mode:
                continue
            rotate = bool(mode & HADAMARD)
            amax = oracle.amax(oracle.operand(x, axis, rotate))
            wanted = oracle.quantize(
                x,
                axis=axis,
                block="16x16" if mode & TILE16 else "1x16",
                rounding="sr" if mode & STOCHASTIC else "rne",
                rotate=rotate,
                key=KEY,
                tensor_amax=amax,
            )
            out.tile16, out.stochastic = bool(mode & TILE16), bool(mode & STOCHASTIC)
            out.hadamard = rotate
            out.amax = memory.input("amax", np.array([amax], np.float32)).address
            name = "rows" if axis == -1 else "columns"
            for part, value in (
                ("codes", wanted.packed),
                ("scales", wanted.tiles),
                ("global_scale", np.array([wanted.global_scale])),
            ):
                buffer = memory.output(f"{part} of {name}", value.nbytes)
                setattr(out, part, buffer.address)
                expected.append((buffer, value))
        result = execute(text, "quantize", args, memory, recorder)
        for buffer, value in expected:
            assert_written(buffer, value)
        return result


def assert_written(buffer: interpreter.Buffer, value: np.ndarray) -> None:
    assert buffer.written.all(), f"{(~buffer.written).sum()} bytes of {buffer.name} not written"
    bytes_of = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    different = np.flatnonzero(buffer.data != bytes_of)
    assert different.size == 0, f"{different.size} bytes of {buffer.name}, first {different[0]}"


RECIPES = [
    (WANTED, 0),
    (WANTED, WANTED),
    (WANTED, WANTED | HADAMARD),
    (WANTED | TILE16, WANTED | TILE16),
    (WANTED | STOCHASTIC, 0),
    (WANTED | STOCHASTIC, WANTED | STOCHASTIC),
    (WANTED | STOCHASTIC, WANTED | STOCHASTIC | HADAMARD),
]
ANY_SHAPE = [
    Quantization((39, 90), "bf16", WANTED, WANTED | STOCHASTIC | HADAMARD),
    Quantization((130, 48), "f32", WANTED | HADAMARD, WANTED | TILE16),
    Quantization((17, 143), "f16", WANTED | STOCHASTIC | TILE16, WANTED | HADAMARD),
    Quantization((50, 16), "f32", 0, WANTED | STOCHASTIC),
    Quantization((1, 33), "bf16", WANTED | STOCHASTIC | HADAMARD, 0),
]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("modes", RECIPES, ids=str)
def test_quantize_whole_tiles(ptx, recorder, target, modes):
    result = Quantization((128, 384), "bf16", *modes).run(ptx("quantize", target), recorder)
    # Sectors of what grows with the tensor are used in full. Before Blackwell a load has 16 bytes at
    # most: two of them share a sector, of which the second is in the L1 cache.
    bulk = {text: counts for text, counts in result.sectors.items() if counts[2] >= 8}
    assert bulk
    for text, (used, sectors, _) in bulk.items():
        expected = interpreter.SECTOR // (
            2 if target in ("90", "80") and text.startswith("ld") else 1
        )
        assert used == expected * sectors, text
    outputs = sum(mode != 0 for mode in modes)
    moved = 128 * 384 * 2 + outputs * 128 * 384 * 9 // 16
    assert sum(used for used, _, _ in bulk.values()) == moved


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("call", ANY_SHAPE, ids=str)
def test_quantize_any_shape(ptx, recorder, target, call):
    call.run(ptx("quantize", target), recorder)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(1, 77), (130, 40), (16, 256)])
def test_amax(ptx, recorder, target, dtype, shape):
    type_index, numpy_dtype = TYPES[dtype]
    x = tensor(shape, numpy_dtype)
    expected = [oracle.amax(oracle.operand(x, axis, r)) for axis, r in ((-1, 0), (-1, 1), (-2, 1))]
    for plain_only in (True, False):
        memory = interpreter.Memory()
        out = memory.output("amax", 4 if plain_only else 12)
        args = AmaxArgs(
            x=memory.input("x", x).address,
            type=type_index, examples=1, batch=1, rows=shape[0], k=shape[1], signs=SIGNS,
            stride=1 if plain_only else 3, plain=out.address,
            along_rows=0 if plain_only else out.address + 4,
            along_columns=0 if plain_only else out.address + 8,
        )  # fmt: skip
        execute(ptx("amax", target), "amax", args, memory, recorder)
        assert_written(out, np.array(expected[:1] if plain_only else expected, "f4"))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(3, 50), (130, 144)])
def test_dequantize(ptx, recorder, target, dtype, shape):
    type_index, numpy_dtype = TYPES[dtype]
    quantized = oracle.quantize(tensor(shape, np.float32))
    memory = interpreter.Memory()
    values = quantized.values.astype(numpy_dtype)
    out = memory.output("x", values.nbytes)
    args = DequantizeArgs(
        codes=memory.input("codes", quantized.packed).address,
        scales=memory.input("scales", quantized.tiles).address,
        global_scale=memory.input("global_scale", np.array([quantized.global_scale])).address,
        examples=1, batch=1, rows=shape[0], k=shape[1], type=type_index, x=out.address,
    )  # fmt: skip
    execute(ptx("dequantize", target), "dequantize", args, memory, recorder)
    assert_written(out, values)


# ---- Changes that must be noticed: an instruction that is executed, and what becomes of it.


def moved_by(n: int) -> Callable[[re.Match], str]:
    """Of a match of (all before the offset)(offset or none)."""
    return lambda match: f"{match[1]}+{int(match[2] or 0) + n}]"


STORE = r"(st\.global\.v2\.(?:u32|b32)\s+\[%rd\d+)\+?(\d*)\]"
MUTATIONS = {
    "no barrier": (r"bar\.sync\s+0", ""),
    "another rounding": (r"cvt\.rn\.bf16x2\.f32", "cvt.rz.bf16x2.f32"),
    "codes of a pair swapped": (
        r"(cvt\.rn\.satfinite\.e2m1x2\.f32\s+\w+), ([^,]+), (.+)", r"\1, \3, \2"
    ),
    "scales of a pair swapped": (
        r"(cvt\.rn\.satfinite\.e4m3x2\.f32\s+\w+), ([^,]+), (.+)", r"\1, \3, \2"
    ),
    "a store of the next block": (STORE, moved_by(8)),
    "a store misaligned": (STORE, moved_by(4)),
    "a load of the next scale": (
        r"(ld\.shared\.(?:f32|b32)\s+%\w+, \[%r\d+)\+?(\d*)\]", moved_by(4)
    ),
    "no store": (r"st\.global\.v[24]\..*", ""),
    "the smallest magnitude": (r"max\.xorsign\.abs\.bf16x2", "min.xorsign.abs.bf16x2"),
    "difference for sum": (r"add\.rn\.f32x2", "sub.rn.f32x2"),
    "sum for product": (r"mul\.rn\.f32x2", "add.rn.f32x2"),
    "the other half": (r"(fma\.rn\.f32\.bf16\s+[^,]+), l,", r"\1, h,"),
    "another shuffle": (r"shfl\.sync\.bfly\.b32", "shfl.sync.down.b32"),
    "half a warp": (r"(shfl\.sync\.bfly\.b32.*), -1", r"\1, 65535"),
    "other bytes": (r"(prmt\.b32.*), [%\w]+$", r"\1, 12816"),
    "an instruction unknown": (r"prmt\.b32", "prmt.b32.f4e"),
}  # fmt: skip


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_mutations_are_noticed(ptx, recorder, mutation):
    """In the kernels of three recipes: the first that executes such an instruction."""
    text = interpreter.without_comments(ptx("quantize", "100a"))
    pattern, replacement = MUTATIONS[mutation]
    for modes in (RECIPES[6], RECIPES[3], RECIPES[2]):
        call = Quantization((128, 128), "bf16", *modes)
        executed = sorted(call.run(text, recorder).executed)
        statements = [(at, text[at : text.index(";", at)]) for at in executed]
        matches = [(at, s) for at, s in statements if re.search(pattern, s)]
        if matches:
            break
    assert matches, f"no instruction to change: {pattern}"
    at, statement = matches[len(matches) // 2]
    changed = text[:at] + re.sub(pattern, replacement, statement) + text[at + len(statement) :]
    with pytest.raises((interpreter.Error, AssertionError)):
        call.run(changed, recorder)


def test_the_interpreter_refuses_what_it_does_not_know():
    head = ".visible .entry f(.param .u64 p)\n{\n.reg .b32 %r<3>;\n.reg .f32 %f<3>;\n"
    for line, message in (
        ("frobnicate.b32 %r1, %r2;", "unknown instruction"),
        ("add.rz.f32 %f1, %f2, %f2;", "unknown modifier rz"),
        ("mov.u32 %r1, %clock;", "unknown operand %clock"),
        ("add.s32 %r1, %r2, 1;", "was never written"),
        ("cvt.rzi.s32.f32 %r1, %f1;", "unknown conversion"),
    ):
        kernel = interpreter.parse(head + "mov.f32 %f2, 0f3F800000;\n" + line + "\nret;\n}\n")["f"]
        with pytest.raises(interpreter.Error, match=message):
            interpreter.launch(kernel, (1, 1, 1), 32, bytes(8), interpreter.Memory())


def test_fma_is_rounded_once():
    rng = np.random.default_rng(0)
    a, b, c = rng.integers(0, 2**32, (3, 4096), np.uint32).view(np.float32)
    with np.errstate(all="ignore"):
        c[::2] = -a[::2] * b[::2]  # cancellation
        got = interpreter.fma(a, b, c)
    for x, y, z, r in zip(a[:1500], b, c, got, strict=False):
        if np.isfinite([x, y, z]).all():
            exact = _exact(x) * _exact(y) + _exact(z)
            assert _nearest(exact) == r, (x, y, z)


def _exact(x: np.float32) -> fractions.Fraction:
    return fractions.Fraction(float(x))


def _nearest(exact) -> np.float32:
    """The float32 next to a fraction, a tie to even."""
    if abs(exact) >= 2**128 - 2**103:
        return np.float32(np.inf if exact > 0 else -np.inf)
    guess = np.float32(float(exact))  # within one step: rounded twice
    near = [guess, *(np.nextafter(guess, np.float32(s * np.inf)) for s in (-1, 1))]
    near = [v for v in near if np.isfinite(v)]
    return min(near, key=lambda v: (abs(_exact(v) - exact), int(v.view(np.uint32)) & 1))
