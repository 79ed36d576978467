"""The quantized array."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_nvfp4_ops import _primitive, layout
from jax_nvfp4_ops.dequantize import dequantize_p
from jax_nvfp4_ops.format import HADAMARD_SIGNS

_FLOATS = (jnp.float32, jnp.bfloat16, jnp.float16)


@jax.tree_util.register_pytree_with_keys_class
class NVFP4Array:
    """A matrix, or a batch of them, in NVFP4, quantized along its last axis. `quantize` makes it.

    It is a pytree of three arrays, so it passes through jit, vmap, scan, tree_map and checkpoints:

    Attributes:
      packed: u8[..., rows, ceil(k / 32) * 16]: two codes a byte, each row filled with zeros to 32 codes.
      scales: u8[..., ceil(rows / 128), ceil(k / 64), 512]: E4M3 block scales in the tiles that the GEMM reads.
      global_scale: f32[]: the decode scale; it multiplies. After vmap it has the mapped axes.
      k: Length of the last axis. It is static, as the next three.
      block: "1x16" or "16x16".
      hadamard: Whether the values are the random Hadamard transform, along the last axis, of what they stand for.
      dtype: What was quantized, and what `dequantize` returns by default.

    Invariants: rows and leading axes come from `packed`, so mapping over leading axes keeps an array valid; padding
    codes and scales are zero.
    """

    __slots__ = ("block", "dtype", "global_scale", "hadamard", "k", "packed", "scales")

    def __init__(
        self,
        packed: Any,
        scales: Any,
        global_scale: Any,
        *,
        k: int,
        block: str,
        hadamard: bool,
        dtype: Any,
    ) -> None:
        self.packed = packed
        self.scales = scales
        self.global_scale = global_scale
        self.k = k
        self.block = block
        self.hadamard = hadamard
        self.dtype = jnp.dtype(dtype)

    def tree_flatten_with_keys(self) -> Any:
        """The three arrays with their names, and what is static."""
        key = jax.tree_util.GetAttrKey
        children = tuple((key(n), getattr(self, n)) for n in ("packed", "scales", "global_scale"))
        return children, (self.k, self.block, self.hadamard, self.dtype)

    @classmethod
    def tree_unflatten(cls, aux: Any, children: Any) -> NVFP4Array:
        """The inverse; children may be anything that a tree can hold."""
        k, block, hadamard, dtype = aux
        return cls(*children, k=k, block=block, hadamard=hadamard, dtype=dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape [..., rows, k]."""
        return (*self.packed.shape[:-1], self.k)

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.packed.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape))

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and global scale, padding included."""
        return int(self.packed.size + self.scales.size + 4 * self.global_scale.size)

    @property
    def _coded(self) -> int:
        """Codes in a row: a transformed block is whole, even where k ends inside of it."""
        return layout.ceil_div(self.k, layout.BLOCK) * layout.BLOCK if self.hadamard else self.k

    @property
    def codes(self) -> jax.Array:
        """The packed codes without padding, u8[..., rows, ceil(k / 2)]; low nibble first."""
        return self.packed[..., : layout.ceil_div(self._coded, 2)]

    def as_f4(self) -> jax.Array:
        """The codes as float4_e2m1fn[..., rows, k]. Unscaled; XLA does little arithmetic on this dtype."""
        f4 = jax.lax.bitcast_convert_type(self.packed, jnp.float4_e2m1fn)
        return f4.reshape(*self.packed.shape[:-1], 2 * self.packed.shape[-1])[..., : self._coded]

    def linear_scales(self) -> jax.Array:
        """The block scales without tiles or padding, float8_e4m3fn[..., rows, ceil(k / 16)]."""
        linear = layout.scales_to_linear(self.scales, self.packed.shape[-2], self.k)
        return jax.lax.bitcast_convert_type(linear, jnp.float8_e4m3fn)

    def check(self, op: str) -> None:
        """Raises unless the three arrays fit each other and k, as in an array that `quantize` made."""
        rows = self.packed.shape[-2] if self.ndim >= 2 else 0
        expected = {
            "packed": (layout.codes_shape(rows, self.k), jnp.uint8),
            "scales": (layout.scales_shape(rows, self.k), jnp.uint8),
            "global_scale": ((), jnp.float32),
        }
        lead = self.packed.shape[:-2]
        for name, (shape, dtype) in expected.items():
            leaf = getattr(self, name)
            # A global scale has the first of the leading axes.
            own = lead[: leaf.ndim] if name == "global_scale" else lead
            if leaf.shape != (*own, *shape) or leaf.dtype != dtype or self.ndim < 2:
                raise ValueError(
                    f"{op}: an NVFP4Array with k={self.k} must have {name} of shape [..., {', '.join(map(str, shape))}] "
                    f"and dtype {jnp.dtype(dtype)}; got {leaf.dtype}{list(leaf.shape)} beside packed "
                    f"{list(self.packed.shape)}. Make it with nvfp4.quantize."
                )

    def dequantize(self, dtype: Any = None, *, transformed: bool = False) -> jax.Array:
        """The values, `E2M1(code) * (E4M3(scale) * global_scale)`.

        Args:
          dtype: float32, bfloat16 or float16; by default what was quantized.
          transformed: For an array with `hadamard`: return the transformed values [..., rows, ceil(k / 16) * 16] as
            they are stored, instead of transforming them back.

        Returns:
          dtype[..., rows, k].

        Numerics: float32, rounded once to dtype; exact bits on every platform (the transform back is a float32 sum of 16).
        Derivative: with respect to the global scale only.
        """
        dtype = self.dtype if dtype is None else jnp.dtype(dtype)
        if not any(dtype == t for t in _FLOATS):
            raise TypeError(f"dequantize: dtype must be float32, bfloat16 or float16; got {dtype}.")
        self.check("dequantize")
        if not self.hadamard:
            (x,) = _primitive.bind(
                dequantize_p, self.packed, self.scales, self.global_scale, k=self.k, dtype=dtype
            )
            return x
        (y,) = _primitive.bind(
            dequantize_p,
            self.packed,
            self.scales,
            self.global_scale,
            k=self._coded,
            dtype=dtype if transformed else jnp.dtype(jnp.float32),
        )
        if transformed:
            return y
        blocks = jnp.matmul(
            y.reshape(*y.shape[:-1], y.shape[-1] // layout.BLOCK, layout.BLOCK),
            _inverse_hadamard(),
            precision=jax.lax.Precision.HIGHEST,  # GPUs would round to TF32
        )
        x = blocks.reshape(y.shape)[..., : self.k].astype(dtype)
        # Without it XLA drops this rounding where the caller casts back to float32.
        return jax.lax.optimization_barrier(x)

    def astype(self, dtype: Any) -> jax.Array:
        """The same as `dequantize(dtype)`."""
        return self.dequantize(dtype)

    def __getitem__(self, index: Any) -> NVFP4Array:
        """Indexes and slices all axes but the last (integers, slices, `...`); at least one axis beside the last has to remain."""
        index = index if isinstance(index, tuple) else (index,)
        if any(not isinstance(i, int | np.integer | slice | type(...)) for i in index):
            raise TypeError(
                f"NVFP4Array: an index must be made of integers, slices and ...; got {index!r}. "
                "Use jax.tree.map on the array, or dequantize() first."
            )
        if ... in index:
            at = index.index(...)
            index = index[:at] + (slice(None),) * (self.ndim - len(index) + 1) + index[at + 1 :]
        index += (slice(None),) * (self.ndim - len(index))
        if len(index) != self.ndim or index[-1] != slice(None):
            raise IndexError(
                f"NVFP4Array: the last axis of shape {self.shape} is quantized and can not be indexed; got {index!r}. "
                "Use dequantize() first."
            )
        *lead, row = index[:-1]
        if not isinstance(row, slice):
            raise IndexError(
                f"NVFP4Array: the axis of rows must keep its place; got {row!r} for shape {self.shape}. "
                f"Use a slice, [..., {row}:{row + 1}, :]."
            )
        lead = tuple(lead)
        scale = (
            self.global_scale[lead[: self.global_scale.ndim]]
            if self.global_scale.ndim
            else self.global_scale
        )
        packed, scales, block = self.packed[lead], self.scales[lead], self.block
        if row != slice(None):
            linear = layout.scales_to_linear(scales, packed.shape[-2], self.k)
            packed, scales = packed[..., row, :], layout.scales_from_linear(linear[..., row, :])
            block = "1x16"  # each row has its scales; a tile may be cut
        return NVFP4Array(
            packed, scales, scale, k=self.k, block=block, hadamard=self.hadamard, dtype=self.dtype
        )

    def __repr__(self) -> str:
        text = f"NVFP4Array(shape={self._shape_text()}, block={self.block!r}, hadamard={self.hadamard}, dtype={self.dtype}"
        leaves = (self.packed, self.scales, self.global_scale)
        if not all(
            isinstance(x, jax.Array | np.ndarray) and not isinstance(x, jax.core.Tracer)
            for x in leaves
        ):
            return text + ")"
        if (
            any(isinstance(x, jax.Array) and not x.is_fully_addressable for x in leaves)
            or self.size == 0
        ):
            return text + ")"
        s = self.statistics()
        return (
            f"{text},\n           global_scale={np.asarray(self.global_scale)}, zeros {float(s['zero']):.2%}, "
            f"saturated {float(s['saturated']):.2%}, expected rounding error {float(s['relative_error']):.2%} rms)"
        )

    def _shape_text(self) -> str:
        try:
            return str(self.shape)
        except (AttributeError, TypeError):
            return "?"  # leaves that are no arrays, as in a tree of specs

    def statistics(self) -> dict[str, jax.Array]:
        """What the codes tell about the error, without the original.

        Returns:
          f32[] each: "zero", share of codes that are 0; "saturated", share at +-6; "underflowed", share of blocks
          whose scale is 0; "relative_error", the root mean square rounding error to expect, if values spread evenly
          between the points of the grid, relative to that of the values.
        """
        magnitude = jnp.abs(self.as_f4().astype(jnp.float32))
        scale = self.linear_scales().astype(jnp.float32)
        per_code = jnp.repeat(scale, layout.BLOCK, axis=-1)[..., : magnitude.shape[-1]]
        # Widths of the intervals that round to {0, 0.5, 1, 1.5, 2, 3, 4, 6}.
        width = jnp.array([0.5, 0.5, 0.5, 0.5, 0.75, 1.0, 1.5, 2.0])
        index = jax.lax.bitcast_convert_type(self.as_f4(), jnp.uint4).astype(jnp.uint8) & 7
        step = width[index] * per_code
        value = magnitude * per_code
        power = jnp.sum(value * value)
        return {
            "zero": jnp.mean(magnitude == 0),
            "saturated": jnp.mean(magnitude == 6),
            "underflowed": jnp.mean(scale == 0),
            "relative_error": jnp.sqrt(jnp.sum(step * step) / 12 / jnp.where(power == 0, 1, power)),
        }


def _inverse_hadamard() -> np.ndarray:
    """The matrix that undoes the random Hadamard transform."""
    h = np.ones((1, 1), np.float32)
    while h.shape[0] < layout.BLOCK:
        h = np.block([[h, h], [h, -h]])
    signs = np.array(
        [-1.0 if HADAMARD_SIGNS >> i & 1 else 1.0 for i in range(layout.BLOCK)], np.float32
    )
    return (h / 4) * signs
