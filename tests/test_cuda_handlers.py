"""The CUDA handlers of amax, quantize and dequantize under jax.jit, on the CPU: the CPU backend's bits.

csrc/testing/handler_cuda_on_cpu.cc is one handler with its kernels, as a target of the CPU; matmul's is in test_cublaslt.py.
"""

from __future__ import annotations

import ctypes

import jax
import jax.numpy as jnp
import jax_nvfp4_ops as nvfp4
import native
import pytest
from cuda_on_cpu import CUDA_FLAGS, build_library, lowered_for_cuda, register
from helpers import DTYPES, assert_same_tree, normal, wide
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

OPS = ("amax", "quantize", "dequantize")
TARGETS = {op: f"nvfp4_{op}_cuda_on_cpu" for op in OPS}


@pytest.fixture(scope="session")
def libraries(tmp_path_factory):
    folder = native.shared_folder(tmp_path_factory, "cuda_handlers")
    libraries = {}
    for op in OPS:
        flags = [f'-DNVFP4_OP_FILE="ops/{op}.cc"', f"-DNVFP4_OP={op.capitalize()}"]
        sources = ["testing/handler_cuda_on_cpu.cc", "testing/cuda_on_cpu.cc", f"ops/{op}_cuda.cu"]
        library = ctypes.CDLL(str(build_library(folder, op, sources, [*CUDA_FLAGS, *flags])))
        library.FailCall.argtypes = [ctypes.c_int64]
        for counter in ("Calls", "Kernels", "Memsets", "Copies"):
            getattr(library, counter).restype = ctypes.c_int64
        register(TARGETS[op], library, "CudaOnCpu")
        libraries[op] = library
    return libraries


def run(f, *arrays):
    """f(*arrays) on the handlers of CUDA."""
    with lowered_for_cuda(TARGETS):
        program = jax.jit(lambda *a: f(*a)).lower(*arrays).compile()
    return jax.block_until_ready(program(*arrays))


def enqueued(library) -> tuple[int, int, int]:
    return library.Kernels(), library.Memsets(), library.Copies()


def everything(x, key):
    """Each op, in every form that recipes use."""
    both = nvfp4.quantize(x, axis=(-1, -2), rounding=("sr", "sr"), hadamard=(False, True), key=key)
    tiles = nvfp4.quantize(x, axis=(-1, -2), block="16x16")
    return (
        nvfp4.amax(x, ("plain", "rows", "columns")),
        nvfp4.quantize(x),
        nvfp4.quantize(x, axis=-2, hadamard=True),
        both,
        tiles,
        both[0].dequantize(x.dtype),
        tiles[1].dequantize(jnp.float32),
    )


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize(
    "shape", [(5, 16), (33, 80), (130, 48), (2, 3, 20, 36), (0, 32), (4, 0)], ids=str
)
def test_ops_have_the_bits_of_the_cpu(libraries, shape, dtype):
    x, key = jnp.asarray(wide(shape, dtype)), jax.random.key(1)
    assert_same_tree(run(everything, x, key), jax.jit(everything)(x, key))


def test_examples_of_vmap(libraries):
    x, keys = jnp.asarray(wide((3, 20, 70))), jax.random.split(jax.random.key(0), 3)
    assert_same_tree(run(jax.vmap(everything), x, keys), jax.jit(jax.vmap(everything))(x, keys))


def test_the_quantizations_of_a_layer(libraries):
    """With the partners that make the alphas of the backward products."""

    def f(x, w, g, key):
        y, pull = jax.vjp(lambda x, w: nvfp4.matmul(x, w, key=key), x, w)
        return y, *pull(g)

    args = [jnp.asarray(normal(s, seed=i)) for i, s in enumerate([(40, 64), (64, 48), (40, 48)])]
    key = jax.random.key(7)
    assert_same_tree(run(f, *args, key), jax.jit(f)(*args, key))


@pytest.mark.parametrize("spec", [P("d"), P(None, "m"), P("d", "m")], ids=str)
@pytest.mark.parametrize("shape", [(512, 256), (2, 512, 256), (512, 384)], ids=str)
def test_a_part_of_a_tensor_has_random_bits_of_its_place(libraries, shape, spec):
    """Whole tiles, and the shape whose parts end inside of one."""
    mesh = jax.make_mesh((4, 2), ("d", "m"), axis_types=(AxisType.Auto,) * 2)
    x, key = jnp.asarray(wide(shape, DTYPES["bf16"])), jax.random.key(1)
    spec = P(*(None,) * (len(shape) - 2), *spec)

    def f(x, key):
        stochastic = {"rounding": "sr", "key": key}
        return nvfp4.quantize(x, axis=(-1, -2), **stochastic), nvfp4.quantize(x, **stochastic)

    expected = jax.jit(f)(x, key)
    assert_same_tree(run(f, jax.device_put(x, NamedSharding(mesh, spec)), key), expected)


def test_parts_of_several_sequences_have_random_bits_of_their_places(libraries):
    """Rows of one matrix that lie in several parts of the tensor: wgrad's g and x, of tokens [batch, sequence]."""
    mesh = jax.make_mesh((4, 2), ("d", "m"), axis_types=(AxisType.Auto,) * 2)

    def f(x, w, g, key):
        _, pull = jax.vjp(lambda x, w: nvfp4.matmul(x, w, key=key), x, w)
        return pull(g)

    shapes = [(8, 256, 64), (64, 48), (8, 256, 48)]
    x, w, g = (jnp.asarray(normal(s, DTYPES["bf16"], i)) for i, s in enumerate(shapes))
    x, g = (jax.device_put(v, NamedSharding(mesh, P("d", "m"))) for v in (x, g))
    key = jax.random.key(7)
    assert_same_tree(run(f, x, w, g, key), jax.jit(f)(x, w, g, key))


@pytest.mark.parametrize("op", OPS)
def test_a_call_is_one_kernel_and_at_most_one_memset(libraries, op):
    x = jnp.asarray(wide((130, 200), DTYPES["bf16"]))
    q = nvfp4.quantize(x)
    program = {
        "amax": lambda: nvfp4.amax(x, ("plain", "rows", "columns")),
        "quantize": lambda: nvfp4.quantize(x, axis=(-1, -2), amax=jnp.float32(1)),
        "dequantize": lambda: q.dequantize(jnp.bfloat16),
    }[op]
    before = enqueued(libraries[op])
    run(program)
    kernels, memsets, copies = (b - a for a, b in zip(before, enqueued(libraries[op]), strict=True))
    assert (kernels, copies) == (1, 0) and memsets <= 1


@pytest.mark.parametrize("op", OPS)
def test_each_failure_of_the_runtime_is_an_error(libraries, op):
    """It names op, type and shape; and the next call is right."""
    x = jnp.asarray(wide((40, 64), DTYPES["bf16"]))
    q = nvfp4.quantize(x)
    f, operand = {
        "amax": (lambda x: nvfp4.amax(x), x),
        "quantize": (lambda x: nvfp4.quantize(x, amax=jnp.float32(1)), x),
        "dequantize": (lambda q: q.dequantize(jnp.bfloat16), q),
    }[op]
    library = libraries[op]
    before = library.Calls()
    expected = run(f, operand)
    calls = library.Calls() - before
    assert calls >= 1
    messages = []
    for n in range(calls):
        library.FailCall(n)
        try:
            assert_same_tree(run(f, operand), expected)  # the call was no more than a question
        except jax.errors.JaxRuntimeError as error:
            messages.append(str(error))
        assert_same_tree(run(f, operand), expected)
    assert messages
    wanted = f"nvfp4_{op}: no kernel was enqueued for x of type bf16 and shape (40, 64): "
    for message in messages:
        assert wanted in message and "cudaErrorLaunchFailure" in message
