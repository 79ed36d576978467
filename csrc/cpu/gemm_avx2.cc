// csrc/cpu/gemm_avx2.cc: matmul with AVX2: products of unsigned and signed bytes, and a block's sum
// in 16-bit lanes.
//
// A lane is a column of the result, so that a block ends with an unpack and a conversion, which
// other execution ports take than the multiplier. Bytes of a are stored with 12 added, to be
// unsigned; a block starts at -12 times the sum of b, which takes it back.
#include <immintrin.h>

#include <cstring>

#include "cpu/gemm_x86.h"

namespace nvfp4 {
namespace {

using Ints = __m256i;
using Floats = __m256;

constexpr int kRows = 6, kColumns = 32, kPairs = kBlock / 2;

// One packed block of 32 columns. A row's 8 bytes of codes are four words of four codes; pair 2i
// has the codes of word i's low nibbles, pair 2i + 1 those of its high ones. The order within a
// block is free, as a is packed in the same one.
struct BBlock {
  int16_t start[2][16];
  int8_t pair[kPairs][2][16][2];  // [pair][half of the columns][lane][code]
  float scale[kColumns];
};
static_assert(sizeof(BBlock) % 64 == 0);

// Column of a lane in its half: unpacking the lower and upper lanes then gives columns 0..7
// and 8..15.
constexpr int kColumnOfLane[16] = {0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 6, 7, 12, 13, 14, 15};

// A packed block of a: u8[8 pairs][rows][2], then float scale[rows].
constexpr int kABytes = 20;

Ints LoadAligned(const void* p) { return _mm256_load_si256(static_cast<const Ints*>(p)); }
Ints LoadAny(const void* p) { return _mm256_loadu_si256(static_cast<const Ints*>(p)); }

Ints Broadcast16(const void* p) {
  int16_t v;
  std::memcpy(&v, p, sizeof v);
  return _mm256_set1_epi16(v);
}

Ints Broadcast32(const void* p) {
  int32_t v;
  std::memcpy(&v, p, sizeof v);
  return _mm256_set1_epi32(v);
}

Ints Join(__m128i low, __m128i high) {
  return _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
}

Ints TwiceTable() {
  return _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(kTwiceE2M1)));
}

// Keeps the compiler from rearranging the sums of all rows into trees that do not fit the
// registers.
inline void Pin(Ints& v) { asm("" : "+x"(v)); }

template <int kHeight>
void TileOf(int64_t blocks, const uint8_t* a, const uint8_t* b, float* acc) {
  const Ints zero = _mm256_setzero_si256();
  const auto* w = reinterpret_cast<const BBlock*>(b);
  for (int64_t block = 0; block < blocks; ++block, ++w, a += kABytes * kHeight) {
    asm("" : "+r"(acc));  // or its sums would be carried in registers that are not there
    Ints sum[kHeight][2];
#pragma GCC unroll 8
    for (int j = 0; j < kPairs; ++j) {
      const Ints w0 = LoadAligned(w->pair[j][0]), w1 = LoadAligned(w->pair[j][1]);
#pragma GCC unroll 6
      for (int r = 0; r < kHeight; ++r) {
        const Ints x = Broadcast16(a + 2 * (j * kHeight + r));
        sum[r][0] = _mm256_add_epi16(_mm256_maddubs_epi16(x, w0),
                                     j != 0 ? sum[r][0] : LoadAligned(w->start[0]));
        sum[r][1] = _mm256_add_epi16(_mm256_maddubs_epi16(x, w1),
                                     j != 0 ? sum[r][1] : LoadAligned(w->start[1]));
        Pin(sum[r][0]);
        Pin(sum[r][1]);
      }
    }
#pragma GCC unroll 6
    for (int r = 0; r < kHeight; ++r) {
      const Floats scale =
          _mm256_broadcast_ss(reinterpret_cast<const float*>(a + 16 * kHeight) + r);
      float* to = acc + kColumns * r;
#pragma GCC unroll 4
      for (int q = 0; q < 4; ++q) {
        // The sum in the upper half of a 32-bit lane is 2^16 times as large: that is in a's scale.
        const Ints wide = q % 2 != 0 ? _mm256_unpackhi_epi16(zero, sum[r][q / 2])
                                     : _mm256_unpacklo_epi16(zero, sum[r][q / 2]);
        const Floats factor = _mm256_mul_ps(scale, _mm256_load_ps(w->scale + 8 * q));
        _mm256_store_ps(to + 8 * q, _mm256_fmadd_ps(_mm256_cvtepi32_ps(wide), factor,
                                                    _mm256_load_ps(to + 8 * q)));
      }
    }
  }
}

void Tile(int64_t rows, int64_t blocks, const uint8_t* a, const uint8_t* b, float* acc) {
  switch (rows) {
    case 1:
      return TileOf<1>(blocks, a, b, acc);
    case 2:
      return TileOf<2>(blocks, a, b, acc);
    case 3:
      return TileOf<3>(blocks, a, b, acc);
    case 4:
      return TileOf<4>(blocks, a, b, acc);
    case 5:
      return TileOf<5>(blocks, a, b, acc);
    default:
      return TileOf<6>(blocks, a, b, acc);
  }
}

void PackA(const GemmMatrix& a, int64_t row, int64_t rows, int64_t block, int64_t blocks,
           uint8_t* out) {
  const __m128i table =
                    _mm_add_epi8(_mm256_castsi256_si128(TwiceTable()), _mm_set1_epi8(kTwiceMax)),
                nibble = _mm_set1_epi8(15);
  for (int64_t r = 0; r < rows; ++r) {
    const uint8_t* codes = CodesOf(a, row + r, block);
    uint8_t* to = out;
    for (int64_t b = 0; b < blocks; ++b, codes += kBlock / 2, to += kABytes * rows) {
      const __m128i raw = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes));
      const __m128i in_pairs =
          _mm_and_si128(_mm_unpacklo_epi16(raw, _mm_srli_epi16(raw, 4)), nibble);
      alignas(16) uint16_t pair[kPairs];
      _mm_store_si128(reinterpret_cast<__m128i*>(pair), _mm_shuffle_epi8(table, in_pairs));
      for (int j = 0; j < kPairs; ++j) std::memcpy(to + 2 * (j * rows + r), &pair[j], 2);
      const float scale =
          DecodeE4M3(*ScaleOf(a, row + r, block + b)) * (0.25f * 0x1p-16f / kScaleUnit);
      std::memcpy(to + 16 * rows + 4 * r, &scale, sizeof scale);
    }
  }
}

// In each half: row i of a 4 x 4 matrix of 32 bits to column i.
void Transpose32(const Ints (&two)[4], Ints (&words)[4]) {
  const Ints low01 = _mm256_unpacklo_epi32(two[0], two[1]),
             high01 = _mm256_unpackhi_epi32(two[0], two[1]);
  const Ints low23 = _mm256_unpacklo_epi32(two[2], two[3]),
             high23 = _mm256_unpackhi_epi32(two[2], two[3]);
  words[0] = _mm256_unpacklo_epi64(low01, low23);
  words[1] = _mm256_unpackhi_epi64(low01, low23);
  words[2] = _mm256_unpacklo_epi64(high01, high23);
  words[3] = _mm256_unpackhi_epi64(high01, high23);
}

// Word i of the block's 8 bytes of 16 rows in words[i], a row a lane.
void TransposeWords(const uint8_t* const* rows, int64_t at, Ints (&words)[4]) {
  const auto load = [&](int lane) {
    return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(rows[lane] + at));
  };
  Ints two[4];  // lanes 2i, 2i + 1 | 8 + 2i, 9 + 2i: words 0, 0, 1, 1, 2, 2, 3, 3
  for (int i = 0; i < 4; ++i)
    two[i] = Join(_mm_unpacklo_epi16(load(2 * i), load(2 * i + 1)),
                  _mm_unpacklo_epi16(load(8 + 2 * i), load(9 + 2 * i)));
  Transpose32(two, words);
}

void PackB(const GemmMatrix& m, int64_t row, int64_t block, int64_t blocks, uint8_t* out) {
  const Ints table = TwiceTable(), nibble = _mm256_set1_epi8(15),
             offset = _mm256_set1_epi8(kTwiceMax);
  auto* to = reinterpret_cast<BBlock*>(out);
  for (int half = 0; half < 2; ++half) {
    const uint8_t* rows[16];
    bool whole = true;
    for (int lane = 0; lane < 16; ++lane) {
      const int64_t r = row + 16 * half + kColumnOfLane[lane];
      whole = whole && r < m.rows;
      rows[lane] = r < m.rows ? CodesOf(m, r, block) : kZeroCodes;
    }
    // Rows are too short for the prefetcher to settle: ask for the next panel's, which follow in
    // memory.
    const int64_t ahead = whole ? 32 * m.stride : 0;
    for (int64_t b = 0; b < blocks; ++b) {
      if (b % 8 == 0)
        for (const uint8_t* r : rows)
          _mm_prefetch(reinterpret_cast<const char*>(r + b * (kBlock / 2) + ahead), _MM_HINT_T1);
      Ints words[4], sum = _mm256_setzero_si256();  // eight codes of at most 12 fit a byte
      TransposeWords(rows, b * (kBlock / 2), words);
      for (int j = 0; j < kPairs; ++j) {
        const Ints codes = _mm256_and_si256(
            j % 2 != 0 ? _mm256_srli_epi16(words[j / 2], 4) : words[j / 2], nibble);
        const Ints twice = _mm256_shuffle_epi8(table, codes);
        _mm256_store_si256(reinterpret_cast<Ints*>(to[b].pair[j][half]), twice);
        sum = _mm256_add_epi8(sum, twice);
      }
      _mm256_store_si256(
          reinterpret_cast<Ints*>(to[b].start[half]),
          _mm256_sub_epi16(_mm256_setzero_si256(), _mm256_maddubs_epi16(offset, sum)));
    }
  }
  for (int64_t b = 0; b < blocks; b += kTileBlocks) {
    const int64_t n = blocks - b < kTileBlocks ? blocks - b : kTileBlocks;
    for (int q = 0; q < kColumns; q += 8) {
      Floats scale[kTileBlocks];
      LoadScales(m, row + q, block + b, scale);
      for (int64_t i = 0; i < n; ++i) _mm256_store_ps(to[b + i].scale + q, scale[i]);
    }
  }
}

// ---- Few rows of a. Here b is the unsigned side, as its table can have 12 added for free; what
// takes it back comes with a.

// One row, four blocks: i8 even[32], odd[32] codes of each byte, i32 start[4], float scale[4].
struct DirectGroup {
  int8_t even[32], odd[32];
  int32_t start[4];
  float scale[4];
};
static_assert(sizeof(DirectGroup) == kTileBlocks * kDirectBytes);

// Four blocks of a row of a, zero codes past the row's end, as twice their values: the codes in the
// low nibbles and in the high ones; -12 times the sum of two neighbours in both; the scales.
struct FourBlocks {
  alignas(32) int8_t low[32], high[32];
  alignas(32) int16_t start[16];
  alignas(16) float scale[kTileBlocks];

  FourBlocks(const GemmMatrix& a, int64_t row, int64_t block) {
    const int64_t inside = (a.blocks - block) * (kBlock / 2);
    const uint8_t* codes = CodesOf(a, row, block);
    alignas(32) uint8_t copy[32] = {};
    if (inside < 32) {
      std::memcpy(copy, codes, inside);
      codes = copy;
    }
    const Ints raw = LoadAny(codes), table = TwiceTable(), nibble = _mm256_set1_epi8(15);
    const Ints even = _mm256_shuffle_epi8(table, _mm256_and_si256(raw, nibble));
    const Ints odd =
        _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(raw, 4), nibble));
    const Ints sum = _mm256_maddubs_epi16(_mm256_set1_epi8(kTwiceMax), _mm256_add_epi8(even, odd));
    _mm256_store_si256(reinterpret_cast<Ints*>(low), even);
    _mm256_store_si256(reinterpret_cast<Ints*>(high), odd);
    _mm256_store_si256(reinterpret_cast<Ints*>(start),
                       _mm256_sub_epi16(_mm256_setzero_si256(), sum));
    int32_t bytes;
    std::memcpy(&bytes, ScaleOf(a, row, block), sizeof bytes);
    const __m128i halves = _mm_slli_epi16(_mm_cvtepu8_epi16(_mm_cvtsi32_si128(bytes)), 7);
    // b's scales are in kScaleUnit too; 1/4 for the doubled codes.
    constexpr float kUnit = 0.25f / (kScaleUnit * kScaleUnit);
    _mm_store_ps(scale, _mm_mul_ps(_mm_cvtph_ps(halves), _mm_set1_ps(kUnit)));
  }
};

void PackDirectOne(const GemmMatrix& a, int64_t row, uint8_t* out) {
  for (int64_t first = 0; first < a.blocks; first += kTileBlocks, out += sizeof(DirectGroup)) {
    const FourBlocks four(a, row, first);
    DirectGroup group;
    std::memcpy(group.even, four.low, sizeof group.even);
    std::memcpy(group.odd, four.high, sizeof group.odd);
    std::memcpy(group.scale, four.scale, sizeof group.scale);
    for (int i = 0; i < kTileBlocks; ++i) {
      const int16_t* start = four.start + 4 * i;
      group.start[i] = start[0] + start[1] + start[2] + start[3];
    }
    std::memcpy(out, &group, sizeof group);
  }
}

// Eight rows of b and their scales, four blocks at a time.
class EightRows {
 public:
  EightRows(const GemmMatrix& b, int64_t tile, int64_t pair)
      : blocks_(b.blocks), stride_(b.stride) {
    for (int i = 0; i < 8; ++i) {
      const int64_t row = tile * kTileRows + 2 * pair + i / 4 + i % 4 * 32;
      rows_[i] = CodesOf(b, row < b.rows ? row : 0,
                         0);  // a row past the last one: whatever, it is dropped
    }
    scales_ = b.scales + tile * b.tile_columns * kTileBytes + 32 * pair;
  }

  // Calls f(rows, offset, scales) for each group of four blocks: 32 bytes of codes of each row,
  // four bytes of scales in a lane.
  template <typename F>
  void ForEachGroup(F&& f) const {
    int64_t block = 0;
    for (; block + kTileBlocks <= blocks_; block += kTileBlocks) {
      const int64_t at = block * (kBlock / 2);
      // The rows of the next pair follow these in memory, too short each for the prefetcher to
      // settle.
      if (block % 8 == 0)
        for (const uint8_t* row : rows_)
          _mm_prefetch(reinterpret_cast<const char*>(row + at + 4 * stride_), _MM_HINT_T1);
      _mm_prefetch(reinterpret_cast<const char*>(scales_ + block / kTileBlocks * kTileBytes + 64),
                   _MM_HINT_T1);
      f(rows_, at, LoadAny(scales_ + block / kTileBlocks * kTileBytes));
    }
    if (block < blocks_) {  // the last blocks: not past the end of a row
      uint8_t copy[8][32] = {};
      const uint8_t* rows[8];
      for (int i = 0; i < 8; ++i) {
        std::memcpy(copy[i], rows_[i] + block * (kBlock / 2), (blocks_ - block) * (kBlock / 2));
        rows[i] = copy[i];
      }
      f(rows, 0, LoadAny(scales_ + block / kTileBlocks * kTileBytes));
    }
  }

 private:
  const uint8_t* rows_[8];
  const uint8_t* scales_;
  int64_t blocks_, stride_;
};

// One row of a: k stays along the lanes, and only the sums of the blocks are transposed.
void DirectOne(const uint8_t* a, const EightRows& rows, float* out) {
  const Ints table = _mm256_add_epi8(TwiceTable(), _mm256_set1_epi8(kTwiceMax)),
             nibble = _mm256_set1_epi8(15);
  const Ints ones = _mm256_set1_epi16(1);
  Floats acc = _mm256_setzero_ps();
  rows.ForEachGroup([&](const uint8_t* const* row, int64_t at, Ints four_scales) {
    const auto* x = reinterpret_cast<const DirectGroup*>(a);
    const Ints even = LoadAny(x->even), odd = LoadAny(x->odd);
    const auto sums = [&](int i) {  // two 32-bit sums a block
      const Ints raw = LoadAny(row[i] + at);
      const Ints low = _mm256_shuffle_epi8(table, _mm256_and_si256(raw, nibble));
      const Ints high =
          _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(raw, 4), nibble));
      return _mm256_madd_epi16(
          _mm256_add_epi16(_mm256_maddubs_epi16(low, even), _mm256_maddubs_epi16(high, odd)), ones);
    };
    Floats two[4];  // rows r, r + 1 as integers: r block 0, r block 1, r + 1 block 0, r + 1 block 1
                    // | the same of blocks 2, 3
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j)
      two[j] = _mm256_castsi256_ps(
          _mm256_madd_epi16(_mm256_packs_epi32(sums(2 * j), sums(2 * j + 1)), ones));
    const Floats e0 = _mm256_shuffle_ps(two[0], two[1], 0x88),
                 o0 = _mm256_shuffle_ps(two[0], two[1], 0xDD);
    const Floats e1 = _mm256_shuffle_ps(two[2], two[3], 0x88),
                 o1 = _mm256_shuffle_ps(two[2], two[3], 0xDD);
    const Floats block[4] = {
        _mm256_permute2f128_ps(e0, e1, 0x20), _mm256_permute2f128_ps(o0, o1, 0x20),
        _mm256_permute2f128_ps(e0, e1, 0x31), _mm256_permute2f128_ps(o0, o1, 0x31)};
    Floats scales[kTileBlocks];
    DecodeScales(four_scales, scales);
#pragma GCC unroll 4
    for (int b = 0; b < 4; ++b) {
      const Floats sum = _mm256_cvtepi32_ps(
          _mm256_add_epi32(_mm256_castps_si256(block[b]), Broadcast32(&x->start[b])));
      acc = _mm256_fmadd_ps(sum, _mm256_mul_ps(scales[b], _mm256_broadcast_ss(&x->scale[b])), acc);
    }
    a += sizeof(DirectGroup);
  });
  _mm256_store_ps(out, acc);
}

// Two to four rows, one block: i8[4 groups][rows][4], i16 start[rows][2], float scale[rows].
// Groups: low nibbles of bytes 0..3, of bytes 4..7, and the high ones.
void PackDirectSome(const GemmMatrix& a, int64_t row, int64_t rows, uint8_t* out) {
  for (int64_t first = 0; first < a.blocks; first += kTileBlocks) {
    for (int64_t r = 0; r < rows; ++r) {
      const FourBlocks four(a, row + r, first);
      uint8_t* to = out + 4 * r;
      for (int b = 0; b < kTileBlocks; ++b, to += kDirectBytes * rows) {
        for (int g = 0; g < 4; ++g)
          std::memcpy(to + 4 * g * rows, (g < 2 ? four.low : four.high) + 8 * b + g % 2 * 4, 4);
        const int16_t* sum = four.start + 4 * b;
        const int16_t start[2] = {static_cast<int16_t>(sum[0] + sum[2]),
                                  static_cast<int16_t>(sum[1] + sum[3])};
        std::memcpy(to + 16 * rows, start, 4);
        std::memcpy(to + 20 * rows, &four.scale[b], 4);
      }
    }
    out += kTileBlocks * kDirectBytes * rows;
  }
}

// Dword i of 16 bytes of eight rows in words[i], a row a lane.
void TransposeDwords(const uint8_t* const* rows, int64_t at, Ints (&words)[4]) {
  Ints two[4];
  for (int i = 0; i < 4; ++i)
    two[i] = Join(_mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[i] + at)),
                  _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[i + 4] + at)));
  Transpose32(two, words);
}

template <int kHeight>
void DirectSome(const uint8_t* a, const EightRows& rows, float* out) {
  const Ints table = _mm256_add_epi8(TwiceTable(), _mm256_set1_epi8(kTwiceMax)),
             nibble = _mm256_set1_epi8(15);
  const Ints ones = _mm256_set1_epi16(1);
  Floats acc[kHeight];
  for (int r = 0; r < kHeight; ++r) acc[r] = _mm256_setzero_ps();
  rows.ForEachGroup([&](const uint8_t* const* row, int64_t at, Ints four_scales) {
    Floats scales[kTileBlocks];
    DecodeScales(four_scales, scales);
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      Ints words[4];
      TransposeDwords(row, at + 16 * half, words);
#pragma GCC unroll 2
      for (int b = 0; b < 2; ++b) {
        const Ints d0 = words[2 * b], d1 = words[2 * b + 1];
        const Ints group[4] = {
            _mm256_shuffle_epi8(table, _mm256_and_si256(d0, nibble)),
            _mm256_shuffle_epi8(table, _mm256_and_si256(d1, nibble)),
            _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(d0, 4), nibble)),
            _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(d1, 4), nibble))};
        const Floats scale = scales[2 * half + b];
#pragma GCC unroll 4
        for (int r = 0; r < kHeight; ++r) {
          Ints sum = Broadcast32(a + 16 * kHeight + 4 * r);
#pragma GCC unroll 4
          for (int g = 0; g < 4; ++g) {
            sum = _mm256_add_epi16(
                sum, _mm256_maddubs_epi16(group[g], Broadcast32(a + 4 * (g * kHeight + r))));
            Pin(sum);
          }
          const Floats factor = _mm256_mul_ps(
              scale, _mm256_broadcast_ss(reinterpret_cast<const float*>(a + 20 * kHeight) + r));
          acc[r] =
              _mm256_fmadd_ps(_mm256_cvtepi32_ps(_mm256_madd_epi16(sum, ones)), factor, acc[r]);
        }
        a += kDirectBytes * kHeight;
      }
    }
  });
  for (int r = 0; r < kHeight; ++r) _mm256_store_ps(out + 8 * r, acc[r]);
}

// Eight values of a type.
Floats LoadEight(FloatType type, const void* from) {
  if (type == FloatType::kF32) return _mm256_loadu_ps(static_cast<const float*>(from));
  const __m128i bits = _mm_loadu_si128(static_cast<const __m128i*>(from));
  if (type == FloatType::kF16) return _mm256_cvtph_ps(bits);
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}

void StoreEight(FloatType type, void* to, Floats y) {
  if (type == FloatType::kF32) return _mm256_storeu_ps(static_cast<float*>(to), y);
  __m128i bits;
  if (type == FloatType::kF16) {
    bits = _mm256_cvtps_ph(y, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  } else {  // as Bf16Of
    const Ints u = _mm256_castps_si256(y), upper = _mm256_srli_epi32(u, 16);
    const Ints even = _mm256_and_si256(upper, _mm256_set1_epi32(1));
    const Ints rounded = _mm256_srli_epi32(
        _mm256_add_epi32(u, _mm256_add_epi32(even, _mm256_set1_epi32(0x7FFF))), 16);
    const Ints quiet = _mm256_or_si256(upper, _mm256_set1_epi32(0x40));
    const Ints is_nan = _mm256_castps_si256(_mm256_cmp_ps(y, y, _CMP_UNORD_Q));
    const Ints word = _mm256_blendv_epi8(rounded, quiet, is_nan);
    bits = _mm_packus_epi32(_mm256_castsi256_si128(word), _mm256_extracti128_si256(word, 1));
  }
  _mm_storeu_si128(static_cast<__m128i*>(to), bits);
}

template <FloatType kOut>
void FinishAs(const GemmResult& result, const float* acc, int64_t n) {
  constexpr int64_t kSize = kOut == FloatType::kF32 ? 4 : 2;
  const int64_t bias_size = result.bias_type == FloatType::kF32 ? 4 : 2;
  const auto* bias = static_cast<const uint8_t*>(result.bias);
  const auto* accumulate = static_cast<const uint8_t*>(result.accumulate);
  auto* y = static_cast<uint8_t*>(result.y);
  const auto eight = [&](const float* from, const void* plus, const void* and_plus, void* to) {
    Floats v = _mm256_mul_ps(_mm256_set1_ps(result.alpha), _mm256_loadu_ps(from));
    if (plus != nullptr) v = _mm256_add_ps(v, LoadEight(result.bias_type, plus));
    if (and_plus != nullptr) v = _mm256_add_ps(v, LoadEight(kOut, and_plus));
    StoreEight(kOut, to, v);
  };
  int64_t i = 0;
  for (; i + 8 <= n; i += 8)
    eight(acc + i, bias != nullptr ? bias + i * bias_size : nullptr,
          accumulate != nullptr ? accumulate + i * kSize : nullptr, y + i * kSize);
  if (i == n) return;
  const int64_t rest = n - i;
  float from[8] = {}, plus[8] = {}, and_plus[8] = {}, to[8];
  std::memcpy(from, acc + i, rest * 4);
  if (bias != nullptr) std::memcpy(plus, bias + i * bias_size, rest * bias_size);
  if (accumulate != nullptr) std::memcpy(and_plus, accumulate + i * kSize, rest * kSize);
  eight(from, bias != nullptr ? plus : nullptr, accumulate != nullptr ? and_plus : nullptr, to);
  std::memcpy(y + i * kSize, to, rest * kSize);
}

}  // namespace

void FinishAvx2(const GemmResult& result, const float* acc, int64_t n) {
  switch (result.out) {
    case FloatType::kF32:
      return FinishAs<FloatType::kF32>(result, acc, n);
    case FloatType::kBf16:
      return FinishAs<FloatType::kBf16>(result, acc, n);
    case FloatType::kF16:
      return FinishAs<FloatType::kF16>(result, acc, n);
  }
}

void PackDirectAvx2(const GemmMatrix& a, int64_t row, int64_t rows, uint8_t* out) {
  if (rows == 1) {
    PackDirectOne(a, row, out);
  } else {
    PackDirectSome(a, row, rows, out);
  }
}

void DirectAvx2(int64_t rows, const uint8_t* a, const GemmMatrix& b, int64_t tile, int64_t pair,
                float* acc) {
  const EightRows eight(b, tile, pair);
  switch (rows) {
    case 1:
      return DirectOne(a, eight, acc);
    case 2:
      return DirectSome<2>(a, eight, acc);
    case 3:
      return DirectSome<3>(a, eight, acc);
    default:
      return DirectSome<4>(a, eight, acc);
  }
}

const GemmKernels kAvx2Gemm{kRows, kColumns, kABytes,    sizeof(BBlock), PackA,
                            PackB, Tile,     FinishAvx2, PackDirectAvx2, DirectAvx2};

}  // namespace nvfp4
