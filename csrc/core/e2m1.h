// csrc/core/e2m1.h: E2M1, the four-bit float of OCP MX v1.0 and NVFP4.
//
//   code  s ee m    value = (-1)^s * {0, 0.5, 1, 1.5, 2, 3, 4, 6}[ee m]
//
// No Inf, no NaN.
#pragma once

#include "core/bits.h"

namespace nvfp4 {

constexpr float kE2M1Max = 6.0f;

// The code (in the low nibble) nearest to x. A tie goes to the even code, |x| > 6 saturates, -0 is
// 8, NaN is 7 as the hardware conversion has it.
NVFP4_HD uint32_t EncodeE2M1(float x) {
  if (x != x) return 7;
  const float a = Magnitude(x);
  // A midpoint belongs to its even neighbour: `>` keeps it below, `>=` lifts it.
  const uint32_t index = (a > 0.25f) + (a >= 0.75f) + (a > 1.25f) + (a >= 1.75f) + (a > 2.5f) +
                         (a >= 3.5f) + (a > 5.0f);
  return (BitsOf(x) >> 31) << 3 | index;
}

NVFP4_HD float DecodeE2M1(uint32_t code) {
  const uint32_t exponent = code >> 1 & 3, mantissa = code & 1;
  const float a = exponent == 0 ? 0.5f * static_cast<float>(mantissa)
                                : FloatOf((exponent + 126) << 23 | mantissa << 22);
  return (code & 8) != 0 ? -a : a;
}

}  // namespace nvfp4
