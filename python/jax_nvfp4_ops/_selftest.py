"""A test of one device that takes a second: bits against NumPy, a product against NumPy."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_nvfp4_ops as nvfp4

_GRID = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
# Sizes that fill neither blocks nor tiles nor 16 bytes of a result.
_M, _N, _K = 48, 37, 88


def quantize(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.float32]:
    """Codes, scales and global scale of x[R, K] in blocks of 1x16, to nearest: docs/numerics.md step by step."""
    f32 = np.float32
    x = x.astype(f32)
    rows, k = x.shape
    blocks = np.pad(x, ((0, 0), (0, -k % 16))).reshape(rows, -1, 16)
    encode = min(f32(2688) / np.abs(x).max(), np.finfo(f32).max)
    decode = f32(1) / encode
    scales = np.minimum(np.abs(blocks).max(-1) * (encode * (f32(1) / f32(6))), f32(448))
    scales = scales.astype(jnp.float8_e4m3fn)
    with np.errstate(divide="ignore"):
        inverse = np.minimum(f32(1) / (scales.astype(f32) * decode), np.finfo(f32).max)
    y = (blocks * inverse[..., None]).reshape(rows, -1)
    # Ties to the even code: the distance to the next one below counts first for odd ones.
    distance = np.abs(np.minimum(np.abs(y), 6)[..., None] - _GRID)
    nearest = distance == distance.min(-1, keepdims=True)
    even = np.arange(8) % 2 == 0
    codes = np.argmax(nearest * (1 + even), -1).astype(np.uint8) | np.signbit(y) * np.uint8(8)
    return codes[:, :k], scales, decode


def _values(codes: np.ndarray, scales: np.ndarray, decode: np.float32) -> np.ndarray:
    scale = np.repeat(scales.astype(np.float32) * decode, 16, 1)[:, : codes.shape[1]]
    values: np.ndarray = np.where(codes & 8, -1, 1) * _GRID[codes & 7] * scale
    return values.astype(np.float32)


def _unpack(q: nvfp4.NVFP4Array) -> tuple[np.ndarray, np.ndarray, np.float32]:
    packed = np.asarray(q.codes)
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(packed.shape[0], -1)
    scales = np.asarray(q.linear_scales())
    return codes[:, : q.shape[1]], scales, np.float32(q.global_scale)


def run(device: jax.Device) -> list[str]:
    """Tests the ops on a device; returns what is wrong, in words."""
    rng = np.random.default_rng(0)
    failures = []

    def matrix(rows: int) -> np.ndarray:
        # Blocks of very different sizes, zeros of both signs, and ties.
        x = rng.normal(size=(rows, _K)) * np.exp2(rng.integers(-20, 4, (rows, 1)))
        x[0, :8] = [0, -0.0, 6, 5, 3.5, 2.5, 0.25, -0.25]
        x[1, 16:32] = 0
        return x.astype(jnp.bfloat16)

    def check(what: str, same: Any) -> None:
        wrong = int(np.size(same) - np.count_nonzero(same))
        if wrong:
            failures.append(f"{what}: {wrong} of {np.size(same)} differ")

    x, w = matrix(_M), matrix(_N)
    on_device = [jax.device_put(jnp.asarray(a), device) for a in (x, w)]
    both = jax.jit(lambda a: nvfp4.quantize(a, axis=(-1, -2)))
    qx, qx_columns = both(on_device[0])
    qw, _ = both(on_device[1])
    for name, q, source in (
        ("quantize along rows", qx, x),
        ("quantize along columns", qx_columns, x.T),
    ):
        expected, got = quantize(source), _unpack(q)
        parts = ("codes", "scales", "global scale")
        for part, mine, theirs in zip(parts, expected, got, strict=True):
            bits = [np.ascontiguousarray(a).view(np.uint8) for a in (mine, theirs)]
            check(f"{name}, {part}", bits[0] == bits[1])
        check(
            f"dequantize after {name}", np.asarray(q.dequantize(jnp.float32)) == _values(*expected)
        )
    a, b = _values(*quantize(x)).astype(np.float64), _values(*quantize(w)).astype(np.float64)
    y = jax.jit(lambda p, q: nvfp4.matmul(p, q, out_dtype=jnp.float32))(qx, qw)
    # Sums of float32 in any order stay a thousand times below this; one wrong code in a row does not.
    check("matmul", np.abs(np.asarray(y) - a @ b.T) <= 2**-12 * (np.abs(a) @ np.abs(b).T))
    if device.platform != "cpu":
        _compare_with_cpu(x, on_device[0], check)
    return failures


def _compare_with_cpu(x: np.ndarray, on_device: jax.Array, check: Any) -> None:
    """Stochastic rounding and the Hadamard transform, whose bits are the same on every platform."""

    @jax.jit
    def gradient(a: jax.Array, key: jax.Array) -> Any:
        return nvfp4.quantize(
            a,
            axis=(-1, -2),
            rounding="sr",
            hadamard=(False, True),
            block=("16x16", "1x16"),
            key=key,
        )

    words = jax.random.key_data(jax.random.key(0))
    cpu = jax.devices("cpu")[0]
    expected = gradient(*(jax.device_put(np.asarray(a), cpu) for a in (x, words)))
    got = gradient(on_device, jax.device_put(words, on_device.device))
    for mine, theirs in zip(*map(jax.tree.leaves, (expected, got)), strict=True):
        check("stochastic rounding and Hadamard", np.asarray(mine) == np.asarray(theirs))
