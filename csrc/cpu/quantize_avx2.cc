// csrc/cpu/quantize_avx2.cc: amax, quantize and dequantize with AVX2, FMA and F16C; the bits of
// quantize_portable.cc.
//
// 16 values are one vector of bfloat16 or two of float32, the even and the odd elements. Codes are
// made in 16-bit lanes, in the order of the elements. Scales come first for a whole strip, then
// codes: in one pass the long chain amax, scale, division would stall the next block.
//
// Everything but the table has internal linkage: no other unit may end up with code that needs
// AVX2.
#include <immintrin.h>

#include <cstring>

#include "core/half.h"
#include "core/scale_layout.h"
#include "cpu/quantize.h"

namespace nvfp4 {
namespace {

// Vectors would otherwise pass through memory wherever the compiler finds a function too long.
#define NVFP4_INLINE [[gnu::always_inline]] inline

using Ints = __m256i;
using Floats = __m256;

NVFP4_INLINE Ints Set16(int x) { return _mm256_set1_epi16(static_cast<int16_t>(x)); }
NVFP4_INLINE Ints Set32(uint32_t x) { return _mm256_set1_epi32(static_cast<int32_t>(x)); }
NVFP4_INLINE Ints Set64(uint64_t x) { return _mm256_set1_epi64x(static_cast<int64_t>(x)); }
NVFP4_INLINE Ints BitsOf(Floats x) { return _mm256_castps_si256(x); }
NVFP4_INLINE Floats FloatsOf(Ints x) { return _mm256_castsi256_ps(x); }
NVFP4_INLINE Ints LoadInts(const void* p) {
  return _mm256_loadu_si256(static_cast<const Ints*>(p));
}
NVFP4_INLINE void StoreInts(void* p, Ints x) { _mm256_storeu_si256(static_cast<Ints*>(p), x); }
NVFP4_INLINE Floats LoadFloats(const void* p) {
  return _mm256_loadu_ps(static_cast<const float*>(p));
}
NVFP4_INLINE __m128i Low(Ints x) { return _mm256_castsi256_si128(x); }
NVFP4_INLINE __m128i High(Ints x) { return _mm256_extracti128_si256(x, 1); }

// 16-bit lanes: the lower halves of the 32-bit lanes of `even` and `odd`, and their upper halves.
NVFP4_INLINE Ints LowerHalves(Ints even, Ints odd) {
  return _mm256_blend_epi16(even, _mm256_slli_epi32(odd, 16), 0xAA);
}
NVFP4_INLINE Ints UpperHalves(Ints even, Ints odd) {
  return _mm256_blend_epi16(_mm256_srli_epi32(even, 16), odd, 0xAA);
}

// 16 values, the even and the odd elements.
struct Pair {
  Floats even, odd;
};

NVFP4_INLINE Pair Widen(Ints bf16) {
  return {FloatsOf(_mm256_slli_epi32(bf16, 16)),
          FloatsOf(_mm256_and_si256(bf16, Set32(0xFFFF0000u)))};
}

// ---- The two forms of 16 values in a strip. Magnitudes order like integers. ----

struct Bf16 {
  static constexpr int64_t kBytes = 32;
  Ints x;

  NVFP4_INLINE static Bf16 Load(const uint8_t* p) { return {LoadInts(p)}; }
  NVFP4_INLINE Bf16 Magnitude() const { return {_mm256_and_si256(x, Set16(0x7FFF))}; }
  NVFP4_INLINE Bf16 Min(Bf16 other) const { return {_mm256_min_epu16(x, other.x)}; }
  NVFP4_INLINE Bf16 Max(Bf16 other) const { return {_mm256_max_epu16(x, other.x)}; }
  NVFP4_INLINE Bf16 Flip(Bf16 signs) const { return {_mm256_xor_si256(x, signs.x)}; }
  NVFP4_INLINE Pair ToFloats() const { return Widen(x); }
  NVFP4_INLINE Ints Signs() const { return x; }  // bit 15 of each lane

  // The sign bit of the elements i for which bit i is set.
  NVFP4_INLINE static Bf16 SignMask(uint32_t bits) {
    const Ints at = _mm256_setr_epi16(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192,
                                      16384, -32768);
    return {_mm256_and_si256(
        _mm256_cmpeq_epi16(_mm256_and_si256(Set16(static_cast<int>(bits)), at), at),
        Set16(-32768))};
  }

  // A limit from below for magnitudes: float32 in pairs of lanes, in 32-bit lanes that are the same
  // for both.
  NVFP4_INLINE static Ints LimitOf(Floats x) {
    const Ints high = _mm256_srli_epi32(BitsOf(x), 16);
    return _mm256_or_si256(high, _mm256_slli_epi32(high, 16));
  }
  NVFP4_INLINE static Bf16 OneLimit(const uint32_t* limit) { return {Set32(*limit)}; }
  NVFP4_INLINE static Bf16 LimitPair(const uint32_t* limits) {
    return {_mm256_blend_epi16(LoadInts(limits), LoadInts(limits + 8), 0xAA)};
  }

  // The maxima of 8 blocks, as float32.
  NVFP4_INLINE static Ints Reduce(const Bf16 (&m)[8]) {
    auto max16 = [](Ints a, Ints b) {
      return _mm256_max_epu16(_mm256_unpacklo_epi16(a, b), _mm256_unpackhi_epi16(a, b));
    };
    auto max32 = [](Ints a, Ints b) {
      return _mm256_max_epu16(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
    };
    const Ints a = max32(max16(m[0].x, m[1].x), max16(m[2].x, m[3].x)),
               b = max32(max16(m[4].x, m[5].x), max16(m[6].x, m[7].x));
    const Ints c = _mm256_max_epu16(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b));
    return _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_max_epu16(Low(c), High(c))), 16);
  }
};

struct F32 {
  static constexpr int64_t kBytes = 64;
  Ints even, odd;

  NVFP4_INLINE static F32 Load(const uint8_t* p) { return {LoadInts(p), LoadInts(p + 32)}; }
  NVFP4_INLINE F32 Magnitude() const {
    return {_mm256_and_si256(even, Set32(0x7FFFFFFF)), _mm256_and_si256(odd, Set32(0x7FFFFFFF))};
  }
  NVFP4_INLINE F32 Min(F32 other) const {
    return {_mm256_min_epu32(even, other.even), _mm256_min_epu32(odd, other.odd)};
  }
  NVFP4_INLINE F32 Max(F32 other) const {
    return {_mm256_max_epu32(even, other.even), _mm256_max_epu32(odd, other.odd)};
  }
  NVFP4_INLINE F32 Flip(F32 signs) const {
    return {_mm256_xor_si256(even, signs.even), _mm256_xor_si256(odd, signs.odd)};
  }
  NVFP4_INLINE Pair ToFloats() const { return {FloatsOf(even), FloatsOf(odd)}; }
  NVFP4_INLINE Ints Signs() const { return UpperHalves(even, odd); }

  NVFP4_INLINE static F32 SignMask(uint32_t bits) {
    const Pair p = Bf16::SignMask(bits).ToFloats();
    return {BitsOf(p.even), BitsOf(p.odd)};
  }
  NVFP4_INLINE static Ints LimitOf(Floats x) { return BitsOf(x); }
  NVFP4_INLINE static F32 OneLimit(const uint32_t* limit) { return {Set32(*limit), Set32(*limit)}; }
  NVFP4_INLINE static F32 LimitPair(const uint32_t* limits) {
    return {LoadInts(limits), LoadInts(limits + 8)};
  }

  NVFP4_INLINE static Ints Reduce(const F32 (&m)[8]) {
    Ints v[8];
    for (int i = 0; i < 8; ++i) v[i] = _mm256_max_epu32(m[i].even, m[i].odd);
    auto max32 = [](Ints a, Ints b) {
      return _mm256_max_epu32(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
    };
    auto max64 = [](Ints a, Ints b) {
      return _mm256_max_epu32(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b));
    };
    const Ints a = max64(max32(v[0], v[1]), max32(v[2], v[3])),
               b = max64(max32(v[4], v[5]), max32(v[6], v[7]));
    return _mm256_max_epu32(_mm256_permute2x128_si256(a, b, 0x20),
                            _mm256_permute2x128_si256(a, b, 0x31));
  }
};

NVFP4_INLINE uint32_t MaxOf(Ints x) {
  __m128i m = _mm_max_epu32(Low(x), High(x));
  m = _mm_max_epu32(m, _mm_shuffle_epi32(m, 0x4E));
  m = _mm_max_epu32(m, _mm_shuffle_epi32(m, 0xB1));
  return static_cast<uint32_t>(_mm_cvtsi128_si32(m));
}

// ---- Hadamard transform ----

// Float32 to bfloat16 in 16-bit lanes, RNE. NaN may become any number.
NVFP4_INLINE Ints RoundToBf16(Pair x) {
  const Ints high = UpperHalves(BitsOf(x.even), BitsOf(x.odd)),
             low = LowerHalves(BitsOf(x.even), BitsOf(x.odd));
  // The carry of low + 0x7FFF + odd is bit 15 of an average, which does not overflow.
  const Ints odd = _mm256_and_si256(high, Set16(1));
  const Ints carry =
      _mm256_srli_epi16(_mm256_avg_epu16(low, _mm256_or_si256(odd, Set16(0x7FFE))), 15);
  return _mm256_add_epi16(high, carry);
}

// The transform along rows works on four blocks in step. One alone is a chain of some 40 cycles,
// and a CPU does not look far enough ahead to fill them with the next one.
constexpr int kStep = 4;

// Strides 1, 2 and 4. Element bit 0 says which vector of a pair, bits 1 and 2 the lane in a half,
// bit 3 the half. A shuffle swaps the vector's bit with one of the lane's, so that each stage is
// between vectors. After them bit 2 is the vector, bits 0 and 1 are the lane.
NVFP4_INLINE void HadamardRowStages(Pair (&x)[kStep]) {
#pragma GCC unroll 4
  for (Pair& p : x) p = {_mm256_add_ps(p.even, p.odd), _mm256_sub_ps(p.even, p.odd)};
#pragma GCC unroll 2
  for (int stage = 0; stage < 2; ++stage) {
#pragma GCC unroll 4
    for (Pair& p : x)
      p = {_mm256_shuffle_ps(p.even, p.odd, 0x88), _mm256_shuffle_ps(p.even, p.odd, 0xDD)};
#pragma GCC unroll 4
    for (Pair& p : x) p = {_mm256_add_ps(p.even, p.odd), _mm256_sub_ps(p.even, p.odd)};
  }
}

// Stride 8 and the factor, rounded to bfloat16 in the order of the elements.
NVFP4_INLINE void HadamardRowEnd(const Pair (&x)[kStep], Ints (&out)[kStep]) {
  // A product with +-1 is exact: one rounding.
  const Floats alternate = _mm256_setr_ps(1, 1, 1, 1, -1, -1, -1, -1),
               quarter = _mm256_set1_ps(0.25f);
  Floats y[2 * kStep];
#pragma GCC unroll 4
  for (int i = 0; i < kStep; ++i) {
    y[2 * i] =
        _mm256_fmadd_ps(x[i].even, alternate, _mm256_permute2f128_ps(x[i].even, x[i].even, 1));
    y[2 * i + 1] =
        _mm256_fmadd_ps(x[i].odd, alternate, _mm256_permute2f128_ps(x[i].odd, x[i].odd, 1));
  }
#pragma GCC unroll 8
  for (Floats& v : y) v = _mm256_mul_ps(v, quarter);
#pragma GCC unroll 4
  for (int i = 0; i < kStep; ++i) {
    // The order is 0, 4, 1, 5, 2, 6, 3, 7 in either half.
    const Ints order = _mm256_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15, 0, 1,
                                        4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
    out[i] = _mm256_shuffle_epi8(RoundToBf16({y[2 * i], y[2 * i + 1]}), order);
  }
}

// Two stages for four rows.
NVFP4_INLINE void Radix4(Floats (&x)[4]) {
  const Floats a = _mm256_add_ps(x[0], x[1]), b = _mm256_sub_ps(x[0], x[1]);
  const Floats c = _mm256_add_ps(x[2], x[3]), d = _mm256_sub_ps(x[2], x[3]);
  x[0] = _mm256_add_ps(a, c);
  x[1] = _mm256_add_ps(b, d);
  x[2] = _mm256_sub_ps(a, c);
  x[3] = _mm256_sub_ps(b, d);
}

using FloatTile = float[16][16];  // [row][8 even, 8 odd columns]

// Strides 1 and 2 of the transform along the columns of a tile.
template <class Form>
NVFP4_INLINE void HadamardColumnStages(const uint8_t* x, int64_t stride, uint32_t signs,
                                       FloatTile& tile) {
  for (int r = 0; r < 16; r += 4) {
    Floats even[4], odd[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const Pair p = Form::Load(x + (r + i) * stride).ToFloats();
      const Floats sign = FloatsOf(Set32((signs >> (r + i) & 1u) << 31));
      even[i] = _mm256_xor_ps(p.even, sign);
      odd[i] = _mm256_xor_ps(p.odd, sign);
    }
    Radix4(even);
    Radix4(odd);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      _mm256_store_ps(tile[r + i], even[i]);
      _mm256_store_ps(tile[r + i] + 8, odd[i]);
    }
  }
}

// A strip of transformed values.
class TransformedStrip {
 public:
  template <class Form>
  static void Rows(const Strip& strip, uint32_t mask, TransformedStrip& to) {
    const Form signs = Form::SignMask(mask);
    for (int64_t row = 0; row < kStripRows; row += kStep) {
      for (int64_t b = 0; b < strip.blocks; ++b) {
        Pair x[kStep];
        Ints y[kStep];
        const uint8_t* from = strip.x + row * strip.stride + b * Form::kBytes;
#pragma GCC unroll 4
        for (int i = 0; i < kStep; ++i)
          x[i] = Form::Load(from + i * strip.stride).Flip(signs).ToFloats();
        HadamardRowStages(x);
        HadamardRowEnd(x, y);
#pragma GCC unroll 4
        for (int i = 0; i < kStep; ++i) StoreInts(to.x_[row + i] + b * Bf16::kBytes, y[i]);
      }
    }
  }

  template <class Form>
  static void Columns(const Strip& strip, uint32_t signs, TransformedStrip& to) {
    const Floats quarter = _mm256_set1_ps(0.25f);
    for (int64_t b = 0; b < strip.blocks; ++b) {
      alignas(32) FloatTile tile;
      HadamardColumnStages<Form>(strip.x + b * Form::kBytes, strip.stride, signs, tile);
      for (int r = 0; r < 4; ++r) {
        Floats even[4], odd[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
          even[i] = LoadFloats(tile[r + 4 * i]);
          odd[i] = LoadFloats(tile[r + 4 * i] + 8);
        }
        Radix4(even);
        Radix4(odd);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i)
          StoreInts(to.x_[r + 4 * i] + b * Bf16::kBytes,
                    RoundToBf16({_mm256_mul_ps(even[i], quarter), _mm256_mul_ps(odd[i], quarter)}));
      }
    }
  }

  Strip Of(const Strip& strip) const {
    return {FloatType::kBf16, x_[0], sizeof x_[0], strip.rows, strip.blocks};
  }

 private:
  alignas(64) uint8_t x_[kStripRows][kStripColumns * 2 + 64];
};

// ---- amax ----

template <class Form>
uint32_t AmaxRows(const Strip& strip, uint32_t mask) {
  const Form signs = Form::SignMask(mask);
  const Floats magnitude = FloatsOf(Set32(0x7FFFFFFF));
  Ints largest = _mm256_setzero_si256();
  for (int64_t row = 0; row < strip.rows; row += kStep) {  // rows past the last one are zeros
    for (int64_t b = 0; b < strip.blocks; ++b) {
      Pair x[kStep];
      const uint8_t* from = strip.x + row * strip.stride + b * Form::kBytes;
#pragma GCC unroll 4
      for (int i = 0; i < kStep; ++i)
        x[i] = Form::Load(from + i * strip.stride).Flip(signs).ToFloats();
      HadamardRowStages(x);
      // Of the last stage's a + b and a - b the larger magnitude is |a| + |b|.
#pragma GCC unroll 4
      for (const Pair& p : x) {
        const Floats a = _mm256_permute2f128_ps(p.even, p.odd, 0x20),
                     b2 = _mm256_permute2f128_ps(p.even, p.odd, 0x31);
        const Floats sum = _mm256_add_ps(_mm256_and_ps(a, magnitude), _mm256_and_ps(b2, magnitude));
        largest = _mm256_max_epu32(largest, BitsOf(sum));
      }
    }
  }
  // The factor and the rounding are monotonic.
  return MagnitudeBits(nvfp4::RoundToBf16(FloatOf(MaxOf(largest)) * 0.25f));
}

template <class Form>
uint32_t AmaxColumns(const Strip& strip, uint32_t signs) {
  const Floats magnitude = FloatsOf(Set32(0x7FFFFFFF));
  Ints largest = _mm256_setzero_si256();
  for (int64_t b = 0; b < strip.blocks; ++b) {
    alignas(32) FloatTile tile;
    HadamardColumnStages<Form>(strip.x + b * Form::kBytes, strip.stride, signs, tile);
    for (int r = 0; r < 4; ++r) {
      for (int half = 0; half < 16; half += 8) {
        const Floats x0 = LoadFloats(tile[r] + half), x1 = LoadFloats(tile[r + 4] + half);
        const Floats x2 = LoadFloats(tile[r + 8] + half), x3 = LoadFloats(tile[r + 12] + half);
        const Floats a = _mm256_add_ps(x0, x1), c = _mm256_add_ps(x2, x3),
                     d = _mm256_sub_ps(x0, x1), e = _mm256_sub_ps(x2, x3);
        const Floats sum = _mm256_add_ps(_mm256_and_ps(a, magnitude), _mm256_and_ps(c, magnitude));
        const Floats difference =
            _mm256_add_ps(_mm256_and_ps(d, magnitude), _mm256_and_ps(e, magnitude));
        largest = _mm256_max_epu32(largest, _mm256_max_epu32(BitsOf(sum), BitsOf(difference)));
      }
    }
  }
  return MagnitudeBits(nvfp4::RoundToBf16(FloatOf(MaxOf(largest)) * 0.25f));
}

uint32_t AmaxRows(const Strip& strip, uint32_t signs) {
  return strip.type == FloatType::kBf16 ? AmaxRows<Bf16>(strip, signs)
                                        : AmaxRows<F32>(strip, signs);
}

uint32_t AmaxColumns(const Strip& strip, uint32_t signs) {
  return strip.type == FloatType::kBf16 ? AmaxColumns<Bf16>(strip, signs)
                                        : AmaxColumns<F32>(strip, signs);
}

// Four vectors at a time, each with a maximum of its own.
template <class Max>
NVFP4_INLINE Ints AmaxOf(const uint8_t* x, int64_t size, Ints magnitude, const Max& max) {
  Ints m[4] = {};
  int64_t i = 0;
  for (; i + 128 <= size; i += 128) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j)
      m[j] = max(m[j], _mm256_and_si256(LoadInts(x + i + 32 * j), magnitude));
  }
  for (; i < size; i += 32) {
    Ints last = _mm256_setzero_si256();
    memcpy(&last, x + i, size - i < 32 ? size - i : 32);
    m[0] = max(m[0], _mm256_and_si256(last, magnitude));
  }
  return max(max(m[0], m[1]), max(m[2], m[3]));
}

uint32_t Amax(FloatType type, const void* x, int64_t n) {
  auto* bytes = static_cast<const uint8_t*>(x);
  if (type == FloatType::kF32)
    return MaxOf(AmaxOf(bytes, 4 * n, Set32(0x7FFFFFFF),
                        [](Ints a, Ints b) { return _mm256_max_epu32(a, b); }));
  const Ints m =
      AmaxOf(bytes, 2 * n, Set16(0x7FFF), [](Ints a, Ints b) { return _mm256_max_epu16(a, b); });
  const uint32_t largest =
      MaxOf(_mm256_max_epu32(_mm256_srli_epi32(m, 16), _mm256_and_si256(m, Set32(0xFFFF))));
  const uint16_t half = static_cast<uint16_t>(largest);
  return MagnitudeBits(type == FloatType::kBf16 ? FloatOfBf16(half) : FloatOfF16(half));
}

// ---- Scales ----

// What the blocks of a strip are quantized with, 8 (a vector) at a time, in any order.
struct BlockScales {
  alignas(32) uint32_t amax[256];
  alignas(32) float encode[256];    // BlockEncode, times a power of two
  alignas(32) uint32_t limit[256];  // as Form::LimitOf gives it: larger magnitudes have code 7
  alignas(32) uint8_t byte[256];
};

// Encode factors are halved for RNE, and times 2^-14 for SR: what the first step of either would
// be. That is exact but for tensors near FLT_MAX.
constexpr float kNearestFactor = 0.5f, kStochasticFactor = 0x1p-14f;
bool IsExact(const TensorScale& tensor) { return tensor.finite_decode < 0x1p100f; }

// Of n blocks, a multiple of 16. Two vectors go in step, since one is a long chain (see
// HadamardRowStages).
template <class Form, bool kStochastic>
void ComputeScales(const TensorScale& tensor, int64_t n, BlockScales& s) {
  const Floats factor = _mm256_set1_ps(tensor.block_factor),
               tensor_decode = _mm256_set1_ps(tensor.finite_decode);
  for (int64_t first = 0; first < n; first += 16) {
    Floats sum[2], magic[2], power[2], decode[2], encode[2];
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      const Floats amax = _mm256_load_ps(reinterpret_cast<const float*>(s.amax + first + 8 * i));
      const Floats scale = _mm256_min_ps(
          _mm256_mul_ps(amax, factor), _mm256_set1_ps(kE4M3Max));  // of a NaN min gives the second
      // The scale's power of two, at least 2^-6, times 1.5 * 2^20 has steps of a unit of E4M3: the
      // sum is rounded to them, and its low bits count them (8 .. 16, or 0 .. 8 below 2^-6).
      power[i] =
          _mm256_max_ps(_mm256_and_ps(scale, FloatsOf(Set32(0x7F800000))), _mm256_set1_ps(0x1p-6f));
      magic[i] = _mm256_mul_ps(power[i], _mm256_set1_ps(0x1.8p20f));
      sum[i] = _mm256_add_ps(scale, magic[i]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      decode[i] = _mm256_mul_ps(_mm256_sub_ps(sum[i], magic[i]), tensor_decode);
      encode[i] =
          _mm256_min_ps(_mm256_div_ps(_mm256_set1_ps(1.0f), decode[i]), _mm256_set1_ps(kFloatMax));
    }
    Ints byte[2];
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      const Ints count = _mm256_sub_epi32(BitsOf(sum[i]), BitsOf(magic[i]));
      const Ints exponent =
          _mm256_sub_epi32(_mm256_srli_epi32(BitsOf(power[i]), 20), Set32((127 - 6) << 3));
      byte[i] = _mm256_add_epi32(count, exponent);
      // Where x * encode is about 7, also where encode is FLT_MAX. A bfloat16 limit is cut, to no
      // less than 6.9.
      const Floats limit = _mm256_max_ps(_mm256_mul_ps(decode[i], _mm256_set1_ps(7.0f)),
                                         _mm256_set1_ps(7.0f / kFloatMax));
      StoreInts(s.limit + first + 8 * i, Form::LimitOf(limit));
      _mm256_store_ps(s.encode + first + 8 * i,
                      _mm256_mul_ps(encode[i], _mm256_set1_ps(kStochastic ? kStochasticFactor
                                                                          : kNearestFactor)));
    }
    const Ints words = _mm256_permute4x64_epi64(_mm256_packus_epi32(byte[0], byte[1]), 0xD8);
    _mm_store_si128(reinterpret_cast<__m128i*>(s.byte + first),
                    _mm_packus_epi16(Low(words), High(words)));
  }
}

// ---- Codes ----

// 16 codes without signs in 16-bit lanes, from magnitudes up to 7 / encode.
NVFP4_INLINE Ints EncodeNearest(Pair magnitude, Pair encode) {
  // Half of y has an integer part of 0, 1, 2 or 3. It says how large a step of E2M1 is: for each a
  // float whose own step that is. The sum then is y rounded to even in its lowest bits, which hold
  // nothing else; what must be added to get from a count of steps to a code is even and can come
  // with it. The last one swallows y and leaves code 7.
  const __m128 table =
      _mm_setr_ps(0x1.8p21f, 0x1.8p22f + 1.0f, 0x1.8p23f + 4.0f, 0x1.8p27f + 7 * 16.0f);
  const Floats magic = _mm256_set_m128(table, table);
  const Floats even = _mm256_mul_ps(magnitude.even, encode.even),
               odd = _mm256_mul_ps(magnitude.odd, encode.odd);
  return LowerHalves(
      BitsOf(_mm256_add_ps(even, _mm256_permutevar_ps(magic, _mm256_cvttps_epi32(even)))),
      BitsOf(_mm256_add_ps(odd, _mm256_permutevar_ps(magic, _mm256_cvttps_epi32(odd)))));
}

// The same with `random`, nine bits in each lane (core/stochastic.h).
NVFP4_INLINE Ints EncodeStochastic(Pair magnitude, Pair encode, Ints random) {
  const __m128i even =
      _mm256_cvtps_ph(_mm256_mul_ps(magnitude.even, encode.even), _MM_FROUND_TO_NEAREST_INT);
  const __m128i odd =
      _mm256_cvtps_ph(_mm256_mul_ps(magnitude.odd, encode.odd), _MM_FROUND_TO_NEAREST_INT);
  const Ints half = _mm256_set_m128i(_mm_unpackhi_epi16(even, odd), _mm_unpacklo_epi16(even, odd));
  const Ints clamped = _mm256_min_epu16(half, Set16(0x0E00));  // 6 * 2^-14; NaN and Inf are above
  return _mm256_srli_epi16(_mm256_add_epi16(clamped, random), kRandomBits);
}

NVFP4_INLINE Ints WithSigns(Ints codes, Ints signs) {
  return _mm256_or_si256(codes, _mm256_and_si256(_mm256_srli_epi16(signs, 12), Set16(8)));
}

// ---- Random bits ----

// Philox for 16 consecutive rows of the quantized matrix at one block. A 64-bit lane holds a word
// in its lower half, as the multiplication reads it; its upper half is arbitrary. Lane i of vector
// s is row 4 i + s.
class RandomTile {
 public:
  using Words = Ints[4][4];  // [word][s]

  RandomTile(const uint32_t key[2], uint32_t stream) : stream_(stream) {
    for (uint32_t round = 0; round < kRounds; ++round) {
      key_[round][0] = Set64(key[0] + round * 0x9E3779B9u);
      key_[round][1] = Set64(key[1] + round * 0xBB67AE85u);
    }
  }

  // The rows must agree in their upper 32 bits.
  NVFP4_INLINE void Generate(int64_t row, int64_t block, Words& words) const {
    const Ints multiplier0 = Set64(kMultiplier0), multiplier1 = Set64(kMultiplier1);
    // Only word 1 of the counter, the row, differs between lanes. So most of the first rounds is
    // the same for all.
    const uint64_t product10 = Product(kMultiplier0, block),
                   product11 = Product(kMultiplier1, row >> 32);
    const uint64_t x10 = product11 >> 32 ^ Key(0, 0), x12 = product10 >> 32 ^ stream_ ^ Key(0, 1);
    const uint64_t product21 = Product(kMultiplier1, x12);
    const uint64_t x20 = product21 >> 32 ^ product11 ^ Key(1, 0), x22 = product10 ^ Key(1, 1);
    const uint64_t product30 = Product(kMultiplier0, x20);
    const Ints x30 = Set64(product21 ^ Key(2, 0)), x32 = Set64(product30 >> 32 ^ Key(2, 1));
    const Ints rows =
        _mm256_add_epi64(Set64(static_cast<uint32_t>(row)), _mm256_setr_epi64x(0, 4, 8, 12));
    Ints c0[4], c1[4], c2[4], c3[4];
#pragma GCC unroll 4
    for (int s = 0; s < 4; ++s) {
      const Ints c = _mm256_xor_si256(_mm256_add_epi64(rows, Set64(s)), Set64(x10));
      const Ints p0 = _mm256_mul_epu32(c, multiplier0);
      const Ints p1 =
          _mm256_mul_epu32(_mm256_xor_si256(_mm256_srli_epi64(p0, 32), Set64(x22)), multiplier1);
      c0[s] = _mm256_xor_si256(_mm256_srli_epi64(p1, 32), x30);
      c1[s] = p1;
      c2[s] = _mm256_xor_si256(p0, x32);
      c3[s] = Set64(product30);
    }
#pragma GCC unroll 7
    for (int round = 3; round < kRounds; ++round) {
#pragma GCC unroll 4
      for (int s = 0; s < 4; ++s) {
        const Ints p0 = _mm256_mul_epu32(c0[s], multiplier0),
                   p1 = _mm256_mul_epu32(c2[s], multiplier1);
        c0[s] =
            _mm256_xor_si256(_mm256_srli_epi64(p1, 32), _mm256_xor_si256(c1[s], key_[round][0]));
        c2[s] =
            _mm256_xor_si256(_mm256_srli_epi64(p0, 32), _mm256_xor_si256(c3[s], key_[round][1]));
        c1[s] = p1;
        c3[s] = p0;
      }
    }
#pragma GCC unroll 4
    for (int s = 0; s < 4; ++s) {
      words[0][s] = c0[s];
      words[1][s] = c1[s];
      words[2][s] = c2[s];
      words[3][s] = c3[s];
    }
  }

  static bool RowsAgree(int64_t row, int64_t n) { return row >> 32 == (row + n - 1) >> 32; }

 private:
  static constexpr int kRounds = 10;
  static constexpr uint32_t kMultiplier0 = 0xD2511F53u, kMultiplier1 = 0xCD9E8D57u;
  static uint64_t Product(uint32_t multiplier, uint64_t x) {
    return uint64_t{multiplier} * static_cast<uint32_t>(x);
  }
  uint64_t Key(int round, int i) const {
    return static_cast<uint64_t>(_mm256_extract_epi64(key_[round][i], 0));
  }

  Ints key_[kRounds][2];
  uint32_t stream_;
};

// The lower halves of the 64-bit lanes of a and of b, alternating.
NVFP4_INLINE Ints Interleave32(Ints a, Ints b) {
  return _mm256_blend_epi32(a, _mm256_slli_epi64(b, 32), 0xAA);
}

// ---- Along rows ----

using BlockWords = uint32_t[4];

// The words of 16 rows, for every block of a strip: words[row][block].
void FillRandom(const RandomTile& random, int64_t row, int64_t block, int64_t blocks,
                BlockWords (*words)[kStripBlocks]) {
  for (int64_t b = 0; b < blocks; ++b) {
    RandomTile::Words w;
    random.Generate(row, block + b, w);
#pragma GCC unroll 4
    for (int s = 0; s < 4; ++s) {
      const Ints first = Interleave32(w[0][s], w[1][s]), second = Interleave32(w[2][s], w[3][s]);
      const Ints even = _mm256_unpacklo_epi64(first, second),
                 odd = _mm256_unpackhi_epi64(first, second);  // rows s, s + 8 | ...
      auto* to = &words[s][b];
      _mm_store_si128(reinterpret_cast<__m128i*>(to), Low(even));
      _mm_store_si128(reinterpret_cast<__m128i*>(to + 4 * kStripBlocks), Low(odd));
      _mm_store_si128(reinterpret_cast<__m128i*>(to + 8 * kStripBlocks), High(even));
      _mm_store_si128(reinterpret_cast<__m128i*>(to + 12 * kStripBlocks), High(odd));
    }
  }
}

// The nine bits of a block's elements, in 16-bit lanes.
NVFP4_INLINE Ints ElementBits(const BlockWords& words) {
  const Floats all = _mm256_broadcast_ps(reinterpret_cast<const __m128*>(words));
  const Ints twice = BitsOf(_mm256_permutevar_ps(all, _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3)));
  return _mm256_and_si256(_mm256_srlv_epi32(twice, _mm256_setr_epi32(0, 7, 0, 7, 0, 7, 0, 7)),
                          Set32(0x01FF01FF));
}

// Four blocks of codes without signs in 16-bit lanes, and their signs: 8 bytes each.
NVFP4_INLINE Ints PackCodes(const Ints (&codes)[4], const Ints (&signs)[4]) {
  auto two = [&](int i) {
    const Ints code = _mm256_packus_epi16(codes[i], codes[i + 1]);
    const Ints sign = _mm256_and_si256(_mm256_packs_epi16(signs[i], signs[i + 1]),
                                       _mm256_set1_epi8(static_cast<char>(0x80)));
    // low + 16 * high
    return _mm256_maddubs_epi16(_mm256_or_si256(code, _mm256_srli_epi16(sign, 4)), Set16(0x1001));
  };
  return _mm256_permutevar8x32_epi32(_mm256_packus_epi16(two(0), two(2)),
                                     _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

// Eight blocks that lie `step` bytes apart and whose scales and words are `every` apart.
template <class Form>
NVFP4_INLINE Ints AmaxOfEight(const uint8_t* x, int64_t step) {
  Form m[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) m[i] = Form::Load(x + i * step).Magnitude();
  return Form::Reduce(m);
}

template <class Form, bool kStochastic>
NVFP4_INLINE void EncodeEight(const uint8_t* x, int64_t step, const BlockScales& scales,
                              int64_t first, int64_t every, const BlockWords* words,
                              Ints (&out)[2]) {
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {
    Ints codes[4], signs[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const int i = 4 * half + j;
      const int64_t at = first + i * every;
      const Form v = Form::Load(x + i * step), magnitude = v.Magnitude();
      const Floats factor = _mm256_broadcast_ss(scales.encode + at);
      if constexpr (kStochastic) {
        codes[j] = EncodeStochastic(magnitude.ToFloats(), {factor, factor}, ElementBits(words[at]));
      } else {
        codes[j] = EncodeNearest(magnitude.Min(Form::OneLimit(scales.limit + at)).ToFloats(),
                                 {factor, factor});
      }
      signs[j] = v.Signs();
    }
    out[half] = PackCodes(codes, signs);
  }
}

// Blocks go by eights along a row. What is left over goes by eights down a column of blocks.
template <class Form, bool kStochastic>
void RowsOf(const QuantizeSpec& spec, const Strip& strip, int64_t row, int64_t block,
            uint8_t* codes, int64_t codes_stride, uint8_t* scales) {
  const int64_t along = strip.blocks / 8 * 8;
  BlockScales s;
  for (int64_t r = 0; r < strip.rows; ++r) {
    for (int64_t b = 0; b < along; b += 8)
      StoreInts(s.amax + r * kStripBlocks + b,
                AmaxOfEight<Form>(strip.x + r * strip.stride + b * Form::kBytes, Form::kBytes));
    for (int64_t b = along; b < kStripBlocks; b += 8)
      StoreInts(s.amax + r * kStripBlocks + b, _mm256_setzero_si256());
  }
  for (int64_t b = along; b < strip.blocks; ++b) {
    for (int64_t r = 0; r < strip.rows; r += 8) {
      alignas(32) uint32_t amax[8];
      StoreInts(amax,
                AmaxOfEight<Form>(strip.x + r * strip.stride + b * Form::kBytes, strip.stride));
      for (int64_t i = 0; i < 8; ++i) s.amax[(r + i) * kStripBlocks + b] = amax[i];
    }
  }
  if (spec.tile16) {
    for (int64_t b = 0; b < kStripBlocks; b += 8) {
      Ints largest = LoadInts(s.amax + b);
      for (int64_t r = 1; r < strip.rows; ++r)
        largest = _mm256_max_epu32(largest, LoadInts(s.amax + r * kStripBlocks + b));
      for (int64_t r = 0; r < strip.rows; ++r) StoreInts(s.amax + r * kStripBlocks + b, largest);
    }
  }
  ComputeScales<Form, kStochastic>(spec.scale, strip.rows * kStripBlocks, s);
  for (int64_t r = 0; r < strip.rows; ++r) {
    for (int64_t b = 0; b < strip.blocks; b += kTileBlocks)
      memcpy(scales + b / kTileBlocks * kTileBytes + r * kStripRows, s.byte + r * kStripBlocks + b,
             kTileBlocks);
  }
  alignas(32) BlockWords words[kStochastic ? kStripRows : 1][kStripBlocks];
  if constexpr (kStochastic)
    FillRandom(RandomTile(spec.key, kStreamRows), row, block, strip.blocks, words);
  for (int64_t r = 0; r < strip.rows; ++r) {
    for (int64_t b = 0; b < along; b += 8) {
      Ints out[2];
      EncodeEight<Form, kStochastic>(strip.x + r * strip.stride + b * Form::kBytes, Form::kBytes, s,
                                     r * kStripBlocks + b, 1, words[0], out);
      uint8_t* to = codes + r * codes_stride + b * (kBlock / 2);
      StoreInts(to, out[0]);
      StoreInts(to + 32, out[1]);
    }
  }
  for (int64_t b = along; b < strip.blocks; ++b) {
    for (int64_t r = 0; r < strip.rows; r += 8) {
      Ints out[2];
      EncodeEight<Form, kStochastic>(strip.x + r * strip.stride + b * Form::kBytes, strip.stride, s,
                                     r * kStripBlocks + b, kStripBlocks, words[0], out);
      const int64_t rows = strip.rows - r < 8 ? strip.rows - r : 8;
      for (int64_t i = 0; i < rows; ++i)
        memcpy(codes + (r + i) * codes_stride + b * (kBlock / 2),
               reinterpret_cast<const uint8_t*>(out) + i * 8, 8);
    }
  }
}

// ---- Along columns: the 16 columns of a tile are lanes ----

// 16-bit lanes are columns; the four codes in each of w[g] are rows 4 g .. 4 g + 3.
NVFP4_INLINE void StoreColumns(const Ints (&w)[4], uint8_t* codes, int64_t stride) {
  const Ints a = _mm256_unpacklo_epi16(w[0], w[1]), b = _mm256_unpackhi_epi16(w[0], w[1]);
  const Ints c = _mm256_unpacklo_epi16(w[2], w[3]), d = _mm256_unpackhi_epi16(w[2], w[3]);
  // Columns 2 i and 2 i + 1, then 8 more.
  const Ints q[4] = {_mm256_unpacklo_epi32(a, c), _mm256_unpackhi_epi32(a, c),
                     _mm256_unpacklo_epi32(b, d), _mm256_unpackhi_epi32(b, d)};
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    auto* to = codes + 2 * i * stride;
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to), Low(q[i]));
    _mm_storeh_pd(reinterpret_cast<double*>(to + stride), _mm_castsi128_pd(Low(q[i])));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to + 8 * stride), High(q[i]));
    _mm_storeh_pd(reinterpret_cast<double*>(to + 9 * stride), _mm_castsi128_pd(High(q[i])));
  }
}

// The amax of each column of a tile: the 8 even ones, then the 8 odd ones.
template <class Form>
NVFP4_INLINE void AmaxOfColumns(const uint8_t* x, int64_t stride, bool tile16, uint32_t* amax) {
  Form largest = Form::Load(x).Magnitude();
#pragma GCC unroll 15
  for (int r = 1; r < 16; ++r) largest = largest.Max(Form::Load(x + r * stride).Magnitude());
  const Pair pair = largest.ToFloats();
  Ints even = BitsOf(pair.even), odd = BitsOf(pair.odd);
  if (tile16) even = odd = Set32(MaxOf(_mm256_max_epu32(even, odd)));
  StoreInts(amax, even);
  StoreInts(amax + 8, odd);
}

template <class Form, bool kStochastic>
void ColumnsOf(const QuantizeSpec& spec, const Strip& strip, int64_t row, int64_t block,
               uint8_t* codes, int64_t codes_stride, uint8_t* scales) {
  BlockScales s;
  for (int64_t b = 0; b < strip.blocks; ++b)
    AmaxOfColumns<Form>(strip.x + b * Form::kBytes, strip.stride, spec.tile16, s.amax + b * kBlock);
  ComputeScales<Form, kStochastic>(spec.scale, strip.blocks * kBlock, s);
  for (int64_t b = 0; b < strip.blocks; ++b) {
    const __m128i both = _mm_load_si128(
        reinterpret_cast<const __m128i*>(s.byte + b * kBlock));  // 8 even ones, 8 odd ones
    _mm_storeu_si128(reinterpret_cast<__m128i*>(scales + b * kBlock),
                     _mm_unpacklo_epi8(both, _mm_srli_si128(both, 8)));
  }
  const RandomTile random(spec.key, kStreamColumns);
  for (int64_t b = 0; b < strip.blocks; ++b) {
    const uint8_t* x = strip.x + b * Form::kBytes;
    const Pair encode{LoadFloats(s.encode + b * kBlock), LoadFloats(s.encode + b * kBlock + 8)};
    [[maybe_unused]] const Form limit = Form::LimitPair(s.limit + b * kBlock);
    [[maybe_unused]] Ints low[4], high[4];  // the halves of each word
    if constexpr (kStochastic) {
      RandomTile::Words words;
      random.Generate(row + b * kBlock, block, words);
#pragma GCC unroll 4
      for (int w = 0; w < 4; ++w) {
        const Ints even_words = Interleave32(words[w][0], words[w][2]),
                   odd_words = Interleave32(words[w][1], words[w][3]);
        low[w] = LowerHalves(even_words, odd_words);
        high[w] = UpperHalves(even_words, odd_words);
      }
    }
    Ints w[4];
#pragma GCC unroll 4
    for (int g = 0; g < 4; ++g) {
      w[g] = _mm256_setzero_si256();
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        const Form v = Form::Load(x + (4 * g + i) * strip.stride), magnitude = v.Magnitude();
        Ints code;
        if constexpr (kStochastic) {
          const Ints half = i % 2 == 0 ? low[g] : high[g];
          code = EncodeStochastic(
              magnitude.ToFloats(), encode,
              i < 2 ? _mm256_and_si256(half, Set16(0x1FF)) : _mm256_srli_epi16(half, 7));
        } else {
          code = EncodeNearest(magnitude.Min(limit).ToFloats(), encode);
        }
        w[g] = _mm256_or_si256(w[g], _mm256_slli_epi16(WithSigns(code, v.Signs()), 4 * i));
      }
    }
    StoreColumns(w, codes + b * kBlock * codes_stride, codes_stride);
  }
}

// ---- The table ----

void Rows(const QuantizeSpec& spec, const Strip& strip, int64_t row, int64_t block, uint8_t* codes,
          int64_t codes_stride, uint8_t* scales) {
  if (!IsExact(spec.scale) || !RandomTile::RowsAgree(row, kStripRows))
    return PortableQuantizeKernels().rows(spec, strip, row, block, codes, codes_stride, scales);
  const bool bf16 = strip.type == FloatType::kBf16;
  Strip from = strip;
  TransformedStrip transformed;
  if (spec.hadamard) {
    bf16 ? TransformedStrip::Rows<Bf16>(strip, spec.signs, transformed)
         : TransformedStrip::Rows<F32>(strip, spec.signs, transformed);
    from = transformed.Of(strip);
  }
  auto* rows = from.type == FloatType::kBf16
                   ? (spec.stochastic ? RowsOf<Bf16, true> : RowsOf<Bf16, false>)
                   : (spec.stochastic ? RowsOf<F32, true> : RowsOf<F32, false>);
  rows(spec, from, row, block, codes, codes_stride, scales);
}

void Columns(const QuantizeSpec& spec, const Strip& strip, int64_t row, int64_t block,
             uint8_t* codes, int64_t codes_stride, uint8_t* scales) {
  if (!IsExact(spec.scale) || !RandomTile::RowsAgree(row, strip.blocks * kBlock))
    return PortableQuantizeKernels().columns(spec, strip, row, block, codes, codes_stride, scales);
  const bool bf16 = strip.type == FloatType::kBf16;
  Strip from = strip;
  TransformedStrip transformed;
  if (spec.hadamard) {
    bf16 ? TransformedStrip::Columns<Bf16>(strip, spec.signs, transformed)
         : TransformedStrip::Columns<F32>(strip, spec.signs, transformed);
    from = transformed.Of(strip);
  }
  auto* columns = from.type == FloatType::kBf16
                      ? (spec.stochastic ? ColumnsOf<Bf16, true> : ColumnsOf<Bf16, false>)
                      : (spec.stochastic ? ColumnsOf<F32, true> : ColumnsOf<F32, false>);
  columns(spec, from, row, block, codes, codes_stride, scales);
}

// 8 float32 and the 8 after them to the 8 even and the 8 odd ones.
NVFP4_INLINE void StoreEvenOdd(Floats first, Floats second, float* to) {
  const Floats a = _mm256_permute2f128_ps(first, second, 0x20),
               b = _mm256_permute2f128_ps(first, second, 0x31);
  _mm256_store_ps(to, _mm256_shuffle_ps(a, b, 0x88));
  _mm256_store_ps(to + 8, _mm256_shuffle_ps(a, b, 0xDD));
}

NVFP4_INLINE void LoadBlock(FloatType type, const uint8_t* x, void* block) {
  if (type == FloatType::kBf16) {
    StoreInts(block, LoadInts(x));
  } else if (type == FloatType::kF32) {
    StoreEvenOdd(LoadFloats(x), LoadFloats(x + 32), static_cast<float*>(block));
  } else {
    const Ints half = LoadInts(x);
    StoreEvenOdd(_mm256_cvtph_ps(Low(half)), _mm256_cvtph_ps(High(half)),
                 static_cast<float*>(block));
  }
}

template <FloatType kType>
void LoadRow(const uint8_t* x, int64_t n, uint8_t* row) {
  constexpr int64_t kFrom = kType == FloatType::kF32 ? 64 : 32,
                    kTo = kType == FloatType::kBf16 ? 32 : 64;
  for (; n >= kBlock; n -= kBlock, x += kFrom, row += kTo) LoadBlock(kType, x, row);
  if (n > 0) {
    alignas(32) uint8_t block[kFrom] = {};
    memcpy(block, x, n * (kFrom / kBlock));
    LoadBlock(kType, block, row);
  }
}

void Load(FloatType type, const void* x, int64_t n, void* row) {
  auto* load = type == FloatType::kBf16  ? LoadRow<FloatType::kBf16>
               : type == FloatType::kF32 ? LoadRow<FloatType::kF32>
                                         : LoadRow<FloatType::kF16>;
  load(static_cast<const uint8_t*>(x), n, static_cast<uint8_t*>(row));
}

// ---- Dequantize ----

// E2M1 codes in the low nibbles of 32-bit lanes.
NVFP4_INLINE Floats DecodeE2M1(Ints codes) {
  const Floats table = _mm256_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f);
  const Ints sign = _mm256_slli_epi32(_mm256_and_si256(codes, Set32(8)), 28);
  return _mm256_xor_ps(_mm256_permutevar8x32_ps(table, codes), FloatsOf(sign));
}

// Float32 to bfloat16 in the lower halves of the lanes, RNE; NaN stays NaN.
NVFP4_INLINE Ints Bf16Of(Floats x) {
  const Ints high = _mm256_srli_epi32(BitsOf(x), 16), odd = _mm256_and_si256(high, Set32(1));
  const Ints rounded =
      _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(BitsOf(x), Set32(0x7FFF)), odd), 16);
  const Ints nan = _mm256_or_si256(high, Set32(0x40));
  return _mm256_blendv_epi8(rounded, nan, BitsOf(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
}

NVFP4_INLINE void DequantizeBlock(const uint8_t* codes, float scale, FloatType type, void* out) {
  const Ints bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes)));
  const Floats s = _mm256_set1_ps(scale);
  const Floats even = _mm256_mul_ps(DecodeE2M1(bytes), s),
               odd = _mm256_mul_ps(DecodeE2M1(_mm256_srli_epi32(bytes, 4)), s);
  if (type == FloatType::kBf16) {
    StoreInts(out, _mm256_or_si256(Bf16Of(even), _mm256_slli_epi32(Bf16Of(odd), 16)));
    return;
  }
  if (type == FloatType::kF16) {
    const __m128i e = _mm256_cvtps_ph(even, _MM_FROUND_TO_NEAREST_INT),
                  o = _mm256_cvtps_ph(odd, _MM_FROUND_TO_NEAREST_INT);
    StoreInts(out, _mm256_set_m128i(_mm_unpackhi_epi16(e, o), _mm_unpacklo_epi16(e, o)));
    return;
  }
  const Floats a = _mm256_unpacklo_ps(even, odd), b = _mm256_unpackhi_ps(even, odd);
  _mm256_storeu_ps(static_cast<float*>(out), _mm256_permute2f128_ps(a, b, 0x20));
  _mm256_storeu_ps(static_cast<float*>(out) + 8, _mm256_permute2f128_ps(a, b, 0x31));
}

template <FloatType kType>
void DequantizeRow(const uint8_t* codes, const uint8_t* scales, float global_scale, int64_t n,
                   uint8_t* out) {
  constexpr int64_t kBytes = kType == FloatType::kF32 ? 64 : 32;
  for (; n > 0; n -= kBlock, codes += kBlock / 2, ++scales, out += kBytes) {
    const float scale = DecodeE4M3(*scales) * global_scale;
    if (n >= kBlock) {
      DequantizeBlock(codes, scale, kType, out);
    } else {
      alignas(32) uint8_t block[kBytes];
      DequantizeBlock(codes, scale, kType, block);
      memcpy(out, block, n * (kBytes / kBlock));
    }
  }
}

void Dequantize(const uint8_t* codes, const uint8_t* scales, float global_scale, int64_t n,
                FloatType type, void* out) {
  auto* dequantize = type == FloatType::kBf16  ? DequantizeRow<FloatType::kBf16>
                     : type == FloatType::kF32 ? DequantizeRow<FloatType::kF32>
                                               : DequantizeRow<FloatType::kF16>;
  dequantize(codes, scales, global_scale, n, static_cast<uint8_t*>(out));
}

}  // namespace

const QuantizeKernels& Avx2QuantizeKernels() {
  static constexpr QuantizeKernels kKernels{Load, Amax,    AmaxRows,  AmaxColumns,
                                            Rows, Columns, Dequantize};
  return kKernels;
}

}  // namespace nvfp4
