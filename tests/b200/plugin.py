"""A B200 for JAX to compile for: the CUDA plugin, a description of the chip, and FFI targets."""

from __future__ import annotations

import ctypes
import fcntl
import functools
import importlib
import importlib.util
import math
import os
import pathlib
import subprocess
import sys
import tempfile

import jax
from jax._src import xla_bridge
from jax.experimental import topologies

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
NAME = "NVIDIA B200"

# XLA's view of the chip (stream_executor.GpuTargetConfigProto, in text form): NVIDIA's data, as far as the
# choices of the compiler depend on them. jaxlib refuses fields that it does not know: these suit 0.10 to 0.12.
TARGET_CONFIG = f"""
platform_name: "CUDA"
device_description_str: "{NAME}"
dnn_version_info {{ major: 9 minor: 10 }}
gpu_device_info {{
  name: "{NAME}"
  cuda_compute_capability {{ major: 10 feature_extension: ACCELERATED_FEATURES }}
  core_count: 148
  fpus_per_core: 128
  clock_rate_ghz: 1.965
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  l2_cache_size: 132644864
  memory_bandwidth: 7672320000000
  device_memory_size: 191514411008
  device_address_bits: 64
  device_interconnect_info {{ active_links: 18 }}
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.10.0"
}}
"""


class UnavailableError(Exception):
    """The plugin is not here and can not be installed."""


def _installed() -> bool:
    try:
        return importlib.util.find_spec("jax_plugins.xla_cuda13") is not None
    except ModuleNotFoundError:  # no plugin at all
        return False


def _install(folder: pathlib.Path) -> None:
    """Installs the plugin of this JAX, about 140 MB without the CUDA libraries, into a folder."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    wheels = [f"jax-cuda13-{part}=={jax.__version__}" for part in ("plugin", "pjrt")]
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.exists():  # another process was faster
            return
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            target = pathlib.Path(scratch, "packages")
            pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
            done = subprocess.run(
                [*pip, "--no-deps", "--only-binary=:all:", "--target", str(target), *wheels],
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode:
                why = (done.stderr.strip().splitlines() or ["pip does not say why"])[-1]
                raise UnavailableError(f"{' and '.join(wheels)} can not be installed: {why}")
            target.rename(folder)


def _register_stubs() -> None:
    """Gives each FFI target without a handler for CUDA, and those of programs.py, one that does nothing."""
    from jax_nvfp4_ops import _native

    from b200.programs import ATTENTION_TARGETS

    known = _native.registrations()
    missing = [name for name in known["cpu"] if name not in known.get("CUDA", {})]
    with tempfile.TemporaryDirectory() as scratch:
        library = str(pathlib.Path(scratch, "stubs.so"))
        compiler = [os.environ.get("CXX", "g++"), "-std=c++17", "-shared", "-fPIC"]
        source = str(pathlib.Path(__file__).with_name("stubs.cc"))
        subprocess.run(
            [*compiler, "-isystem", jax.ffi.include_dir(), source, "-o", library], check=True
        )
        stub = jax.ffi.pycapsule(ctypes.CDLL(library).Stub)
    for name in (*missing, *ATTENTION_TARGETS):
        jax.ffi.register_ffi_target(name, stub, platform="CUDA")


@functools.cache
def load() -> None:
    """Makes JAX able to compile for CUDA; CPU programs and the list of devices stay as they are.

    Raises:
      UnavailableError: If the plugin is not installed, and can not be.
    """
    installed = _installed()
    jax.devices()  # finds the plugins that are installed
    if not installed:
        folder = ROOT / "build" / f"jax-cuda13-{jax.__version__}"
        if not folder.exists():
            _install(folder)
        sys.path.append(str(folder))
        importlib.invalidate_caches()
        importlib.import_module("jax_plugins.xla_cuda13").initialize()
        # What JAX does with a plugin that it finds by itself: custom partitioning works through it.
        for callback in xla_bridge._plugin_callbacks:
            callback(c_api=xla_bridge._backend_factories["cuda"].c_api)
    _register_stubs()


def load_for_tests() -> None:
    """The same in a test, which is skipped where that is impossible; with NVFP4_REQUIRE_B200=1 it fails."""
    import pytest

    if jax.__version_info__ < (0, 10, 2):
        pytest.skip("needs jax 0.10.2 or newer: before, XLA does not say what it launches")
    try:
        load()
    except UnavailableError as reason:
        if os.environ.get("NVFP4_REQUIRE_B200") == "1":
            pytest.fail(f"{reason}, and NVFP4_REQUIRE_B200=1")
        pytest.skip(str(reason))


@functools.cache
def mesh(*sizes: int, names: tuple[str, ...] = ("x",)) -> jax.sharding.Mesh:
    """A mesh of B200s that are not there, eight a host, along axes of these sizes."""
    load()
    devices = math.prod(sizes)
    hosts = max(devices // 8, 1)
    topology = topologies.get_topology_desc(
        NAME,
        platform="cuda",
        topology=f"1x{hosts}x{devices // hosts}",
        target_config=TARGET_CONFIG,
    )
    return topologies.make_mesh(topology, sizes, names)
