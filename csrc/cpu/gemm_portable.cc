// csrc/cpu/gemm_portable.cc: matmul in plain C++, in a form that compilers vectorize; the reference
// of every other table.
#include <cstring>

#include "core/half.h"
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

float Load(FloatType type, const void* from, int64_t i) {
  switch (type) {
    case FloatType::kF32:
      return static_cast<const float*>(from)[i];
    case FloatType::kBf16:
      return FloatOfBf16(static_cast<const uint16_t*>(from)[i]);
    case FloatType::kF16:
      return FloatOfF16(static_cast<const uint16_t*>(from)[i]);
  }
  return 0.0f;
}

void Store(FloatType type, void* to, int64_t i, float y) {
  switch (type) {
    case FloatType::kF32:
      static_cast<float*>(to)[i] = y;
      break;
    case FloatType::kBf16:
      static_cast<uint16_t*>(to)[i] = Bf16Of(y);
      break;
    case FloatType::kF16:
      static_cast<uint16_t*>(to)[i] = F16Of(y);
      break;
  }
}

}  // namespace

void FinishPortable(const GemmResult& result, const float* acc, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    float y = result.alpha * acc[i];
    if (result.bias != nullptr) y += Load(result.bias_type, result.bias, i);
    if (result.accumulate != nullptr) y += Load(result.out, result.accumulate, i);
    Store(result.out, result.y, i, y);
  }
}

const GemmKernels kPortableGemm{kRows, kColumns, sizeof(ABlock), sizeof(BBlock), PackA,
                                PackB, Tile,     FinishPortable, nullptr,        nullptr};

}  // namespace nvfp4
