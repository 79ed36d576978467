"""Builds the C++ test programs, for this machine or, to be run under emulation, for aarch64."""

from __future__ import annotations

import concurrent.futures
import contextlib
import fcntl
import os
import pathlib
import shutil
import subprocess

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parent.parent
CPP = pathlib.Path(__file__).parent / "cpp"
# No contraction: a compiler for aarch64 fuses multiply and add unless it is told not to.
FLAGS = ["-std=c++17", "-O2", "-g1", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror"]
# As CMakeLists.txt has them: the units of an instruction set carry its name.
AVX2 = ["-mavx2", "-mfma", "-mf16c", "-mbmi2"]
# VNNI units are built for emulation, with NVFP4_EMULATE_VNNI.
ISA_FLAGS = {
    "_avx2": AVX2,
    "_avxvnni": AVX2,
    "_avx512vnni": AVX2,
    "_neon": ["-march=armv8.2-a+dotprod"],
}
# -O1: what a checker adds to -O2 takes half a minute to compile.
SANITIZE = ["-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]


class Program:
    """A built program; a call sends it arrays and returns what it writes."""

    def __init__(self, command: list[str]):
        self.command = command

    def __call__(self, *arguments, inputs: np.ndarray | bytes = b"", dtype=np.uint8) -> np.ndarray:
        done = subprocess.run(
            [*self.command, *map(str, arguments)],
            input=inputs if isinstance(inputs, bytes) else np.ascontiguousarray(inputs).tobytes(),
            capture_output=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr.decode()
        return np.frombuffer(done.stdout, dtype)


def _tools(target: str) -> tuple[list[str], list[str]]:
    """Compiler and emulator of "host" or "aarch64"; skips the test where they are missing."""
    if target == "host":
        return [os.environ.get("CXX", "g++")], []
    tools = ["aarch64-linux-gnu-g++", "qemu-aarch64-static"]
    for tool in tools:
        if shutil.which(tool) is None:
            if os.environ.get("NVFP4_REQUIRE_AARCH64") == "1":
                pytest.fail(f"{tool} is not installed, and NVFP4_REQUIRE_AARCH64=1")
            pytest.skip(f"{tool} is not installed")
    return [tools[0], "-static"], [tools[1]]


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def shared_folder(factory: pytest.TempPathFactory, name: str) -> pathlib.Path:
    """A folder for programs that is the same in all workers of a test run."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    folder.mkdir(exist_ok=True)
    return folder


@contextlib.contextmanager
def _lock(path: pathlib.Path):
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def build(
    sources: list[pathlib.Path], folder: pathlib.Path, target: str = "host", flags: list[str] = ()
) -> Program:
    """Compiles and links `sources`; the program is named after the first.

    A program that is in `folder` already, made by this or another worker, is taken as it is.
    """
    compiler, emulator = _tools(target)
    binary = folder / f"{sources[0].stem}_{target}"

    def compile_one(source: pathlib.Path) -> str:
        isa = next((f for suffix, f in ISA_FLAGS.items() if source.stem.endswith(suffix)), [])
        to = folder / f"{source.stem}_{target}.o"
        include = f"-I{ROOT / 'csrc'}"
        _run([*compiler, *FLAGS, *flags, *isa, include, "-c", str(source), "-o", str(to)])
        return str(to)

    with _lock(binary.with_suffix(".lock")):
        if not binary.exists():
            with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
                objects = list(pool.map(compile_one, sources))
            _run([*compiler, *flags, *objects, "-o", str(binary)])
    return Program([*emulator, str(binary)])
