// csrc/cpu/gemm_portable.cc: matmul in plain C++, in a form that compilers vectorize; the reference
// of every other table.
#include <cstring>

#include "cpu/gemm.h"

namespace nvfp4 {
namespace {

constexpr int kRows = 4, kColumns = 16;

struct ABlock {  // of one row
  int16_t x[kBlock];
  float scale;
};

struct BBlock {
  int16_t w[kBlock][kColumns];
  float scale[kColumns];
};

void Twice(const uint8_t* codes, int16_t* out, int64_t step) {
  for (int i = 0; i < kBlock; ++i) out[i * step] = kTwiceE2M1[codes[i / 2] >> i % 2 * 4 & 15];
}

void PackA(const GemmMatrix& a, int64_t row, int64_t rows, int64_t block, int64_t blocks,
           uint8_t* out) {
  auto* to = reinterpret_cast<ABlock*>(out);
  for (int64_t b = 0; b < blocks; ++b) {
    for (int64_t r = 0; r < rows; ++r, ++to) {
      Twice(CodesOf(a, row + r, block + b), to->x, 1);
      to->scale = 0.25f * DecodeE4M3(*ScaleOf(a, row + r, block + b));
    }
  }
}

void PackB(const GemmMatrix& m, int64_t row, int64_t block, int64_t blocks, uint8_t* out) {
  auto* to = reinterpret_cast<BBlock*>(out);
  for (int64_t b = 0; b < blocks; ++b) {
    for (int j = 0; j < kColumns; ++j) {
      const bool inside = row + j < m.rows;
      Twice(inside ? CodesOf(m, row + j, block + b) : kZeroCodes, &to[b].w[0][j], kColumns);
      to[b].scale[j] = inside ? DecodeE4M3(*ScaleOf(m, row + j, block + b)) : 0.0f;
    }
  }
}

void Tile(int64_t rows, int64_t blocks, const uint8_t* a, const uint8_t* b, float* acc) {
  auto* x = reinterpret_cast<const ABlock*>(a);
  auto* w = reinterpret_cast<const BBlock*>(b);
  for (int64_t i = 0; i < blocks; ++i, ++w) {
    for (int64_t r = 0; r < rows; ++r, ++x) {
      int16_t sum[kColumns] = {};
      for (int k = 0; k < kBlock; ++k)
        for (int j = 0; j < kColumns; ++j)
          sum[j] = static_cast<int16_t>(sum[j] + x->x[k] * w->w[k][j]);
      for (int j = 0; j < kColumns; ++j)
        acc[r * kColumns + j] += static_cast<float>(sum[j]) * (x->scale * w->scale[j]);
    }
  }
}

}  // namespace

const GemmKernels kPortableGemm{kRows, kColumns, sizeof(ABlock), sizeof(BBlock), PackA, PackB,
                                Tile,  0,        nullptr,        nullptr};

}  // namespace nvfp4
