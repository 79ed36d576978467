"""matmul's CUDA backend on the CPU: its handlers, plans and loader against cuBLASLt's own descriptors.

csrc/testing/cublaslt_double.cc stands in for the four functions of cuBLASLt that need a GPU, and computes
what it is asked for with the roundings of the CPU backend; so results are compared bit by bit. The real
library is `nvidia-cublas` from PyPI, or what NVFP4_REAL_CUBLASLT names.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import importlib
import json
import os
import pathlib
import sys
import types

import jax
import jax.numpy as jnp
import jax_nvfp4_ops as nvfp4
import native
import numpy as np
import pytest
from cuda_on_cpu import CUDA_FLAGS, build_library, lowered_for_cuda, register
from helpers import DTYPES, assert_same_bits, normal
from jax_nvfp4_ops import _cuda
from test_dequantize import random_quantized

TARGET = "nvfp4_matmul_cuda_on_cpu"
FP4, BF16, F16, F32 = 33, 14, 2, 0  # cuBLASLt's types
ERRORS = {"NOT_INITIALIZED": 1, "ALLOC_FAILED": 3, "NOT_SUPPORTED": 15, "INTERNAL_ERROR": 14}


def real_cublaslt() -> str:
    candidates = [os.environ.get("NVFP4_REAL_CUBLASLT"), *_cuda.find_cublaslt()]
    for path in candidates:
        if path and pathlib.Path(path).exists():
            return path
    if os.environ.get("NVFP4_REQUIRE_CUBLASLT") == "1":
        pytest.fail("nvidia-cublas is not installed, and NVFP4_REQUIRE_CUBLASLT=1")
    pytest.skip("nvidia-cublas is not installed: pip install 'jax-nvfp4-ops[test-cuda]'")


@pytest.fixture(scope="session")
def libraries(tmp_path_factory):
    os.environ["NVFP4_REAL_CUBLASLT"] = real_cublaslt()
    folder = native.shared_folder(tmp_path_factory, "cublaslt")
    double = build_library(
        folder, "cublaslt_double", ["testing/cublaslt_double.cc"], ["-std=c++17"]
    )
    sources = [
        "testing/matmul_cuda_on_cpu.cc",
        *("ops/matmul_cuda.cc", "ops/matmul_cuda.cu", "cuda/gemm.cc", "cuda/cublaslt.cc"),
    ]
    runtime = ctypes.CDLL(str(build_library(folder, "matmul_cuda_on_cpu", sources, CUDA_FLAGS)))
    runtime.Load.restype = ctypes.c_char_p
    runtime.RuntimeKernels.restype = runtime.RuntimeCalls.restype = ctypes.c_int64
    runtime.RuntimeFail.argtypes = [ctypes.c_int64]
    loaded = ctypes.CDLL(str(double))
    loaded.DoubleLive.restype = ctypes.c_int64
    loaded.DoubleRequests.restype = ctypes.c_char_p
    loaded.DoubleVersion.argtypes = [ctypes.c_size_t]
    register(TARGET, runtime, "MatmulCudaOnCpu")
    register(TARGET + "_init", runtime, "MatmulCudaInitializeOnCpu")
    return double, loaded, runtime


class Cuda:
    """The devices, the double, and how to run a function on them."""

    def __init__(self, path, double, runtime):
        self.path, self.double, self.runtime = str(path).encode(), double, runtime

    def run(self, f, *args, target=TARGET, device=None):
        """f under jax.jit, with matmul lowered as for CUDA, to the handlers on the CPU."""
        device = device or jax.devices()[0]
        with lowered_for_cuda({"matmul": target}):
            program = jax.jit(lambda *a: f(*a)).lower(*jax.device_put(args, device)).compile()
        return jax.block_until_ready(program(*jax.device_put(args, device)))

    def calls(self, name):
        return self.double.DoubleCalls(f"cublasLt{name}".encode())

    def requests(self, call="matmul"):
        lines = map(json.loads, self.double.DoubleRequests().decode().splitlines())
        return [r for r in lines if r["call"] == call]

    def refuse(self, what):
        self.double.DoubleRefuse(what.encode())

    def load(self, path):
        return self.runtime.Load(str(path).encode()).decode()


@pytest.fixture
def cuda(libraries):
    path, double, runtime = libraries
    double.DoubleReset()
    runtime.RuntimeReset()
    assert runtime.Load(str(path).encode()) == b""
    yield Cuda(path, double, runtime)
    runtime.Unload()
    assert double.DoubleLive() == 0, "a handle, descriptor, layout or preference was not destroyed"


def operands(m, n, k, scale=0.01, batch=((), ())):
    a, _ = random_quantized((*batch[0], m, k), 1, scale)
    b, _ = random_quantized((*batch[1], n, k), 2, scale)
    return a, b


def product(dtype, **kw):
    return lambda a, b, *rest: nvfp4.matmul(
        a, b, out_dtype=dtype, **dict(zip(kw.get("names", ()), rest, strict=True))
    )


def compare(cuda, f, *args, device=None):
    want = jax.jit(lambda *a: f(*a))(*args)
    got = cuda.run(f, *args, device=device)
    jax.tree.map(assert_same_bits, got, want)
    for leaf in jax.tree.leaves(want):
        assert leaf.size == 0 or np.count_nonzero(leaf) > leaf.size // 2
    objections = [r["objection"] for r in cuda.requests() if r["objection"]]
    assert not objections


SHAPES = [
    (1, 1, 1),
    (1, 8, 16),
    (2, 3, 15),
    (5, 17, 33),
    (16, 16, 464),
    (33, 80, 80),
    (127, 130, 257),
    (128, 128, 128),
    (1, 515, 1040),
    (259, 5, 100),
    (140, 264, 96),
]
# Of what has a path of its own: FP4, dequantized, FP4 of a chip where refusals are no errors.
CAPABILITIES = [100, 90, 120]


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mnk", SHAPES, ids=str)
def test_products_have_the_bits_of_the_cpu_backend(cuda, mnk, dtype, capability):
    cuda.runtime.RuntimeCapability(0, capability)
    compare(cuda, product(DTYPES[dtype]), *operands(*mnk))
    assert {r["operands"] for r in cuda.requests()} == (
        {FP4} if capability >= 100 else {F16 if dtype == "f16" else BF16}
    )


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_a_product_that_fits_is_one_launch_and_no_kernel(cuda, capability):
    cuda.runtime.RuntimeCapability(0, capability)
    compare(cuda, product(jnp.bfloat16), *operands(48, 64, 128))
    (request,) = cuda.requests()
    assert request["m"] == 64 and request["n"] == 48 and request["k"] == 128
    assert request["result"] == BF16 and request["pointers"] == 1
    assert cuda.runtime.RuntimeKernels() == (0 if capability >= 100 else 2)


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("refused", ["", "bias"])
@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize("bias", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [24, 19])
def test_bias_and_accumulate(cuda, n, dtype, bias, accumulates, refused, capability):
    """Added by cuBLASLt where it can, by a kernel where it can not, rounded once either way."""
    cuda.runtime.RuntimeCapability(0, capability)
    cuda.refuse(refused)
    a, b = operands(37, n, 100)
    rest = [normal((n,), DTYPES[bias], 3, 10)]
    if accumulates:
        rest.append(normal((37, n), DTYPES[dtype], 4, 10))
    names = ["bias", "accumulate"][: len(rest)]
    compare(cuda, product(DTYPES[dtype], names=names), a, b, *rest)
    fused = n == 24 and not refused and bias == {"f32": "bf16"}.get(dtype, dtype)
    assert any(r["bias"] for r in cuda.requests()) == fused


def test_accumulate_alone_is_added_by_cublaslt(cuda):
    a, b = operands(37, 24, 100)
    compare(cuda, product(jnp.float32, names=["accumulate"]), a, b, normal((37, 24), seed=4))
    assert cuda.runtime.RuntimeKernels() == 0


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("batch", [((3,), (3,)), ((3, 1), (1, 2)), ((), (4,)), ((2,), ())], ids=str)
def test_batches_repeat_operands_without_copies(cuda, batch, capability):
    cuda.runtime.RuntimeCapability(0, capability)
    compare(cuda, product(jnp.float32), *operands(20, 12, 48, batch=batch))
    assert cuda.calls("Matmul") == np.prod(np.broadcast_shapes(*batch), dtype=int)
    assert cuda.calls("MatmulAlgoGetHeuristic") == 1


def test_examples_have_alphas_of_their_own(cuda):
    def f(x, w):
        return jax.vmap(
            lambda x, w: nvfp4.matmul(nvfp4.quantize(x), nvfp4.quantize(w), out_dtype=jnp.float32)
        )(x, w)

    compare(cuda, f, normal((3, 20, 48), seed=1), normal((3, 12, 48), seed=2))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mnk", [(5, 7, 0), (0, 8, 32), (8, 0, 32), (3, 8, 0)], ids=str)
def test_empty_products(cuda, mnk, dtype):
    m, n, k = mnk
    a, b = (
        nvfp4.quantize(jnp.zeros((rows, k), jnp.float32), amax=jnp.float32(1)) for rows in (m, n)
    )
    f = product(DTYPES[dtype], names=["bias", "accumulate"])
    compare(cuda, f, a, b, normal((n,), seed=1), normal((m, n), DTYPES[dtype], 2))
    assert cuda.calls("Matmul") == 0


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("recipe", [nvfp4.recipes.NVIDIA, nvfp4.recipes.RNE], ids=["nvidia", "rne"])
@pytest.mark.parametrize("shape", [(64, 96, 48), (35, 50, 21)], ids=str)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["bf16", "f32"])
def test_a_layer_forward_and_backward(cuda, shape, recipe, dtype, capability):
    """fprop, dgrad and wgrad of a linear layer."""
    cuda.runtime.RuntimeCapability(0, capability)
    m, n, k = shape

    def f(x, w, g, key):
        dimensions = (((1,), (1,)), ((), ()))
        y, pull = jax.vjp(
            lambda x, w: nvfp4.dot_general(x, w, dimensions, recipe=recipe, key=key), x, w
        )
        return y, *pull(g)

    x, w, g = (normal(s, np.float32, i) for i, s in enumerate([(m, k), (n, k), (m, n)]))
    compare(cuda, f, *(jnp.asarray(t, dtype) for t in (x, w, g)), jax.random.key(7))
    assert cuda.calls("Matmul") >= 3


# ---- Workspaces


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(
    "mnk", [(300, 517, 96), (517, 300, 256), (1, 1030, 64), (700, 90, 32)], ids=str
)
@pytest.mark.parametrize("accumulates", [False, True])
def test_small_workspaces_make_panels(cuda, monkeypatch, mnk, accumulates, capability):
    cuda.runtime.RuntimeCapability(0, capability)
    monkeypatch.setattr(_cuda, "workspace_size", lambda *_: 250_001)
    rest = [normal(mnk[:2], seed=3)] if accumulates else []
    f = product(jnp.float32, names=["accumulate"] * accumulates)
    compare(cuda, f, *operands(*mnk), *rest)
    whole = capability >= 100 and mnk[1] % 4 == 0  # needs no memory of ours
    assert (cuda.calls("Matmul") == 1) == whole


def test_a_workspace_that_is_too_small_is_an_error(cuda, monkeypatch):
    monkeypatch.setattr(_cuda, "workspace_size", lambda *_: 4096)
    with pytest.raises(jax.errors.JaxRuntimeError, match="workspace of 4096 bytes is too small"):
        cuda.run(product(jnp.float32), *operands(300, 517, 96))
    assert cuda.calls("Matmul") == 0


def test_sizes_of_workspaces(monkeypatch):
    base = 32 << 20
    monkeypatch.setattr(_cuda, "_dequantizes", lambda: False)
    assert _cuda.workspace_size(100, 64, 512) == base
    assert _cuda.workspace_size(100, 65, 512) == base + 128 * 512
    monkeypatch.setattr(_cuda, "_dequantizes", lambda: True)
    assert _cuda.workspace_size(100, 64, 512) == base + 164 * 2048
    assert _cuda.workspace_size(1 << 20, 64, 4096) == base + (1 << 30)


# ---- Plans


def test_the_same_request_is_planned_once(cuda):
    a, b = operands(48, 64, 128)
    for _ in range(3):
        cuda.run(product(jnp.bfloat16), a, b)
    assert cuda.calls("Create") == cuda.calls("MatmulAlgoGetHeuristic") == 1
    cuda.run(product(jnp.float16), a, b)
    assert cuda.calls("MatmulAlgoGetHeuristic") == 2
    cuda.run(product(jnp.bfloat16, names=["bias"]), a, b, jnp.ones(64, jnp.bfloat16))
    assert cuda.calls("MatmulAlgoGetHeuristic") == 3
    assert cuda.calls("Create") == 1


def test_a_refusal_is_remembered(cuda):
    cuda.refuse("bias")
    a, b = operands(48, 64, 128)
    for _ in range(3):
        cuda.run(product(jnp.bfloat16, names=["bias"]), a, b, jnp.ones(64, jnp.bfloat16))
    assert cuda.calls("MatmulAlgoGetHeuristic") == 2


def test_plans_are_made_before_the_run(cuda):
    """XLA runs the initialize stage outside of captures: it enqueues nothing, and leaves nothing to do."""
    a, b = operands(35, 65, 128)
    f = product(jnp.bfloat16, names=["bias"])
    bias = jnp.ones(65, jnp.bfloat16)
    cuda.run(f, a, b, bias, target=TARGET + "_init")
    planned = cuda.calls("MatmulAlgoGetHeuristic")
    assert planned > 0
    assert cuda.calls("Matmul") == cuda.runtime.RuntimeKernels() == 0
    compare(cuda, f, a, b, bias)
    assert cuda.calls("MatmulAlgoGetHeuristic") == planned


def test_a_first_call_inside_of_a_capture(cuda):
    """Handles and plans are then made in the mode that allows it."""
    cuda.double.DoubleCapture(cuda.runtime.MayAskInCapture)
    compare(cuda, product(jnp.bfloat16), *operands(48, 64, 128))
    assert cuda.runtime.MayAskInCapture() == 0


def test_devices_have_handles_and_plans_of_their_own(cuda):
    devices = jax.devices()[:3]
    cuda.runtime.RuntimeCapability(devices[2].id, 90)
    args = operands(48, 64, 128)
    for device in devices * 2:
        compare(cuda, product(jnp.bfloat16), *args, device=device)
    assert cuda.calls("Create") == cuda.calls("MatmulAlgoGetHeuristic") == 3
    assert sorted(r["operands"] for r in cuda.requests()) == [BF16] * 2 + [FP4] * 4


def test_threads_share_plans(cuda):
    a, b = operands(48, 64, 128)
    want = nvfp4.matmul(a, b, out_dtype=jnp.bfloat16)
    with lowered_for_cuda({"matmul": TARGET}):
        f = jax.jit(lambda a, b: [nvfp4.matmul(a, b, out_dtype=jnp.bfloat16) for _ in range(8)])
        program = f.lower(a, b).compile()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for results in pool.map(lambda _: program(a, b), range(32)):
            for got in results:
                assert_same_bits(got, want)
    assert cuda.calls("Create") == cuda.calls("MatmulAlgoGetHeuristic") == 1


# ---- Devices


@pytest.mark.parametrize(
    ("capability", "operand"),
    [
        (80, BF16),
        (86, BF16),
        (89, BF16),
        (90, BF16),
        (100, FP4),
        (103, FP4),
        (110, FP4),
        (120, FP4),
        (121, FP4),
    ],
)
def test_every_capability_has_its_path(cuda, capability, operand):
    cuda.runtime.RuntimeCapability(0, capability)
    compare(cuda, product(jnp.bfloat16), *operands(16, 16, 64))
    assert [r["operands"] for r in cuda.requests()] == [operand]


@pytest.mark.parametrize("capability", [110, 120, 121])
def test_a_chip_without_fp4_kernels_dequantizes(cuda, capability):
    cuda.runtime.RuntimeCapability(0, capability)
    cuda.refuse("fp4")
    compare(cuda, product(jnp.bfloat16), *operands(16, 16, 64))
    assert [r["operands"] for r in cuda.requests()] == [BF16]


@pytest.mark.parametrize("capability", [100, 103])
def test_a_refusal_where_there_are_fp4_kernels_is_an_error(cuda, capability):
    cuda.runtime.RuntimeCapability(0, capability)
    cuda.refuse("fp4")
    with pytest.raises(jax.errors.JaxRuntimeError, match="CUBLAS_STATUS_NOT_SUPPORTED"):
        cuda.run(product(jnp.bfloat16), *operands(16, 16, 64))


def test_a_chip_without_bfloat16_is_an_error(cuda):
    cuda.runtime.RuntimeCapability(0, 75)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"8\.0 and later.* capability 7\.5"):
        cuda.run(product(jnp.bfloat16), *operands(16, 16, 64))


@pytest.mark.parametrize("n", [64, 5])
def test_a_single_row_is_padded_where_it_is_refused(cuda, n):
    cuda.refuse("single")
    compare(cuda, product(jnp.bfloat16), *operands(1, n, 96))
    assert cuda.requests()[-1]["n"] > 1


def test_faulty_algorithms_are_passed_over(cuda):
    cuda.double.DoubleFaultyAlgorithms(3)
    cuda.runtime.RuntimeCapability(0, 103)
    compare(cuda, product(jnp.bfloat16), *operands(16, 16, 64))
    cuda.runtime.RuntimeCapability(0, 103)
    cuda.double.DoubleFaultyAlgorithms(8)
    with pytest.raises(jax.errors.JaxRuntimeError, match="knows no algorithm"):
        cuda.run(product(jnp.bfloat16), *operands(16, 32, 64))


# ---- Faults


FALLIBLE = [
    "Create",
    "MatmulDescCreate",
    "MatmulDescSetAttribute",
    "MatrixLayoutCreate",
    "MatmulPreferenceCreate",
    "MatmulPreferenceSetAttribute",
    "MatmulAlgoGetHeuristic",
    "Matmul",
]


@pytest.mark.parametrize("status", ERRORS)
@pytest.mark.parametrize("name", FALLIBLE)
def test_each_failure_is_an_error_and_leaves_nothing(cuda, name, status):
    a, b = operands(35, 24, 100)
    accumulate = normal((35, 24), seed=3)
    f = product(jnp.float32, names=["accumulate"])
    cuda.run(f, a, b, accumulate)
    calls = cuda.calls(name)
    for n in range(calls):
        cuda.runtime.Unload()
        assert cuda.double.DoubleLive() == 0
        assert cuda.load(cuda.path.decode()) == ""
        cuda.double.DoubleFail(f"cublasLt{name}".encode(), n, ERRORS[status])
        with pytest.raises(jax.errors.JaxRuntimeError) as error:
            cuda.run(f, a, b, accumulate)
        text = str(error.value)
        assert f"cublasLt{name} failed with CUBLAS_STATUS_{status}" in text
        assert "f32[M = 35, N = 24] with K = 128, accumulate" in text
        if name != "Create":
            assert "on device 0 (compute capability 10.0), cuBLASLt 13." in text
    cuda.runtime.Unload()  # a refusal is remembered
    assert cuda.load(cuda.path.decode()) == ""
    compare(cuda, f, a, b, accumulate)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_each_failure_of_the_runtime_is_an_error(cuda, capability):
    cuda.runtime.RuntimeCapability(0, capability)
    args = operands(35, 19, 100)
    cuda.run(product(jnp.float32), *args)
    calls = cuda.runtime.RuntimeCalls()
    assert calls >= 6
    for n in range(calls):
        cuda.runtime.Unload()
        assert cuda.load(cuda.path.decode()) == ""
        cuda.runtime.RuntimeFail(n)
        with pytest.raises(
            jax.errors.JaxRuntimeError, match=r"failed with.*cudaErrorLaunchFailure"
        ):
            cuda.run(product(jnp.float32), *args)
    compare(cuda, product(jnp.float32), *args)


# ---- The library


def test_an_old_library_is_refused(cuda):
    cuda.double.DoubleVersion(130100)
    error = cuda.load(cuda.path.decode())
    assert "is cuBLASLt 13.1.0, but versions before 13.2.0 give wrong results" in error
    assert "pip install 'nvidia-cublas>=13.2'" in error
    cuda.double.DoubleVersion(130200)
    assert cuda.load(cuda.path.decode()) == ""


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("/nowhere/libcublasLt.so.13", "cannot open shared object"),
        ("libc.so.6", "lacks the function cublasLt"),
    ],
)
def test_what_is_no_cublaslt_is_refused(cuda, path, text):
    error = cuda.load(path)
    assert text in error and "nvidia-cublas>=13.2" in error


def test_a_library_is_looked_for_on_first_use(cuda):
    cuda.runtime.Unload()
    cuda.runtime.SetPaths(b"/nowhere/libcublasLt.so.13", cuda.path)
    compare(cuda, product(jnp.float32), *operands(16, 16, 64))
    cuda.runtime.Unload()
    cuda.runtime.SetPaths(b"/nowhere/libcublasLt.so.13", b"libc.so.6")
    with pytest.raises(jax.errors.JaxRuntimeError) as error:
        cuda.run(product(jnp.float32), *operands(16, 16, 64))
    assert "there is no cuBLASLt that it can use" in str(error.value)
    assert "/nowhere/" in str(error.value) and "libc.so.6 lacks" in str(error.value)


def test_the_real_library_says_that_there_is_no_gpu(cuda):
    """It loads, all of its functions are found, and what it then says is passed on."""
    assert cuda.load(os.environ["NVFP4_REAL_CUBLASLT"]) == ""
    with pytest.raises(
        jax.errors.JaxRuntimeError, match=r"cublasLtCreate failed with CUBLAS_STATUS_"
    ):
        cuda.run(product(jnp.float32), *operands(16, 16, 64))


# ---- Finding it


@pytest.fixture
def no_cublaslt(monkeypatch):
    monkeypatch.delenv("JAX_NVFP4_OPS_CUBLASLT", raising=False)
    monkeypatch.setitem(sys.modules, "cuda", None)
    monkeypatch.setattr(_cuda, "_from_pip_packages", list)


@pytest.mark.usefixtures("no_cublaslt")
def test_the_linker_is_asked_last(monkeypatch):
    assert _cuda.find_cublaslt() == ["libcublasLt.so.13"]
    monkeypatch.setattr(_cuda, "_from_pip_packages", lambda: ["/pip/libcublasLt.so.13"])
    assert _cuda.find_cublaslt() == ["/pip/libcublasLt.so.13", "libcublasLt.so.13"]
    monkeypatch.setenv("JAX_NVFP4_OPS_CUBLASLT", "/mine.so")
    assert _cuda.find_cublaslt() == ["/mine.so"]


@pytest.mark.usefixtures("no_cublaslt")
def test_cuda_pathfinder_is_asked_first(monkeypatch):
    found = types.SimpleNamespace(abs_path="/found/libcublasLt.so.13")
    pathfinder = types.SimpleNamespace(
        load_nvidia_dynamic_lib=lambda name: {"cublasLt": found}[name]
    )
    monkeypatch.setitem(sys.modules, "cuda", types.SimpleNamespace(pathfinder=pathfinder))
    assert _cuda.find_cublaslt() == ["/found/libcublasLt.so.13", "libcublasLt.so.13"]

    def fail(name):
        raise RuntimeError(name)

    pathfinder.load_nvidia_dynamic_lib = fail
    assert _cuda.find_cublaslt() == ["libcublasLt.so.13"]


@pytest.mark.parametrize("folder", ["cu13/lib", "cublas/lib"])
def test_pip_packages_are_found(monkeypatch, tmp_path, folder):
    file = tmp_path / "nvidia" / folder / "libcublasLt.so.13"
    file.parent.mkdir(parents=True)
    file.touch()
    spec = types.SimpleNamespace(submodule_search_locations=[str(tmp_path / "nvidia")])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: {"nvidia": spec}[name])
    assert _cuda._from_pip_packages() == [str(file)]
    file.unlink()
    assert _cuda._from_pip_packages() == []
