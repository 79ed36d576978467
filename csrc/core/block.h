// csrc/core/block.h: one NVFP4 block, 16 values along K that share an E4M3 scale: scale factors,
// codes, and back (docs/numerics.md).
#pragma once

#include "core/e2m1.h"
#include "core/e4m3.h"
#include "core/stochastic.h"

namespace nvfp4 {

constexpr int kBlock = 16;

// What a tensor's amax says about the scales of its blocks.
struct TensorScale {
  float decode;         // S_dec, what is stored: NaN if the amax is not finite
  float block_factor;   // a block's scale is E4M3(amax_block * block_factor)
  float finite_decode;  // decode, but 1 for a NaN: codes are then computed as if S_enc were 1
};

NVFP4_HD TensorScale TensorScaleOf(float amax) {
  const bool finite = MagnitudeBits(amax) < 0x7F800000u;
  float encode = 1.0f;
  if (finite && amax != 0.0f) {
    encode = (kE2M1Max * kE4M3Max) / amax;
    if (!(encode < kFloatMax)) encode = kFloatMax;
  }
  const float decode = 1.0f / encode;
  return TensorScale{finite ? decode : FloatOf(0x7FC00000u), encode * (1.0f / 6.0f), decode};
}

// The scale byte of a block. `amax` is that of the block; a NaN saturates, so that NaN is never
// written.
NVFP4_HD uint8_t BlockScale(float amax, const TensorScale& tensor) {
  const float scale = amax * tensor.block_factor;
  return EncodeE4M3(scale < kE4M3Max ? scale : kE4M3Max);
}

// What the block's values are multiplied with before they are rounded to E2M1.
NVFP4_HD float BlockEncode(uint8_t scale, const TensorScale& tensor) {
  const float encode = 1.0f / (DecodeE4M3(scale) * tensor.finite_decode);
  return encode < kFloatMax ? encode : kFloatMax;
}

// A code's value.
NVFP4_HD float Dequantize(uint32_t code, uint8_t scale, float global_scale) {
  return DecodeE2M1(code) * (DecodeE4M3(scale) * global_scale);
}

}  // namespace nvfp4
