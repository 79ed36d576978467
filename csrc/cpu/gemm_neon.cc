// csrc/cpu/gemm_neon.cc: matmul on aarch64 with FEAT_DotProd (GB200's host CPU has it): sdot adds
// four products of signed bytes to a 32-bit lane, and takes four bytes of a by lane number.
#include <arm_neon.h>

#include <cstring>

#include "cpu/gemm.h"

namespace nvfp4 {
namespace {

constexpr int kRows = 8, kColumns = 8, kGroups = kBlock / 4;
// A packed block of b: i8[4 groups][columns][4], float scale[columns]. Of a: i8[rows][16], float
// scale[rows].
constexpr int kBBytes = kColumns * (kBlock + 4), kABytes = kBlock + 4;

template <int kGroup, int kHeight>
inline void AddGroup(const int8_t* w, const int8x16_t (&x)[kHeight], int32x4_t (&sum)[kHeight][2]) {
  const int8x16_t w0 = vld1q_s8(w + 4 * kColumns * kGroup),
                  w1 = vld1q_s8(w + 4 * kColumns * kGroup + 16);
#pragma GCC unroll 8
  for (int r = 0; r < kHeight; ++r) {
    sum[r][0] = vdotq_laneq_s32(sum[r][0], w0, x[r], kGroup);
    sum[r][1] = vdotq_laneq_s32(sum[r][1], w1, x[r], kGroup);
  }
}

template <int kHeight>
void TileOf(int64_t blocks, const uint8_t* a, const uint8_t* b, float* acc) {
  for (int64_t block = 0; block < blocks; ++block, b += kBBytes, a += kABytes * kHeight) {
    int8x16_t x[kHeight];
    int32x4_t sum[kHeight][2];
#pragma GCC unroll 8
    for (int r = 0; r < kHeight; ++r) {
      x[r] = vld1q_s8(reinterpret_cast<const int8_t*>(a) + kBlock * r);
      sum[r][0] = sum[r][1] = vdupq_n_s32(0);
    }
    const auto* w = reinterpret_cast<const int8_t*>(b);
    AddGroup<0>(w, x, sum);
    AddGroup<1>(w, x, sum);
    AddGroup<2>(w, x, sum);
    AddGroup<3>(w, x, sum);
    const auto* scales = reinterpret_cast<const float*>(b + kBlock * kColumns);
    const float32x4_t scale0 = vld1q_f32(scales), scale1 = vld1q_f32(scales + 4);
#pragma GCC unroll 8
    for (int r = 0; r < kHeight; ++r) {
      const float scale = reinterpret_cast<const float*>(a + kBlock * kHeight)[r];
      float* to = acc + kColumns * r;
      vst1q_f32(to, vfmaq_f32(vld1q_f32(to), vcvtq_f32_s32(sum[r][0]), vmulq_n_f32(scale0, scale)));
      vst1q_f32(to + 4,
                vfmaq_f32(vld1q_f32(to + 4), vcvtq_f32_s32(sum[r][1]), vmulq_n_f32(scale1, scale)));
    }
  }
}

void Tile(int64_t rows, int64_t blocks, const uint8_t* a, const uint8_t* b, float* acc) {
  static constexpr void (*kTiles[])(int64_t, const uint8_t*, const uint8_t*, float*) = {
      TileOf<1>, TileOf<2>, TileOf<3>, TileOf<4>, TileOf<5>, TileOf<6>, TileOf<7>, TileOf<8>};
  kTiles[rows - 1](blocks, a, b, acc);
}

// The low nibbles of a block's 8 bytes, then the high ones, as twice the codes' values.
int8x16_t Twice(const uint8_t* codes) {
  const uint8x8_t raw = vld1_u8(codes);
  return vqtbl1q_s8(vld1q_s8(kTwiceE2M1),
                    vcombine_u8(vand_u8(raw, vdup_n_u8(15)), vshr_n_u8(raw, 4)));
}

void PackA(const GemmMatrix& a, int64_t row, int64_t rows, int64_t block, int64_t blocks,
           uint8_t* out) {
  for (int64_t b = 0; b < blocks; ++b, out += kABytes * rows) {
    for (int64_t r = 0; r < rows; ++r) {
      vst1q_s8(reinterpret_cast<int8_t*>(out) + kBlock * r, Twice(CodesOf(a, row + r, block + b)));
      const float scale = DecodeE4M3(*ScaleOf(a, row + r, block + b)) * 0.25f;
      std::memcpy(out + kBlock * rows + 4 * r, &scale, 4);
    }
  }
}

void PackB(const GemmMatrix& m, int64_t row, int64_t block, int64_t blocks, uint8_t* out) {
  for (int64_t b = 0; b < blocks; ++b, out += kBBytes) {
    for (int i = 0; i < kColumns; ++i) {
      int8_t twice[kBlock];
      vst1q_s8(twice, Twice(row + i < m.rows ? CodesOf(m, row + i, block + b) : kZeroCodes));
      for (int g = 0; g < kGroups; ++g) std::memcpy(out + 4 * (kColumns * g + i), twice + 4 * g, 4);
      const float scale =
          DecodeE4M3(*ScaleOf(m, row + i, block + b));  // rows past the last one have zeros
      std::memcpy(out + kBlock * kColumns + 4 * i, &scale, 4);
    }
  }
}

}  // namespace

const GemmKernels kNeonGemm{kRows, kColumns, kABytes,        kBBytes, PackA,
                            PackB, Tile,     FinishPortable, nullptr, nullptr};

}  // namespace nvfp4
