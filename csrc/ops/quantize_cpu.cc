// csrc/ops/quantize_cpu.cc: quantize on the CPU: cuts the input into strips for cpu/quantize.h and
// puts their results in place.
#include <algorithm>
#include <cstring>

#include "core/scale_layout.h"
#include "cpu/quantize.h"
#include "ops/quantize.h"

namespace nvfp4 {
namespace {

constexpr int64_t kTaskRows =
    kTileRows;  // 8 strips: the column results are whole cache lines, the scales whole tiles
constexpr int64_t kTaskStrips = kTaskRows / kStripRows;
constexpr int64_t kMaxTaskPieces = 16;  // of kStripColumns columns

QuantizeSpec SpecOf(const QuantizeArgs& args, const QuantizeOutput& out, int64_t example) {
  QuantizeSpec spec{TensorScaleOf(out.amax[example * args.amax_stride]),
                    out.tile16,
                    out.stochastic,
                    out.hadamard,
                    args.signs,
                    {0, 0}};
  if (out.stochastic) std::memcpy(spec.key, args.key + 2 * example, sizeof spec.key);
  return spec;
}

// Where the matrix that a row of x belongs to begins among the rows and the columns of an example's
// matrices, all in a row, and in which block: what random bits are drawn for.
struct RandomOrigin {
  RandomOrigin(const QuantizeArgs& args, int64_t matrix, int64_t of_row) {
    if (args.origin == nullptr) {
      row = matrix * args.rows;
      column = matrix * args.k;
      return;
    }
    QuantizeOrigin origin;
    std::memcpy(&origin, args.origin, sizeof origin);
    const uint32_t* const numbers = args.origin + kOriginWords;
    column = origin.column;
    block_of_row = origin.column / kBlock;
    if (args.segment != 0) {
      const int64_t segment = of_row / args.segment;
      row = int64_t{numbers[segment]} * origin.rows + origin.row - segment * args.segment;
      block_of_column = row / kBlock;
    } else {
      row = int64_t{numbers[matrix]} * origin.rows + origin.row;
      column += int64_t{numbers[matrix]} * origin.columns;
      block_of_column = origin.row / kBlock;
    }
  }
  int64_t row, column, block_of_row = 0, block_of_column = 0;
};

// One task: 128 rows x some columns of one matrix. Both results of it are whole tiles of scales,
// and it writes all their bytes.
class Task {
 public:
  Task(const QuantizeArgs& args, int64_t matrix, int64_t row0, int64_t column0, int64_t columns)
      : args_(args),
        kernels_(CurrentQuantizeKernels()),
        matrix_(matrix),
        random_(args, matrix % args.batch, row0),
        x_(static_cast<const uint8_t*>(args.x) + matrix * args.rows * args.k * SizeOf(args.type)),
        row0_(row0),
        rows_(std::min(kTaskRows, args.rows - row0)),
        column0_(column0),
        columns_(std::min(columns, args.k - column0)) {
    const int64_t example = matrix / args.batch;
    if (args.along_rows.codes != nullptr) row_spec_ = SpecOf(args, args.along_rows, example);
    if (args.along_columns.codes != nullptr)
      column_spec_ = SpecOf(args, args.along_columns, example);
  }

  void Run() {
    const bool along_rows = args_.along_rows.codes != nullptr;
    if (along_rows)
      ClearPartialTiles(args_.along_rows, args_.rows, args_.k, row0_ + rows_, column0_, columns_);
    if (args_.along_columns.codes == nullptr) {
      for (int64_t row = row0_; row < row0_ + rows_; row += kStripRows)
        for (int64_t column = column0_; column < column0_ + columns_; column += kStripColumns)
          AlongRows(Load(row, column, kStripColumns), row, column);
      return;
    }
    ClearPartialTiles(args_.along_columns, args_.k, args_.rows, column0_ + columns_, row0_, rows_);
    for (int64_t column = column0_; column < column0_ + columns_; column += kStripColumns) {
      for (int64_t row = row0_; row < row0_ + rows_; row += kStripRows) {
        const bool last = row + kStripRows >= row0_ + rows_;
        const Strip strip = Load(
            row, column, last ? kStripColumns - (row - row0_) * args_.k : kStripRows * args_.k);
        if (along_rows) AlongRows(strip, row, column);
        AlongColumns(strip, row, column);
      }
      StoreColumns(column);
    }
  }

 private:
  int64_t ColumnsFrom(int64_t column) const {
    return std::min(kStripColumns, column0_ + columns_ - column);
  }

  Strip Load(int64_t row, int64_t column, int64_t next) {
    return buffer_.Load(kernels_, {args_.type, x_, args_.rows, args_.k}, row, column,
                        ColumnsFrom(column), next, args_.along_columns.codes == nullptr);
  }

  // Of a result [rows, k]: zeros to the tiles of scales, `columns` wide, in which this task ends
  // before their last row.
  void ClearPartialTiles(const QuantizeOutput& out, int64_t rows, int64_t k, int64_t row_end,
                         int64_t column, int64_t columns) const {
    if (row_end % kTileRows == 0) return;
    const int64_t tile_columns = TileColumns(k), row = row_end / kTileRows * kTileRows;
    uint8_t* tiles = out.scales + matrix_ * ScalesSize(rows, k) +
                     ScaleOffset(row, column / kBlock, tile_columns);
    std::memset(tiles, 0, TileColumns(columns) * kTileBytes);
  }

  void AlongRows(const Strip& strip, int64_t row, int64_t column) const {
    const QuantizeOutput& out = args_.along_rows;
    const int64_t stride = CodesStride(args_.k), block = column / kBlock;
    uint8_t* codes = out.codes + (matrix_ * args_.rows + row) * stride + block * kBlock / 2;
    uint8_t* scales = out.scales + matrix_ * ScalesSize(args_.rows, args_.k) +
                      ScaleOffset(row, block, TileColumns(args_.k));
    kernels_.rows(row_spec_, strip, random_.row + row, random_.block_of_row + block, codes, stride,
                  scales);
    if (strip.blocks % 2 != 0)  // the end of K
      for (int64_t r = 0; r < strip.rows; ++r)
        std::memset(codes + r * stride + strip.blocks * kBlock / 2, 0, kBlock / 2);
  }

  void AlongColumns(const Strip& strip, int64_t row, int64_t column) {
    const int64_t index = (row - row0_) / kStripRows;
    kernels_.columns(column_spec_, strip, random_.column + column,
                     random_.block_of_column + row / kBlock,
                     gathered_.codes[0] + index * kBlock / 2, sizeof gathered_.codes[0],
                     gathered_.scales[index]);
  }

  void StoreColumns(int64_t column) {
    const int64_t n = ColumnsFrom(column);
    const QuantizeOutput& out = args_.along_columns;
    const int64_t stride = CodesStride(args_.rows), tile_columns = TileColumns(args_.rows);
    const int64_t strips = CeilDiv(rows_, kStripRows), block = row0_ / kBlock,
                  size = CodesStride(rows_);
    uint8_t* codes = out.codes + (matrix_ * args_.k + column) * stride + block * kBlock / 2;
    uint8_t* scales = out.scales + matrix_ * ScalesSize(args_.k, args_.rows);
    if (strips == kTaskStrips) {
      for (int64_t c = 0; c < n; ++c)
        std::memcpy(codes + c * stride, gathered_.codes[c], kTaskRows / 2);
    } else {
      std::memset(gathered_.scales[strips], 0, (kTaskStrips - strips) * kStripColumns);
      for (int64_t c = 0; c < n; ++c) {
        std::memset(gathered_.codes[c] + strips * kBlock / 2, 0, size - strips * kBlock / 2);
        std::memcpy(codes + c * stride, gathered_.codes[c], size);
      }
    }
    for (int64_t s = 0; s < strips; s += kTileBlocks) {
      uint8_t four[kStripColumns][kTileBlocks];
      for (int64_t c = 0; c < kStripColumns; ++c)
        for (int64_t i = 0; i < kTileBlocks; ++i) four[c][i] = gathered_.scales[s + i][c];
      constexpr int64_t kRun = 32;  // columns a constant distance apart in a tile
      for (int64_t run = 0; run < n; run += kRun) {
        uint8_t* to = scales + ScaleOffset(column + run, block + s, tile_columns);
        for (int64_t c = run; c < std::min(run + kRun, n); ++c, to += kTileBytes / kRun)
          std::memcpy(to, four[c], kTileBlocks);
      }
    }
  }

  const QuantizeArgs& args_;
  const QuantizeKernels& kernels_;
  const int64_t matrix_;
  const RandomOrigin random_;
  const uint8_t* const x_;  // this matrix
  const int64_t row0_, rows_, column0_, columns_;
  QuantizeSpec row_spec_{}, column_spec_{};
  StripBuffer buffer_;
  // What the strips along columns give for the same columns: a column's codes are a cache line
  // before they are written.
  struct {
    alignas(64) uint8_t codes[kStripColumns][kTaskRows / 2];
    uint8_t scales[kTaskStrips][kStripColumns];
  } gathered_;
};

}  // namespace

void QuantizeOnCpu(const QuantizeArgs& args, const Parallel& parallel) {
  const FloatEnvironment environment;
  for (const QuantizeOutput* out : {&args.along_rows, &args.along_columns}) {
    if (out->codes == nullptr) continue;
    for (int64_t example = 0; example < args.examples; ++example) {
      const float decode = TensorScaleOf(out->amax[example * args.amax_stride]).decode;
      out->global_scale[example] =
          out->partner != nullptr ? decode * out->partner[example] : decode;
    }
  }
  // Long tasks read long rows, but there should be some for every thread.
  const int64_t matrices = args.examples * args.batch, row_tasks = CeilDiv(args.rows, kTaskRows);
  const int64_t pieces = matrices * row_tasks * CeilDiv(args.k, kStripColumns);
  const int64_t columns =
      std::clamp<int64_t>(pieces / (4 * parallel.threads()), 1, kMaxTaskPieces) * kStripColumns;
  const int64_t column_tasks = CeilDiv(args.k, columns), tasks = row_tasks * column_tasks;
  parallel.Run(matrices * tasks, [&](int64_t i) {
    Task(args, i / tasks, i % tasks / column_tasks * kTaskRows, i % column_tasks * columns, columns)
        .Run();
  });
}

}  // namespace nvfp4
