// csrc/core/scale_layout.h: where codes and block scales lie in memory (docs/numerics.md).
#pragma once

#include "core/block.h"

namespace nvfp4 {

constexpr int kTileRows = 128;  // of one scale tile
constexpr int kTileBlocks = 4;  // of one scale tile
constexpr int kTileBytes = kTileRows * kTileBlocks;
constexpr int kCodesAlign = 32;  // a row of codes is filled with zeros to a multiple of this

NVFP4_HD int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

NVFP4_HD int64_t BlocksOf(int64_t k) { return CeilDiv(k, kBlock); }

// Bytes from one row of codes to the next.
NVFP4_HD int64_t CodesStride(int64_t k) { return CeilDiv(k, kCodesAlign) * (kCodesAlign / 2); }

// Scale tiles along K.
NVFP4_HD int64_t TileColumns(int64_t k) { return CeilDiv(BlocksOf(k), kTileBlocks); }

// Bytes of all scales of a [rows, k] matrix.
NVFP4_HD int64_t ScalesSize(int64_t rows, int64_t k) {
  return CeilDiv(rows, kTileRows) * TileColumns(k) * kTileBytes;
}

// Byte offset of the scale of (row, block) in a matrix with `tile_columns` tiles along K.
NVFP4_HD int64_t ScaleOffset(int64_t row, int64_t block, int64_t tile_columns) {
  return (row / kTileRows * tile_columns + block / kTileBlocks) * kTileBytes + row % 32 * 16 +
         row % kTileRows / 32 * 4 + block % kTileBlocks;
}

}  // namespace nvfp4
