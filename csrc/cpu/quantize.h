// csrc/cpu/quantize.h: the inner loops of amax, quantize and dequantize, one table for each instruction set.
//
// They work on strips: 16 rows of a matrix as float32, filled with zeros to a whole number of blocks, so that no inner loop
// knows about types, tails or tiles.
#pragma once

#include "core/block.h"
#include "core/hadamard.h"
#include "ops/types.h"

namespace nvfp4 {

struct Strip {
  const float* x;  // [16][stride], 32-byte aligned, as is every row
  int64_t stride;  // in floats
  int64_t blocks;  // of 16 columns
};

// How an orientation is quantized.
struct QuantizeSpec {
  TensorScale scale;
  bool tile16, stochastic, hadamard;
  uint32_t signs;
  uint32_t key[2];
};

struct QuantizeKernels {
  // x[0 .. n-1] as float32.
  void (*load)(FloatType type, const void* x, int64_t n, float* out);

  // The largest magnitude as bits (core/bits.h MagnitudeBits) of n values, and of a strip after the Hadamard transform along
  // its rows or its columns.
  uint32_t (*amax)(FloatType type, const void* x, int64_t n);
  uint32_t (*amax_rows)(const Strip& strip, uint32_t signs);
  uint32_t (*amax_columns)(const Strip& strip, uint32_t signs);

  // A strip along its rows. The strip's first block is at (row, block) of the quantized matrix; the result has a row for each of
  // its 16: codes[16][codes_stride] (8 bytes a block), scales[16][scales_stride] (1 byte a block).
  void (*rows)(const QuantizeSpec& spec, const Strip& strip, int64_t row, int64_t block, uint8_t* codes, int64_t codes_stride,
               uint8_t* scales, int64_t scales_stride);

  // A strip along its columns, each of which is one block. The strip's first column is at (row, block) of the quantized matrix;
  // the result has a row for each of its columns: codes[16 * blocks][codes_stride], scales[16 * blocks][scales_stride].
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
  static constexpr int64_t kColumns = 256;  // at most: 16 KiB, half of a small L1 cache

  // Columns `column` .. `column + n - 1` of rows `row` .. `row + 15` of a [rows, k] matrix, zeros below its last row.
  Strip Load(const QuantizeKernels& kernels, FloatType type, const void* matrix, int64_t rows, int64_t k, int64_t row,
             int64_t column, int64_t n) {
    const int64_t filled = (n + kBlock - 1) / kBlock * kBlock;
    for (int64_t r = 0; r < kBlock; ++r) {
      float* to = x_ + r * kStride;
      const int64_t loaded = row + r < rows ? n : 0;
      if (loaded != 0) kernels.load(type, static_cast<const uint8_t*>(matrix) + ((row + r) * k + column) * SizeOf(type), n, to);
      for (int64_t i = loaded; i < filled; ++i) to[i] = 0.0f;
    }
    return Strip{x_, kStride, filled / kBlock};
  }

 private:
  static constexpr int64_t kStride = kColumns + 16;  // rows a power of two apart would share cache sets
  alignas(64) float x_[kBlock * kStride];
};

}  // namespace nvfp4
