// csrc/ops/types.h: the floating point types that ops read and write.
#pragma once

#include <cstdint>

namespace nvfp4 {

enum class FloatType : uint8_t { kF32, kBf16, kF16 };

inline int64_t SizeOf(FloatType type) { return type == FloatType::kF32 ? 4 : 2; }

}  // namespace nvfp4
