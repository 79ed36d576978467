// csrc/cpu/gemm.h: the inner loops of the CPU matmul, one table for each instruction set.
// ops/matmul_cpu.cc drives them.
//
//   acc[m, n] = sum over blocks of (scale_a * scale_b) * (sum over 16 of the codes' values)
//
// Codes are integers once doubled, at most 12. A block's sum of 16 products is an integer of 12
// bits; times two scales of 4 bits each it is exact in float32 (the 1/4 for the doubling is in the
// packed scale of a). So each block adds one rounding, in the order of the blocks, and every table
// gives the same bits, fused multiply-add or not.
//
// Units are compiled for different instruction sets: what they share is constant data and functions
// with internal linkage, as of an inline function the linker keeps one copy, perhaps one that this
// machine can not run.
#pragma once

#include "core/scale_layout.h"
#include "ops/matmul.h"

namespace nvfp4 {

// Twice the value of each code.
alignas(16) constexpr int8_t kTwiceE2M1[16] = {0, 1,  2,  3,  4,  6,  8,  12,
                                               0, -1, -2, -3, -4, -6, -8, -12};
constexpr int kTwiceMax = 12;  // added to them for instructions that take unsigned bytes

// One operand in the layout of core/scale_layout.h.
struct GemmMatrix {
  const uint8_t* codes;
  const uint8_t* scales;
  int64_t rows, blocks;
  int64_t stride;        // bytes from one row of codes to the next
  int64_t tile_columns;  // scale tiles along K
};

static inline const uint8_t* CodesOf(const GemmMatrix& m, int64_t row, int64_t block) {
  return m.codes + row * m.stride + block * (kBlock / 2);
}

static inline const uint8_t* ScaleOf(const GemmMatrix& m, int64_t row, int64_t block) {
  return m.scales + ScaleOffset(row, block, m.tile_columns);
}

// Where a run of results goes, and what is added on the way; all from the first result on.
struct GemmResult {
  float alpha;
  FloatType out, bias_type;
  const void* bias;        // or null
  const void* accumulate;  // or null; may be y itself
  void* y;
};

struct GemmKernels {
  // Panels: `rows` rows of a (or fewer) by `columns` rows of b, which are columns of the result; a
  // multiple of `columns` is in 32 consecutive rows of a scale tile. Bytes of a packed block:
  // a_bytes a row, b_bytes a panel.
  int64_t rows, columns, a_bytes, b_bytes;

  // Blocks `block` .. `block + blocks - 1`. A panel of b may reach past its last row: what it holds
  // there does not matter.
  void (*pack_a)(const GemmMatrix& a, int64_t row, int64_t rows, int64_t block, int64_t blocks,
                 uint8_t* out);
  void (*pack_b)(const GemmMatrix& b, int64_t row, int64_t block, int64_t blocks, uint8_t* out);

  // acc[rows][columns] += the blocks of two packed panels. acc and b are aligned to 64 bytes.
  void (*tile)(int64_t rows, int64_t blocks, const uint8_t* a, const uint8_t* b, float* acc);

  // n results of a row: y = alpha * acc + bias + accumulate, rounded after each step.
  void (*finish)(const GemmResult& result, const float* acc, int64_t n);

  // For up to kDirectRows rows of a, where b is best read as it is. Null: not offered.
  // All blocks, in whole groups of four, kDirectBytes a row and block.
  void (*pack_direct)(const GemmMatrix& a, int64_t row, int64_t rows, uint8_t* out);
  // acc[rows][8] = for the eight rows of b that share 32 bytes of scales in tile `tile`: row i of
  // them is tile * 128 + 2 * pair + i / 4 + i % 4 * 32.
  void (*direct)(int64_t rows, const uint8_t* a, const GemmMatrix& b, int64_t tile, int64_t pair,
                 float* acc);
};

constexpr int64_t kDirectRows = 4;  // for more than one pass, packing b costs less
constexpr int64_t kDirectBytes = 24;
constexpr int64_t kMaxPanelRows = 8, kMaxPanelColumns = 32;
constexpr int64_t kChunk = 128;  // blocks packed at once: panels of a then stay in the L1 cache,
                                 // those of b in the L2 cache
// A row past the last one, for pack_b.
alignas(64) constexpr uint8_t kZeroCodes[kChunk * kBlock / 2] = {};

extern const GemmKernels kPortableGemm;
void FinishPortable(const GemmResult& result, const float* acc, int64_t n);
#if defined(__x86_64__)
extern const GemmKernels kAvx2Gemm, kAvxVnniGemm, kAvx512VnniGemm;
void FinishAvx2(const GemmResult& result, const float* acc, int64_t n);
void PackDirectAvx2(const GemmMatrix& a, int64_t row, int64_t rows, uint8_t* out);
void DirectAvx2(int64_t rows, const uint8_t* a, const GemmMatrix& b, int64_t tile, int64_t pair,
                float* acc);
#elif defined(__aarch64__)
extern const GemmKernels kNeonGemm;
#endif

// MatmulOnCpu (ops/matmul.h) with a given table.
void MatmulWith(const GemmKernels& kernels, const MatmulShape& shape, const MatmulProduct* products,
                int64_t count, const Parallel& parallel);

}  // namespace nvfp4
