#!/usr/bin/env python3
"""Runs the demo, the tests and the other chores of a clone, in an environment of its own (.venv).

It needs Python 3.11 or newer with its headers, and a C++17 compiler; all else comes from pip. The
package is used where it lies: CMake builds the compiled module into python/jax_nvfp4_ops, again
whenever csrc/ has changed, and only what has changed.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import shlex
import shutil
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
BIN = VENV / "bin"
OLDEST_PYTHON = (3, 11)
EXTRAS = ("examples", "test", "test-cuda", "dev")
CPP_SUFFIXES = {".cc", ".h", ".cu", ".cuh"}


def say(text: str) -> None:
    print(f"dev.py: {text}", flush=True)


def run(*command: str | pathlib.Path) -> int:
    """Runs a command in the root of the clone, with its output shown, and returns its status."""
    return subprocess.run([str(word) for word in command], cwd=ROOT, check=False).returncode


def must(*command: str | pathlib.Path) -> None:
    """Runs a command, and ends the program if it fails."""
    if status := run(*command):
        say(f"failed with status {status}: {shlex.join(map(str, command))}")
        sys.exit(status)


def restart_with_newer_python() -> None:
    """Replaces this process by one of a Python that is new enough, where it is not."""
    if sys.version_info >= OLDEST_PYTHON:
        return
    for minor in range(20, OLDEST_PYTHON[1] - 1, -1):
        python = shutil.which(f"python3.{minor}")
        if python and subprocess.run([python, "-c", ""], check=False).returncode == 0:
            os.execv(python, [python, *sys.argv])
    sys.exit(
        f"dev.py: Python must be 3.{OLDEST_PYTHON[1]} or newer; got {sys.version.split()[0]}; "
        "run dev.py with a newer one"
    )


def version_of(python: str | pathlib.Path) -> str:
    """Version ("3.11") of an interpreter; ends the program if it can not build the package."""
    probe = (
        "import importlib.util, os, sys, sysconfig; print('%d.%d' % sys.version_info[:2],"
        " os.path.exists(sysconfig.get_path('include') + '/Python.h'),"
        " importlib.util.find_spec('ensurepip') is not None)"
    )
    try:
        answer = subprocess.check_output([str(python), "-c", probe], text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"dev.py: --python must be a Python interpreter; got {python}: {error}")
    version, headers, ensurepip = answer.split()
    if tuple(map(int, version.split("."))) < OLDEST_PYTHON:
        sys.exit(f"dev.py: Python must be 3.{OLDEST_PYTHON[1]} or newer; {python} is {version}")
    if headers != "True":
        sys.exit(f"dev.py: {python} has no Python.h; install its headers (Debian: python3-dev)")
    if ensurepip != "True":
        sys.exit(f"dev.py: {python} has no ensurepip; install it (Debian: python3-venv)")
    return version


def requirements(extras: tuple[str, ...]) -> list[str]:
    """What pyproject.toml asks for, and CMake and Ninja.

    The jaxlib of the build environment is pinned to the oldest FFI headers, for wheels; a module
    built here need only load into the jaxlib that is here.
    """
    import tomllib

    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    build = [r for r in settings["build-system"]["requires"] if not r.startswith("jaxlib")]
    project = settings["project"]
    chosen = [r for extra in extras for r in project["optional-dependencies"][extra]]
    return [*project["dependencies"], *chosen, *build, "cmake>=3.24", "ninja"]


def make_venv(python: str | None, extras: tuple[str, ...]) -> str:
    """Makes .venv, or brings it up to date, and returns its Python's version."""
    marker = (
        VENV / "dev.json"
    )  # what was installed; absent from an environment that was left half made
    known = json.loads(marker.read_text()) if marker.exists() else None
    version = version_of(python or (sys.executable if known is None else BIN / "python"))
    if known is None or known["python"] != version:
        say(f"making .venv with Python {version}")
        shutil.rmtree(VENV, ignore_errors=True)
        must(python or sys.executable, "-m", "venv", VENV)
        known = {"python": version, "installed": []}
    wanted = requirements(extras)
    if not set(wanted) <= set(known["installed"]):
        say(f"installing the package's requirements, and for {', '.join(extras)}")
        must(BIN / "python", "-m", "pip", "install", "-qq", "--disable-pip-version-check", *wanted)
        site_packages = VENV / "lib" / f"python{version}" / "site-packages"
        (site_packages / "jax_nvfp4_ops.pth").write_text(f"{ROOT / 'python'}\n")
        marker.write_text(json.dumps({"python": version, "installed": wanted}))
    return version


def build(version: str) -> None:
    """Compiles what has changed; CMAKE_ARGS has further arguments, as for a wheel."""
    folder = ROOT / "build" / f"dev-{version}"
    cmake = BIN / "cmake"
    configure = [
        *(str(cmake), "-S", str(ROOT), "-B", str(folder), "-G", "Ninja", "--log-level=WARNING"),
        f"-DCMAKE_MAKE_PROGRAM={BIN / 'ninja'}",
        f"-DPython_EXECUTABLE={BIN / 'python'}",
        *shlex.split(os.environ.get("CMAKE_ARGS", "")),
    ]
    marker = folder / "configured.json"
    if not marker.exists() or json.loads(marker.read_text()) != configure:
        if not any(map(shutil.which, [os.environ.get("CXX", "c++"), "g++", "clang++"])):
            sys.exit(
                "dev.py: there is no C++ compiler; install one (Debian: g++), or name it in CXX"
            )
        say(f"configuring {folder.relative_to(ROOT)}")
        shutil.rmtree(folder, ignore_errors=True)
        must(*configure)
        marker.write_text(json.dumps(configure))
    must(cmake, "--build", folder)
    install = [cmake, "--install", folder, "--prefix", ROOT / "python"]
    done = subprocess.run(install, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)


def set_up(arguments: argparse.Namespace, extras: tuple[str, ...] = EXTRAS) -> None:
    start = time.monotonic()
    build(make_venv(arguments.python, extras))
    say(f"ready after {time.monotonic() - start:.0f} s")


def cpp_files() -> list[pathlib.Path]:
    folders = [ROOT / "csrc", ROOT / "tests"]
    return sorted(f for d in folders for f in d.rglob("*") if f.suffix in CPP_SUFFIXES)


def demo(arguments: argparse.Namespace) -> int:
    set_up(arguments, ("examples",))
    return run(BIN / "python", "examples/train_gpt.py", *arguments.rest)


def test(arguments: argparse.Namespace) -> int:
    set_up(arguments)
    # All tests: on all cores, up to what memory is sure to suffice for.
    workers = str(min(8, os.cpu_count() or 1))
    chosen = arguments.rest or ["-n", workers, "--dist", "worksteal"]
    steps = {
        "lint": [BIN / "ruff", "check", "--quiet"],
        "format of Python": [BIN / "ruff", "format", "--check", "--quiet"],
        "format of C++": [BIN / "clang-format", "--dry-run", "--Werror", *cpp_files()],
        "types": [BIN / "mypy"],
        "tests": [BIN / "python", "-m", "pytest", *chosen],
    }
    failed = []
    for name, command in steps.items():
        say(name)
        if run(*command):
            failed.append(name)
    if failed:
        say(f"failed: {', '.join(failed)}")
        if any("format" in name for name in failed):
            say("`python3 tools/dev.py format` formats all files")
        return 1
    say(f"passed: {', '.join(steps)}")
    return 0


def wheel(arguments: argparse.Namespace) -> int:
    """Builds dist/*.whl as pip does everywhere: isolated, with the oldest FFI headers."""
    make_venv(arguments.python, ("dev",))
    for stale in (ROOT / "build").glob("lib.*"):  # setuptools would pack a module deleted since
        shutil.rmtree(stale)
    return run(
        BIN / "python", "-m", "pip", "wheel", "--no-deps", "-w", "dist", *arguments.rest, "."
    )


def stubs(arguments: argparse.Namespace) -> int:
    set_up(arguments)
    return run(BIN / "python", "tools/stubs.py")


def format_all(arguments: argparse.Namespace) -> int:
    make_venv(arguments.python, EXTRAS)
    commands = (
        [BIN / "ruff", "check", "--fix"],
        [BIN / "ruff", "format"],
        [BIN / "clang-format", "-i", *cpp_files()],
    )
    return max([run(*command) for command in commands])


def main() -> int:
    restart_with_newer_python()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--python", help="interpreter for .venv (default: the one there, else this one)"
    )
    commands = parser.add_subparsers(required=True, metavar="command")
    for name, function, text in (
        ("demo", demo, "train the example GPT in float32 and in NVFP4 (arguments: the demo's)"),
        ("test", test, "check format, lint and types, and run the tests (arguments: pytest's)"),
        ("wheel", wheel, "build a wheel into dist/ (arguments: pip wheel's)"),
        ("stubs", stubs, "write the type stub of the compiled module"),
        ("format", format_all, "format Python and C++"),
    ):
        commands.add_parser(name, help=text, add_help=False).set_defaults(function=function)
    arguments, rest = parser.parse_known_args()
    arguments.rest = rest
    return arguments.function(arguments)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
