// csrc/cuda/device.cuh: instructions that C++ has no name for, each next to what it means.
//
// The meaning is what other targets and the emulation on the CPU (csrc/testing/) run, and both have
// the same bits. Halves of a word: element 0 is the low one.
#pragma once

#include <cuda_runtime.h>

#include "core/block.h"
#include "core/half.h"
#include "cuda/stream.h"
#include "ops/types.h"

// The conversion to E2M1 is an instruction of all Blackwell chips, but only of targets that name
// the chip or its family: without the guard other targets would not compile.
#if defined(__CUDA_ARCH_FAMILY_SPECIFIC__) && __CUDA_ARCH_FAMILY_SPECIFIC__ >= 1000
#define NVFP4_HAS_E2M1 1
#else
#define NVFP4_HAS_E2M1 0
#endif
// Pairs of float32 in one instruction, products of halves added to float32, accesses of 32 bytes.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
#define NVFP4_HAS_BLACKWELL 1
#else
#define NVFP4_HAS_BLACKWELL 0
#endif
// The conversion to E4M3, the larger magnitude with a sign.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
#define NVFP4_HAS_ADA 1
#else
#define NVFP4_HAS_ADA 0
#endif
#if defined(__CUDA_ARCH__)
#define NVFP4_ON_DEVICE 1
#else
#define NVFP4_ON_DEVICE 0
#endif

#define NVFP4_DEVICE __device__ __forceinline__

namespace nvfp4 {

inline CudaError TextOf(cudaError_t error) {
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

// Lets a kernel have this much dynamic shared memory.
template <typename... Parameters>
cudaError_t AllowShared(void (*kernel)(Parameters...), size_t size) {
  constexpr size_t kWithoutAsking = 48 << 10;
  if (size <= kWithoutAsking) return cudaSuccess;
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              static_cast<int>(size));
}

// A block's dynamic shared memory.
template <typename T>
NVFP4_DEVICE T& DynamicShared() {
#if defined(__CUDACC__)
  extern __shared__ uint4 dynamic_shared[];
  return *reinterpret_cast<T*>(dynamic_shared);
#else
  return *static_cast<T*>(cuda_on_cpu::DynamicShared());
#endif
}

// The same value in all lanes, told to the compiler: it can then live in a uniform register.
NVFP4_DEVICE uint32_t Uniform(uint32_t x) { return __reduce_max_sync(0xFFFFFFFFu, x); }
NVFP4_DEVICE float Uniform(float x) { return FloatOf(Uniform(BitsOf(x))); }

// The same value, which the compiler then keeps in a register and does not compute again.
NVFP4_DEVICE uint32_t InRegister(uint32_t x) {
  return __shfl_sync(0xFFFFFFFFu, x, static_cast<int>(threadIdx.x % 32));
}

// ---- Pairs of float32

NVFP4_DEVICE float2 Pair(float x, float y) { return make_float2(x, y); }

#if NVFP4_HAS_BLACKWELL
#define NVFP4_PAIR_OPERATION(name, instruction)                                               \
  NVFP4_DEVICE float2 name(float2 a, float2 b) {                                              \
    float2 d;                                                                                 \
    asm("{\n .reg .b64 a, b, d;\n mov.b64 a, {%2, %3};\n mov.b64 b, {%4, %5};\n " instruction \
        " d, a, b;\n mov.b64 {%0, %1}, d;\n}"                                                 \
        : "=f"(d.x), "=f"(d.y)                                                                \
        : "f"(a.x), "f"(a.y), "f"(b.x), "f"(b.y));                                            \
    return d;                                                                                 \
  }
NVFP4_PAIR_OPERATION(Add, "add.rn.f32x2")
NVFP4_PAIR_OPERATION(Subtract, "sub.rn.f32x2")
NVFP4_PAIR_OPERATION(Multiply, "mul.rn.f32x2")
#undef NVFP4_PAIR_OPERATION
#else
NVFP4_DEVICE float2 Add(float2 a, float2 b) {
  return Pair(__fadd_rn(a.x, b.x), __fadd_rn(a.y, b.y));
}
NVFP4_DEVICE float2 Subtract(float2 a, float2 b) {
  return Pair(__fadd_rn(a.x, -b.x), __fadd_rn(a.y, -b.y));
}
NVFP4_DEVICE float2 Multiply(float2 a, float2 b) {
  return Pair(__fmul_rn(a.x, b.x), __fmul_rn(a.y, b.y));
}
#endif

// ---- Halves of a word as float32

template <FloatType kType>
NVFP4_DEVICE float FloatOfHalf(uint16_t bits) {
  static_assert(kType != FloatType::kF32, "a word holds two bfloat16 or float16");
  return kType == FloatType::kBf16 ? FloatOfBf16(bits) : FloatOfF16(bits);
}

// fl(half kHalf of `pair` * factor + addend), rounded once. A factor is 1 or one quarter, or minus
// that; `factor` holds it as the type of the halves.
template <FloatType kType, int kHalf>
NVFP4_DEVICE float MultiplyAdd(uint32_t pair, uint16_t factor, float addend) {
#if NVFP4_HAS_BLACKWELL
  float d;
  if constexpr (kType == FloatType::kBf16 && kHalf == 0)
    asm("{\n .reg .b16 l, h;\n mov.b32 {l, h}, %1;\n fma.rn.f32.bf16 %0, l, %2, %3;\n}"
        : "=f"(d)
        : "r"(pair), "h"(factor), "f"(addend));
  else if constexpr (kType == FloatType::kBf16)
    asm("{\n .reg .b16 l, h;\n mov.b32 {l, h}, %1;\n fma.rn.f32.bf16 %0, h, %2, %3;\n}"
        : "=f"(d)
        : "r"(pair), "h"(factor), "f"(addend));
  else if constexpr (kHalf == 0)
    asm("{\n .reg .b16 l, h;\n mov.b32 {l, h}, %1;\n fma.rn.f32.f16 %0, l, %2, %3;\n}"
        : "=f"(d)
        : "r"(pair), "h"(factor), "f"(addend));
  else
    asm("{\n .reg .b16 l, h;\n mov.b32 {l, h}, %1;\n fma.rn.f32.f16 %0, h, %2, %3;\n}"
        : "=f"(d)
        : "r"(pair), "h"(factor), "f"(addend));
  return d;
#else
  return __fmaf_rn(FloatOfHalf<kType>(static_cast<uint16_t>(pair >> 16 * kHalf)),
                   FloatOfHalf<kType>(factor), addend);
#endif
}

// Half kHalf of `pair`.
template <FloatType kType, int kHalf>
NVFP4_DEVICE float Widen(uint32_t pair) {
#if NVFP4_HAS_BLACKWELL
  // Adding -0 changes no number, not even -0.
  float d;
  if constexpr (kType == FloatType::kBf16 && kHalf == 0)
    asm("{\n .reg .b16 l, h;\n mov.b32 {l, h}, %1;\n add.rn.f32.bf16 %0, l, %2;\n}"
        : "=f"(d)
        : "r"(pair), "f"(-0.0f));
  else if constexpr (kType == FloatType::kBf16)
    asm("{\n .reg .b16 l, h;\n mov.b32 {l, h}, %1;\n add.rn.f32.bf16 %0, h, %2;\n}"
        : "=f"(d)
        : "r"(pair), "f"(-0.0f));
  else if constexpr (kHalf == 0)
    asm("{\n .reg .b16 l, h;\n mov.b32 {l, h}, %1;\n add.rn.f32.f16 %0, l, %2;\n}"
        : "=f"(d)
        : "r"(pair), "f"(-0.0f));
  else
    asm("{\n .reg .b16 l, h;\n mov.b32 {l, h}, %1;\n add.rn.f32.f16 %0, h, %2;\n}"
        : "=f"(d)
        : "r"(pair), "f"(-0.0f));
  return d;
#else
  return FloatOfHalf<kType>(static_cast<uint16_t>(pair >> 16 * kHalf));
#endif
}

template <FloatType kType>
NVFP4_DEVICE float2 WidenPair(uint32_t pair) {
  return Pair(Widen<kType, 0>(pair), Widen<kType, 1>(pair));
}

// ---- Largest magnitudes. kNan: a NaN wins; else a number does, and signs mean nothing.

// Of both halves.
template <FloatType kType, bool kNan = false>
NVFP4_DEVICE uint32_t MaxMagnitudeOfHalves(uint32_t a, uint32_t b) {
#if NVFP4_HAS_ADA
  uint32_t d;
  if constexpr (kType == FloatType::kBf16 && kNan)
    asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  else if constexpr (kType == FloatType::kBf16)
    asm("max.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  else if constexpr (kNan)
    asm("max.NaN.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  else
    asm("max.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
#else
  // As integers NaN is the largest.
  uint32_t d = 0;
  for (int shift = 0; shift < 32; shift += 16) {
    const uint32_t x = a >> shift & 0x7FFFu, y = b >> shift & 0x7FFFu;
    d |= (x > y ? x : y) << shift;
  }
  return d;
#endif
}

// The result has no sign.
template <bool kNan = false>
NVFP4_DEVICE float MaxMagnitude(float a, float b, float c) {
#if NVFP4_HAS_BLACKWELL
  float d;
  if constexpr (kNan)
    asm("{\n .reg .f32 a, b, c;\n abs.f32 a, %1;\n abs.f32 b, %2;\n abs.f32 c, %3;\n"
        " max.NaN.f32 %0, a, b, c;\n}"
        : "=f"(d)
        : "f"(a), "f"(b), "f"(c));
  else
    asm("{\n .reg .f32 a, b, c;\n abs.f32 a, %1;\n abs.f32 b, %2;\n abs.f32 c, %3;\n"
        " max.f32 %0, a, b, c;\n}"
        : "=f"(d)
        : "f"(a), "f"(b), "f"(c));
  return d;
#else
  if (kNan) {
    const uint32_t x = MagnitudeBits(a), y = MagnitudeBits(b), z = MagnitudeBits(c);
    return FloatOf(max(max(x, y), z));
  }
  return max(max(Magnitude(a), Magnitude(b)), Magnitude(c));
#endif
}

// ---- Conversions

// To bfloat16 and back.
NVFP4_DEVICE float ThroughBf16(float x) {
#if NVFP4_ON_DEVICE
  uint32_t d;  // with a zero in the low half: the float32 itself
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(x), "f"(0.0f));
  return FloatOf(d);
#else
  return RoundToBf16(x);
#endif
}

// The block scale of a number that is not negative, in byte 0; the clamp at 448 is part of it.
NVFP4_DEVICE uint32_t EncodeScale(float x) {
#if NVFP4_HAS_ADA
  uint32_t d;
  asm("{\n .reg .b16 h, z;\n cvt.rn.satfinite.e4m3x2.f32 h, %2, %1;\n mov.b16 z, 0;\n"
      " mov.b32 %0, {h, z};\n}"
      : "=r"(d)
      : "f"(x), "f"(0.0f));
  return d;
#else
  return EncodeE4M3(x);
#endif
}

// Eight codes, the first in the lowest nibble.
NVFP4_DEVICE uint32_t EncodeE2M1x8(const float (&y)[8]) {
#if NVFP4_HAS_E2M1
  uint32_t d;
  asm("{\n .reg .b8 a, b, c, d;\n"
      " cvt.rn.satfinite.e2m1x2.f32 a, %2, %1;\n"
      " cvt.rn.satfinite.e2m1x2.f32 b, %4, %3;\n"
      " cvt.rn.satfinite.e2m1x2.f32 c, %6, %5;\n"
      " cvt.rn.satfinite.e2m1x2.f32 d, %8, %7;\n"
      " mov.b32 %0, {a, b, c, d};\n}"
      : "=r"(d)
      : "f"(y[0]), "f"(y[1]), "f"(y[2]), "f"(y[3]), "f"(y[4]), "f"(y[5]), "f"(y[6]), "f"(y[7]));
  return d;
#else
  uint32_t d = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) d |= EncodeE2M1(y[i]) << 4 * i;
  return d;
#endif
}

NVFP4_DEVICE uint32_t F16PairOf(float first, float second) {
#if NVFP4_ON_DEVICE
  uint32_t d;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(second), "f"(first));
  return d;
#else
  return F16Of(first) | static_cast<uint32_t>(F16Of(second)) << 16;
#endif
}

NVFP4_DEVICE uint32_t Bf16PairOf(float first, float second) {
#if NVFP4_ON_DEVICE
  uint32_t d;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(second), "f"(first));
  return d;
#else
  return Bf16Of(first) | static_cast<uint32_t>(Bf16Of(second)) << 16;
#endif
}

// The values of eight codes, v[i] those of 2 * i and 2 * i + 1.
NVFP4_DEVICE void DecodeE2M1x8(uint32_t codes, float2* v) {
#if NVFP4_HAS_E2M1
  uint32_t d[4];  // float16
  asm("{\n .reg .b8 a, b, c, d;\n mov.b32 {a, b, c, d}, %4;\n"
      " cvt.rn.f16x2.e2m1x2 %0, a;\n cvt.rn.f16x2.e2m1x2 %1, b;\n"
      " cvt.rn.f16x2.e2m1x2 %2, c;\n cvt.rn.f16x2.e2m1x2 %3, d;\n}"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(codes));
#pragma unroll
  for (int i = 0; i < 4; ++i) v[i] = WidenPair<FloatType::kF16>(d[i]);
#else
#pragma unroll
  for (int i = 0; i < 4; ++i)
    v[i] = Pair(DecodeE2M1(codes >> 8 * i & 15), DecodeE2M1(codes >> (8 * i + 4) & 15));
#endif
}

// Two float16 with their magnitudes at most that of both halves of `limit`, which has no sign.
NVFP4_DEVICE uint32_t ClampF16Pair(uint32_t x, uint32_t limit) {
#if NVFP4_HAS_ADA
  uint32_t d;
  asm("min.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(d) : "r"(x), "r"(limit));
  return d;
#else
  uint32_t d = x & 0x80008000u;
  for (int shift = 0; shift < 32; shift += 16)
    d |= min(x >> shift & 0x7FFFu, limit >> shift & 0x7FFFu) << shift;
  return d;
#endif
}

// ---- Memory

struct Words {
  uint32_t w[8];
};

// 32 bytes that no kernel writes meanwhile. kBytes: that they are aligned to, 16 or 32.
template <int kBytes>
NVFP4_DEVICE Words LoadWords(const void* from) {
  Words d;
#if NVFP4_HAS_BLACKWELL
  if constexpr (kBytes == 32) {
    asm volatile("ld.global.nc.v8.b32 {%0, %1, %2, %3, %4, %5, %6, %7}, [%8];"
                 : "=r"(d.w[0]), "=r"(d.w[1]), "=r"(d.w[2]), "=r"(d.w[3]), "=r"(d.w[4]),
                   "=r"(d.w[5]), "=r"(d.w[6]), "=r"(d.w[7])
                 : "l"(from));
    return d;
  }
#endif
  const uint4 a = __ldg(static_cast<const uint4*>(from));
  const uint4 b = __ldg(static_cast<const uint4*>(from) + 1);
  d = {{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}};
  return d;
}

}  // namespace nvfp4
