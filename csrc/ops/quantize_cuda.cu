// csrc/ops/quantize_cuda.cu: quantize on CUDA: one kernel for both outputs, each tile of 128 x 128
// read once.
//
// 256 threads quantize a tile along its rows from registers and keep it in shared memory, where
// they quantize it along its columns (cuda/tile.cuh says who has what). A block of threads takes
// some tiles of the same 128 rows one after the other, and shares what they have in common: the
// encode factors of all 127 block scales, so that no block needs a division. Block scales are
// gathered in shared memory and leave it as whole scale tiles.
//
// Moves 2 bytes an element of bfloat16 in and 9/16 out for each output, in whole sectors of 32
// bytes. The same bits as the CPU: whatever is not float32 arithmetic in core's order is exact.
#include <algorithm>

#include "core/block.h"
#include "cuda/stochastic.cuh"
#include "cuda/tile.cuh"
#include "ops/quantize.h"

// Uniform branches that only extreme tensors take. benchmarks/sass_model.py builds without them to
// count what the others execute.
#if defined(NVFP4_COUNT_INSTRUCTIONS)
#define NVFP4_RARELY(condition) false
#else
#define NVFP4_RARELY(condition) (condition)
#endif

namespace nvfp4 {
namespace {

// Blocks of threads on a multiprocessor at once: 128 registers for a thread.
constexpr int kResidentBlocks = 2;

// What a kernel does to an output: bits. kAny: what the output says, in any kernel.
enum Mode : int {
  kAbsent = 0,
  kWanted = 1,
  kTile16 = 2,
  kStochastic = 4,
  kHadamard = 8,
  kAny = 16
};

NVFP4_HD constexpr bool IsSet(int mode, int bit) { return (mode & bit) != 0; }

constexpr int kScaleTiles = kTileBlocksAcross / kTileBlocks;  // of a tile, in one output
constexpr int kScaleBytes = kScaleTiles * kTileBytes;
constexpr int kLine = 16;  // bytes of a scale tile that one thread stores
constexpr int kScaleLines = kScaleBytes / kLine;
constexpr int kScaleTileColumns = kTileBlocks * kBlock;  // elements
constexpr int kBlockBytes = kBlock / 2;
constexpr int kScales = 128;  // E4M3 codes without a sign

// Factors that are powers of two are folded into others, which changes no bit where all stay
// normal: where the amax is zero or between these. What is said of folds below holds for all but
// such tensors, and places in tensors of more than 2^32 rows.
constexpr float kFoldsFrom = 0x1p-100f, kFoldsBelow = 0x1p100f;

struct OutputState {
  float encode[kScales];  // BlockEncode of each scale, times 2^-14 where that is folded in
  float block_factor;     // TensorScale::block_factor
};

template <FloatType kKept>
struct Shared {
  OutputState rows, columns;
  // Of two tiles, as a block of threads fills the next while the last ones still copy; along rows,
  // then along columns.
  alignas(16) uint8_t scales[2][2][kScaleBytes];
  alignas(16) Tile<kKept> tile;  // not there if only rows are wanted
};

// Blocks of threads are numbered along k, then down the rows of the matrices one after the other.
struct Grid {
  Divider blocks_across, tiles_down, batch;
  uint32_t tiles_across;
  uint32_t tiles_of_block;
};

template <FloatType kType, int kRows, int kColumns, bool kWhole>
class Quantizer {
 public:
  static constexpr bool kHasRows = kRows != kAbsent, kHasColumns = kColumns != kAbsent;
  using T = Tile<kType>;
  // Stochastic rounding takes so many instructions that they bound the kernel, not the memory. Then
  // a tile is widened once and kept as float32, and all factors are folded that can be: 2^-14 of
  // stochastic rounding, and one quarter of the Hadamard transform, which the tile is kept with.
  static constexpr bool kFolds = kWhole && T::kHalves && ((kRows | kColumns) & kStochastic) != 0;
  static constexpr bool kQuarters = kFolds && (kColumns & kHadamard) != 0;
  static constexpr FloatType kKept = kFolds ? FloatType::kF32 : kType;
  using Kept = Tile<kKept>;
  // The next tile is loaded before this one is quantized along its columns. Stochastic rounding
  // leaves no registers for that, and takes long enough for another block of threads to load.
  static constexpr bool kLoadsEarly = kWhole && ((kRows | kColumns) & kStochastic) == 0;

  NVFP4_DEVICE Quantizer(const QuantizeArgs& args, const Grid& grid)
      : args_(args), grid_(grid), shared_(DynamicShared<Shared<kKept>>()) {}

  NVFP4_DEVICE void Run() {
    if (blockIdx.x == 0) {
      StoreGlobalScales(args_.along_rows);
      StoreGlobalScales(args_.along_columns);
    }
    const uint32_t band = grid_.blocks_across.Quotient(blockIdx.x);
    const uint32_t first = grid_.blocks_across.Remainder(blockIdx.x, band) * grid_.tiles_of_block;
    if (first >= grid_.tiles_across) return;  // no elements
    const uint32_t matrix = grid_.tiles_down.Quotient(band);
    const uint32_t example = grid_.batch.Quotient(matrix);
    Place(matrix, grid_.batch.Remainder(matrix, example), grid_.tiles_down.Remainder(band, matrix),
          first);
    typename T::RowBlock blocks[kThreadRows];
    Load(blocks);
    Prepare(example);
    left_ = min(grid_.tiles_of_block, grid_.tiles_across - first);
    while (true) {
      if (!kFolds || !NVFP4_RARELY(!folds_))
        QuantizeTile<kFolds>(blocks);
      else
        QuantizeTile<false>(blocks);
      if (--left_ == 0) return;
      Advance();
      if constexpr (!kLoadsEarly) Load(blocks);
    }
  }

 private:
  // ---- Once for a block of threads

  NVFP4_DEVICE void StoreGlobalScales(const QuantizeOutput& out) const {
    if (out.amax == nullptr) return;
#pragma unroll 1
    for (int64_t i = threadIdx.x; i < args_.examples; i += kTileThreads) {
      const float decode = TensorScaleOf(out.amax[i * args_.amax_stride]).decode;
      out.global_scale[i] = out.partner != nullptr ? __fmul_rn(decode, out.partner[i]) : decode;
    }
  }

  NVFP4_DEVICE bool Folds(const QuantizeOutput& out, uint32_t example) const {
    if (out.amax == nullptr) return true;
    const float amax = out.amax[example * args_.amax_stride];
    return amax == 0.0f || (amax >= kFoldsFrom && amax < kFoldsBelow);
  }

  // Whether the upper words of the rows of some tiles, which random bits are drawn for, differ.
  static NVFP4_DEVICE bool Carries(int64_t first, uint32_t tiles) {
    return first >> 32 != (first + tiles * kTile - 1) >> 32;
  }

  NVFP4_DEVICE void Prepare(uint32_t example) {
    if constexpr (kFolds)
      folds_ = Folds(args_.along_rows, example) && Folds(args_.along_columns, example) &&
               !Carries(random_row_, 1) && !Carries(random_column_, grid_.tiles_of_block);
    const bool columns = threadIdx.x >= kScales;
    const uint8_t scale = static_cast<uint8_t>(threadIdx.x % kScales);
    const QuantizeOutput& out = columns ? args_.along_columns : args_.along_rows;
    if (out.amax != nullptr) {
      const TensorScale tensor = TensorScaleOf(out.amax[example * args_.amax_stride]);
      OutputState& state = columns ? shared_.columns : shared_.rows;
      float encode = BlockEncode(scale, tensor), factor = tensor.block_factor;
      if (kFolds && folds_) {
        const float kept = kQuarters && !columns ? 4.0f : 1.0f;
        encode = __fmul_rn(encode, kept * (out.stochastic ? 0x1p-14f : 1.0f));
        factor = __fmul_rn(factor, kept);
      }
      state.encode[scale] = encode;
      if (scale == 0) state.block_factor = factor;
    }
    if constexpr (((kRows | kColumns) & (kStochastic | kAny)) != 0) {
      if (args_.key != nullptr) random_.SetKey(args_.key[2 * example], args_.key[2 * example + 1]);
    }
    __syncthreads();
    if (WantsRows()) row_factor_ = Uniform(shared_.rows.block_factor);
    if (WantsColumns()) column_factor_ = Uniform(shared_.columns.block_factor);
  }

  // ---- Where this thread is, from tile to tile

  NVFP4_DEVICE void Place(uint32_t matrix, uint32_t matrix_of_example, uint32_t down,
                          uint32_t across) {
    const BlockPlace row_place = RowPlace(0), column_place = ColumnPlace();
    row_ = static_cast<int64_t>(down) * kTile;
    column_ = static_cast<int64_t>(across) * kTile;
    const int64_t matrix_row = matrix * args_.rows + row_ + row_place.row;
    from_ = static_cast<const uint8_t*>(args_.x) +
            (matrix_row * args_.k + column_ + row_place.block * kBlock) * T::kSize;
    PlaceRandom(matrix_of_example);
    row_block_ = static_cast<uint32_t>(column_ / kBlock) + row_place.block;
    column_block_ = static_cast<uint32_t>(row_ / kBlock) + column_place.block;
    row_staged_ = StagedOffset(row_place);
    column_staged_ = StagedOffset(column_place);
    store_place_ = Kept::StorePlace();
    load_place_ = Kept::LoadPlace();
    if constexpr (kFolds) {
      // Instructions count there, and the compiler would spend some in each tile. A fourth register
      // would be one too many.
      row_staged_ = InRegister(row_staged_);
      store_place_ = InRegister(store_place_);
      load_place_ = InRegister(load_place_);
    }
    codes_stride_[0] = CodesStride(args_.k);
    codes_stride_[1] = CodesStride(args_.rows);
    if (WantsRows())
      row_codes_ = args_.along_rows.codes + matrix_row * codes_stride_[0] +
                   row_block_ * int64_t{kBlockBytes};
    if (WantsColumns())
      column_codes_ = args_.along_columns.codes +
                      (matrix * args_.k + column_ + column_place.row) * codes_stride_[1] +
                      column_block_ * int64_t{kBlockBytes};
    PlaceScales(matrix);
  }

  // What this thread copies in StoreScales.
  NVFP4_DEVICE void PlaceScales(uint32_t matrix) {
    const int thread = static_cast<int>(threadIdx.x), line = thread % kScaleLines;
    const bool columns = thread >= kScaleLines;
    if (thread >= 2 * kScaleLines || (columns ? !WantsColumns() : !WantsRows())) return;
    const QuantizeOutput& out = columns ? args_.along_columns : args_.along_rows;
    const int64_t rows = columns ? args_.k : args_.rows, k = columns ? args_.rows : args_.k;
    const int64_t row = columns ? column_ : row_, column = columns ? row_ : column_;
    scales_ = out.scales + matrix * ScalesSize(rows, k) +
              (row / kTileRows * TileColumns(k) + column / kScaleTileColumns) * kTileBytes +
              line * kLine;
    scales_step_ = columns ? static_cast<uint32_t>(TileColumns(k)) : kScaleTiles;
  }

  // What random bits are drawn for: places in the tensor that x may be a part of.
  NVFP4_DEVICE void PlaceRandom(uint32_t matrix_of_example) {
    random_row_ = row_;
    random_column_ = column_;
    if (args_.origin == nullptr) {
      random_row_ += matrix_of_example * args_.rows;
      random_column_ += matrix_of_example * args_.k;
      return;
    }
    const auto& origin = *reinterpret_cast<const QuantizeOrigin*>(args_.origin);
    const uint32_t* const numbers = args_.origin + kOriginWords;
    random_column_ += origin.column;
    row_block_shift_ = origin.column / kBlock;
    if (args_.segment != 0) {
      const int64_t segment = row_ / args_.segment;
      const int64_t first = static_cast<int64_t>(numbers[segment]) * origin.rows + origin.row -
                            segment * args_.segment;
      random_row_ += first;
      column_block_shift_ = static_cast<uint32_t>(first / kBlock);
    } else {
      const uint32_t number = numbers[matrix_of_example];
      random_row_ += static_cast<int64_t>(number) * origin.rows + origin.row;
      random_column_ += static_cast<int64_t>(number) * origin.columns;
      column_block_shift_ = origin.row / kBlock;
    }
  }

  NVFP4_DEVICE void Advance() {
    column_ += kTile;
    row_block_ += kTileBlocksAcross;
    random_column_ += kTile;
    if (WantsRows()) row_codes_ += kTileBlocksAcross * kBlockBytes;
    if (WantsColumns()) column_codes_ += kTile * codes_stride_[1];
    scales_ += int64_t{scales_step_} * kTileBytes;
    buffer_ ^= 1;
  }

  // ---- One tile

  NVFP4_DEVICE bool WantsRows() const {
    return kRows == kAny ? args_.along_rows.codes != nullptr : kHasRows;
  }
  NVFP4_DEVICE bool WantsColumns() const {
    return kColumns == kAny ? args_.along_columns.codes != nullptr : kHasColumns;
  }

  // The next tile.
  NVFP4_DEVICE void Load(typename T::RowBlock (&blocks)[kThreadRows]) {
    const BlockPlace at = RowPlace(0);
    const int64_t step = kRowStep * args_.k * T::kSize;
    if constexpr (kWhole) {
      const uint8_t* from = from_;
#pragma unroll
      for (int i = 0; i < kThreadRows; ++i, from += step) blocks[i] = T::template Load<32>(from);
    } else {
      T::Load(from_, step, args_.rows - row_ - at.row, args_.k - column_ - at.block * kBlock,
              args_.k * T::kSize % 16 == 0, blocks);
    }
    from_ += kTile * T::kSize;
  }

  // As the tile is kept.
  static NVFP4_DEVICE typename Kept::RowBlock Keep(const typename T::RowBlock& block) {
    if constexpr (kFolds)
      return Widened<kType, kQuarters>(block);
    else
      return block;
  }

  template <bool kFolded>
  NVFP4_DEVICE void QuantizeTile(typename T::RowBlock (&loaded)[kThreadRows]) {
    typename Kept::RowBlock blocks[kThreadRows];
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) blocks[i] = Keep(loaded[i]);
    if (WantsColumns()) shared_.tile.Store(store_place_, blocks);
    if constexpr (kRows == kAny) {
      const QuantizeOutput& out = args_.along_rows;
      if (WantsRows()) {
        if (out.stochastic) {
          if (out.hadamard)
            Rows<kWanted | kStochastic | kHadamard, kFolded>(blocks);
          else
            Rows<kWanted | kStochastic, kFolded>(blocks);
        } else {
          if (out.hadamard)
            Rows<kWanted | kHadamard, kFolded>(blocks);
          else
            Rows<kWanted, kFolded>(blocks);
        }
      }
    } else if constexpr (kHasRows) {
      Rows<kRows, kFolded>(blocks);
    }
    __syncthreads();
    if constexpr (kLoadsEarly) {
      if (left_ > 1) Load(loaded);
    }
    if constexpr (kColumns == kAny) {
      const QuantizeOutput& out = args_.along_columns;
      if (WantsColumns()) {
        if (out.stochastic) {
          if (out.hadamard)
            Columns<kWanted | kStochastic | kHadamard, kFolded>();
          else
            Columns<kWanted | kStochastic, kFolded>();
        } else {
          if (out.hadamard)
            Columns<kWanted | kHadamard, kFolded>();
          else
            Columns<kWanted, kFolded>();
        }
      }
    } else if constexpr (kHasColumns) {
      Columns<kColumns, kFolded>();
    }
    if (WantsColumns()) __syncthreads();
    StoreScales();
  }

  NVFP4_DEVICE uint32_t Signs() const { return kWhole ? kHadamardSigns : args_.signs; }

  // Codes of 16 values from their products with the encode factor. In the quantized matrix they are
  // in row first_row + row.
  template <int kMode, bool kFolded>
  NVFP4_DEVICE uint2 Encode(float (&y)[kBlock], uint32_t stream, int64_t first_row, int row,
                            uint32_t block) const {
    if constexpr (IsSet(kMode, kStochastic)) {
      if constexpr (!kFolded) {
#pragma unroll
        for (int i = 0; i < kBlock; ++i) y[i] = __fmul_rn(y[i], 0x1p-14f);
      }
      const int64_t high = kFolded ? first_row : first_row + row;  // Carries
      return EncodeStochastic(y, random_.At(static_cast<uint32_t>(first_row) + row,
                                            static_cast<uint32_t>(high >> 32), block, stream));
    } else {
      return make_uint2(EncodeE2M1x8({y[0], y[1], y[2], y[3], y[4], y[5], y[6], y[7]}),
                        EncodeE2M1x8({y[8], y[9], y[10], y[11], y[12], y[13], y[14], y[15]}));
    }
  }

  template <int kMode, bool kFolded>
  NVFP4_DEVICE void Rows(const typename Kept::RowBlock (&blocks)[kThreadRows]) {
    const QuantizeOutput& out = args_.along_rows;
    const OutputState& state = shared_.rows;
    const bool square = kRows == kAny ? out.tile16 : IsSet(kMode, kTile16);
    float scale[kThreadRows];
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) {
      if constexpr (IsSet(kMode, kHadamard)) {
        float2 v[kBlock / 2];
        Kept::Hadamard(blocks[i], Signs(), v);
        scale[i] = ThroughBf16(Kept::AmaxOfAll(v));
      } else {
        scale[i] = Kept::Amax(blocks[i]);
        if constexpr (kQuarters && !kFolded) scale[i] = __fmul_rn(scale[i], 4.0f);
      }
    }
    if (square) {
      float amax = max(max(scale[0], scale[1]), max(scale[2], scale[3]));
      amax = MaxOfSquare(amax, kSquareAlongRows);
#pragma unroll
      for (int i = 0; i < kThreadRows; ++i)
        scale[i] = kWhole || row_ + RowPlace(i).row < args_.rows ? amax : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kThreadRows; i += 2) {
      const float2 two = Multiply(Pair(scale[i], scale[i + 1]), Pair(row_factor_, row_factor_));
      scale[i] = two.x;
      scale[i + 1] = two.y;
    }
    const BlockPlace at = RowPlace(0);
    uint8_t* staged = shared_.scales[buffer_][0] + row_staged_;
    uint8_t* to = row_codes_;
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) {
      const int step = kRowStep * i;
      const uint32_t byte = EncodeScale(scale[i]);
      const float encode = state.encode[byte];
      float2 v[kBlock / 2];
      if constexpr (IsSet(kMode, kHadamard)) {
        Kept::Hadamard(blocks[i], Signs(), v);
#pragma unroll
        for (int j = 0; j < kBlock / 2; ++j) v[j] = Pair(ThroughBf16(v[j].x), ThroughBf16(v[j].y));
      } else {
#pragma unroll
        for (int j = 0; j < kBlock / 2; ++j) {
          v[j] = Kept::PairOf(blocks[i], j);
          if constexpr (kQuarters && !kFolded) v[j] = Multiply(v[j], Pair(4.0f, 4.0f));
        }
      }
      float y[kBlock];
#pragma unroll
      for (int j = 0; j < kBlock / 2; ++j) {
        const float2 p = Multiply(v[j], Pair(encode, encode));
        y[2 * j] = p.x;
        y[2 * j + 1] = p.y;
      }
      staged[step * kLine] = static_cast<uint8_t>(byte);
      uint2 codes = Encode<kMode, kFolded>(y, kStreamRows, random_row_, at.row + step,
                                           row_block_ + row_block_shift_);
      if constexpr (kWhole) {
        *reinterpret_cast<uint2*>(to) = codes;
      } else if (row_ + at.row + step < args_.rows &&
                 row_block_ * int64_t{kBlockBytes} < codes_stride_[0]) {
        if (row_block_ >= BlocksOf(args_.k)) codes = make_uint2(0, 0);
        *reinterpret_cast<uint2*>(to) = codes;
      }
      to += kRowStep * codes_stride_[0];
    }
  }

  template <int kMode, bool kFolded>
  NVFP4_DEVICE void Columns() {
    const QuantizeOutput& out = args_.along_columns;
    const OutputState& state = shared_.columns;
    const bool square = kColumns == kAny ? out.tile16 : IsSet(kMode, kTile16);
    const BlockPlace at = ColumnPlace();
    const int64_t left = args_.k - column_ - at.row;  // columns from the first of this thread on
    uint8_t* staged = shared_.scales[buffer_][1] + column_staged_;
    uint8_t* to = column_codes_;
    const typename Kept::ColumnBlock words = shared_.tile.LoadColumns(load_place_);
    float square_amax = 0.0f;
    if (square) {
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        float2 v[kBlock];
        const float2 amax = ColumnAmax<kMode>(words, part, v);
        square_amax = max(square_amax, max(amax.x, amax.y));
      }
      square_amax = MaxOfSquare(square_amax, kSquareAlongColumns);
    }
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      float2 v[kBlock];
      float2 amax = ColumnAmax<kMode>(words, part, v);
      if (square) {
        amax = Pair(kWhole || left > 2 * part ? square_amax : 0.0f,
                    kWhole || left > 2 * part + 1 ? square_amax : 0.0f);
      }
      const float2 scale = Multiply(amax, Pair(column_factor_, column_factor_));
      const uint32_t bytes[2] = {EncodeScale(scale.x), EncodeScale(scale.y)};
      const float2 encode = Pair(state.encode[bytes[0]], state.encode[bytes[1]]);
      if constexpr (IsSet(kMode, kHadamard)) {
#pragma unroll
        for (int r = 0; r < kBlock; ++r) v[r] = Pair(ThroughBf16(v[r].x), ThroughBf16(v[r].y));
      } else {
#pragma unroll
        for (int r = 0; r < kBlock; ++r) v[r] = Kept::PairOf(words, part, r);
      }
#pragma unroll
      for (int r = 0; r < kBlock; ++r) v[r] = Multiply(v[r], encode);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float y[kBlock];
#pragma unroll
        for (int r = 0; r < kBlock; ++r) y[r] = half == 0 ? v[r].x : v[r].y;
        const int i = 2 * part + half;
        staged[i * kLine] = static_cast<uint8_t>(bytes[half]);
        uint2 codes = Encode<kMode, kFolded>(y, kStreamColumns, random_column_, at.row + i,
                                             column_block_ + column_block_shift_);
        if constexpr (kWhole) {
          *reinterpret_cast<uint2*>(to) = codes;
        } else if (i < left && column_block_ * int64_t{kBlockBytes} < codes_stride_[1]) {
          if (column_block_ >= BlocksOf(args_.rows)) codes = make_uint2(0, 0);
          *reinterpret_cast<uint2*>(to) = codes;
        }
        to += codes_stride_[1];
      }
    }
  }

  // With the Hadamard transform v is what it gives, not yet rounded.
  template <int kMode>
  NVFP4_DEVICE float2 ColumnAmax(const typename Kept::ColumnBlock& words, int part,
                                 float2 (&v)[kBlock]) const {
    if constexpr (IsSet(kMode, kHadamard)) {
      Kept::template Hadamard<kQuarters>(words, part, Signs(), v);
      const float2 amax = Kept::AmaxOfColumns(v);
      return Pair(ThroughBf16(amax.x), ThroughBf16(amax.y));
    } else {
      return Kept::AmaxOfColumns(words, part);
    }
  }

  // Of a scale, in the scale tiles of this tile.
  static NVFP4_DEVICE int StagedOffset(BlockPlace at) {
    return at.block / kTileBlocks * kTileBytes + at.row % 32 * kLine + at.row / 32 * kTileBlocks +
           at.block % kTileBlocks;
  }

  // 64 threads for each output.
  NVFP4_DEVICE void StoreScales() const {
    const auto thread = static_cast<int>(threadIdx.x);
    const bool columns = thread >= kScaleLines;
    if (thread >= 2 * kScaleLines || (columns ? !WantsColumns() : !WantsRows())) return;
    if constexpr (!kWhole) {
      const int line = thread % kScaleLines;
      // The last scale tile may lie past the end.
      const int64_t before = columns ? row_ : column_, k = columns ? args_.rows : args_.k;
      if (before / kScaleTileColumns + line / (kTileBytes / kLine) >= TileColumns(k)) return;
    }
    *reinterpret_cast<uint4*>(scales_) =
        reinterpret_cast<const uint4*>(shared_.scales[buffer_])[thread];
  }

  const QuantizeArgs& args_;
  const Grid& grid_;
  Shared<kKept>& shared_;
  int64_t row_ = 0, column_ = 0;                // of the tile
  int64_t random_row_ = 0, random_column_ = 0;  // the same, counted through an example's matrices
  uint32_t row_block_ = 0, column_block_ = 0;   // this thread's, in the quantized matrices
  uint32_t row_block_shift_ = 0, column_block_shift_ = 0;  // from them to those of the whole tensor
  int64_t codes_stride_[2] = {0, 0};                       // along rows, along columns
  const uint8_t* from_ = nullptr;  // this thread's first block along rows, in the next tile
  uint32_t left_ = 0;              // tiles, with this one
  uint32_t store_place_ = 0, load_place_ = 0;    // in the tile
  uint32_t row_staged_ = 0, column_staged_ = 0;  // this thread's first scales, in scales[][]
  uint8_t* row_codes_ = nullptr;
  uint8_t* column_codes_ = nullptr;
  uint8_t* scales_ = nullptr;  // where this thread copies some of the tile's to
  uint32_t scales_step_ = 0;   // from tile to tile, in scale tiles
  float row_factor_ = 1.0f, column_factor_ = 1.0f;  // TensorScale::block_factor
  int buffer_ = 0;                                  // of Staged
  bool folds_ = true;
  RandomBits random_ = {};
};

template <FloatType kType, int kRows, int kColumns, bool kWhole>
__global__ void __launch_bounds__(kTileThreads, kWhole ? kResidentBlocks : 1)
    QuantizeKernel(const __grid_constant__ QuantizeArgs args, const __grid_constant__ Grid grid) {
  Quantizer<kType, kRows, kColumns, kWhole>(args, grid).Run();
}

// ---- Launch

struct Kernel {
  void (*function)(const QuantizeArgs, const Grid);
  size_t shared_bytes, tile_bytes;  // the tile is at the end of what is shared
};

template <FloatType kType, int kRows, int kColumns, bool kWhole>
constexpr Kernel KernelFor() {
  constexpr FloatType kKept = Quantizer<kType, kRows, kColumns, kWhole>::kKept;
  return {QuantizeKernel<kType, kRows, kColumns, kWhole>, sizeof(Shared<kKept>),
          sizeof(Tile<kKept>)};
}

int ModeOf(const QuantizeOutput& out) {
  if (out.codes == nullptr) return kAbsent;
  return kWanted | (out.tile16 ? kTile16 : 0) | (out.stochastic ? kStochastic : 0) |
         (out.hadamard ? kHadamard : 0);
}

struct WholeKernel {
  int rows, columns;
  Kernel kernel;
};

template <int kRows, int kColumns>
constexpr WholeKernel Whole() {
  return {kRows, kColumns, KernelFor<FloatType::kBf16, kRows, kColumns, true>()};
}

// What recipes ask for: bfloat16, all of it in whole tiles.
constexpr WholeKernel kWholeKernels[] = {
    Whole<kWanted, kAbsent>(),
    Whole<kWanted, kWanted>(),
    Whole<kWanted, kWanted | kHadamard>(),
    Whole<kWanted | kTile16, kWanted | kTile16>(),
    Whole<kWanted | kStochastic, kAbsent>(),
    Whole<kWanted | kStochastic, kWanted | kStochastic>(),
    Whole<kWanted | kStochastic, kWanted | kStochastic | kHadamard>(),
};

Kernel KernelOf(const QuantizeArgs& args) {
  const int rows = ModeOf(args.along_rows), columns = ModeOf(args.along_columns);
  // Loads of 32 bytes.
  const bool aligned = reinterpret_cast<uintptr_t>(args.x) % 32 == 0;
  if (args.type == FloatType::kBf16 && aligned && args.rows % kTile == 0 && args.k % kTile == 0 &&
      (!((rows | columns) & kHadamard) || args.signs == kHadamardSigns)) {
    for (const WholeKernel& whole : kWholeKernels)
      if (whole.rows == rows && whole.columns == columns) return whole.kernel;
  }
  switch (args.type) {
    case FloatType::kF32:
      return KernelFor<FloatType::kF32, kAny, kAny, false>();
    case FloatType::kBf16:
      return KernelFor<FloatType::kBf16, kAny, kAny, false>();
    case FloatType::kF16:
      return KernelFor<FloatType::kF16, kAny, kAny, false>();
  }
  return {};
}

// How many tiles a block of threads takes one after the other, of `across` in each of `bands`: what
// ends first. Blocks run in turns of those that fit on the chip; what a block prepares takes about
// as long as half a tile.
int64_t TilesOfBlock(int64_t across, int64_t bands) {
  constexpr int64_t kMostTiles = 8;
  int device = 0, multiprocessors = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device) !=
          cudaSuccess)
    return 1;  // the launch will say what is wrong
  const int64_t resident = std::max(1, multiprocessors) * int64_t{kResidentBlocks};
  int64_t best = 1, least = INT64_MAX;
  for (int64_t tiles = 1; tiles <= kMostTiles; ++tiles) {
    const int64_t turns = CeilDiv(CeilDiv(across, tiles) * bands, resident);
    const int64_t cost = turns * (2 * tiles + 1);
    if (cost < least) {
      least = cost;
      best = tiles;
    }
  }
  return best;
}

}  // namespace

CudaError QuantizeOnCuda(const QuantizeArgs& args, CudaStream stream) {
  if (args.examples == 0) return nullptr;
  const Kernel kernel = KernelOf(args);
  const int64_t across = CeilDiv(args.k, kTile), down = CeilDiv(args.rows, kTile),
                matrices = args.examples * args.batch;
  const int64_t tiles_of_block = TilesOfBlock(across, down * matrices);
  const int64_t blocks_across = CeilDiv(across, tiles_of_block);
  // At least one: there are global scales even where there are no elements.
  constexpr int64_t kMostBlocks = 0x7FFFFFFF;
  const int64_t blocks = std::max<int64_t>(1, blocks_across * down * matrices);
  if (blocks > kMostBlocks) return "quantize: x has more elements than one kernel can take";
  const Grid grid{Divider(blocks_across), Divider(down), Divider(args.batch),
                  static_cast<uint32_t>(down * matrices == 0 ? 0 : across),
                  static_cast<uint32_t>(tiles_of_block)};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(kTileThreads);
  const bool has_tile = args.along_columns.codes != nullptr;
  config.dynamicSmemBytes = kernel.shared_bytes - (has_tile ? 0 : kernel.tile_bytes);
  config.stream = stream;
  const cudaError_t error = AllowShared(kernel.function, config.dynamicSmemBytes);
  if (error != cudaSuccess) return TextOf(error);
  return TextOf(cudaLaunchKernelEx(&config, kernel.function, args, grid));
}

}  // namespace nvfp4
