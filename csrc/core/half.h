// csrc/core/half.h: bfloat16 and float16 as bits, to and from float32.
#pragma once

#include "core/bits.h"

namespace nvfp4 {

NVFP4_HD float FloatOfBf16(uint16_t bits) { return FloatOf(static_cast<uint32_t>(bits) << 16); }

// RNE; NaN stays a (quiet) NaN.
NVFP4_HD uint16_t Bf16Of(float x) {
  const uint32_t u = BitsOf(x);
  if (x != x) return static_cast<uint16_t>(u >> 16 | 0x40);
  return static_cast<uint16_t>((u + 0x7FFFu + (u >> 16 & 1)) >> 16);
}

NVFP4_HD float RoundToBf16(float x) { return FloatOfBf16(Bf16Of(x)); }

NVFP4_HD float FloatOfF16(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16, magnitude = bits & 0x7FFFu;
  if (magnitude >= 0x7C00u) return FloatOf(sign | 0x7F800000u | (magnitude & 0x3FFu) << 13);
  // As a float32 with the same fields the value is 2^112 times too small, subnormals included.
  return FloatOf(sign | BitsOf(FloatOf(magnitude << 13) * 0x1p112f));
}

// RNE; overflow gives Inf, NaN stays a (quiet) NaN.
NVFP4_HD uint16_t F16Of(float x) {
  const uint32_t sign = BitsOf(x) >> 16 & 0x8000u, magnitude = MagnitudeBits(x);
  uint32_t bits;
  if (magnitude > 0x7F800000u) {
    bits = 0x7E00u | (magnitude >> 13 & 0x3FFu);
  } else if (magnitude >= 0x47800000u) {  // 65536 and above
    bits = 0x7C00u;
  } else if (magnitude < 0x38800000u) {
    // Below 2^-14 the step is 2^-24. Adding 0.5, whose own step that is, leaves the rounded count
    // of steps in the low bits.
    bits = BitsOf(FloatOf(magnitude) + 0.5f) - BitsOf(0.5f);
  } else {
    // RNE at bit 13 (23 - 10 mantissa bits), then the bias from 127 to 15. A carry out of 65504
    // gives Inf by itself.
    bits = (magnitude + 0xFFFu + (magnitude >> 13 & 1) - ((127 - 15) << 23)) >> 13;
  }
  return static_cast<uint16_t>(sign | bits);
}

}  // namespace nvfp4
