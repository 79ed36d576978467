"""CMake builds the whole package for aarch64, with a cross compiler."""

import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig

import pytest

ROOT = pathlib.Path(__file__).parent.parent
ELF_MACHINE = slice(18, 20)  # in the header of an ELF file
AARCH64 = b"\xb7\x00"


def tool(name: str) -> str:
    """Path of a program beside this Python or on PATH; skips the test where it is missing."""
    path = shutil.which(name, path=f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}")
    if path is None:
        if os.environ.get("NVFP4_REQUIRE_AARCH64") == "1":
            pytest.fail(f"{name} is not installed, and NVFP4_REQUIRE_AARCH64=1")
        pytest.skip(f"{name} is not installed")
    return path


@pytest.mark.slow
def test_the_package_builds_for_aarch64(tmp_path):
    pytest.importorskip("nanobind", reason="needs what `tools/dev.py` installs for building")
    cmake = tool("cmake")
    configure = [
        *(cmake, "-S", str(ROOT), "-B", str(tmp_path), "-G", "Ninja"),
        f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}",
        f"-DCMAKE_CXX_COMPILER={tool('aarch64-linux-gnu-g++')}",
        "-DCMAKE_SYSTEM_NAME=Linux",
        "-DCMAKE_SYSTEM_PROCESSOR=aarch64",
        "-DNVFP4_WERROR=ON",
        f"-DPython_EXECUTABLE={sys.executable}",
        # This machine's Python: its headers say the same of any 64-bit Linux.
        f"-DPython_INCLUDE_DIR={sysconfig.get_path('include')}",
    ]
    for command in (configure, [cmake, "--build", str(tmp_path)]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    (module,) = tmp_path.glob("_native*.so")
    assert module.read_bytes()[ELF_MACHINE] == AARCH64
