"""`python -m jax_nvfp4_ops doctor`: what is installed, what each device will do, and whether it works.

It reports and never raises, whatever is broken: it needs neither JAX nor the compiled module, and whatever touches a device runs
in a process of its own, which may crash.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import glob
import importlib
import importlib.metadata
import json
import os
import pathlib
import platform
import re
import signal
import subprocess
import sys
import sysconfig
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

OK, NOTE, PROBLEM = "ok", "note", "problem"

_NEEDED = {"jax": (0, 10, 0), "jaxlib": (0, 10, 0), "numpy": (0,), "ml_dtypes": (0,)}
_PLUGINS = ("jax-cuda13-plugin", "jax-cuda13-pjrt")
_OLD_PLUGINS = ("jax-cuda12-plugin", "jax-cuda12-pjrt")
_FOR_BENCH = ("cuda-bindings", "rich", "matplotlib")
_OPTIONAL = ("nvidia-cublas", "cuda-pathfinder", *_FOR_BENCH)
_WITH_CUDA = "pip install 'jax-nvfp4-ops[cuda13]' (in a clone: '.[cuda13]')"
_WITH_BENCH = "pip install 'jax-nvfp4-ops[bench]' (in a clone: '.[bench]')"
_AGAIN = "pip install --force-reinstall --no-deps jax-nvfp4-ops (in a clone: .)"
_OLDEST_DRIVER = (580,)
_OLDEST_CUBLASLT = (13, 2, 0)
# From a clone: a wheel may have been built without nvcc.
_BUILD_CUDA = (
    "put nvcc of CUDA 13.0 or later on PATH (or name it in CUDACXX), and in a clone of jax_nvfp4_ops run "
    "CMAKE_ARGS=-DNVFP4_CUDA=ON pip install --force-reinstall '.[cuda13]'"
)
_PROBE_SECONDS = 600


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of the report.

    Args:
      section: What it is about.
      status: "ok", "note" (nothing is wrong here) or "problem".
      text: What was found.
      fix: What to do, if there is something.
    """

    section: str
    status: str
    text: str
    fix: str | None = None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", version)[:3])


def _describe(error: BaseException) -> str:
    """An error in one line, or the few that an importer or XLA wrote."""
    lines = [line.rstrip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: " + "\n".join(lines[:8])


# ---- What is installed ---------------------------------------------------------------------------------


def packages() -> list[Finding]:
    """Python, JAX, its plugins, and what is optional."""
    section = "packages"
    found = [
        Finding(
            section,
            OK,
            f"Python {platform.python_version()}, {platform.system()} {platform.machine()}",
        )
    ]
    versions = {name: _version(name) for name in (*_NEEDED, *_PLUGINS, *_OLD_PLUGINS, *_OPTIONAL)}
    for name, oldest in _NEEDED.items():
        version = versions[name]
        wanted = f">={'.'.join(map(str, oldest))}" if any(oldest) else ""
        if version is None:
            found.append(
                Finding(section, PROBLEM, f"{name} is missing", f"pip install '{name}{wanted}'")
            )
        elif _numbers(version) < oldest:
            text = f"{name} {version} is older than {wanted[2:]}"
            found.append(Finding(section, PROBLEM, text, f"pip install --upgrade '{name}{wanted}'"))
        else:
            found.append(Finding(section, OK, f"{name} {version}"))
    jaxlib = versions["jaxlib"]
    for name in _PLUGINS:
        version = versions[name]
        if version is None:
            continue
        if jaxlib and _numbers(version) != _numbers(jaxlib):
            found.append(
                Finding(
                    section,
                    PROBLEM,
                    f"{name} {version} is not of the version of jaxlib, {jaxlib}",
                    f"pip install --upgrade 'jax[cuda13]=={versions['jax']}'",
                )
            )
        else:
            found.append(Finding(section, OK, f"{name} {version}"))
    if not any(versions[name] for name in _PLUGINS):
        found.append(Finding(section, NOTE, "no CUDA plugin: JAX sees no GPU", _WITH_CUDA))
    for name in _OLD_PLUGINS:
        if versions[name]:
            found.append(
                Finding(
                    section,
                    PROBLEM,
                    f"{name} {versions[name]}: CUDA 12 has no cuBLASLt whose FP4 products are right",
                    f"pip uninstall {' '.join(_OLD_PLUGINS)}; {_WITH_CUDA}",
                )
            )
    for name in _OPTIONAL:
        if versions[name]:
            found.append(Finding(section, OK, f"{name} {versions[name]}"))
        elif name in _FOR_BENCH:
            text = f"{name} is missing: only `python -m jax_nvfp4_ops bench` needs it"
            found.append(Finding(section, NOTE, text, _WITH_BENCH))
        elif any(versions[plugin] for plugin in _PLUGINS):
            text = f"{name} is missing: matmul on CUDA then looks for cuBLASLt where JAX may not have it"
            found.append(Finding(section, NOTE, text, _WITH_CUDA))
    return found


def this_package(import_error: BaseException | None) -> tuple[list[Finding], list[str] | None]:
    """This package and its compiled module.

    Args:
      import_error: What `import jax_nvfp4_ops` raised.

    Returns:
      Findings, and the platforms that the module has kernels for; None if it does not load.
    """
    section = "jax_nvfp4_ops"
    folder = pathlib.Path(__file__).resolve().parent
    version = _version("jax-nvfp4-ops")
    found = [Finding(section, OK, f"version {version or 'not installed by pip'}, in {folder}")]
    try:
        _native = importlib.import_module("jax_nvfp4_ops._native")
    except Exception as error:
        found.append(
            Finding(
                section, PROBLEM, f"the compiled module: {_describe(error)}", _native_fix(folder)
            )
        )
        return found, None
    platforms = list(_native.registrations())
    ffi = _native.xla_ffi_version()
    text = f"compiled for {' and '.join(platforms)}, with XLA FFI {ffi[0]}.{ffi[1]}"
    theirs = _jaxlib_ffi()
    if theirs and (ffi[0] != theirs[0] or ffi[1] > theirs[1]):
        found.append(
            Finding(
                section,
                PROBLEM,
                f"{text}, which jaxlib's, {theirs[0]}.{theirs[1]}, does not load",
                f"{_AGAIN}, which builds with the oldest headers",
            )
        )
    else:
        suffix = f"; jaxlib has {theirs[0]}.{theirs[1]}" if theirs else ""
        found.append(Finding(section, OK, text + suffix))
    if "CUDA" not in platforms:
        found.append(Finding(section, NOTE, "this build has no CUDA backend", _BUILD_CUDA))
    if import_error is not None:
        found.append(
            Finding(
                section,
                PROBLEM,
                f"import jax_nvfp4_ops: {_describe(import_error)}",
                "if jax itself does not import, reinstall it; else please report this as a bug",
            )
        )
    return found, platforms


def _native_fix(folder: pathlib.Path) -> str:
    """What helps against a compiled module that does not load."""
    modules = sorted(path.name for path in folder.glob("_native*.so"))
    wanted = f"_native{sysconfig.get_config_var('EXT_SUFFIX')}"
    if not modules:
        return "it was never built: pip install . in a clone (a C++17 compiler is needed), or install a wheel"
    if wanted not in modules and "_native.abi3.so" not in modules:
        return (
            f"it is for another Python or machine ({', '.join(modules)}; this one loads {wanted}): "
            "install again with this Python"
        )
    return f"install again: {_AGAIN}"


def _jaxlib_ffi() -> tuple[int, int] | None:
    """Version of the FFI of the jaxlib that is installed, from its headers."""
    try:
        files = importlib.metadata.files("jaxlib") or []
        header = next(f for f in files if str(f).endswith("xla/ffi/api/c_api.h"))
        text = pathlib.Path(str(header.locate())).read_text()
        major, minor = (
            int(re.findall(rf"define XLA_FFI_API_{part} (\d+)", text)[0])
            for part in ("MAJOR", "MINOR")
        )
    except (importlib.metadata.PackageNotFoundError, StopIteration, OSError, IndexError):
        return None
    return major, minor


# ---- cuBLASLt ------------------------------------------------------------------------------------------


def cublaslt_version(path: str) -> tuple[int, int, int]:
    """Version of the library at a path.

    Raises:
      OSError: If it can not be loaded.
      AttributeError: If it is not cuBLASLt.
    """
    library = ctypes.CDLL(path)
    library.cublasLtGetVersion.restype = ctypes.c_size_t
    number = library.cublasLtGetVersion()
    return number // 10000, number // 100 % 100, number % 100


def cublaslt(candidates: Sequence[str], *, wanted: bool) -> list[Finding]:
    """The library that matmul on CUDA will use.

    Args:
      candidates: Paths to try, best first.
      wanted: Whether anything here will use it: its absence is a problem then.
    """
    section = "cuBLASLt"
    failures = []
    for path in candidates:
        try:
            version = cublaslt_version(path)
        except (OSError, AttributeError) as error:
            text = str(error)
            failures.append(text if path in text else f"{path}: {text}")
            continue
        text = f"{path} is version {'.'.join(map(str, version))}"
        if version >= _OLDEST_CUBLASLT:
            return [Finding(section, OK, text)]
        failures.append(f"{text}, but versions before 13.2 give wrong results without an error")
    chosen = os.environ.get("JAX_NVFP4_OPS_CUBLASLT")
    fix = "pip install 'nvidia-cublas>=13.2'"
    if chosen:
        fix = f"the environment variable JAX_NVFP4_OPS_CUBLASLT names {chosen}: correct it or unset it; {fix}"
    text = "none that can be used: " + "; ".join(failures or ["no path to try"])
    if wanted:
        return [Finding(section, PROBLEM, text, fix)]
    return [Finding(section, NOTE, f"{text} (no device here needs it)", fix)]


# ---- Devices -------------------------------------------------------------------------------------------


def path_of(capability: tuple[int, int]) -> tuple[str, str]:
    """Status and words of what matmul does on a CUDA device of a compute capability."""
    if capability >= (10, 0):
        text = "FP4 tensor cores, through cuBLASLt"
        if capability[0] != 10:
            text += "; what it refuses is dequantized to bfloat16"
        return OK, text
    if capability >= (8, 0):
        return (
            OK,
            "no FP4 tensor cores: operands are dequantized to bfloat16, exactly, for cuBLASLt",
        )
    return PROBLEM, "not supported: it has no bfloat16; compute capability 8.0 or later is needed"


def has_nvidia_gpu() -> bool:
    """Whether the kernel's driver shows an NVIDIA GPU, whatever JAX says."""
    return bool(glob.glob("/dev/nvidia[0-9]*"))


def driver() -> Finding | None:
    """NVIDIA's driver, if there is one."""
    try:
        text = pathlib.Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    number = re.search(r"\b(\d{3,}\.\d[\d.]*)", text)
    if number is None:
        return None
    found = f"NVIDIA's driver is version {number[1]}"
    if _numbers(number[1]) >= _OLDEST_DRIVER:
        return Finding("devices", OK, found)
    return Finding(
        "devices",
        PROBLEM,
        f"{found}, but CUDA 13 needs {_OLDEST_DRIVER[0]} or later",
        "update the driver, or JAX_PLATFORMS=cpu to do without the GPU",
    )


def run_probe(seconds: float = _PROBE_SECONDS) -> tuple[list[dict[str, Any]], str | None]:
    """Runs `probe` in a process of its own.

    Returns:
      Its messages, and what went wrong with the process itself.
    """
    with tempfile.TemporaryDirectory() as folder:
        messages = pathlib.Path(folder, "messages")
        messages.touch()
        environment = dict(os.environ)
        # The memory of a GPU may be in use by a training run.
        environment.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        environment["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
        command = [sys.executable, "-m", "jax_nvfp4_ops", "doctor", "--probe", str(messages)]
        trouble = None
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                errors="replace",
                check=False,
                env=environment,
                timeout=seconds,
            )
        except subprocess.TimeoutExpired:
            trouble = f"did not end within {seconds:.0f} s"
        else:
            if done.returncode < 0:
                try:
                    name = signal.Signals(-done.returncode).name
                except ValueError:
                    name = f"signal {-done.returncode}"
                trouble = f"crashed with {name}"
            elif done.returncode > 0:
                trouble = f"ended with status {done.returncode}"
            if trouble:
                last = [line for line in done.stderr.splitlines() if line.strip()][-4:]
                trouble += "".join(f"\n{line}" for line in last)
        lines = messages.read_text().splitlines()
    return [json.loads(line) for line in lines if line.endswith("}")], trouble


def probe(tell: Callable[[Mapping[str, Any]], None], import_error: BaseException | None) -> None:
    """Asks JAX for its devices and tests each; what it finds, it tells at once, as the next step may crash.

    Args:
      tell: Takes messages: {"step": words}, {"device": ...}, {"error": words}, {"test": words, "device": name}.
      import_error: What `import jax_nvfp4_ops` raised; then nothing is tested.
    """
    tell({"step": "import jax"})
    import jax

    tell({"step": "asking JAX for its devices"})
    devices: list[Any] = []
    try:
        devices += jax.devices()
    except Exception as error:
        tell({"error": f"jax.devices(): {_describe(error)}"})
    if not any(d.platform == "cpu" for d in devices):
        try:
            devices += jax.devices("cpu")
        except Exception as error:
            tell({"error": f"jax.devices('cpu'): {_describe(error)}"})
    shown: dict[str, Any] = {}
    for device in devices:
        name = f"{device.platform}:{device.id}"
        # One CPU is like another.
        if device.platform == "cpu" and any(n.startswith("cpu:") for n in shown):
            continue
        shown[name] = device
        tell(
            {
                "device": name,
                "platform": device.platform,
                "kind": device.device_kind,
                "capability": getattr(device, "compute_capability", None),
            }
        )
    if import_error is not None:
        return
    from jax_nvfp4_ops import _selftest

    for name, device in shown.items():
        if device.platform not in ("cpu", "gpu"):
            continue
        tell({"step": f"testing {name}"})
        try:
            failures = _selftest.run(device)
        except Exception as error:
            failures = [_describe(error)]
        tell({"test": failures, "device": name})


def devices(
    platforms: Sequence[str] | None, messages: Sequence[Mapping[str, Any]], trouble: str | None
) -> tuple[list[Finding], bool]:
    """What each device will do, from the messages of `probe`.

    Args:
      platforms: What the module is compiled for; None if it does not load.
      messages: Of `probe`.
      trouble: What went wrong with its process.

    Returns:
      Findings, and whether there is a CUDA device.
    """
    section = "devices"
    found: list[Finding] = [f for f in [driver()] if f]
    tests = {m["device"]: m["test"] for m in messages if "test" in m}
    shown = [m for m in messages if "kind" in m]
    for message in messages:
        if "error" in message:
            found.append(Finding(section, PROBLEM, message["error"], _backend_fix()))
    for device in shown:
        found += _device(device, platforms, tests)
    if trouble:
        steps = [m["step"] for m in messages if "step" in m]
        found.append(
            Finding(
                section,
                PROBLEM,
                f"{steps[-1] if steps else 'starting Python'}: the process {trouble}",
                "run `python -m jax_nvfp4_ops doctor` again with JAX_TRACEBACK_FILTERING=off TF_CPP_MIN_LOG_LEVEL=0, "
                "and report it with the whole output",
            )
        )
    has_cuda = any(device["platform"] == "gpu" for device in shown)
    if not has_cuda and has_nvidia_gpu():
        chosen = os.environ.get("JAX_PLATFORMS", "")
        if chosen and "cuda" not in chosen and "gpu" not in chosen:
            text = f"there is an NVIDIA GPU, but JAX_PLATFORMS={chosen} leaves it out"
            found.append(Finding(section, NOTE, text, "unset JAX_PLATFORMS to use it"))
        else:
            found.append(
                Finding(
                    section,
                    PROBLEM,
                    "there is an NVIDIA GPU, but JAX does not see it",
                    f"{_WITH_CUDA}; if that is installed, `nvidia-smi` shows whether the driver works",
                )
            )
    return found, has_cuda


def _device(
    device: Mapping[str, Any],
    platforms: Sequence[str] | None,
    tests: Mapping[str, Sequence[str]],
) -> list[Finding]:
    """What one device will do, and whether it did."""
    section = "devices"
    name = f"{device['device']} ({device['kind']})"
    chip = re.match(r"(\d+)\.(\d+)", str(device["capability"]))  # others' GPUs have none, or words
    status, fix = OK, None
    if device["platform"] == "cpu":
        text = f"{name}: integer kernels"
        if platforms is not None:
            from jax_nvfp4_ops import _native

            sets = _native.instruction_sets()
            text += f" of the instruction set {sets[0]}"
            if len(sets) > 1:
                text += f" (also {', '.join(sets[1:])})"
    elif chip:
        major, minor = chip.groups()
        status, how = path_of((int(major), int(minor)))
        text = f"{name}, compute capability {major}.{minor}: {how}"
        if status == PROBLEM:
            fix = "JAX_PLATFORMS=cpu uses the CPU instead"
        elif platforms is not None and "CUDA" not in platforms:
            status, fix = PROBLEM, _BUILD_CUDA
            text += "; but this build has no CUDA backend, only that for " + ", ".join(platforms)
        elif status == NOTE:
            fix = f"CMAKE_ARGS='-DNVFP4_CUDA=ON -DNVFP4_CUDA_TARGETS={major}{minor}' pip install . in a clone"
    else:
        status, text = NOTE, f"{name}: this package has nothing for {device['platform']}"
    found = [Finding(section, status, text, fix)]
    if status == PROBLEM or device["device"] not in tests:
        return found
    failures = tests[device["device"]]
    if not failures:
        text = f"{device['device']}: self-test passed: the bits of docs/numerics.md, the product of NumPy"
        return [*found, Finding(section, OK, text)]
    text = f"{device['device']}: self-test failed: " + "; ".join(failures)
    return [*found, Finding(section, PROBLEM, text, _test_fix(text))]


def _test_fix(text: str) -> str:
    """What helps against a failure of the self-test."""
    if "no kernel image" in text or "invalid device function" in text:
        return (
            "this build has no kernels for this chip: "
            + _BUILD_CUDA
            + ", with -DNVFP4_CUDA_TARGETS of the chip"
        )
    if "Wrong number of" in text:  # of a handler's operands or attributes
        return "the compiled module is of another version than the Python around it: install both again (pip install .)"
    if "cublaslt" in text.lower():
        return "pip install 'nvidia-cublas>=13.2'"
    if "out of memory" in text.lower() or "RESOURCE_EXHAUSTED" in text:
        return "the device's memory is in use: stop what uses it, and try again"
    return f"{_AGAIN}; if it still fails, please report it as a bug"


def _backend_fix() -> str:
    chosen = os.environ.get("JAX_PLATFORMS")
    if chosen:
        return f"JAX_PLATFORMS={chosen} asks for it: unset it, or install what it names (for cuda: {_WITH_CUDA})"
    return f"{_WITH_CUDA}, or JAX_PLATFORMS=cpu to do without a GPU"


# ---- The report ----------------------------------------------------------------------------------------


def examine(import_error: BaseException | None) -> list[Finding]:
    """All findings.

    Args:
      import_error: What `import jax_nvfp4_ops` raised.
    """
    found = packages()
    own, platforms = this_package(import_error)
    found += own
    messages, trouble = run_probe()
    about_devices, has_cuda = devices(platforms, messages, trouble)
    found += about_devices
    try:
        from jax_nvfp4_ops import _cuda

        candidates = _cuda.find_cublaslt()
    except ImportError:
        text = "not looked for, as jax_nvfp4_ops does not import"
        return [*found, Finding("cuBLASLt", NOTE, text)]
    except Exception as error:
        text = f"looking for it: {_describe(error)}"
        status = PROBLEM if has_cuda else NOTE
        return [*found, Finding("cuBLASLt", status, text, "pip install --upgrade cuda-pathfinder")]
    return [*found, *cublaslt(candidates, wanted=has_cuda)]


def as_text(findings: Sequence[Finding]) -> str:
    """The report for people."""
    lines = []
    section = None
    for finding in findings:
        if finding.section != section:
            section = finding.section
            lines += ["", section]
        first, *rest = finding.text.splitlines() or [""]
        lines.append(f"  {finding.status:8} {first}")
        lines += [f"           {line}" for line in rest]
        if finding.fix:
            word = "fix" if finding.status == PROBLEM else "if wanted"
            lines.append(f"           {word}: {finding.fix}")
    problems = [f for f in findings if f.status == PROBLEM]
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        lines += ["", f"{count}: see above for what to do."]
    else:
        lines += ["", "All is well for the devices that are here."]
    return "\n".join(lines[1:])


def main(arguments: Sequence[str]) -> int:
    """Runs the command.

    Returns:
      0 if all is well for the devices that are there, else 1; 2 for bad arguments.
    """
    import jax_nvfp4_ops

    parser = argparse.ArgumentParser(
        prog="python -m jax_nvfp4_ops doctor",
        description="Says what is installed and what is missing, what each device will do, and whether it does it. "
        "The exit status is 0 if all is well for the devices that are there, else 1.",
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="write the report as JSON")
    parser.add_argument("--probe", metavar="FILE", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    import_error: BaseException | None = jax_nvfp4_ops.import_error
    if options.probe:
        with open(options.probe, "a") as file:

            def tell(message: Mapping[str, Any]) -> None:
                file.write(json.dumps(message) + "\n")
                file.flush()

            probe(tell, import_error)
        return 0
    try:
        findings = examine(import_error)
    except Exception:  # of the doctor itself: the report is all that a user has
        findings = [
            Finding("doctor", PROBLEM, traceback.format_exc(), "please report this as a bug")
        ]
    healthy = not any(f.status == PROBLEM for f in findings)
    if options.json:
        report = {"healthy": healthy, "findings": [dataclasses.asdict(f) for f in findings]}
        print(json.dumps(report, indent=1))
    else:
        print(as_text(findings))
    return 0 if healthy else 1
