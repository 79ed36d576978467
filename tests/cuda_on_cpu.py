"""The CUDA handlers as FFI targets of the CPU: libraries of csrc/testing, and programs lowered to them."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import os
import pathlib

import jax
import native
from jax_nvfp4_ops import _primitive
from jax_nvfp4_ops._compat import mlir

CSRC = native.ROOT / "csrc"
FLAGS = [
    *("-O2", "-g1", "-fPIC", "-shared", "-Wl,-Bsymbolic", "-Wl,--no-undefined"),
    "-fno-gnu-unique",  # or the libraries of a process would share blockIdx and the like
    *("-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", f"-I{CSRC}"),
]
# Of handlers and kernels.
CUDA_FLAGS = [
    *("-std=c++20", "-DNVFP4_CUDA"),
    f"-I{CSRC}/testing/cuda_headers",
    f"-isystem{jax.ffi.include_dir()}",
]


def build_library(folder: pathlib.Path, name: str, sources, flags) -> pathlib.Path:
    """Compiles sources, below csrc/, to one library; workers of a test run share it."""
    library = folder / f"lib{name}.so"
    with native._lock(library.with_suffix(".lock")):
        if not library.exists():
            inputs = ["-x", "c++", *(str(CSRC / s) for s in sources), "-x", "none", "-ldl"]
            compiler = os.environ.get("CXX", "g++")
            native._run([compiler, *FLAGS, *flags, *inputs, "-o", str(library)])
    return library


def register(target: str, library: ctypes.CDLL, symbol: str) -> None:
    """Makes a handler of a library a target of the CPU."""
    jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(getattr(library, symbol)), platform="cpu")


@contextlib.contextmanager
def lowered_for_cuda(targets: dict[str, str]):
    """Programs that are lowered meanwhile call these targets, by op, as on CUDA."""
    before = {}
    modules = {op: importlib.import_module(f"jax_nvfp4_ops.{op}") for op in targets}

    def lower(op: str, target: str, platform: str) -> None:
        modules[op]._TARGET = target
        call = functools.partial(modules[op]._call, platform=platform)
        rule = mlir.lower_fun(call, multiple_results=True)
        primitive = _primitive.local_primitives[getattr(modules[op], f"{op}_p")]
        mlir.register_lowering(primitive, rule, platform="cpu")

    for op, target in targets.items():
        before[op] = modules[op]._TARGET
        lower(op, target, "cuda")
    try:
        yield
    finally:
        for op, target in before.items():
            lower(op, target, "cpu")
