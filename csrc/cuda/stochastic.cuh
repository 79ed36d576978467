// csrc/cuda/stochastic.cuh: stochastic rounding (core/stochastic.h) of 16 values in packed 16-bit
// arithmetic.
#pragma once

#include "core/stochastic.h"
#include "cuda/device.cuh"

namespace nvfp4 {

constexpr uint32_t kF16Six = 0x0E000E00u;  // twice float16 of 6 * 2^-14

// (mask & a) | (~mask & b)
NVFP4_DEVICE uint32_t Select(uint32_t mask, uint32_t a, uint32_t b) {
  return (a & mask) | (b & ~mask);
}

// Codes of eight elements from sums h + u: two elements a word, each a half `s000cccf ffffffff` of
// sign, code and fraction.
NVFP4_DEVICE uint32_t PackSums(const uint32_t (&sum)[4]) {
  // The upper bytes of all halves: those of even elements, then those of odd ones.
  const uint32_t low = __byte_perm(sum[0], sum[1], 0x7351);
  const uint32_t high = __byte_perm(sum[2], sum[3], 0x7351);
  const uint32_t even = __byte_perm(low, high, 0x5410), odd = __byte_perm(low, high, 0x7632);
  // Rotated by 4, the codes of even elements lie as far below their place as those of odd ones do,
  // and their signs are in place.
  const uint32_t rotated = __funnelshift_r(even, even, 4);
  uint32_t codes = Select(0xF0F0F0F0u, rotated, odd);
  codes = __funnelshift_l(codes, codes, 3);
  return Select(0x77777777u, codes, Select(0x08080808u, rotated, odd));
}

// The codes of 16 values, of which y holds 2^-14 times each, not yet clamped.
NVFP4_DEVICE uint2 EncodeStochastic(const float (&y)[16], const Philox& random) {
  constexpr uint32_t kLow = 0x01FF01FFu, kShift = 7;  // core/stochastic.h ElementRandom
  uint32_t sum[8];
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    const uint32_t h0 = ClampF16Pair(F16PairOf(y[4 * w], y[4 * w + 1]), kF16Six);
    const uint32_t h1 = ClampF16Pair(F16PairOf(y[4 * w + 2], y[4 * w + 3]), kF16Six);
    sum[2 * w] = h0 + (random.word[w] & kLow);
    sum[2 * w + 1] = h1 + ((random.word[w] & kLow << kShift) >> kShift);
  }
  return make_uint2(PackSums({sum[0], sum[1], sum[2], sum[3]}),
                    PackSums({sum[4], sum[5], sum[6], sum[7]}));
}

}  // namespace nvfp4
