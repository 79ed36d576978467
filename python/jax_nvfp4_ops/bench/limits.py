"""What a device can do at best, which measured figures are compared with."""

from __future__ import annotations

import dataclasses
import glob
import os
import pathlib
import statistics
import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

# Dense tensor-core operations (a multiply-add is two) per clock and SM, accumulated in float32, by
# compute capability. From NVIDIA's white papers and data sheets: the published throughput of a product
# divided by its SMs and its boost clock, which gives a power of two, or 1.5 of one, each time;
# tests/test_bench.py has those figures and redoes the division.
TENSOR_FLOPS: Mapping[tuple[int, int], Mapping[str, int]] = {
    (8, 0): {"bf16": 2048},
    (8, 6): {"bf16": 1024},
    (8, 9): {"bf16": 1024, "fp8": 2048},
    (9, 0): {"bf16": 4096, "fp8": 8192},
    (10, 0): {"bf16": 8192, "fp8": 16384, "fp4": 32768},
    (10, 3): {"bf16": 8192, "fp8": 16384, "fp4": 49152},
    (12, 0): {"bf16": 1024, "fp8": 2048, "fp4": 4096},
}
# GeForce products do these at half of that rate.
_HALVED_ON_GEFORCE = ("bf16", "fp8")

_INSTALL = "pip install 'jax-nvfp4-ops[bench]' (in a clone: '.[bench]')"
# Larger than the last cache of any device of today: for one that does not tell its own.
_LARGE_CACHE = 256 << 20


@dataclasses.dataclass(frozen=True)
class Limits:
    """The limits of one device; None or absent where they are not known.

    Attributes:
      flops: FLOP/s by the format of the operands: "fp4", "fp8", "bf16".
      bandwidth: Bytes of memory read or written a second.
      cache: Bytes of the last cache before memory.
      source: Where these come from, in words.
      facts: What was read from the device, for the record.
    """

    flops: Mapping[str, float]
    bandwidth: float | None
    cache: int
    source: str
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def of_device(device: jax.Device) -> Limits:
    """The limits of a JAX device."""
    if device.platform == "cpu":
        return _of_cpu(device)
    if device.platform != "gpu":
        return Limits({}, None, _LARGE_CACHE, f"nothing is known of {device.platform} devices")
    try:
        from cuda.bindings import (  # type: ignore[import-not-found, import-untyped, unused-ignore]
            driver,
        )
    except ImportError as error:
        return Limits(
            {}, None, _LARGE_CACHE, f"not known: cuda-bindings is missing ({error}); {_INSTALL}"
        )
    try:
        return of_cuda(driver, device.local_hardware_id)
    except RuntimeError as error:
        return Limits({}, None, _LARGE_CACHE, f"not known: {error}")


def of_cuda(driver: Any, ordinal: int) -> Limits:
    """The limits of a CUDA device.

    Args:
      driver: The module `cuda.bindings.driver`.
      ordinal: Number of the device in this process.

    Raises:
      RuntimeError: If the driver does not answer.
    """

    def ask(name: str, *arguments: Any) -> Any:
        status, *answer = getattr(driver, name)(*arguments)
        if int(status) != 0:
            raise RuntimeError(f"{name} failed with {status!r}")
        return answer[0] if answer else None

    ask("cuInit", 0)
    device = ask("cuDeviceGet", ordinal)

    def attribute(name: str) -> int:
        key = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(ask("cuDeviceGetAttribute", key, device))

    name = ask("cuDeviceGetName", 256, device).split(b"\0")[0].decode()
    capability = (
        attribute("COMPUTE_CAPABILITY_MAJOR"),
        attribute("COMPUTE_CAPABILITY_MINOR"),
    )
    sms, clock = attribute("MULTIPROCESSOR_COUNT"), attribute("CLOCK_RATE") * 1e3
    memory_clock, bus = attribute("MEMORY_CLOCK_RATE") * 1e3, attribute("GLOBAL_MEMORY_BUS_WIDTH")
    per_clock = dict(TENSOR_FLOPS.get(capability, {}))
    if "GeForce" in name:
        per_clock = {
            format: value // 2 if format in _HALVED_ON_GEFORCE else value
            for format, value in per_clock.items()
        }
    # Two transfers a clock.
    bandwidth = memory_clock * 2 * bus / 8
    version = ask("cuDriverGetVersion")
    source = (
        f"{sms} SMs at {clock * 1e-6:.0f} MHz, memory of {bus} bits at {memory_clock * 1e-6:.0f} MHz "
        "(the driver's highest clocks; under load they may be lower)"
    )
    if not per_clock:
        source += f"; tensor-core rates of compute capability {capability[0]}.{capability[1]} are not in the table"
    return Limits(
        {format: value * sms * clock for format, value in per_clock.items()},
        bandwidth or None,
        attribute("L2_CACHE_SIZE") or _LARGE_CACHE,
        source,
        {
            "name": name,
            "compute_capability": f"{capability[0]}.{capability[1]}",
            "sms": sms,
            "clock_hz": clock,
            "memory_clock_hz": memory_clock,
            "memory_bus_bits": bus,
            "driver_cuda": f"{version // 1000}.{version % 1000 // 10}",
        },
    )


def _of_cpu(device: jax.Device) -> Limits:
    """Bandwidth as measured now. No FLOP/s: what cores can do depends on clocks that nobody states."""
    cache = _cpu_cache()
    # Beyond the cache, but no more than a server's memory takes without notice.
    count = min(max(2 * cache, 64 << 20), 1 << 30) // 4
    increment = jax.jit(lambda x: x + 1, donate_argnums=0)  # in place: no new pages
    x = jax.device_put(jnp.zeros(count, jnp.float32), device)
    seconds = []
    for _ in range(8):
        start = time.perf_counter()
        x = jax.block_until_ready(increment(x))
        seconds.append(time.perf_counter() - start)
    return Limits(
        {},
        8 * count / statistics.median(seconds[1:]),
        cache,
        f"bandwidth measured now: x + 1 in place on {4 * count >> 20} MiB by XLA; no limit of FLOP/s is claimed for a CPU",
        {"cpu": _cpu_name(), "cores": os.cpu_count(), "load": round(os.getloadavg()[0], 1)},
    )


def _cpu_cache() -> int:
    """Bytes of the largest cache of the first core, as Linux tells it."""
    sizes = []
    for path in glob.glob("/sys/devices/system/cpu/cpu0/cache/index*/size"):
        text = pathlib.Path(path).read_text().strip()  # "36608K"
        unit = {"K": 1 << 10, "M": 1 << 20}.get(text[-1:], 0)
        if unit and text[:-1].isdigit():
            sizes.append(int(text[:-1]) * unit)
    return max(sizes, default=32 << 20)


def _cpu_name() -> str:
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "unknown"
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "unknown"
