// csrc/core/e4m3.h: E4M3FN, the eight-bit float of OCP OFP8 that NVFP4 scales its blocks with.
//
//   code  s eeee mmm    value = (-1)^s * 2^(e-7) * 1.mmm,  or 2^-6 * 0.mmm where e is 0
//
// Largest value 448, no Inf, NaN is s1111111.
#pragma once

#include "core/bits.h"

namespace nvfp4 {

constexpr float kE4M3Max = 448.0f;
constexpr uint8_t kE4M3Nan = 0x7F;

// The code nearest to x. A tie goes to the even code, |x| > 448 saturates (Inf too), NaN stays NaN.
NVFP4_HD uint8_t EncodeE4M3(float x) {
  const uint32_t magnitude = MagnitudeBits(x);
  const uint32_t sign = BitsOf(x) >> 31 << 7;
  if (magnitude > 0x7F800000u) return static_cast<uint8_t>(sign | kE4M3Nan);
  const float a = FloatOf(magnitude);
  if (a >= kE4M3Max) return static_cast<uint8_t>(sign | 0x7E);
  uint32_t code;
  if (a < 0.015625f) {
    // Below 2^-6 the step is 2^-9. Adding 2^14, whose own step that is, leaves the rounded count of
    // steps in the low bits.
    code = BitsOf(a + 16384.0f) - BitsOf(16384.0f);
  } else {
    // RNE at bit 20 (23 - 3 mantissa bits), then the bias from 127 to 7.
    code = ((magnitude + 0x7FFFFu + (magnitude >> 20 & 1)) >> 20) - ((127 - 7) << 3);
  }
  return static_cast<uint8_t>(sign | code);
}

NVFP4_HD float DecodeE4M3(uint8_t code) {
  const uint32_t exponent = code >> 3 & 15, mantissa = code & 7;
  if (exponent == 15 && mantissa == 7) return FloatOf(0x7FC00000u);
  const float a = exponent == 0 ? static_cast<float>(mantissa) * 0.001953125f
                                : FloatOf((exponent + 120) << 23 | mantissa << 20);
  return (code & 0x80) != 0 ? -a : a;
}

}  // namespace nvfp4
