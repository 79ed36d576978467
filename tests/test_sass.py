"""What nvcc's assembler makes of the CUDA kernels, without a GPU: conversions in hardware, no
spills, wide accesses, and instructions within the bounds of benchmarks/sass_model.py.

Counts depend on the compiler. They are checked for the releases of nvcc that the model knows; with
another the tests fail until it gets a column there.
"""

from __future__ import annotations

import os
import re
import sys

import native
import pytest

sys.path.insert(0, str(native.ROOT / "benchmarks"))
import sass_model

TOOLS = sass_model.find_tools()
MISSING = [tool for tool in sass_model.TOOLS if tool not in TOOLS]
if MISSING and os.environ.get("NVFP4_REQUIRE_NVCC") != "1":
    pytest.skip("needs " + ", ".join(MISSING), allow_module_level=True)

# Blackwell: all have the conversion to E2M1.
TARGETS = ("sm_100a", "sm_103a", "sm_120f")
CASES = {case.name: case for case in sass_model.CASES}


@pytest.fixture(scope="session")
def kernels(tmp_path_factory):
    """`kernels(op, target, count)`: by mangled name; workers of a test run share what is compiled."""
    assert not MISSING, f"NVFP4_REQUIRE_NVCC=1, and there is no {', '.join(MISSING)}"
    folder = native.shared_folder(tmp_path_factory, "sass")
    known = {}

    def compile_one(op: str, target: str = "sm_100a", count: bool = False):
        cubin = folder / f"{op}_{target}{'_count' if count else ''}.cubin"
        if cubin not in known:
            with native._lock(cubin.with_suffix(".lock")):
                if not cubin.exists():
                    part = cubin.with_suffix(".part")
                    sass_model.compile_cubin(TOOLS, op, str(part), arch=target, count=count)
                    part.rename(cubin)
            known[cubin] = sass_model.read_cubin(TOOLS, str(cubin))
        return known[cubin]

    return compile_one


@pytest.fixture(scope="session")
def bounds(kernels):
    version = sass_model.nvcc_version(TOOLS)
    found = sass_model.bounds_of(version)
    assert found is not None, f"benchmarks/sass_model.py: no bounds for nvcc {version} in RELEASES"
    return found


def whole_kernels(found):
    """Of case names: their kernels."""
    return {name: sass_model.find(case, found) for name, case in CASES.items()}


def opcodes(kernel) -> str:
    return " ".join(i.opcode for i in kernel.instructions)


@pytest.mark.parametrize("name", CASES)
def test_instructions_leave_the_bandwidth(kernels, bounds, name):
    most = bounds.instructions
    result = sass_model.measure(CASES[name], kernels("quantize", count=True))
    assert result.per_element <= most[name]
    assert result.per_element > most[name] - 0.3, "the bound in sass_model is out of date"
    assert result.share >= CASES[name].bar


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("op", ["amax", "dequantize", "quantize"])
def test_nothing_spills(kernels, bounds, op, target):
    found = kernels(op, target)
    assert len(found) >= 3
    for name, kernel in found.items():
        local = [i for i in kernel.instructions if i.base in ("LDL", "STL")]
        assert kernel.spills <= bounds.spills, name
        assert kernel.spills > 0 or not local, name


@pytest.mark.parametrize("target", TARGETS)
def test_whole_tiles_leave_registers_for_two_blocks(kernels, target):
    for name, kernel in whole_kernels(kernels("quantize", target)).items():
        assert kernel.registers <= sass_model.MOST_REGISTERS, name


@pytest.mark.parametrize("target", TARGETS)
def test_conversions_are_instructions(kernels, target):
    for name, kernel in kernels("dequantize", target).items():
        assert re.search(r"F2FP\.F16\.E2M1", opcodes(kernel)), name
    for name, kernel in whole_kernels(kernels("quantize", target)).items():
        outputs = 1 if name.startswith("rows") else 2
        # A thread has 64 elements of each output, of which an instruction takes two. Stochastic
        # rounding has a second copy of all, for unlikely tensors. A 16x16 block has one scale, which
        # a compiler may convert more than once.
        text = opcodes(kernel)
        codes = "F2FP.F16.F32" if "SR" in name else "F2FP.SATFINITE.E2M1.F32"
        copies = 2 if "SR" in name else 1
        scales = text.count("F2FP.SATFINITE.E4M3.F32")
        assert scales >= outputs if "16x16" in name else scales == copies * 4 * outputs, name
        assert text.count(codes) == copies * 32 * outputs, name


@pytest.mark.parametrize("target", TARGETS)
def test_accesses_of_whole_tiles_are_wide(kernels, target):
    """Elements come 32 bytes at a time, scales leave 16; codes leave eight, as 16 of them are what a
    thread has of a row. That neighbours make whole sectors of them is for tests/test_ptx.py to say.
    """
    for name, kernel in whole_kernels(kernels("quantize", target)).items():
        first, last = sass_model.tile_loop(kernel)
        outputs = 1 if name.startswith("rows") else 2
        tile = [i for i in kernel.instructions if first <= i.address <= last]
        loads = [i.bytes for i in tile if i.base == "LDG"]
        stores = [i.bytes for i in tile if i.base == "STG"]
        assert loads == [32] * 4, name
        copies = 2 if "SR" in name else 1
        assert sorted(stores) == copies * 4 * outputs * [8] + copies * [16], name


@pytest.mark.parametrize("target", TARGETS)
def test_accesses_of_other_kernels_are_wide(kernels, target):
    """Of whole blocks; there are narrow ones too, for what is left at an end."""
    for name, kernel in kernels("amax", target).items():
        assert (
            sum(i.bytes for i in kernel.instructions if i.base == "LDG" and i.bytes >= 16) >= 128
        ), name
    for name, kernel in kernels("dequantize", target).items():
        loads = [i.bytes for i in kernel.instructions if i.base == "LDG"]
        stores = [i.bytes for i in kernel.instructions if i.base == "STG"]
        assert sorted(loads) == [4, 8, 8, 8, 8, 16], name  # a factor, codes, scales
        assert stores.count(16) in (8, 16), name
