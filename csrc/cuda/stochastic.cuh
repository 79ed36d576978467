// csrc/cuda/stochastic.cuh: stochastic rounding (core/stochastic.h) of 16 values in packed 16-bit
// arithmetic.
#pragma once

#include <utility>

#include "core/stochastic.h"
#include "cuda/device.cuh"

namespace nvfp4 {

constexpr uint32_t kF16Six = 0x0E000E00u;  // twice float16 of 6 * 2^-14

// (a & mask) | (b & ~mask), in one instruction.
NVFP4_DEVICE uint32_t Select(uint32_t mask, uint32_t a, uint32_t b) {
#if NVFP4_ON_DEVICE
  uint32_t d;
  asm("lop3.b32 %0, %1, %2, %3, 0xB8;" : "=r"(d) : "r"(b), "r"(mask), "r"(a));
  return d;
#else
  return (a & mask) | (b & ~mask);
#endif
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

// The random bits of blocks (core/stochastic.h BlockRandom). Rounds are template arguments, not
// turns of a loop, as an array that is indexed in a loop may lie in memory.
class RandomBits {
 public:
  NVFP4_DEVICE void SetKey(uint32_t key0, uint32_t key1) { SetKey(key0, key1, Rounds()); }

  NVFP4_DEVICE Philox At(uint32_t row, uint32_t row_high, uint32_t block, uint32_t stream) const {
    Philox random{{block, row, row_high, stream}};
    Run(random.word, Rounds());
    return random;
  }

 private:
  using Rounds = std::make_integer_sequence<uint32_t, 10>;

  template <uint32_t... kRounds>
  NVFP4_DEVICE void SetKey(uint32_t key0, uint32_t key1,
                           std::integer_sequence<uint32_t, kRounds...>) {
    constexpr uint32_t kWeyl0 = 0x9E3779B9u, kWeyl1 = 0xBB67AE85u;
    ((key0_[kRounds] = Uniform(key0 + kRounds * kWeyl0)), ...);
    ((key1_[kRounds] = Uniform(key1 + kRounds * kWeyl1)), ...);
  }

  template <uint32_t... kRounds>
  NVFP4_DEVICE void Run(uint32_t (&c)[4], std::integer_sequence<uint32_t, kRounds...>) const {
    (Round(c, key0_[kRounds], key1_[kRounds]), ...);
  }

  static NVFP4_DEVICE void Round(uint32_t (&c)[4], uint32_t key0, uint32_t key1) {
    uint32_t low0, high0, low1, high1;
    MultiplyWide(c[0], 0xD2511F53u, low0, high0);
    MultiplyWide(c[2], 0xCD9E8D57u, low1, high1);
    c[0] = high1 ^ c[1] ^ key0;
    c[2] = high0 ^ c[3] ^ key1;
    c[1] = low1;
    c[3] = low0;
  }

  // a * b, both halves.
  static NVFP4_DEVICE void MultiplyWide(uint32_t a, uint32_t b, uint32_t& low, uint32_t& high) {
#if NVFP4_ON_DEVICE
    asm("{\n .reg .b64 p;\n mul.wide.u32 p, %2, %3;\n mov.b64 {%0, %1}, p;\n}"
        : "=r"(low), "=r"(high)
        : "r"(a), "r"(b));
#else
    const uint64_t p = static_cast<uint64_t>(a) * b;
    low = static_cast<uint32_t>(p);
    high = static_cast<uint32_t>(p >> 32);
#endif
  }

  uint32_t key0_[Rounds::size()] = {}, key1_[Rounds::size()] = {};  // of each round
};

// sum + (x >> 7) in one instruction
NVFP4_DEVICE uint32_t AddShifted(uint32_t sum, uint32_t x) {
#if NVFP4_ON_DEVICE
  uint32_t d;
  asm("mad.hi.u32 %0, %1, %2, %3;" : "=r"(d) : "r"(x), "r"(1u << (32 - 7)), "r"(sum));
  return d;
#else
  return sum + (x >> 7);
#endif
}

// The codes of 16 values, of which y holds 2^-14 times each, not yet clamped.
NVFP4_DEVICE uint2 EncodeStochastic(const float (&y)[16], const Philox& random) {
  constexpr uint32_t kLow = 0x01FF01FFu;  // core/stochastic.h ElementRandom
  uint32_t sum[8];
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    const uint32_t h0 = ClampF16Pair(F16PairOf(y[4 * w], y[4 * w + 1]), kF16Six);
    const uint32_t h1 = ClampF16Pair(F16PairOf(y[4 * w + 2], y[4 * w + 3]), kF16Six);
    sum[2 * w] = h0 + (random.word[w] & kLow);
    sum[2 * w + 1] = AddShifted(h1, random.word[w] & kLow << 7);
  }
  return make_uint2(PackSums({sum[0], sum[1], sum[2], sum[3]}),
                    PackSums({sum[4], sum[5], sum[6], sum[7]}));
}

}  // namespace nvfp4
