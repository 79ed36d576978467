"""The golden vectors in tests/data."""

from __future__ import annotations

import functools
import pathlib

import ml_dtypes
import numpy as np

DATA = pathlib.Path(__file__).parent / "data"
TENSORS = sorted(
    p.stem for p in DATA.glob("*.npz") if not p.stem.startswith(("gemm_", "swizzle_", "hadamard16"))
)
GEMMS = sorted(p.stem for p in DATA.glob("gemm_*.npz"))
SWIZZLES = sorted(p.stem for p in DATA.glob("swizzle_*.npz"))


@functools.cache
def load(name: str) -> dict[str, np.ndarray]:
    with np.load(DATA / f"{name}.npz") as archive:
        return dict(archive)


def bf16(bits: np.ndarray) -> np.ndarray:
    return bits.view(ml_dtypes.bfloat16)


def tensor(name: str) -> np.ndarray:
    """The input, bf16 or f32 [M, N]."""
    golden = load(name)
    return golden["input_f32"] if "input_f32" in golden else bf16(golden["input_bf16_bits"])


def cases():
    """(tensor, variant, axis) of every quantized half that the vectors hold."""
    for name in TENSORS:
        for variant in ("1x16", "16x16", "1x16_rht"):
            for axis in (-1, -2):
                key = f"{variant}/data" + ("_t" if axis == -2 else "")
                overflows = name.startswith("bf16_max") and variant == "1x16_rht"
                if key in load(name) and not overflows:
                    yield name, variant, axis


def same_codes(packed: np.ndarray, golden: np.ndarray) -> bool:
    """Equal modulo the sign of zero, which the reference drops."""

    def canonical(codes):
        nibbles = np.stack([codes & 15, codes >> 4], -1)
        return np.where(nibbles == 8, 0, nibbles)

    return np.array_equal(canonical(packed), canonical(golden))
