// csrc/ops/quantize_cpu.cc: quantize on the CPU: cuts the input into strips for cpu/quantize.h and puts their results in place.
#include "ops/quantize.h"

#include <algorithm>
#include <cstring>

#include "core/scale_layout.h"
#include "cpu/quantize.h"

namespace nvfp4 {
namespace {

constexpr int64_t kStripRows = kBlock;
constexpr int64_t kPieceColumns = StripBuffer::kColumns;
constexpr int64_t kTaskColumns = 1024;
constexpr int64_t kTaskRows = kTileRows;  // 8 strips: the column results are whole cache lines, the scales whole tiles
constexpr int64_t kTaskStrips = kTaskRows / kStripRows;

QuantizeSpec SpecOf(const QuantizeArgs& args, const QuantizeOutput& out, int64_t example) {
  QuantizeSpec spec{TensorScaleOf(out.amax[example]), out.tile16, out.stochastic, out.hadamard, args.signs, {0, 0}};
  if (out.stochastic) std::memcpy(spec.key, args.key + 2 * example, sizeof spec.key);
  return spec;
}

// Zeros where no block is: the tail of each row of codes, and the rest of the last tiles of scales.
void WritePadding(const QuantizeOutput& out, int64_t matrix, int64_t rows, int64_t k) {
  const int64_t stride = CodesStride(k), used = BlocksOf(k) * kBlock / 2, tile_columns = TileColumns(k);
  if (used != stride) {
    uint8_t* codes = out.codes + matrix * rows * stride;
    for (int64_t row = 0; row < rows; ++row) std::memset(codes + row * stride + used, 0, stride - used);
  }
  const int64_t tile_rows = CeilDiv(rows, kTileRows);
  uint8_t* scales = out.scales + matrix * ScalesSize(rows, k);
  for (int64_t tile_row = 0; tile_row < tile_rows; ++tile_row) {
    uint8_t* tiles = scales + tile_row * tile_columns * kTileBytes;
    if (rows % kTileRows != 0 && tile_row == tile_rows - 1) {
      std::memset(tiles, 0, tile_columns * kTileBytes);
    } else if (BlocksOf(k) % kTileBlocks != 0) {
      std::memset(tiles + (tile_columns - 1) * kTileBytes, 0, kTileBytes);
    }
  }
}

// One task: up to 128 rows x 1024 columns of one matrix.
class Task {
 public:
  Task(const QuantizeArgs& args, int64_t matrix, int64_t row0, int64_t column0)
      : args_(args),
        kernels_(CurrentQuantizeKernels()),
        matrix_(matrix),
        x_(static_cast<const uint8_t*>(args.x) + matrix * args.rows * args.k * SizeOf(args.type)),
        row0_(row0),
        rows_(std::min(kTaskRows, args.rows - row0)),
        column0_(column0),
        columns_(std::min(kTaskColumns, args.k - column0)) {
    const int64_t example = matrix / args.batch;
    if (args.along_rows.amax != nullptr) row_spec_ = SpecOf(args, args.along_rows, example);
    if (args.along_columns.amax != nullptr) column_spec_ = SpecOf(args, args.along_columns, example);
  }

  void Run() const {
    for (int64_t column = 0; column < columns_; column += kPieceColumns) {
      const int64_t n = std::min(kPieceColumns, columns_ - column);
      for (int64_t strip = 0; strip * kStripRows < rows_; ++strip) {
        const int64_t row = row0_ + strip * kStripRows;
        StripBuffer buffer;
        const Strip s = buffer.Load(kernels_, args_.type, x_, args_.rows, args_.k, row, column0_ + column, n);
        if (args_.along_rows.amax != nullptr) AlongRows(s, row, column0_ + column);
        if (args_.along_columns.amax != nullptr) AlongColumns(s, row, column0_ + column, strip);
      }
      if (args_.along_columns.amax != nullptr) StoreColumns(column0_ + column, n);
    }
  }

 private:
  void AlongRows(const Strip& strip, int64_t row, int64_t column) const {
    const QuantizeOutput& out = args_.along_rows;
    const int64_t stride = CodesStride(args_.k), tile_columns = TileColumns(args_.k), valid = std::min(kStripRows, args_.rows - row);
    const int64_t block = column / kBlock, matrix_row = matrix_ % args_.batch * args_.rows + row;
    uint8_t* codes = out.codes + (matrix_ * args_.rows + row) * stride + block * kBlock / 2;
    constexpr int64_t kPieceBlocks = kPieceColumns / kBlock;
    uint8_t scales[kStripRows][kPieceBlocks];
    if (valid == kStripRows) {
      kernels_.rows(row_spec_, strip, matrix_row, block, codes, stride, scales[0], kPieceBlocks);
    } else {
      uint8_t all[kStripRows][kPieceColumns / 2];
      kernels_.rows(row_spec_, strip, matrix_row, block, all[0], sizeof all[0], scales[0], kPieceBlocks);
      for (int64_t r = 0; r < valid; ++r) std::memcpy(codes + r * stride, all[r], strip.blocks * kBlock / 2);
    }
    uint8_t* to = out.scales + matrix_ * ScalesSize(args_.rows, args_.k);
    for (int64_t r = 0; r < valid; ++r) {
      int64_t b = 0;
      for (; b + kTileBlocks <= strip.blocks; b += kTileBlocks)
        std::memcpy(to + ScaleOffset(row + r, block + b, tile_columns), scales[r] + b, kTileBlocks);
      for (; b < strip.blocks; ++b) to[ScaleOffset(row + r, block + b, tile_columns)] = scales[r][b];
    }
  }

  // A column's codes of all strips are gathered to a cache line before they are written.
  void AlongColumns(const Strip& strip, int64_t row, int64_t column, int64_t index) const {
    const int64_t matrix_row = matrix_ % args_.batch * args_.k + column;
    kernels_.columns(column_spec_, strip, matrix_row, row / kBlock, gathered_.codes[0] + index * kBlock / 2,
                     sizeof gathered_.codes[0], gathered_.scales[0] + index, sizeof gathered_.scales[0]);
  }

  void StoreColumns(int64_t column, int64_t n) const {
    const QuantizeOutput& out = args_.along_columns;
    const int64_t stride = CodesStride(args_.rows), tile_columns = TileColumns(args_.rows);
    const int64_t strips = CeilDiv(rows_, kStripRows), block = row0_ / kBlock;
    uint8_t* codes = out.codes + (matrix_ * args_.k + column) * stride + block * kBlock / 2;
    uint8_t* scales = out.scales + matrix_ * ScalesSize(args_.k, args_.rows);
    for (int64_t c = 0; c < n; ++c) {
      std::memcpy(codes + c * stride, gathered_.codes[c], strips * kBlock / 2);
      for (int64_t s = 0; s < strips; s += kTileBlocks)
        std::memcpy(scales + ScaleOffset(column + c, block + s, tile_columns), gathered_.scales[c] + s,
                    std::min<int64_t>(kTileBlocks, strips - s));
    }
  }

  struct Gathered {
    alignas(64) uint8_t codes[kPieceColumns][kTaskRows / 2];
    uint8_t scales[kPieceColumns][kTaskStrips];
  };

  const QuantizeArgs& args_;
  const QuantizeKernels& kernels_;
  const int64_t matrix_;
  const uint8_t* const x_;  // this matrix
  const int64_t row0_, rows_, column0_, columns_;
  QuantizeSpec row_spec_{}, column_spec_{};
  mutable Gathered gathered_;
};

}  // namespace

void QuantizeOnCpu(const QuantizeArgs& args, const Parallel& parallel) {
  const FloatEnvironment environment;
  const QuantizeOutput* const outputs[] = {&args.along_rows, &args.along_columns};
  for (const QuantizeOutput* out : outputs) {
    if (out->amax == nullptr) continue;
    const bool rows = out == &args.along_rows;
    for (int64_t example = 0; example < args.examples; ++example) {
      const float decode = TensorScaleOf(out->amax[example]).decode;
      out->global_scale[example] = out->partner != nullptr ? decode * out->partner[example] : decode;
    }
    for (int64_t matrix = 0; matrix < args.examples * args.batch; ++matrix)
      WritePadding(*out, matrix, rows ? args.rows : args.k, rows ? args.k : args.rows);
  }
  const int64_t row_tasks = CeilDiv(args.rows, kTaskRows), column_tasks = CeilDiv(args.k, kTaskColumns);
  const int64_t tasks = row_tasks * column_tasks;
  parallel.Run(args.examples * args.batch * tasks, [&](int64_t i) {
    Task(args, i / tasks, i % tasks / column_tasks * kTaskRows, i % column_tasks * kTaskColumns).Run();
  });
}

}  // namespace nvfp4
