// csrc/cpu/gemm_x86.h: block scales for the matmul units of x86, each of which compiles its own
// copy.
#pragma once

#include <immintrin.h>

#include <cstring>

#include "cpu/gemm.h"

namespace nvfp4 {
namespace {

// What float16 makes of an E4M3 code seven bits up: its value * 2^-8, as the exponents' biases are
// 7 and 15. Subnormals stay exact, and never are float32 subnormals.
constexpr float kScaleUnit = 0x1p-8f;

// The scales of four blocks of eight rows: four bytes of a row in a 32-bit lane. scale[b], a row a
// lane, is in units of kScaleUnit.
inline void DecodeScales(__m256i rows, __m256 (&scale)[kTileBlocks]) {
  const __m128i by_block = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const __m256i bytes = _mm256_permutevar8x32_epi32(
      _mm256_shuffle_epi8(rows, _mm256_broadcastsi128_si256(by_block)),
      _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));  // eight bytes a block
  const __m256i low = _mm256_cvtepu8_epi16(_mm256_castsi256_si128(bytes)),
                high = _mm256_cvtepu8_epi16(_mm256_extracti128_si256(bytes, 1));
  const __m256i halves[2] = {_mm256_slli_epi16(low, 7), _mm256_slli_epi16(high, 7)};
  for (int i = 0; i < 2; ++i) {
    scale[2 * i] = _mm256_cvtph_ps(_mm256_castsi256_si128(halves[i]));
    scale[2 * i + 1] = _mm256_cvtph_ps(_mm256_extracti128_si256(halves[i], 1));
  }
}

// For rows `row` .. `row + 7` of a panel of b, four blocks from `block` on. They are four bytes of
// a row, 16 bytes from one row to the next. Rows past the last one have scales too, zeros.
inline void LoadScales(const GemmMatrix& m, int64_t row, int64_t block,
                       __m256 (&scale)[kTileBlocks]) {
  const uint8_t* from = ScaleOf(m, row, block);
  alignas(32) uint8_t rows[32];
  for (int i = 0; i < 8; ++i) std::memcpy(rows + 4 * i, from + 16 * i, 4);
  DecodeScales(_mm256_load_si256(reinterpret_cast<const __m256i*>(rows)), scale);
}

}  // namespace
}  // namespace nvfp4
