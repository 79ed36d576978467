// csrc/cpu/gemm_avxvnni.cc: matmul with AVX-VNNI, 256 bits wide (Alder Lake, Zen 5 and later).
//
// With NVFP4_EMULATE_VNNI the instruction is made of AVX2 ones, so that a machine without it tests
// everything else.
#include <immintrin.h>

namespace nvfp4 {
namespace {

struct Isa {
  using Ints = __m256i;
  using Floats = __m256;
  static constexpr int kLanes = 8;
  static Ints Load(const unsigned char* p) {
    return _mm256_load_si256(reinterpret_cast<const Ints*>(p));
  }
  static Floats Load(const float* p) { return _mm256_load_ps(p); }
  static void Store(float* p, Floats v) { _mm256_store_ps(p, v); }
  static Ints Broadcast(const unsigned char* p) {
    int v;
    __builtin_memcpy(&v, p, sizeof v);
    return _mm256_set1_epi32(v);
  }
  static Floats Broadcast(const float* p) { return _mm256_broadcast_ss(p); }
  static Floats ToFloats(Ints v) { return _mm256_cvtepi32_ps(v); }
  static Floats Multiply(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
  static Floats MultiplyAdd(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
  static Ints AddProducts(Ints sum, Ints u8, Ints s8) {
#if defined(NVFP4_EMULATE_VNNI)
    return _mm256_add_epi32(sum,
                            _mm256_madd_epi16(_mm256_maddubs_epi16(u8, s8), _mm256_set1_epi16(1)));
#else
    return _mm256_dpbusd_avx_epi32(sum, u8, s8);
#endif
  }
};

}  // namespace
}  // namespace nvfp4

#include "cpu/gemm_vnni.h"

namespace nvfp4 {

const GemmKernels kAvxVnniGemm{kRows, kColumns, kABytes,    kBBytes,        PackA,
                               PackB, Tile,     FinishAvx2, PackDirectAvx2, DirectAvx2};

}  // namespace nvfp4
