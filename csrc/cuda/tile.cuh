// csrc/cuda/tile.cuh: 128 x 128 elements of a matrix: how 256 threads load them along rows, and
// read them again along columns from shared memory.
//
// Along rows thread t has the 16 elements of block t % 8 in the rows 16 * (t / 32) + 4 * i +
// t / 8 % 4, i = 0 .. 3: a warp reads rows of 128 elements, and has the 16 x 16 squares of 16 rows.
// Along columns thread t has four columns of the 16 rows of one block: what neighbouring lanes
// write to a column are neighbouring blocks, 32 bytes together.
#pragma once

#include "core/hadamard.h"
#include "core/scale_layout.h"
#include "cuda/device.cuh"

namespace nvfp4 {

constexpr int kTile = kTileRows;  // 128
constexpr int kTileThreads = 256;
constexpr int kTileBlocksAcross = kTile / kBlock;  // 8
constexpr int kThreadRows = 4;
constexpr int kRowStep = 4;  // between two of them
constexpr int kThreadColumns = 4;
constexpr int64_t kMaxGridAxis = 65535;  // y and z

// Division by a number that the host knows, of numbers below 2^31, without a division.
class Divider {
 public:
  explicit Divider(int64_t divisor) : divisor_(divisor < 1 ? 1 : static_cast<uint32_t>(divisor)) {
    while ((uint64_t{1} << shift_) < divisor_) ++shift_;
    multiplier_ = static_cast<uint32_t>(
        ((uint64_t{1} << shift_) - divisor_) * (uint64_t{1} << 32) / divisor_ + 1);
  }
  NVFP4_DEVICE uint32_t Quotient(uint32_t n) const {
    return (__umulhi(n, multiplier_) + n) >> shift_;
  }
  NVFP4_DEVICE uint32_t Remainder(uint32_t n, uint32_t quotient) const {
    return n - quotient * divisor_;
  }

 private:
  uint32_t divisor_, multiplier_ = 0, shift_ = 0;
};

struct BlockPlace {
  int row, block;
};

// The i-th block of this thread along rows.
NVFP4_DEVICE BlockPlace RowPlace(int i) {
  const int t = static_cast<int>(threadIdx.x);
  return {t / 32 * 16 + i * kRowStep + t / 8 % kRowStep, t % 8};
}

// This thread's first column, and its block of rows.
NVFP4_DEVICE BlockPlace ColumnPlace() {
  const int t = static_cast<int>(threadIdx.x);
  return {(t / 4 % 8 + t / 64 * 8) * kThreadColumns, t % 4 + t / 32 % 2 * 4};
}

// The largest in the 16 x 16 square of a thread's blocks, along rows and along columns.
NVFP4_DEVICE float MaxOfSquare(float amax, int lane_bit) {
#pragma unroll
  for (int i = 0; i < 2; ++i, lane_bit *= 2)
    amax = max(amax, __shfl_xor_sync(0xFFFFFFFFu, amax, lane_bit));
  return amax;
}
constexpr int kSquareAlongRows = 8, kSquareAlongColumns = 4;

template <FloatType kType>
struct Tile {
  static constexpr bool kHalves = kType != FloatType::kF32;  // a word holds two elements
  static constexpr int kSize = kHalves ? 2 : 4;
  static constexpr int kBlockWords = kBlock * kSize / 4;
  static constexpr int kBlockChunks = kBlockWords / 4;
  static constexpr int kRowChunks = kTile / kBlock * kBlockChunks;

  // 16 elements of a row.
  struct RowBlock {
    uint32_t w[kBlockWords];
  };
  // 16 rows of four columns.
  static constexpr int kColumnWords = kThreadColumns * kSize / 4;
  struct ColumnBlock {
    uint32_t w[kBlock][kColumnWords];
  };

  uint4 chunks[kTile][kRowChunks];

  // Where a chunk of a row lies. The threads that are served at once find different banks, as they
  // store the blocks of a row and as they load from four blocks of rows.
  static NVFP4_DEVICE int ChunkAt(int row, int chunk) {
    return chunk ^ chunk / 8 ^ row / kBlock % 4 * 2;
  }

  // `from`: the block's first element; all of the block is in the matrix. kBytes: what `from` is
  // aligned to.
  template <int kBytes>
  static NVFP4_DEVICE RowBlock Load(const uint8_t* from) {
    RowBlock b;
#pragma unroll
    for (int i = 0; i < kBlockWords / 8; ++i) {
      const Words words = LoadWords<kBytes>(from + i * 32);
#pragma unroll
      for (int j = 0; j < 8; ++j) b.w[i * 8 + j] = words.w[j];
    }
    return b;
  }

  // Four blocks of which the first begins `rows` rows before the end of the matrix and `columns`
  // before the end of its row; what is not in the matrix is zero. `aligned`: rows are, to 16 bytes.
  static NVFP4_DEVICE void Load(const uint8_t* from, int64_t step, int64_t rows, int64_t columns,
                                bool aligned, RowBlock (&blocks)[kThreadRows]) {
    if (aligned && columns >= kBlock && rows > (kThreadRows - 1) * kRowStep) {
#pragma unroll
      for (int i = 0; i < kThreadRows; ++i, from += step) blocks[i] = Load<16>(from);
      return;
    }
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i, from += step) {
      blocks[i] = {};
      if (i * kRowStep >= rows) continue;
#pragma unroll
      for (int j = 0; j < kBlock; ++j) {
        if (j >= columns) continue;
        if constexpr (kHalves)
          blocks[i].w[j / 2] |= static_cast<uint32_t>(reinterpret_cast<const uint16_t*>(from)[j])
                                << j % 2 * 16;
        else
          blocks[i].w[j] = reinterpret_cast<const uint32_t*>(from)[j];
      }
    }
  }

  // Where this thread's blocks along rows begin, in chunks. All their rows are in one block of
  // rows.
  static NVFP4_DEVICE uint32_t StorePlace() {
    const BlockPlace at = RowPlace(0);
    return at.row * kRowChunks + ChunkAt(at.row, at.block * kBlockChunks);
  }

  NVFP4_DEVICE void Store(uint32_t place, const RowBlock (&blocks)[kThreadRows]) {
#pragma unroll
    for (int i = 0; i < kBlockChunks; ++i) {
      // A block begins at a multiple of its number of chunks.
      uint4* to = &chunks[0][0] + (place ^ i);
#pragma unroll
      for (int j = 0; j < kThreadRows; ++j) {
        const RowBlock& b = blocks[j];
        to[j * kRowStep * kRowChunks] =
            make_uint4(b.w[4 * i], b.w[4 * i + 1], b.w[4 * i + 2], b.w[4 * i + 3]);
      }
    }
  }

  // Where this thread's columns begin, in what it loads at once.
  static NVFP4_DEVICE uint32_t LoadPlace() {
    const BlockPlace at = ColumnPlace();
    const int row = at.block * kBlock, byte = at.row * kSize;
    const int chunk = row * kRowChunks + ChunkAt(row, byte / 16);
    return kHalves ? chunk * 2 + byte / 8 % 2 : chunk;
  }

  NVFP4_DEVICE ColumnBlock LoadColumns(uint32_t place) const {
    ColumnBlock b;
#pragma unroll
    for (int r = 0; r < kBlock; ++r) {
      if constexpr (kHalves) {
        const uint2 words =
            reinterpret_cast<const uint2*>(&chunks[0][0])[place + r * kRowChunks * 2];
        b.w[r][0] = words.x;
        b.w[r][1] = words.y;
      } else {
        const uint4 words = (&chunks[0][0])[place + r * kRowChunks];
        b.w[r][0] = words.x;
        b.w[r][1] = words.y;
        b.w[r][2] = words.z;
        b.w[r][3] = words.w;
      }
    }
    return b;
  }

  // ---- As float32

  // Elements 2 * i and 2 * i + 1 of a block.
  static NVFP4_DEVICE float2 PairOf(const RowBlock& b, int i) {
    if constexpr (kHalves)
      return WidenPair<kType>(b.w[i]);
    else
      return Pair(FloatOf(b.w[2 * i]), FloatOf(b.w[2 * i + 1]));
  }

  // Columns 2 * part and 2 * part + 1 of this thread in row r of a block that LoadColumns gave.
  static NVFP4_DEVICE float2 PairOf(const ColumnBlock& b, int part, int r) {
    if constexpr (kHalves)
      return WidenPair<kType>(b.w[r][part]);
    else
      return Pair(FloatOf(b.w[r][2 * part]), FloatOf(b.w[r][2 * part + 1]));
  }

  // ---- The Hadamard transform (core/hadamard.h), not yet rounded to bfloat16.
  //
  // kFour: four times that, as it is before the last factor. Otherwise halves are multiplied with
  // +-1/4 when they are widened: their products and sums are multiples of 2^-135, so the factor
  // changes no rounding, and nothing overflows where the factor comes last: there amax is not
  // finite, and codes are unspecified. Float32 is multiplied at the end.

  template <bool kFour>
  static NVFP4_DEVICE constexpr uint16_t Factor(uint32_t signs, int i) {
    constexpr uint32_t kOne = kType == FloatType::kBf16 ? 0x3F80u : 0x3C00u;
    constexpr uint32_t kQuarter = kType == FloatType::kBf16 ? 0x3E80u : 0x3400u;
    return static_cast<uint16_t>((kFour ? kOne : kQuarter) | (signs >> i & 1u) << 15);
  }

  // (a + b, a - b) with a = +-x, b = +-y times the factor: signs i and i + 1.
  template <bool kFour, int kHalfX, int kHalfY>
  static NVFP4_DEVICE float2 FirstStage(uint32_t x, uint32_t y, uint32_t signs, int i) {
    const float a = MultiplyAdd<kType, kHalfX>(x, Factor<kFour>(signs, i), -0.0f);
    return Pair(MultiplyAdd<kType, kHalfY>(y, Factor<kFour>(signs, i + 1), a),
                MultiplyAdd<kType, kHalfY>(y, Factor<kFour>(~signs, i + 1), a));
  }

  static NVFP4_DEVICE float Flip(float x, uint32_t signs, int i) {
    return (signs >> i & 1u) != 0 ? -x : x;  // part of the next instruction where signs are known
  }

  template <bool kFour, int kCount>
  static NVFP4_DEVICE void Stages(float2 (&v)[kCount], int first_stride) {
#pragma unroll
    for (int stride = first_stride; stride < kCount; stride *= 2) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if ((i & stride) != 0) continue;
        const float2 a = v[i], b = v[i + stride];
        v[i] = Add(a, b);
        v[i + stride] = Subtract(a, b);
      }
    }
    if constexpr (!kHalves && !kFour) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) v[i] = Multiply(v[i], Pair(0.25f, 0.25f));
    }
  }

  // Of one block: v[i] has its elements 2 * i and 2 * i + 1.
  template <bool kFour = false>
  static NVFP4_DEVICE void Hadamard(const RowBlock& b, uint32_t signs, float2 (&v)[kBlock / 2]) {
#pragma unroll
    for (int i = 0; i < kBlock / 2; ++i) {
      if constexpr (kHalves) {
        v[i] = FirstStage<kFour, 0, 1>(b.w[i], b.w[i], signs, 2 * i);
      } else {
        const float2 p = PairOf(b, i);
        const float x = Flip(p.x, signs, 2 * i), y = Flip(p.y, signs, 2 * i + 1);
        v[i] = Pair(__fadd_rn(x, y), __fadd_rn(x, -y));
      }
    }
    Stages<kFour>(v, 1);
  }

  // Of two columns, along their rows: v[r] has row r of both.
  template <bool kFour = false>
  static NVFP4_DEVICE void Hadamard(const ColumnBlock& b, int part, uint32_t signs,
                                    float2 (&v)[kBlock]) {
    if constexpr (kHalves) {
#pragma unroll
      for (int r = 0; r < kBlock; r += 2) {
        const uint32_t x = b.w[r][part], y = b.w[r + 1][part];
        const float2 first = FirstStage<kFour, 0, 0>(x, y, signs, r);
        const float2 second = FirstStage<kFour, 1, 1>(x, y, signs, r);
        v[r] = Pair(first.x, second.x);
        v[r + 1] = Pair(first.y, second.y);
      }
    } else {
#pragma unroll
      for (int r = 0; r < kBlock; ++r) {
        const float2 p = PairOf(b, part, r);
        v[r] = Pair(Flip(p.x, signs, r), Flip(p.y, signs, r));
      }
    }
    Stages<kFour>(v, kHalves ? 2 : 1);
  }

  // ---- Largest magnitudes of blocks. kNan as in device.cuh.

  template <bool kNan = false>
  static NVFP4_DEVICE float Amax(const RowBlock& b) {
    if constexpr (kHalves) {
      uint32_t amax = b.w[0];
#pragma unroll
      for (int i = 1; i < kBlockWords; ++i) amax = MaxMagnitudeOfHalves<kType, kNan>(amax, b.w[i]);
      const float2 both = WidenPair<kType>(amax);
      return MaxMagnitude<kNan>(both.x, both.y, 0.0f);
    } else {
      float amax = 0.0f;
#pragma unroll
      for (int i = 0; i < kBlockWords; i += 2)
        amax = MaxMagnitude<kNan>(FloatOf(b.w[i]), FloatOf(b.w[i + 1]), amax);
      return amax;
    }
  }

  template <bool kNan = false, int kCount>
  static NVFP4_DEVICE float AmaxOfAll(const float2 (&v)[kCount]) {
    float amax = 0.0f;
#pragma unroll
    for (int i = 0; i < kCount; ++i) amax = MaxMagnitude<kNan>(v[i].x, v[i].y, amax);
    return amax;
  }

  // Of two columns each.
  static NVFP4_DEVICE float2 AmaxOfColumns(const float2 (&v)[kBlock]) {
    float2 amax = Pair(0.0f, 0.0f);
#pragma unroll
    for (int r = 0; r < kBlock; r += 2)
      amax =
          Pair(MaxMagnitude(v[r].x, v[r + 1].x, amax.x), MaxMagnitude(v[r].y, v[r + 1].y, amax.y));
    return amax;
  }

  static NVFP4_DEVICE float2 AmaxOfColumns(const ColumnBlock& b, int part) {
    if constexpr (kHalves) {
      uint32_t amax = b.w[0][part];
#pragma unroll
      for (int r = 1; r < kBlock; ++r) amax = MaxMagnitudeOfHalves<kType>(amax, b.w[r][part]);
      const float2 both = WidenPair<kType>(amax);
      return Pair(MaxMagnitude(both.x, 0.0f, 0.0f), MaxMagnitude(both.y, 0.0f, 0.0f));
    } else {
      float2 v[kBlock];
#pragma unroll
      for (int r = 0; r < kBlock; ++r) v[r] = PairOf(b, part, r);
      return AmaxOfColumns(v);
    }
  }
};

// A block of halves as float32, as it is or times one quarter: both are exact.
template <FloatType kType, bool kQuarter>
NVFP4_DEVICE Tile<FloatType::kF32>::RowBlock Widened(const typename Tile<kType>::RowBlock& b) {
  constexpr uint16_t kFactor = Tile<kType>::template Factor<!kQuarter>(0, 0);
  Tile<FloatType::kF32>::RowBlock wide;
#pragma unroll
  for (int i = 0; i < kBlock / 2; ++i) {
    wide.w[2 * i] = BitsOf(MultiplyAdd<kType, 0>(b.w[i], kFactor, -0.0f));
    wide.w[2 * i + 1] = BitsOf(MultiplyAdd<kType, 1>(b.w[i], kFactor, -0.0f));
  }
  return wide;
}

}  // namespace nvfp4
