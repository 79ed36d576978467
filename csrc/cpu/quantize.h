// csrc/cpu/quantize.h: the inner loops of amax, quantize and dequantize, one table for each
// instruction set.
//
// They work on strips: 16 rows of a matrix, filled with zeros to a whole number of blocks, so that
// no inner loop knows about tails. As a rule a strip is a copy: rows of a matrix are often a power
// of two apart, and would share cache sets.
#pragma once

#include <cstring>

#include "core/scale_layout.h"
#include "ops/types.h"

namespace nvfp4 {

// 16 rows x `blocks` blocks. A bfloat16 matrix stays bfloat16, all others become float32. A float32
// block is held as its 8 even elements and then its 8 odd ones: the two codes of a byte then come
// from the same lane of two vectors, as they do for bfloat16.
struct Strip {
  FloatType type;  // kF32 or kBf16
  const uint8_t* x;
  int64_t stride;  // bytes from a row to the next
  int64_t rows;    // that the matrix has; the others, up to 16, are zeros
  int64_t blocks;  // at most kStripBlocks
};

constexpr int64_t kStripRows = kBlock;
constexpr int64_t kStripBlocks = 16;
constexpr int64_t kStripColumns =
    kStripBlocks * kBlock;  // as float32 16 KiB, half of a small L1 cache

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

  // The largest magnitude as bits (core/bits.h MagnitudeBits) of n values, and of a strip after the
  // Hadamard transform along its rows or its columns. NaN or Inf in x gives the bits of NaN or Inf.
  uint32_t (*amax)(FloatType type, const void* x, int64_t n);
  uint32_t (*amax_rows)(const Strip& strip, uint32_t signs);
  uint32_t (*amax_columns)(const Strip& strip, uint32_t signs);

  // A strip along its rows. Its first block is at (row, block) of the quantized matrix. Writes
  // strip.rows rows of codes
  // [.., codes_stride] (8 bytes a block), and their scales: `scales` is the place of the first in
  // the scale tiles (core/scale_layout.h). block % 4 = 0, and scales are written by fours, zeros
  // past the last block.
  void (*rows)(const QuantizeSpec& spec, const Strip& strip, int64_t row, int64_t block,
               uint8_t* codes, int64_t codes_stride, uint8_t* scales);

  // A strip along its columns, each of which is one block. Its first column is at (row, block) of
  // the quantized matrix; the result has a row for each of its columns: codes[16 *
  // blocks][codes_stride], scales[16 * blocks].
  void (*columns)(const QuantizeSpec& spec, const Strip& strip, int64_t row, int64_t block,
                  uint8_t* codes, int64_t codes_stride, uint8_t* scales);

  // One row: n values from codes and its scales, one byte a block.
  void (*dequantize)(const uint8_t* codes, const uint8_t* scales, float global_scale, int64_t n,
                     FloatType type, void* out);
};

const QuantizeKernels& PortableQuantizeKernels();
#if defined(__x86_64__)
const QuantizeKernels& Avx2QuantizeKernels();
#endif

// For the instruction set in use (cpu/isa.h).
const QuantizeKernels& CurrentQuantizeKernels();

// A matrix [rows, k] in memory.
struct MatrixView {
  FloatType type;
  const void* x;
  int64_t rows, k;
};

// Memory for one strip.
class StripBuffer {
 public:
  // Columns `column` .. `column + n - 1` of rows `row` .. `row + 15`, zeros below the last row. The
  // next strip will be loaded from `next` elements further on: the caches may fetch it meanwhile,
  // which rows this short do not make them do by themselves. A strip that is read `once`, along
  // its rows, need not be a copy.
  Strip Load(const QuantizeKernels& kernels, const MatrixView& matrix, int64_t row, int64_t column,
             int64_t n, int64_t next, bool once) {
    constexpr int64_t kLine = 64;  // of the cache
    const FloatType held = matrix.type == FloatType::kBf16 ? FloatType::kBf16 : FloatType::kF32;
    const int64_t blocks = BlocksOf(n), size = SizeOf(held), from_size = SizeOf(matrix.type);
    const int64_t valid = matrix.rows - row < kStripRows ? matrix.rows - row : kStripRows;
    const int64_t from_stride = matrix.k * from_size;
    const uint8_t* from =
        static_cast<const uint8_t*>(matrix.x) + row * from_stride + column * from_size;
    const auto fetched = reinterpret_cast<uintptr_t>(from) + next * from_size;  // may be outside
    for (int64_t r = 0; r < valid; ++r) {
      for (int64_t i = 0; i < n * from_size; i += kLine)
        __builtin_prefetch(reinterpret_cast<const void*>(fetched + r * from_stride + i), 0, 2);
    }
    if (once && held == FloatType::kBf16 && valid == kStripRows && n % kBlock == 0)
      return {held, from, from_stride, valid, blocks};
    const int64_t stride = kStripColumns * size + kLine;  // an odd number of cache lines
    for (int64_t r = 0; r < valid; ++r)
      kernels.load(matrix.type, from + r * from_stride, n, x_ + r * stride);
    for (int64_t r = valid; r < kStripRows; ++r)
      std::memset(x_ + r * stride, 0, blocks * kBlock * size);
    return {held, x_, stride, valid, blocks};
  }

 private:
  alignas(64) uint8_t x_[kStripRows * (kStripColumns * sizeof(float) + 64)];
};

}  // namespace nvfp4
