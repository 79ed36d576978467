// csrc/cpu/quantize_portable.cc: amax, quantize and dequantize in plain C++ over core/, the
// reference of every other kernel.
#include <algorithm>

#include "core/hadamard.h"
#include "cpu/quantize.h"

namespace nvfp4 {
namespace {

float LoadOne(FloatType type, const void* x, int64_t i) {
  switch (type) {
    case FloatType::kF32:
      return static_cast<const float*>(x)[i];
    case FloatType::kBf16:
      return FloatOfBf16(static_cast<const uint16_t*>(x)[i]);
    case FloatType::kF16:
      return FloatOfF16(static_cast<const uint16_t*>(x)[i]);
  }
  return 0.0f;
}

// Where a strip holds element i of a float32 row.
int64_t Float32Place(int64_t i) {
  return i / kBlock * kBlock + i % 2 * (kBlock / 2) + i % kBlock / 2;
}

void Load(FloatType type, const void* x, int64_t n, void* row) {
  const int64_t filled = BlocksOf(n) * kBlock;
  if (type == FloatType::kBf16) {
    auto* to = static_cast<uint16_t*>(row);
    std::memcpy(to, x, n * sizeof *to);
    std::fill(to + n, to + filled, uint16_t{0});
  } else {
    auto* to = static_cast<float*>(row);
    for (int64_t i = 0; i < filled; ++i) to[Float32Place(i)] = i < n ? LoadOne(type, x, i) : 0.0f;
  }
}

uint32_t Amax(FloatType type, const void* x, int64_t n) {
  uint32_t amax = 0;
  for (int64_t i = 0; i < n; ++i) amax = std::max(amax, MagnitudeBits(LoadOne(type, x, i)));
  return amax;
}

// A block of the strip along its rows or along its columns, with the Hadamard transform if there is
// one.
struct Block {
  float x[kBlock];

  uint32_t Amax() const {
    uint32_t amax = 0;
    for (float v : x) amax = std::max(amax, MagnitudeBits(v));
    return amax;
  }
};

float Get(const Strip& strip, int64_t row, int64_t column) {
  const uint8_t* from = strip.x + row * strip.stride;
  if (strip.type == FloatType::kBf16)
    return FloatOfBf16(reinterpret_cast<const uint16_t*>(from)[column]);
  return reinterpret_cast<const float*>(from)[Float32Place(column)];
}

Block RowBlock(const Strip& strip, int64_t row, int64_t block) {
  Block b;
  for (int i = 0; i < kBlock; ++i) b.x[i] = Get(strip, row, block * kBlock + i);
  return b;
}

Block ColumnBlock(const Strip& strip, int64_t column) {
  Block b;
  for (int i = 0; i < kBlock; ++i) b.x[i] = Get(strip, i, column);
  return b;
}

uint32_t AmaxRows(const Strip& strip, uint32_t signs) {
  uint32_t amax = 0;
  for (int64_t row = 0; row < strip.rows; ++row) {
    for (int64_t block = 0; block < strip.blocks; ++block) {
      Block b = RowBlock(strip, row, block);
      Hadamard16(b.x, signs);
      amax = std::max(amax, b.Amax());
    }
  }
  return amax;
}

uint32_t AmaxColumns(const Strip& strip, uint32_t signs) {
  uint32_t amax = 0;
  for (int64_t column = 0; column < strip.blocks * kBlock; ++column) {
    Block b = ColumnBlock(strip, column);
    Hadamard16(b.x, signs);
    amax = std::max(amax, b.Amax());
  }
  return amax;
}

// Where the result of a block goes.
struct Place {
  uint8_t* codes;
  uint8_t* scale;
};

// The first n of 16 blocks that are neighbours across the quantized axis: their scales (one for all
// with tile16), their codes.
template <typename PlaceOf>
void QuantizeTile(const QuantizeSpec& spec, Block (&blocks)[kBlock], int64_t n, uint32_t stream,
                  int64_t row, int64_t block, const PlaceOf& place_of) {
  uint32_t amax[kBlock], largest = 0;
  for (int i = 0; i < kBlock; ++i) {
    if (spec.hadamard) Hadamard16(blocks[i].x, spec.signs);
    amax[i] = blocks[i].Amax();
    largest = std::max(largest, amax[i]);
  }
  for (int64_t i = 0; i < n; ++i) {
    const uint8_t scale = BlockScale(FloatOf(spec.tile16 ? largest : amax[i]), spec.scale);
    const float encode = BlockEncode(scale, spec.scale);
    uint32_t code[kBlock];
    if (spec.stochastic) {
      const Philox random = BlockRandom(spec.key, stream, row + i, block);
      for (int j = 0; j < kBlock; ++j)
        code[j] = EncodeE2M1Stochastic(blocks[i].x[j] * encode, ElementRandom(random, j));
    } else {
      for (int j = 0; j < kBlock; ++j) code[j] = EncodeE2M1(blocks[i].x[j] * encode);
    }
    const Place to = place_of(i);
    *to.scale = scale;
    for (int j = 0; j < kBlock / 2; ++j)
      to.codes[j] = static_cast<uint8_t>(code[2 * j] | code[2 * j + 1] << 4);
  }
}

void Rows(const QuantizeSpec& spec, const Strip& strip, int64_t row, int64_t block, uint8_t* codes,
          int64_t codes_stride, uint8_t* scales) {
  for (int64_t b = 0; b < strip.blocks; ++b) {
    Block blocks[kBlock];
    for (int i = 0; i < kBlock; ++i) blocks[i] = RowBlock(strip, i, b);
    QuantizeTile(spec, blocks, strip.rows, kStreamRows, row, block + b, [&](int64_t i) {
      return Place{codes + i * codes_stride + b * kBlock / 2,
                   scales + ScaleOffset(i, b, kStripBlocks)};
    });
  }
  for (int64_t b = strip.blocks; b % kTileBlocks != 0; ++b)
    for (int64_t i = 0; i < strip.rows; ++i) scales[ScaleOffset(i, b, kStripBlocks)] = 0;
}

void Columns(const QuantizeSpec& spec, const Strip& strip, int64_t row, int64_t block,
             uint8_t* codes, int64_t codes_stride, uint8_t* scales) {
  for (int64_t column = 0; column < strip.blocks * kBlock; column += kBlock) {
    Block blocks[kBlock];
    for (int i = 0; i < kBlock; ++i) blocks[i] = ColumnBlock(strip, column + i);
    QuantizeTile(spec, blocks, kBlock, kStreamColumns, row + column, block, [&](int64_t i) {
      return Place{codes + (column + i) * codes_stride, scales + column + i};
    });
  }
}

void DequantizeRow(const uint8_t* codes, const uint8_t* scales, float global_scale, int64_t n,
                   FloatType type, void* out) {
  for (int64_t i = 0; i < n; ++i) {
    const float x = Dequantize(codes[i / 2] >> i % 2 * 4 & 15, scales[i / kBlock], global_scale);
    switch (type) {
      case FloatType::kF32:
        static_cast<float*>(out)[i] = x;
        break;
      case FloatType::kBf16:
        static_cast<uint16_t*>(out)[i] = Bf16Of(x);
        break;
      case FloatType::kF16:
        static_cast<uint16_t*>(out)[i] = F16Of(x);
        break;
    }
  }
}

}  // namespace

const QuantizeKernels& PortableQuantizeKernels() {
  static constexpr QuantizeKernels kKernels{Load, Amax,    AmaxRows,     AmaxColumns,
                                            Rows, Columns, DequantizeRow};
  return kKernels;
}

}  // namespace nvfp4
