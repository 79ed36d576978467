// csrc/core/bits.h: float32 as bits and back.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/host_device.h"

namespace nvfp4 {

NVFP4_HD uint32_t BitsOf(float x) {
  uint32_t u;
  memcpy(&u, &x, sizeof u);
  return u;
}

NVFP4_HD float FloatOf(uint32_t u) {
  float x;
  memcpy(&x, &u, sizeof x);
  return x;
}

// The magnitude of x. As an unsigned integer it orders like the float does, with Inf and then NaN
// above all numbers.
NVFP4_HD uint32_t MagnitudeBits(float x) { return BitsOf(x) & 0x7FFFFFFFu; }

NVFP4_HD float Magnitude(float x) { return FloatOf(MagnitudeBits(x)); }

constexpr float kFloatMax = 3.40282346638528859812e+38f;

}  // namespace nvfp4
