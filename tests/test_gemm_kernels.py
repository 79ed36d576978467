"""The kernels of matmul: every instruction set has the bits of a plain loop.

What this machine lacks runs under emulation: VNNI instructions made of AVX2 ones, NEON in qemu.
"""

from __future__ import annotations

import platform
import subprocess

import native
import pytest

X86 = platform.machine() in ("x86_64", "AMD64")
COMMON = [
    "tests/cpp/gemm_test.cc",
    "csrc/ops/matmul_cpu.cc",
    "csrc/cpu/isa.cc",
    "csrc/cpu/gemm_portable.cc",
]
X86_ONLY = ["csrc/cpu/gemm_avx2.cc", "csrc/cpu/gemm_avxvnni.cc", "csrc/cpu/gemm_avx512vnni.cc"]


def build(folder, target="host", flags=()):
    sources = COMMON + (X86_ONLY if target == "host" and X86 else ["csrc/cpu/gemm_neon.cc"])
    emulate = ["-DNVFP4_EMULATE_VNNI", "-pthread"]
    return native.build([native.ROOT / s for s in sources], folder, target, [*emulate, *flags])


def products(program, step=1):
    """How many products were the same with every table; fails with the first that was not."""
    text = program(step).tobytes().decode()
    return int(text.split()[0]), int(text.split("each of ")[1].split()[0])


@pytest.mark.skipif(not X86, reason="the tables of x86-64")
def test_every_table_has_the_bits_of_a_plain_loop(tmp_path):
    made, tables = products(build(tmp_path))
    assert made > 700
    assert tables == 4


@pytest.mark.skipif(not X86, reason="the tables of x86-64")
def test_no_access_outside_and_no_undefined_behaviour(tmp_path):
    made, _ = products(build(tmp_path, flags=native.SANITIZE), 7)
    assert made > 100


def test_neon_has_the_bits_of_a_plain_loop(tmp_path):
    made, tables = products(build(tmp_path, "aarch64"), 5)  # emulation is slow
    assert made > 140
    assert tables == 2


@pytest.mark.skipif(not X86, reason="compiles for x86-64")
@pytest.mark.parametrize("unit", ["avxvnni", "avx512vnni"])
def test_vnni_units_use_the_instruction_when_not_emulated(tmp_path, unit):
    flags = {
        "avxvnni": ["-mavxvnni"],
        "avx512vnni": ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512vnni"],
    }[unit]
    to = tmp_path / "unit.s"
    command = [
        "g++",
        "-std=c++17",
        "-O3",
        "-ffp-contract=off",
        *native.ISA_FLAGS["_avx2"],
        *flags,
        f"-I{native.ROOT / 'csrc'}",
    ]
    subprocess.run(
        [*command, "-S", str(native.ROOT / f"csrc/cpu/gemm_{unit}.cc"), "-o", str(to)], check=True
    )
    text = to.read_text()
    assert text.count("vpdpbusd") > 100
    # Sums of a tile of six rows stay in registers.
    wide = "%zmm" if unit == "avx512vnni" else "%ymm"
    assert any(wide in line for line in text.splitlines() if "vpdpbusd" in line)
