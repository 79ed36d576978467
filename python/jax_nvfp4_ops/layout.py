"""Where codes and block scales lie in memory (docs/numerics.md), in JAX."""

from __future__ import annotations

import jax
import jax.numpy as jnp

BLOCK = 16
TILE_ROWS = 128
_TILE_BLOCKS = 4
TILE_COLUMNS = _TILE_BLOCKS * BLOCK
_TILE_BYTES = TILE_ROWS * _TILE_BLOCKS
_CODES_ALIGN = 32


def ceil_div(a: int, b: int) -> int:
    """The quotient of a and b, rounded up."""
    return -(-a // b)


def codes_shape(rows: int, k: int) -> tuple[int, int]:
    """Shape of the packed codes of a [rows, k] matrix: a row is filled with zeros to 32 codes."""
    return rows, ceil_div(k, _CODES_ALIGN) * (_CODES_ALIGN // 2)


def scales_shape(rows: int, k: int) -> tuple[int, int, int]:
    """Shape of the block scales of a [rows, k] matrix: tiles of 128 rows x 4 blocks."""
    return ceil_div(rows, TILE_ROWS), ceil_div(ceil_div(k, BLOCK), _TILE_BLOCKS), _TILE_BYTES


def scales_to_linear(scales: jax.Array, rows: int, k: int) -> jax.Array:
    """Tiled scales u8[..., tiles, tiles, 512] to linear ones u8[..., rows, ceil(k / 16)]."""
    *lead, tile_rows, tile_columns, _ = scales.shape
    x = scales.reshape(*lead, tile_rows, tile_columns, 32, 4, _TILE_BLOCKS)
    x = jnp.moveaxis(x, -2, -4)  # [..., tile row, 32-row group, tile column, row in group, block]
    x = jnp.moveaxis(x, -2, -3)
    x = x.reshape(*lead, tile_rows * TILE_ROWS, tile_columns * _TILE_BLOCKS)
    return x[..., :rows, : ceil_div(k, BLOCK)]


def scales_from_linear(linear: jax.Array) -> jax.Array:
    """Linear scales u8[..., rows, blocks] to tiled ones u8[..., tiles, tiles, 512]."""
    *lead, rows, blocks = linear.shape
    tile_rows, tile_columns = ceil_div(rows, TILE_ROWS), ceil_div(blocks, _TILE_BLOCKS)
    pad = [(0, 0)] * len(lead)
    pad += [(0, tile_rows * TILE_ROWS - rows), (0, tile_columns * _TILE_BLOCKS - blocks)]
    x = jnp.pad(linear, pad).reshape(*lead, tile_rows, 4, 32, tile_columns, _TILE_BLOCKS)
    x = jnp.moveaxis(x, -4, -2)  # [..., tile row, row in group, tile column, 32-row group, block]
    x = jnp.moveaxis(x, -4, -3)
    return x.reshape(*lead, tile_rows, tile_columns, _TILE_BYTES)
