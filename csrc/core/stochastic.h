// csrc/core/stochastic.h: stochastic rounding to E2M1, and the random bits of a block
// (docs/numerics.md).
#pragma once

#include "core/e2m1.h"
#include "core/half.h"
#include "core/philox.h"

namespace nvfp4 {

constexpr int kRandomBits = 9;  // of one element: the float16 mantissa bits that E2M1 does not have

// The stream of random bits that an orientation reads.
constexpr uint32_t kStreamRows = 0;     // quantized along the last axis
constexpr uint32_t kStreamColumns = 1;  // quantized along the axis before it

// Random bits for the 16 elements of the block at (row, block) of the quantized matrix.
NVFP4_HD Philox BlockRandom(const uint32_t key[2], uint32_t stream, int64_t row, int64_t block) {
  return Philox4x32(key[0], key[1],
                    Philox{{static_cast<uint32_t>(block), static_cast<uint32_t>(row),
                            static_cast<uint32_t>(row >> 32), stream}});
}

// The nine bits of one element. Four elements share a word, in the order that two packed 16-bit
// lanes read with one shift.
NVFP4_HD uint32_t ElementRandom(const Philox& random, int element) {
  constexpr int kShift[4] = {0, 16, 7, 23};
  return random.word[element / 4] >> kShift[element % 4] & ((1u << kRandomBits) - 1);
}

// The code (in the low nibble) of y, rounded up in magnitude with the probability of its distance
// from the value below. `random` is uniform on [0, 512). Scaled by 2^-14, E2M1's grid is the upper
// part of float16's, subnormals included.
NVFP4_HD uint32_t EncodeE2M1Stochastic(float y, uint32_t random) {
  const float a = Magnitude(y);
  const float clamped = a < kE2M1Max ? a : kE2M1Max;  // NaN too
  return (BitsOf(y) >> 31) << 3 | (F16Of(clamped * 0x1p-14f) + random) >> kRandomBits;
}

}  // namespace nvfp4
