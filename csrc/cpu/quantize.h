// csrc/cpu/quantize.h: the inner loops of amax, quantize and dequantize, one table for each instruction set.
//
// They work on strips: 16 rows of a matrix, filled with zeros to a whole number of blocks, so that no inner loop knows about
// tails. A strip is a copy: the rows of a matrix are often a power of two apart and would share cache sets.
#pragma once

#include <cstring>

#include "core/scale_layout.h"
#include "ops/types.h"

namespace nvfp4 {

// 16 rows x `blocks` blocks. A bfloat16 matrix stays bfloat16, all others become float32. A float32 block is held as its 8 even
// elements and then its 8 odd ones: the two codes of a byte then come from the same lane of two vectors, as they do for bfloat16.
struct Strip {
  FloatType type;    // kF32 or kBf16
  const uint8_t* x;  // every row is 32-byte aligned
  int64_t stride;    // bytes from a row to the next
  int64_t rows;      // that the matrix has; the others, up to 16, are zeros
  int64_t blocks;    // at most kStripBlocks
};

constexpr int64_t kStripRows = kBlock;
constexpr int64_t kStripBlocks = 16;
constexpr int64_t kStripColumns = kStripBlocks * kBlock;  // as float32 16 KiB, half of a small L1 cache

// How an orientation is quantized.
struct QuantizeSpec {
  TensorScale scale;
  bool tile16, stochastic, hadamard;
  uint32_t signs;
  uint32_t key[2];
};

struct QuantizeKernels {
  // n values to the row of a strip, filled with zeros to a whole number of blocks.
  void (*load)(FloatType type, const void* x, int64_t n, void* row);

  // The largest magnitude as bits (core/bits.h MagnitudeBits) of n values, and of a strip after the Hadamard transform along
  // its rows or its columns. NaN or Inf in x gives the bits of NaN or Inf.
  uint32_t (*amax)(FloatType type, const void* x, int64_t n);
  uint32_t (*amax_rows)(const Strip& strip, uint32_t signs);
  uint32_t (*amax_columns)(const Strip& strip, uint32_t signs);

  // A strip along its rows. Its first block is at (row, block) of the quantized matrix. Writes strip.rows rows of codes
  // [.., codes_stride] (8 bytes a block), and their scales: `scales` is the place of the first in the scale tiles
  // (core/scale_layout.h). block % 4 = 0, and scales are written by fours, zeros past the last block.
  void (*rows)(const QuantizeSpec& spec, const Strip& strip, int64_t row, int64_t block, uint8_t* codes, int64_t codes_stride,
               uint8_t* scales);

  // A strip along its columns, each of which is one block. Its first column is at (row, block) of the quantized matrix; the
  // result has a row for each of its columns: codes[16 * blocks][codes_stride], scales[16 * blocks][scales_stride].
  void (*columns)(const QuantizeSpec& spec, const Strip& strip, int64_t row, int64_t block, uint8_t* codes, int64_t codes_stride,
                  uint8_t* scales, int64_t scales_stride);

  // One row: n values from codes and its scales, one byte a block.
  void (*dequantize)(const uint8_t* codes, const uint8_t* scales, float global_scale, int64_t n, FloatType type, void* out);
};

const QuantizeKernels& PortableQuantizeKernels();
#if defined(__x86_64__)
const QuantizeKernels& Avx2QuantizeKernels();
#endif

// For the instruction set in use (cpu/isa.h).
const QuantizeKernels& CurrentQuantizeKernels();

// Memory for one strip.
class StripBuffer {
 public:
  // Columns `column` .. `column + n - 1` of rows `row` .. `row + 15` of a [rows, k] matrix, zeros below its last row.
  Strip Load(const QuantizeKernels& kernels, FloatType type, const void* matrix, int64_t rows, int64_t k, int64_t row,
             int64_t column, int64_t n) {
    const FloatType held = type == FloatType::kBf16 ? FloatType::kBf16 : FloatType::kF32;
    const int64_t blocks = (n + kBlock - 1) / kBlock, size = SizeOf(held);
    // An odd number of cache lines: rows a power of two apart would share cache sets.
    const int64_t stride = kStripColumns * size + 64, valid = rows - row < kStripRows ? rows - row : kStripRows;
    const uint8_t* from = static_cast<const uint8_t*>(matrix) + (row * k + column) * SizeOf(type);
    for (int64_t r = 0; r < valid; ++r) kernels.load(type, from + r * k * SizeOf(type), n, x_ + r * stride);
    for (int64_t r = valid; r < kStripRows; ++r) std::memset(x_ + r * stride, 0, blocks * kBlock * size);
    return Strip{held, x_, stride, valid, blocks};
  }

 private:
  alignas(64) uint8_t x_[kStripRows * (kStripColumns * sizeof(float) + 64)];
};

}  // namespace nvfp4
