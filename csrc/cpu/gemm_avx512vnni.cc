// csrc/cpu/gemm_avx512vnni.cc: matmul with AVX-512 VNNI (Cascade Lake, Zen 4 and later).
//
// With NVFP4_EMULATE_VNNI each vector is a pair of AVX2 ones, so that a machine without AVX-512
// tests everything else.
#include <immintrin.h>

namespace nvfp4 {
namespace {

#if defined(NVFP4_EMULATE_VNNI)
struct Isa {
  struct Ints {
    __m256i low, high;
  };
  struct Floats {
    __m256 low, high;
  };
  static constexpr int kLanes = 16;
  static Ints Load(const unsigned char* p) {
    return {_mm256_load_si256(reinterpret_cast<const __m256i*>(p)),
            _mm256_load_si256(reinterpret_cast<const __m256i*>(p + 32))};
  }
  static Floats Load(const float* p) { return {_mm256_load_ps(p), _mm256_load_ps(p + 8)}; }
  static void Store(float* p, Floats v) {
    _mm256_store_ps(p, v.low);
    _mm256_store_ps(p + 8, v.high);
  }
  static Ints Broadcast(const unsigned char* p) {
    int v;
    __builtin_memcpy(&v, p, sizeof v);
    return {_mm256_set1_epi32(v), _mm256_set1_epi32(v)};
  }
  static Floats Broadcast(const float* p) {
    return {_mm256_broadcast_ss(p), _mm256_broadcast_ss(p)};
  }
  static Floats ToFloats(Ints v) { return {_mm256_cvtepi32_ps(v.low), _mm256_cvtepi32_ps(v.high)}; }
  static Floats Multiply(Floats a, Floats b) {
    return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)};
  }
  static Floats MultiplyAdd(Floats a, Floats b, Floats c) {
    return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
  }
  static __m256i AddProducts(__m256i sum, __m256i u8, __m256i s8) {
    return _mm256_add_epi32(sum,
                            _mm256_madd_epi16(_mm256_maddubs_epi16(u8, s8), _mm256_set1_epi16(1)));
  }
  static Ints AddProducts(Ints sum, Ints u8, Ints s8) {
    return {AddProducts(sum.low, u8.low, s8.low), AddProducts(sum.high, u8.high, s8.high)};
  }
};
#else
struct Isa {
  using Ints = __m512i;
  using Floats = __m512;
  static constexpr int kLanes = 16;
  static Ints Load(const unsigned char* p) { return _mm512_load_si512(p); }
  static Floats Load(const float* p) { return _mm512_load_ps(p); }
  static void Store(float* p, Floats v) { _mm512_store_ps(p, v); }
  static Ints Broadcast(const unsigned char* p) {
    int v;
    __builtin_memcpy(&v, p, sizeof v);
    return _mm512_set1_epi32(v);
  }
  static Floats Broadcast(const float* p) { return _mm512_set1_ps(*p); }
  static Floats ToFloats(Ints v) { return _mm512_cvtepi32_ps(v); }
  static Floats Multiply(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
  static Floats MultiplyAdd(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
  static Ints AddProducts(Ints sum, Ints u8, Ints s8) { return _mm512_dpbusd_epi32(sum, u8, s8); }
};
#endif

}  // namespace
}  // namespace nvfp4

#include "cpu/gemm_vnni.h"

namespace nvfp4 {

const GemmKernels kAvx512VnniGemm{kRows, kColumns, kABytes,    kBBytes,        PackA,
                                  PackB, Tile,     FinishAvx2, PackDirectAvx2, DirectAvx2};

}  // namespace nvfp4
