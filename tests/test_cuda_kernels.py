"""The CUDA kernels without a GPU: their sources, compiled for the CPU, have the CPU backend's bits.

csrc/testing/cuda_on_cpu.h says how. tests/cpp/cuda_kernels_test.cc calls every kernel with every
option, over shapes with tails, in three orders of blocks and threads; tests/cpp/cuda_bugs_test.cu
has one kernel with many bugs, which shows what the checks see.
"""

from __future__ import annotations

import concurrent.futures
import functools
import os
import pathlib
import shutil
import subprocess

import native
import pytest

ROOT = native.ROOT
KERNELS = [ROOT / f"csrc/ops/{op}_cuda.cu" for op in ("amax", "dequantize", "quantize")]
BACKEND = [
    ROOT / "csrc/cpu/quantize_portable.cc",
    *(ROOT / f"csrc/ops/{op}_cpu.cc" for op in ("amax", "dequantize", "quantize")),
]
RUNTIME = ROOT / "csrc/testing/cuda_on_cpu.cc"
FLAGS = [
    *("-std=c++20", "-g1", "-O1", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror"),
    *("-Wno-unknown-pragmas", f"-I{ROOT / 'csrc'}", f"-I{ROOT / 'csrc/testing/cuda_headers'}"),
]
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
# Of each kind of build: flags of kernels, of all else, and of the linker.
BUILDS = {
    "plain": (["-O2"], ["-O2"], []),
    "checked": (["-fsanitize=thread"], ["-DCUDA_ON_CPU_CHECK_ACCESSES"], []),
    "sanitized": (SANITIZE, SANITIZE, SANITIZE),
    "thread": (["-fsanitize=thread"], ["-DCUDA_ON_CPU_THREAD_SANITIZER"], ["-fsanitize=thread"]),
}


def run(command: list, **options) -> subprocess.CompletedProcess[str]:
    command = list(map(str, command))
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


@functools.cache
def at_fixed_addresses() -> list[str]:
    """What a command begins with. GCC 12's sanitizers fail, now and then, where Linux draws addresses
    of more than 28 random bits; a container may forbid to ask for none.
    """
    prefix = ["setarch", "-R"]
    return prefix if shutil.which(prefix[0]) and run([*prefix, "true"]).returncode == 0 else []


def execute(program: pathlib.Path, *arguments) -> subprocess.CompletedProcess[str]:
    """Runs a built program. Sanitizers stop at the first report, and have no other options."""
    sanitizers = {f"{name}_OPTIONS": "" for name in ("ASAN", "LSAN", "UBSAN")}
    sanitizers["ASAN_OPTIONS"] = "detect_leaks=0"  # needs ptrace, and looks for something else
    sanitizers["TSAN_OPTIONS"] = "halt_on_error=1"
    return run([*at_fixed_addresses(), program, *arguments], env=os.environ | sanitizers)


def build(folder: pathlib.Path, kind: str, kernels: list, others: list) -> pathlib.Path:
    """A program of CUDA sources and others; workers of a test run share it."""
    compiler = os.environ.get("CXX", "g++")
    kernel_flags, flags, link = BUILDS[kind]
    program = folder / kind
    commands = [
        [compiler, *FLAGS, *kernel_flags, "-x", "c++", "-c", s, "-o", folder / f"{s.name}.{kind}.o"]
        for s in kernels
    ] + [
        [compiler, *FLAGS, *flags, "-c", s, "-o", folder / f"{s.name}.{kind}.o"]
        for s in [*others, RUNTIME]
    ]
    with native._lock(folder / f"{kind}.lock"):
        if not program.exists():
            with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
                for done in pool.map(run, commands):
                    assert done.returncode == 0, done.stderr
            done = run([compiler, *link, *(c[-1] for c in commands), "-o", program])
            assert done.returncode == 0, done.stderr
    return program


@pytest.fixture
def kernels_test(tmp_path_factory):
    folder = native.shared_folder(tmp_path_factory, "cuda_kernels")
    others = [native.CPP / "cuda_kernels_test.cc", *BACKEND]
    return lambda kind: build(folder, kind, KERNELS, others)


@pytest.mark.parametrize(
    ("kind", "step", "calls"), [("plain", 1, 370), ("checked", 2, 180), ("sanitized", 3, 120)]
)
def test_kernels_have_the_bits_of_the_cpu(kernels_test, kind, step, calls):
    done = execute(kernels_test(kind), step)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= calls


def test_thread_sanitizer_is_silent(kernels_test):
    done = execute(kernels_test("thread"), 12)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr, done.stderr
    assert int(done.stdout) >= 30


@pytest.mark.parametrize(
    ("rows", "k"),
    [(798_916, 2688), (1_597_832, 2688), (1_600_000, 2816)],
    ids=["2^31 elements", "2^32", "2^32, whole tiles"],
)
def test_offsets_of_more_than_32_bits(tmp_path_factory, rows, k):
    folder = native.shared_folder(tmp_path_factory, "cuda_offsets")
    program = build(folder, "plain", KERNELS, [native.CPP / "cuda_offsets_test.cc", *BACKEND])
    done = run([program, rows, k])
    assert (done.returncode, done.stdout) == (0, "right\n"), done.stderr


# ---- What the checks see: of each bug, what a build says. Other builds may say it too.

BUGS = {
    "missing_barrier": {"checked": "never written", "thread": "data race"},
    "missing_barrier_before_reuse": {"checked": "a race", "thread": "data race"},
    "missing_syncwarp": {"checked": "never written", "thread": "data race"},
    "two_writers": {"checked": "a race", "thread": "data race"},
    "barrier_in_branch": {"plain": "a barrier that not all threads reach"},
    "barrier_at_two_places": {"plain": "a barrier that not all threads reach"},
    "return_before_barrier": {"plain": "some ended before"},
    "shared_write_past_end": {
        "plain": "outside of dynamic shared memory",
        "checked": "outside of all buffers",
        "sanitized": "out of bounds",
    },
    "shared_read_past_end": {"checked": "outside of all buffers", "sanitized": "out of bounds"},
    "static_shared_past_end": {"sanitized": "out of bounds"},
    "global_write_past_end": {
        "plain": "outside of a buffer",
        "checked": "outside of all buffers",
        "sanitized": "AddressSanitizer: use-after-poison",
    },
    "global_read_past_end": {
        "checked": "outside of all buffers",
        "sanitized": "AddressSanitizer: use-after-poison",
    },
    "global_write_before_begin": {
        "plain": "outside of a buffer",
        "checked": "outside of all buffers",
        "sanitized": "AddressSanitizer: use-after-poison",
    },
    "wild_pointer": {"checked": "outside of all buffers", "sanitized": "AddressSanitizer"},
    "uninitialised_dynamic_shared": {"checked": "never written", "plain": "wrong"},
    "uninitialised_static_shared": {"checked": "never written"},
    "shared_of_another_block": {"checked": "never written", "plain": "wrong"},
    "uninitialised_global": {"checked": "never written"},
    "output_not_written": {"checked": "a byte was not written", "plain": "wrong"},
    "shuffle_with_ended_lanes": {"plain": "wait for others that do not come"},
    "shuffle_from_lane_outside_mask": {"plain": "a lane that its mask does not name"},
    "mask_without_caller": {"plain": "a mask without the lane that calls"},
    "shuffle_in_branch": {"plain": "lanes of one mask at different places"},
    "sum_without_atomic": {"checked": "of another block"},
    "last_block_without_fence": {"checked": "of another block"},
    "last_block_without_barrier": {"checked": "never written"},
    "int_overflow": {"sanitized": "signed integer overflow"},
    "shift_by_width": {"sanitized": "shift exponent"},
    "misaligned_vector": {"sanitized": "misaligned address"},
    "stack_past_end": {"sanitized": "out of bounds"},
    "too_much_shared": {"plain": "cudaErrorInvalidValue"},
}


@pytest.fixture
def bugs_test(tmp_path_factory):
    folder = native.shared_folder(tmp_path_factory, "cuda_bugs")
    return lambda kind: build(folder, kind, [native.CPP / "cuda_bugs_test.cu"], [])


@pytest.mark.parametrize("kind", BUILDS)
def test_a_kernel_without_bugs_is_right(bugs_test, kind):
    for schedule in ("0", "1", "2"):
        done = execute(bugs_test(kind), "none", schedule)
        assert (done.returncode, done.stdout, done.stderr) == (0, "right\n", "")


@pytest.mark.parametrize("kind", BUILDS)
def test_bugs_are_seen(bugs_test, kind):
    program = bugs_test(kind)
    for bug, seen in BUGS.items():
        if kind in seen:
            for schedule in ("0", "1", "2"):
                done = execute(program, bug, schedule)
                assert done.returncode != 0, (bug, schedule)
                assert seen[kind] in done.stdout + done.stderr, (bug, schedule, done.stderr)


def test_every_bug_is_one_that_is_seen():
    source = (native.CPP / "cuda_bugs_test.cu").read_text()
    listed = source.split("#define BUGS(X)")[1].split("enum class")[0]
    names = {part.split(")")[0] for part in listed.split("X(")[1:]}
    assert names == {"none", *BUGS}
