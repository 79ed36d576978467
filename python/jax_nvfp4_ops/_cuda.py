"""What the CUDA backend needs to know of its surroundings: where cuBLASLt is, what the devices can do."""

from __future__ import annotations

import functools
import importlib.util
import os
import pathlib
from typing import Any

import jax

_SONAME = "libcublasLt.so.13"
# Folders of NVIDIA's pip packages below `nvidia`, since CUDA 13 and before.
_FOLDERS = ("cu13/lib", "cublas/lib")

_WORKSPACE = 32 << 20  # what NVIDIA advises for Blackwell and Hopper
_LARGEST_WORKSPACE = 1 << 30
_TILE_ROWS = 128


def find_cublaslt() -> list[str]:
    """Paths of cuBLASLt to try, best first.

    The environment variable JAX_NVFP4_OPS_CUBLASLT names the only one; otherwise what cuda-pathfinder finds (the library that
    JAX has loaded, if it has), then those of NVIDIA's pip packages, then whatever the dynamic linker finds.
    """
    if chosen := os.environ.get("JAX_NVFP4_OPS_CUBLASLT"):
        return [chosen]
    paths = []
    if found := _from_pathfinder():
        paths.append(found)
    paths += _from_pip_packages()
    paths.append(_SONAME)
    return list(dict.fromkeys(paths))


def _from_pathfinder() -> str | None:
    try:
        from cuda import pathfinder  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ImportError:
        return None
    try:
        path: str | None = pathfinder.load_nvidia_dynamic_lib("cublasLt").abs_path
    except RuntimeError:  # it found none; its other errors are bugs
        return None
    return path


def _from_pip_packages() -> list[str]:
    spec = importlib.util.find_spec("nvidia")
    roots = [] if spec is None else spec.submodule_search_locations or []
    files = [pathlib.Path(root, folder, _SONAME) for root in roots for folder in _FOLDERS]
    return [str(file) for file in files if file.exists()]


def workspace_size(m: Any, n: Any, row_bytes: Any) -> Any:
    """Bytes that one matmul works in on CUDA.

    Args:
      m: Rows of a; it and the others may be symbolic dimensions.
      n: Rows of b.
      row_bytes: Bytes of one row of codes.
    """
    size = _WORKSPACE
    if not isinstance(n, int) or n % 8:
        # cuBLASLt refuses such an n: the codes of b's last rows, below a whole scale tile, are padded there.
        size += _TILE_ROWS * row_bytes
    if _dequantizes() and all(isinstance(x, int) for x in (m, n, row_bytes)):
        # Both operands as bfloat16. With less memory the result is the same, made in smaller panels.
        size += min(4 * (m + n) * row_bytes, _LARGEST_WORKSPACE)
    return size


def is_here() -> bool:
    """Whether this process has a CUDA device."""
    try:
        return bool(jax.devices("cuda"))
    except RuntimeError:
        return False


@functools.cache
def _dequantizes() -> bool:
    """Whether a CUDA device of this process has no FP4 tensor cores."""
    # Without a device: compiled here for another machine.
    devices = jax.devices("cuda") if is_here() else []
    return any(int(d.compute_capability.split(".")[0]) < 10 for d in devices)
