// csrc/ops/types.h: the floating point types that ops read and write.
#pragma once

#include <cstdint>

namespace nvfp4 {

enum class FloatType : uint8_t { kF32, kBf16, kF16 };

inline const char* Name(FloatType type) {
  return type == FloatType::kF32 ? "f32" : type == FloatType::kBf16 ? "bf16" : "f16";
}

inline int64_t SizeOf(FloatType type) { return type == FloatType::kF32 ? 4 : 2; }

}  // namespace nvfp4
