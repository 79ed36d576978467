"""The doctor: each thing that can be broken is reported with a fix, and never a traceback."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig
import types

import jax
import jax.numpy as jnp
import jax_nvfp4_ops
import numpy as np
import oracle
import pytest
from helpers import wide
from jax_nvfp4_ops import _selftest, doctor

PACKAGE = pathlib.Path(jax_nvfp4_ops.__file__).parent
NATIVE = "_native" + sysconfig.get_config_var("EXT_SUFFIX")


def run(*arguments, command="doctor", path=None, **environment) -> subprocess.CompletedProcess:
    environment |= {"PYTHONPATH": str(path)} if path else {}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "jax_nvfp4_ops", command, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | environment,
        cwd=path,
    )
    assert "Traceback" not in done.stdout + done.stderr, done.stdout + done.stderr
    return done


def problems(findings) -> list[doctor.Finding]:
    found = [f for f in findings if f.status == doctor.PROBLEM]
    assert all(f.fix for f in found), "every problem has a fix"
    return found


# ---- From the shell ------------------------------------------------------------------------------------


def test_a_sound_installation():
    done = run(JAX_PLATFORMS="cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"jax {jax.__version__}" in done.stdout
    assert "cpu:0: self-test passed" in done.stdout
    assert done.stdout.endswith("All is well for the devices that are here.\n")


def test_as_json():
    done = run("--json", JAX_PLATFORMS="cpu")
    report = json.loads(done.stdout)
    assert done.returncode == 0 and report["healthy"]
    assert {f["section"] for f in report["findings"]} == {
        *("packages", "jax_nvfp4_ops", "devices", "cuBLASLt")
    }
    assert {f["status"] for f in report["findings"]} <= {"ok", "note"}


def test_a_backend_that_does_not_start():
    done = run(JAX_PLATFORMS="none_such")
    assert done.returncode == 1
    assert "problem  jax.devices(): " in done.stdout
    assert "fix: JAX_PLATFORMS=none_such asks for it: unset it" in done.stdout


@pytest.fixture
def copy(tmp_path) -> pathlib.Path:
    """A folder with the package in it, its compiled module left out."""
    shutil.copytree(
        PACKAGE, tmp_path / PACKAGE.name, ignore=shutil.ignore_patterns("*.so", "__pycache__")
    )
    return tmp_path


@pytest.mark.parametrize(
    ("file", "content", "text", "fix"),
    [
        (None, b"", "No module named 'jax_nvfp4_ops._native'", "it was never built: pip install ."),
        (NATIVE, b"not a module", "file too short", "install again: pip install --force-reinstall"),
        (
            "_native.cpython-27-sparc.so",
            b"",
            "No module named 'jax_nvfp4_ops._native'",
            f"it is for another Python or machine (_native.cpython-27-sparc.so; this one loads {NATIVE})",
        ),
    ],
)
def test_a_compiled_module_that_does_not_load(copy, file, content, text, fix):
    if file:
        (copy / PACKAGE.name / file).write_bytes(content)
    done = run(path=copy)
    assert done.returncode == 1
    assert str(copy / PACKAGE.name) in done.stdout
    assert "problem  the compiled module: " in done.stdout and text in done.stdout
    assert f"fix: {fix}" in done.stdout
    assert "cpu:0" in done.stdout and "self-test" not in done.stdout
    done = run("--quick", command="bench", path=copy)
    assert done.returncode == 1
    assert "bench: jax_nvfp4_ops does not import: " in done.stderr and text in done.stderr
    assert "`python -m jax_nvfp4_ops doctor` says more" in done.stderr


@pytest.mark.parametrize(
    "error", ["ImportError('jax is broken')", "RuntimeError('jaxlib is too old for this jax')"]
)
def test_a_jax_that_does_not_import(tmp_path, error):
    (tmp_path / "jax").mkdir()
    (tmp_path / "jax" / "__init__.py").write_text(f"raise {error}")
    (tmp_path / PACKAGE.name).symlink_to(PACKAGE)
    done = run(path=tmp_path)
    assert done.returncode == 1
    assert error.split("'")[1] in done.stdout
    assert "import jax: the process ended with status 1" in done.stdout


def test_elsewhere_an_import_that_fails_is_an_error(copy):
    """Only the command line goes on without: a program must not, with half a package."""
    for words in (["-c", "import jax_nvfp4_ops"], ["-m", "app"]):
        (copy / "app.py").write_text("import jax_nvfp4_ops")
        done = subprocess.run(
            [sys.executable, *words],
            capture_output=True,
            text=True,
            check=False,
            cwd=copy,
            env=os.environ | {"PYTHONPATH": str(copy)},
        )
        assert done.returncode == 1
        assert "No module named 'jax_nvfp4_ops._native'" in done.stderr


def test_bad_arguments(capsys):
    with pytest.raises(SystemExit) as error:
        doctor.main(["--jsno"])
    assert error.value.code == 2
    assert "unrecognized arguments: --jsno" in capsys.readouterr().err


def test_a_fault_of_the_doctor_is_a_finding(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "packages", None)
    assert doctor.main([]) == 1
    out = capsys.readouterr().out
    assert "TypeError" in out and "please report this as a bug" in out


# ---- Packages ------------------------------------------------------------------------------------------

SOUND = {
    "jax": "0.12.0",
    "jaxlib": "0.12.0",
    "numpy": "2.4.6",
    "ml_dtypes": "0.6.0",
    "jax-cuda13-plugin": "0.12.0",
    "jax-cuda13-pjrt": "0.12.0",
    "nvidia-cublas": "13.2.0.1",
    "cuda-pathfinder": "1.3",
}


def of_packages(monkeypatch, **changes) -> list[doctor.Finding]:
    versions = SOUND | {name.replace("__", "-"): v for name, v in changes.items()}
    monkeypatch.setattr(doctor, "_version", versions.get)
    return doctor.packages()


@pytest.mark.parametrize(
    ("changes", "text", "fix"),
    [
        ({"jax": None}, "jax is missing", "pip install 'jax>=0.10.0'"),
        ({"numpy": None}, "numpy is missing", "pip install 'numpy'"),
        ({"jax": "0.9.2"}, "jax 0.9.2 is older than 0.10.0", "pip install --upgrade 'jax>=0.10.0'"),
        (
            {"jax-cuda13-plugin": "0.11.0"},
            "jax-cuda13-plugin 0.11.0 is not of the version of jaxlib, 0.12.0",
            "pip install --upgrade 'jax[cuda13]==0.12.0'",
        ),
        (
            {"jax-cuda12-plugin": "0.12.0"},
            "CUDA 12 has no cuBLASLt whose FP4 products are right",
            f"pip uninstall jax-cuda12-plugin jax-cuda12-pjrt; {doctor._WITH_CUDA}",
        ),
    ],
)
def test_packages_that_are_wrong(monkeypatch, changes, text, fix):
    found = problems(of_packages(monkeypatch, **changes))
    assert any(text in f.text and f.fix == fix for f in found)


def test_packages_that_are_right(monkeypatch):
    found = of_packages(monkeypatch)
    assert not problems(found)
    # A plugin may have a fourth number, for a new build of the same version.
    assert not problems(of_packages(monkeypatch, **{"jax-cuda13-plugin": "0.12.0.1"}))


def test_packages_that_may_be_missing(monkeypatch):
    without = {"jax-cuda13-plugin": None, "jax-cuda13-pjrt": None, "cuda-pathfinder": None}
    found = of_packages(monkeypatch, **without)
    assert not problems(found)
    notes = {f.text: f.fix for f in found if f.status == doctor.NOTE}
    assert "'jax-nvfp4-ops[cuda13]'" in notes["no CUDA plugin: JAX sees no GPU"]
    assert any("rich is missing" in text for text in notes)
    assert not any("cuda-pathfinder" in text for text in notes)  # of no use without CUDA
    notes = [f.text for f in of_packages(monkeypatch, **{"nvidia-cublas": None})]
    assert any("nvidia-cublas is missing" in text for text in notes)


def test_a_module_for_a_newer_ffi(monkeypatch):
    monkeypatch.setattr(doctor, "_jaxlib_ffi", lambda: (0, 1))
    found = problems(doctor.this_package(None)[0])
    assert "which jaxlib's, 0.1, does not load" in found[0].text


def test_the_ffi_of_jaxlib_is_found():
    assert doctor._jaxlib_ffi() >= (0, 3)


# ---- cuBLASLt ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def libraries(tmp_path_factory) -> dict[str, str]:
    """Doubles of cuBLASLt of several versions, and a library that is none."""
    folder = tmp_path_factory.mktemp("libraries")
    functions = {
        "good": "unsigned long cublasLtGetVersion(void) { return 130200; }",
        "old": "unsigned long cublasLtGetVersion(void) { return 130105; }",
        "other": "int something_else(void) { return 0; }",
    }
    for name, function in functions.items():
        source = folder / f"{name}.c"
        source.write_text(function)
        compiler = os.environ.get("CXX", "g++")
        subprocess.run(
            [compiler, "-x", "c", "-shared", "-fPIC", source, "-o", folder / f"{name}.so"],
            check=True,
        )
    return {name: str(folder / f"{name}.so") for name in (*functions, "missing")}


def test_the_first_library_that_can_be_used(libraries):
    paths = [libraries[name] for name in ("missing", "old", "good")]
    [found] = doctor.cublaslt(paths, wanted=True)
    assert found.status == doctor.OK and found.text == f"{libraries['good']} is version 13.2.0"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("missing", "cannot open shared object file"),
        ("old", "is version 13.1.5, but versions before 13.2 give wrong results without an error"),
        ("other", "undefined symbol: cublasLtGetVersion"),
    ],
)
def test_a_library_that_can_not_be_used(libraries, monkeypatch, name, text):
    monkeypatch.delenv("JAX_NVFP4_OPS_CUBLASLT", raising=False)
    [found] = problems(doctor.cublaslt([libraries[name]], wanted=True))
    assert text in found.text and found.fix == "pip install 'nvidia-cublas>=13.2'"
    [found] = doctor.cublaslt([libraries[name]], wanted=False)
    assert found.status == doctor.NOTE and text in found.text
    monkeypatch.setenv("JAX_NVFP4_OPS_CUBLASLT", libraries[name])
    [found] = problems(doctor.cublaslt([libraries[name]], wanted=True))
    assert f"JAX_NVFP4_OPS_CUBLASLT names {libraries[name]}: correct it or unset it" in found.fix


def test_no_path_to_a_library():
    [found] = problems(doctor.cublaslt([], wanted=True))
    assert "no path to try" in found.text


# ---- Devices -------------------------------------------------------------------------------------------


def gpu(capability: str, kind="NVIDIA B200") -> dict:
    return {"device": "gpu:0", "platform": "gpu", "kind": kind, "capability": capability}


def cpu() -> dict:
    return {"device": "cpu:0", "platform": "cpu", "kind": "cpu", "capability": None}


def passed(device: str, *failures: str) -> dict:
    return {"device": device, "test": list(failures)}


BOTH = ["cpu", "CUDA"]


@pytest.mark.parametrize(
    ("capability", "status", "text"),
    [
        ("10.0", "ok", "compute capability 10.0: FP4 tensor cores, through cuBLASLt"),
        ("10.3", "ok", "FP4 tensor cores, through cuBLASLt"),
        ("12.0", "ok", "what it refuses is dequantized to bfloat16"),
        ("11.0", "ok", "what it refuses is dequantized to bfloat16"),
        ("9.0", "ok", "no FP4 tensor cores: operands are dequantized to bfloat16"),
        ("8.0", "ok", "no FP4 tensor cores: operands are dequantized to bfloat16"),
        ("7.5", "problem", "not supported: it has no bfloat16"),
    ],
)
def test_the_path_of_each_chip(capability, status, text):
    found, has_cuda = doctor.devices(BOTH, [gpu(capability), passed("gpu:0")], None)
    assert has_cuda
    assert found[0].status == status and text in found[0].text
    if status == "problem":
        assert found[0].fix == "JAX_PLATFORMS=cpu uses the CPU instead"
    else:
        assert found[1].status == "ok" and "self-test passed" in found[1].text


def test_the_path_of_the_cpu():
    found, has_cuda = doctor.devices(["cpu"], [cpu(), passed("cpu:0")], None)
    assert not has_cuda and not problems(found)
    assert f"instruction set {jax_nvfp4_ops.instruction_sets()[0]}" in found[0].text


def test_a_gpu_without_a_backend():
    found, _ = doctor.devices(["cpu"], [gpu("10.0"), passed("gpu:0", "failed of course")], None)
    [problem] = problems(found)
    assert "this build has no CUDA backend, only that for cpu" in problem.text
    assert "-DNVFP4_CUDA=ON" in problem.fix


@pytest.mark.parametrize(
    ("failure", "fix"),
    [
        ("XlaRuntimeError: no kernel image is available", "-DNVFP4_CUDA_TARGETS of the chip"),
        ("nvfp4_matmul: libcublasLt.so.13: not found", "pip install 'nvidia-cublas>=13.2'"),
        ("RESOURCE_EXHAUSTED: Out of memory", "the device's memory is in use"),
        ("INVALID_ARGUMENT: Wrong number of attributes", "of another version than the Python"),
        ("matmul: 3 of 9 differ", "please report it as a bug"),
    ],
)
def test_a_device_that_fails_its_test(failure, fix):
    found, _ = doctor.devices(BOTH, [gpu("10.0"), passed("gpu:0", failure)], None)
    [problem] = problems(found)
    assert f"gpu:0: self-test failed: {failure}" in problem.text and fix in problem.fix


def test_a_gpu_that_jax_does_not_see(monkeypatch):
    monkeypatch.setattr(doctor, "has_nvidia_gpu", lambda: True)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    [problem] = problems(doctor.devices(BOTH, [cpu(), passed("cpu:0")], None)[0])
    assert "JAX does not see it" in problem.text and "jax-nvfp4-ops[cuda13]" in problem.fix
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    found = doctor.devices(BOTH, [cpu(), passed("cpu:0")], None)[0]
    assert not problems(found) and "JAX_PLATFORMS=cpu leaves it out" in found[-1].text


@pytest.mark.parametrize(
    ("version", "status"), [("580.65.06", "ok"), ("570.133.20", "problem"), ("", None)]
)
@pytest.mark.parametrize(
    "form",
    ["NVIDIA UNIX Open Kernel Module for x86_64  {}", "NVIDIA UNIX x86_64 Kernel Module  {}"],
)
def test_nvidias_driver(monkeypatch, form, version, status):
    text = (
        f"NVRM version: {form.format(version)}  Release Build\nGCC version:  gcc version 12.3.0\n"
    )
    read = pathlib.Path.read_text
    monkeypatch.setattr(
        pathlib.Path,
        "read_text",
        lambda self: text if str(self) == "/proc/driver/nvidia/version" else read(self),
    )
    found = doctor.driver()
    assert (found and found.status) == status
    if status == "problem":
        assert "570.133.20, but CUDA 13 needs 580 or later" in found.text and found.fix
        assert found in doctor.devices(BOTH, [cpu()], None)[0]


def test_a_gpu_of_another_maker():
    found, _ = doctor.devices(
        BOTH, [gpu("gfx942", "MI300X"), passed("gpu:0", "no such target")], None
    )
    assert found[0].status == "note" and "this package has nothing for gpu" in found[0].text


def test_a_crash_names_the_step():
    messages = [{"step": "import jax"}, cpu(), {"step": "testing cpu:0"}]
    found, _ = doctor.devices(BOTH, messages, "crashed with SIGSEGV")
    [problem] = problems(found)
    assert problem.text == "testing cpu:0: the process crashed with SIGSEGV"


@pytest.mark.parametrize(
    ("code", "trouble"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "crashed with SIGSEGV"),
        ("import sys; sys.exit('the\\nlast words')", "ended with status 1\nthe\nlast words"),
        ("import time; time.sleep(60)", "did not end within 1 s"),
        ("", None),
    ],
)
def test_the_process_of_the_probe_may_do_anything(monkeypatch, tmp_path, code, trouble):
    script = tmp_path / "python"
    script.write_text(
        f"#!{sys.executable}\n"
        "import sys\n"
        f"""open(sys.argv[5], "w").write('{{"step": "first"}}\\n{{"step": "sec')\n{code}\n"""
    )
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    messages, found = doctor.run_probe(seconds=1 if "sleep" in code else 60)
    assert messages == [{"step": "first"}]  # and not what was being written
    assert found == trouble


def test_the_probe_tells_what_jax_says(monkeypatch):
    class Gpu:
        platform, id, device_kind, compute_capability = "gpu", 3, "NVIDIA H100", "9.0"

    def devices(backend=None):
        if backend == "cpu":
            raise RuntimeError("no CPU\n\neither")
        return [Gpu, types.SimpleNamespace(platform="tpu", id=0, device_kind="TPU v9")]

    def fails(device):
        raise ValueError(f"no kernels on {device.device_kind}")

    monkeypatch.setattr(jax, "devices", devices)
    monkeypatch.setattr(_selftest, "run", fails)
    messages: list[dict] = []
    doctor.probe(messages.append, None)
    found, has_cuda = doctor.devices(BOTH, messages, None)
    assert has_cuda
    assert [f.status for f in found] == ["problem", "ok", "problem", "note"]
    assert "jax.devices('cpu'): RuntimeError: no CPU\neither" in found[0].text
    assert "gpu:3 (NVIDIA H100), compute capability 9.0" in found[1].text
    assert "self-test failed: ValueError: no kernels on NVIDIA H100" in found[2].text
    assert "this package has nothing for tpu" in found[3].text


# ---- The self-test -------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 16), (33, 40), (5, 96)])
def test_its_reference_is_the_oracles(shape):
    x = wide(shape, jnp.bfloat16)
    codes, scales, decode = _selftest.quantize(x)
    expected = oracle.quantize(x)
    np.testing.assert_array_equal(codes, expected.codes[:, : shape[1]])
    np.testing.assert_array_equal(scales.view(np.uint8), expected.scales)
    assert decode == expected.global_scale


def test_it_passes_here(instruction_set):
    assert _selftest.run(jax.devices("cpu")[0]) == []


@pytest.mark.parametrize(
    ("part", "name"), [("packed", "codes"), ("scales", "scales"), ("global_scale", "global scale")]
)
def test_it_notices_one_wrong_bit(monkeypatch, part, name):
    real = jax_nvfp4_ops.quantize

    def wrong(x, **options):
        rows, columns = real(x, **options)
        array = getattr(rows, part)
        words = jax.lax.bitcast_convert_type(array, jnp.uint32 if array.ndim == 0 else jnp.uint8)
        first = (0,) * array.ndim
        setattr(
            rows,
            part,
            jax.lax.bitcast_convert_type(words.at[first].set(words[first] ^ 1), array.dtype),
        )
        return rows, columns

    monkeypatch.setattr(jax_nvfp4_ops, "quantize", wrong)
    failures = _selftest.run(jax.devices("cpu")[0])
    assert failures[0].startswith(f"quantize along rows, {name}: 1 of ")


def test_it_notices_one_wrong_product(monkeypatch):
    real = jax_nvfp4_ops.matmul
    monkeypatch.setattr(
        jax_nvfp4_ops, "matmul", lambda p, q, **o: real(p, q, **o).at[2, 3].multiply(1.01)
    )
    assert _selftest.run(jax.devices("cpu")[0]) == ["matmul: 1 of 1776 differ"]


def test_on_another_device_random_bits_are_the_cpus(monkeypatch):
    """The second CPU device stands for a GPU."""

    class Other:
        platform = "gpu"

    device = jax.devices("cpu")[1]
    put = jax.device_put
    monkeypatch.setattr(jax, "device_put", lambda x, to: put(x, device if to is Other else to))
    assert _selftest.run(Other) == []

    x = wide((48, 88), jnp.bfloat16)
    other = x.copy()
    other[0, 0] = -other[0, 0] if other[0, 0] else 1
    failures = []
    _selftest._compare_with_cpu(
        x,
        put(other, device),
        lambda what, same: failures.append(what) if not np.all(same) else None,
    )
    assert set(failures) == {"stochastic rounding and Hadamard"}
