// csrc/core/hadamard.h: the random Hadamard transform of 16 values (docs/numerics.md).
#pragma once

#include "core/half.h"

namespace nvfp4 {

// Bit i set: element i changes its sign before the transform.
constexpr uint32_t kHadamardSigns = 0xD7E8;

// x <- bf16(x diag(signs) H16 / 4). The order of the additions is part of the contract.
NVFP4_HD void Hadamard16(float (&x)[16], uint32_t signs) {
  for (int i = 0; i < 16; ++i) x[i] = FloatOf(BitsOf(x[i]) ^ (signs >> i & 1u) << 31);
  for (int stride = 1; stride < 16; stride *= 2) {
    for (int i = 0; i < 16; ++i) {
      if ((i & stride) != 0) continue;
      const float a = x[i], b = x[i + stride];
      x[i] = a + b;
      x[i + stride] = a - b;
    }
  }
  for (int i = 0; i < 16; ++i) x[i] = RoundToBf16(x[i] * 0.25f);
}

}  // namespace nvfp4
