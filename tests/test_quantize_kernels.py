"""The CPU kernels of amax, quantize and dequantize: the same bits from every instruction set.

tests/cpp/quantize_test.cc prints a hash for each of many calls. The plain C++ kernels are the
reference (the oracle is held against them elsewhere); they also run on aarch64 under emulation.
"""

from __future__ import annotations

import os
import pathlib
import platform
import re
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parent.parent
SOURCES = [
    "tests/cpp/quantize_test.cc",
    "csrc/cpu/quantize_portable.cc",
    "csrc/ops/amax_cpu.cc",
    "csrc/ops/dequantize_cpu.cc",
    "csrc/ops/quantize_cpu.cc",
]
AVX2 = "csrc/cpu/quantize_avx2.cc"
AVX2_FLAGS = ["-mavx2", "-mfma", "-mf16c", "-mbmi2"]
# No contraction: a fused multiply-add has other bits. Nothing weaker than what the package uses.
FLAGS = ["-std=c++17", "-O2", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-pthread"]
CXX = os.environ.get("CXX", "g++")
X86 = platform.machine() in ("x86_64", "AMD64")


def run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, f"{command}\n{done.stdout[-500:]}\n{done.stderr}"
    return done.stdout


def build(folder: pathlib.Path, *extra: str, compiler: str = CXX, avx2: bool = X86) -> str:
    """The test program with the kernels of this machine."""
    objects = []
    if avx2:
        objects = [str(folder / "avx2.o")]
        run([compiler, *FLAGS, *AVX2_FLAGS, *extra, "-Icsrc", "-c", AVX2, "-o", objects[0]])
    program = str(folder / "quantize_test")
    run([compiler, *FLAGS, *extra, "-Icsrc", *SOURCES, *objects, "-o", program])
    return program


def assert_same_lines(got: str, expected: str, step: int = 1):
    """`got` has those lines of `expected` whose number is a multiple of `step`."""
    got = got.splitlines()
    number = re.compile(r"(\d+):")
    expected = [
        line
        for line in expected.splitlines()
        if (match := number.match(line)) is None or int(match[1]) % step == 0
    ]
    assert len(got) == len(expected) > 500 // step
    different = [pair for pair in zip(got, expected, strict=True) if pair[0] != pair[1]]
    assert not different, f"{len(different)} of {len(expected)} calls, first {different[0]}"


def tables() -> list[str]:
    """What this machine can run, the reference first."""
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    flags = cpuinfo.read_text().split() if cpuinfo.exists() else []
    has_avx2 = X86 and {"avx2", "fma", "f16c", "bmi2"} <= set(flags)
    return ["portable", "avx2"] if has_avx2 else ["portable"]


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    return build(tmp_path_factory.mktemp("quantize"))


@pytest.fixture(scope="module")
def reference(program):
    return run([program, "portable"])


@pytest.mark.skipif("avx2" not in tables(), reason="needs a CPU with AVX2, FMA, F16C and BMI2")
def test_avx2_has_the_bits_of_the_reference(program, reference):
    assert_same_lines(run([program, "avx2"]), reference)


def test_aarch64_has_the_bits_of_the_reference(tmp_path, reference):
    compiler, emulator = "aarch64-linux-gnu-g++", "qemu-aarch64-static"
    for tool in (compiler, emulator):
        if shutil.which(tool) is None:
            if os.environ.get("NVFP4_REQUIRE_AARCH64") == "1":
                pytest.fail(f"{tool} is not installed, and NVFP4_REQUIRE_AARCH64=1")
            pytest.skip(f"{tool} is not installed")
    program = build(tmp_path, "-static", compiler=compiler, avx2=False)
    step = 4  # emulation is slow
    assert_same_lines(run([emulator, program, "portable", str(step)]), reference, step)


def test_no_access_outside_and_no_undefined_behaviour(tmp_path, reference):
    program = build(tmp_path, "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    for table in tables():
        assert_same_lines(run([program, table]), reference)


@pytest.mark.skipif(not X86 or shutil.which("nm") is None, reason="needs x86-64 and nm")
@pytest.mark.parametrize("level", ["-O0", "-O2"])
def test_avx2_code_stays_in_its_unit(tmp_path, level):
    """Of a function in several units the linker keeps one copy, perhaps one that needs AVX2."""
    built = str(tmp_path / "avx2.o")
    run([CXX, *FLAGS, level, *AVX2_FLAGS, "-Icsrc", "-c", AVX2, "-o", built])
    symbols = run(["nm", "-C", "--defined-only", "--extern-only", built]).splitlines()
    functions = [s.split(maxsplit=2)[2] for s in symbols if s.split()[1] in "TWi"]
    assert functions == ["nvfp4::Avx2QuantizeKernels()"]
