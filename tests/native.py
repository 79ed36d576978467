"""Builds the C++ test programs, for this machine or, to be run under emulation, for aarch64."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parent.parent
# No contraction: a compiler for aarch64 fuses multiply and add unless it is told not to.
FLAGS = ["-std=c++17", "-O2", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror"]


class Program:
    """A built program; `run` sends it arrays and reads arrays."""

    def __init__(self, command: list[str]):
        self.command = command

    def __call__(self, *arguments, inputs: np.ndarray | None = None, dtype=np.uint8) -> np.ndarray:
        done = subprocess.run(
            [*self.command, *map(str, arguments)],
            input=b"" if inputs is None else np.ascontiguousarray(inputs).tobytes(),
            capture_output=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr.decode()
        return np.frombuffer(done.stdout, dtype)


def build(source: pathlib.Path, folder: pathlib.Path, target: str = "host") -> Program:
    """Compiles `source` against csrc/ for "host" or "aarch64"."""
    binary = folder / f"{source.stem}_{target}"
    compiler, emulator = [os.environ.get("CXX", "g++")], []
    if target == "aarch64":
        compiler = ["aarch64-linux-gnu-g++", "-static"]
        emulator = ["qemu-aarch64-static"]
        for tool in (compiler[0], *emulator):
            if shutil.which(tool) is None:
                if os.environ.get("NVFP4_REQUIRE_AARCH64") == "1":
                    pytest.fail(f"{tool} is not installed, and NVFP4_REQUIRE_AARCH64=1")
                pytest.skip(f"{tool} is not installed")
    command = [*compiler, *FLAGS, f"-I{ROOT / 'csrc'}", str(source), "-o", str(binary)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return Program([*emulator, str(binary)])
