// csrc/cpu/gemm_vnni.h: matmul with instructions that add four products of unsigned and signed
// bytes to a 32-bit lane (vpdpbusd).
//
// Included once by the unit of each instruction set, after it has defined `Isa`: vectors Ints and
// Floats of kLanes 32-bit lanes, and the few operations below. b is the unsigned side, with 12
// added, so that AVX-512 can broadcast a from memory within the instruction; what takes the 12
// back, -12 times the sum of a, is where a row's sum starts.
#pragma once

#include <immintrin.h>

#include <cstring>

#include "cpu/gemm_x86.h"

namespace nvfp4 {
namespace {

constexpr int kRows = 6, kColumns = 2 * Isa::kLanes, kGroups = kBlock / 4;
// A packed block of b: u8[4 groups][columns][4], float scale[columns]. Of a: i8[4 groups][rows][4],
// i32 start[rows], float scale[rows]. Groups: low nibbles of bytes 0..3 of a row, of bytes 4..7,
// then the high ones.
constexpr int kBBytes = kColumns * (kBlock + 4), kABytes = 24;

template <int kHeight>
void TileOf(int64_t blocks, const uint8_t* a, const uint8_t* b, float* acc) {
  using Ints = typename Isa::Ints;
  using Floats = typename Isa::Floats;
  for (int64_t block = 0; block < blocks; ++block, b += kBBytes, a += kABytes * kHeight) {
    asm("" : "+r"(acc));  // or its sums would be carried in registers that are not there
    Ints sum[kHeight][2];
#pragma GCC unroll 6
    for (int r = 0; r < kHeight; ++r)
      sum[r][0] = sum[r][1] = Isa::Broadcast(a + 16 * kHeight + 4 * r);
#pragma GCC unroll 4
    for (int g = 0; g < kGroups; ++g) {
      const Ints w0 = Isa::Load(b + 4 * kColumns * g),
                 w1 = Isa::Load(b + 4 * kColumns * g + 4 * Isa::kLanes);
#pragma GCC unroll 6
      for (int r = 0; r < kHeight; ++r) {
        const Ints x = Isa::Broadcast(a + 4 * (g * kHeight + r));
        sum[r][0] = Isa::AddProducts(sum[r][0], w0, x);
        sum[r][1] = Isa::AddProducts(sum[r][1], w1, x);
      }
    }
    const auto* scales = reinterpret_cast<const float*>(b + kBlock * kColumns);
#pragma GCC unroll 6
    for (int r = 0; r < kHeight; ++r) {
      const Floats scale = Isa::Broadcast(reinterpret_cast<const float*>(a + 20 * kHeight) + r);
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) {
        float* to = acc + kColumns * r + Isa::kLanes * v;
        const Floats factor = Isa::Multiply(scale, Isa::Load(scales + Isa::kLanes * v));
        Isa::Store(to, Isa::MultiplyAdd(Isa::ToFloats(sum[r][v]), factor, Isa::Load(to)));
      }
    }
  }
}

void Tile(int64_t rows, int64_t blocks, const uint8_t* a, const uint8_t* b, float* acc) {
  switch (rows) {
    case 1:
      return TileOf<1>(blocks, a, b, acc);
    case 2:
      return TileOf<2>(blocks, a, b, acc);
    case 3:
      return TileOf<3>(blocks, a, b, acc);
    case 4:
      return TileOf<4>(blocks, a, b, acc);
    case 5:
      return TileOf<5>(blocks, a, b, acc);
    default:
      return TileOf<6>(blocks, a, b, acc);
  }
}

void PackB(const GemmMatrix& m, int64_t row, int64_t block, int64_t blocks, uint8_t* out) {
  const __m128i twice = _mm_load_si128(reinterpret_cast<const __m128i*>(kTwiceE2M1));
  const __m256i table = _mm256_broadcastsi128_si256(_mm_add_epi8(twice, _mm_set1_epi8(kTwiceMax)));
  const __m256i nibble = _mm256_set1_epi8(15);
  for (int first = 0; first < kColumns; first += 8) {
    const uint8_t* rows[8];
    for (int i = 0; i < 8; ++i)
      rows[i] = row + first + i < m.rows ? CodesOf(m, row + first + i, block) : kZeroCodes;
    for (int64_t b = 0; b < blocks; ++b) {
      uint8_t* to = out + kBBytes * b;
      const auto load = [&](int i) {
        return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(rows[i] + b * (kBlock / 2)));
      };
      const auto join = [](__m128i low, __m128i high) {
        return _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
      };
      const __m256i even =
          join(_mm_unpacklo_epi32(load(0), load(1)), _mm_unpacklo_epi32(load(4), load(5)));
      const __m256i odd =
          join(_mm_unpacklo_epi32(load(2), load(3)), _mm_unpacklo_epi32(load(6), load(7)));
      const __m256i word[2] = {_mm256_unpacklo_epi64(even, odd), _mm256_unpackhi_epi64(even, odd)};
      for (int g = 0; g < kGroups; ++g) {
        const __m256i codes =
            _mm256_and_si256(g < 2 ? word[g] : _mm256_srli_epi16(word[g - 2], 4), nibble);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 4 * (kColumns * g + first)),
                            _mm256_shuffle_epi8(table, codes));
      }
    }
    for (int64_t b = 0; b < blocks; b += kTileBlocks) {
      __m256 scale[kTileBlocks];
      LoadScales(m, row + first, block + b, scale);
      for (int64_t i = 0; i < kTileBlocks && b + i < blocks; ++i)
        _mm256_storeu_ps(
            reinterpret_cast<float*>(out + kBBytes * (b + i) + kBlock * kColumns) + first,
            scale[i]);
    }
  }
}

void PackA(const GemmMatrix& a, int64_t row, int64_t rows, int64_t block, int64_t blocks,
           uint8_t* out) {
  for (int64_t b = 0; b < blocks; ++b, out += kABytes * rows) {
    for (int64_t r = 0; r < rows; ++r) {
      const uint8_t* codes = CodesOf(a, row + r, block + b);
      int8_t group[kGroups][4];
      int32_t start = 0;
      for (int k = 0; k < kBlock; ++k) {
        const int8_t twice = kTwiceE2M1[codes[k / 2] >> k % 2 * 4 & 15];
        group[k % 2 * 2 + k / 8][k / 2 % 4] = twice;
        start -= kTwiceMax * twice;
      }
      for (int g = 0; g < kGroups; ++g) std::memcpy(out + 4 * (g * rows + r), group[g], 4);
      std::memcpy(out + 16 * rows + 4 * r, &start, 4);
      const float scale = DecodeE4M3(*ScaleOf(a, row + r, block + b)) * (0.25f / kScaleUnit);
      std::memcpy(out + 20 * rows + 4 * r, &scale, 4);
    }
  }
}

}  // namespace
}  // namespace nvfp4
