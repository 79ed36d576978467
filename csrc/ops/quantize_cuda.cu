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
constexpr int kScales = 128;  // E4M3 codes without a sign

// The factor 2^-14 of stochastic rounding is folded into the encode factors, which changes no bit
// where they stay normal: where the amax is below.
constexpr float kFoldsBelow = 0x1p100f;

struct OutputState {
  float encode[kScales];  // BlockEncode of each scale, times 2^-14 where that is folded in
  float block_factor;     // TensorScale::block_factor
};

// Twice, as a block of threads fills the next while the last ones still copy.
struct Staged {
  alignas(16) uint8_t rows[2][kScaleBytes];
  alignas(16) uint8_t columns[2][kScaleBytes];
};

template <FloatType kType>
struct Shared {
  OutputState rows, columns;
  Staged scales;
  alignas(16) Tile<kType> tile;  // not there if only rows are wanted
};

struct Grid {
  int64_t tiles_across, tiles_down, matrices;
  int tiles_of_block;
};

template <FloatType kType, int kRows, int kColumns, bool kWhole>
class Quantizer {
 public:
  static constexpr bool kHasRows = kRows != kAbsent, kHasColumns = kColumns != kAbsent;
  static constexpr bool kFolds =
      kWhole && Tile<kType>::kHalves && ((kRows | kColumns) & kStochastic) != 0;
  using T = Tile<kType>;

  NVFP4_DEVICE Quantizer(const QuantizeArgs& args, const Grid& grid)
      : args_(args), grid_(grid), shared_(DynamicShared<Shared<kType>>()) {}

  NVFP4_DEVICE void Run() {
    if (blockIdx.x == 0 && blockIdx.y == 0 && blockIdx.z == 0) {
      if (kHasRows) StoreGlobalScales(args_.along_rows);
      if (kHasColumns) StoreGlobalScales(args_.along_columns);
    }
    int64_t example = -1;
    for (int64_t matrix = blockIdx.z; matrix < grid_.matrices; matrix += gridDim.z) {
      const int64_t next = args_.batch == 1
                               ? matrix
                               : static_cast<uint32_t>(matrix) / static_cast<uint32_t>(args_.batch);
      if (next != example) {
        example = next;
        Prepare(example);
      }
      matrix_ = matrix;
      matrix_of_example_ = matrix - example * args_.batch;
      for (int64_t down = blockIdx.y; down < grid_.tiles_down; down += gridDim.y) {
        row0_ = down * kTile;
        const int64_t first = static_cast<int64_t>(blockIdx.x) * grid_.tiles_of_block;
        const int64_t end = min(first + grid_.tiles_of_block, grid_.tiles_across);
        for (int64_t across = first; across < end; ++across) {
          column0_ = across * kTile;
          if (!kFolds || !NVFP4_RARELY(!folds_))
            QuantizeTile<kFolds>();
          else
            QuantizeTile<false>();
          buffer_ ^= 1;
        }
      }
    }
  }

 private:
  // ---- Once for a block of threads

  NVFP4_DEVICE void StoreGlobalScales(const QuantizeOutput& out) const {
    if (out.amax == nullptr) return;
    for (int64_t i = threadIdx.x; i < args_.examples; i += kTileThreads) {
      const float decode = TensorScaleOf(out.amax[i * args_.amax_stride]).decode;
      out.global_scale[i] = out.partner != nullptr ? __fmul_rn(decode, out.partner[i]) : decode;
    }
  }

  NVFP4_DEVICE bool Folds(const QuantizeOutput& out, int64_t example) const {
    return out.amax == nullptr || !out.stochastic ||
           out.amax[example * args_.amax_stride] < kFoldsBelow;
  }

  NVFP4_DEVICE void Prepare(int64_t example) {
    __syncthreads();  // the state of another example may be in use
    folds_ = kFolds && Folds(args_.along_rows, example) && Folds(args_.along_columns, example);
    const bool columns = threadIdx.x >= kScales;
    const uint8_t scale = static_cast<uint8_t>(threadIdx.x % kScales);
    const QuantizeOutput& out = columns ? args_.along_columns : args_.along_rows;
    if (out.amax != nullptr) {
      const TensorScale tensor = TensorScaleOf(out.amax[example * args_.amax_stride]);
      OutputState& state = columns ? shared_.columns : shared_.rows;
      const float encode = BlockEncode(scale, tensor);
      state.encode[scale] = folds_ && out.stochastic ? __fmul_rn(encode, 0x1p-14f) : encode;
      state.block_factor = tensor.block_factor;
    }
    __syncthreads();
    if (args_.along_rows.amax != nullptr) rows_factor_ = shared_.rows.block_factor;
    if (args_.along_columns.amax != nullptr) columns_factor_ = shared_.columns.block_factor;
    if (args_.key != nullptr) {
      key_[0] = Uniform(args_.key[2 * example]);
      key_[1] = Uniform(args_.key[2 * example + 1]);
    }
  }

  // ---- One tile

  NVFP4_DEVICE bool WantsRows() const {
    return kRows == kAny ? args_.along_rows.codes != nullptr : kHasRows;
  }
  NVFP4_DEVICE bool WantsColumns() const {
    return kColumns == kAny ? args_.along_columns.codes != nullptr : kHasColumns;
  }

  template <bool kFolded>
  NVFP4_DEVICE void QuantizeTile() {
    typename T::RowBlock blocks[kThreadRows];
    Load(blocks);
    if (WantsColumns()) {
#pragma unroll
      for (int i = 0; i < kThreadRows; ++i) shared_.tile.Store(RowPlace(i), blocks[i]);
    }
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
    if (WantsRows())
      StoreScales(args_.along_rows, shared_.scales.rows[buffer_], 0, args_.rows, args_.k, row0_,
                  column0_);
    if (WantsColumns())
      StoreScales(args_.along_columns, shared_.scales.columns[buffer_], kTileThreads / 4, args_.k,
                  args_.rows, column0_, row0_);
  }

  NVFP4_DEVICE void Load(typename T::RowBlock (&blocks)[kThreadRows]) const {
    const DeviceMatrix matrix = MatrixAt<T::kSize>(args_.x, matrix_, args_.rows, args_.k);
    if constexpr (kWhole) {
      const BlockPlace at = RowPlace(0);
      const uint8_t* from =
          matrix.x + ((row0_ + at.row) * args_.k + column0_ + at.block * kBlock) * T::kSize;
      const int64_t step = (RowPlace(1).row - at.row) * args_.k * T::kSize;
#pragma unroll
      for (int i = 0; i < kThreadRows; ++i) blocks[i] = T::template Load<32>(from + i * step);
    } else {
      T::Load(matrix, row0_, column0_, blocks);
    }
  }

  NVFP4_DEVICE uint32_t Signs() const { return kWhole ? kHadamardSigns : args_.signs; }

  // Codes of 16 values from their products with the encode factor.
  template <int kMode, bool kFolded>
  NVFP4_DEVICE uint2 Encode(float (&y)[kBlock], uint32_t stream, int64_t row, int64_t block) const {
    if constexpr (IsSet(kMode, kStochastic)) {
      if constexpr (!kFolded) {
#pragma unroll
        for (int i = 0; i < kBlock; ++i) y[i] = __fmul_rn(y[i], 0x1p-14f);
      }
      return EncodeStochastic(y, BlockRandom(key_, stream, row, block));
    } else {
      return make_uint2(EncodeE2M1x8({y[0], y[1], y[2], y[3], y[4], y[5], y[6], y[7]}),
                        EncodeE2M1x8({y[8], y[9], y[10], y[11], y[12], y[13], y[14], y[15]}));
    }
  }

  template <int kMode, bool kFolded>
  NVFP4_DEVICE void Rows(const typename T::RowBlock (&blocks)[kThreadRows]) {
    const QuantizeOutput& out = args_.along_rows;
    const OutputState& state = shared_.rows;
    const bool square = kRows == kAny ? out.tile16 : IsSet(kMode, kTile16);
    float scale[kThreadRows];
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) {
      if constexpr (IsSet(kMode, kHadamard)) {
        float2 v[kBlock / 2];
        T::Hadamard(blocks[i], Signs(), v);
        scale[i] = ThroughBf16(T::AmaxOfAll(v));
      } else {
        scale[i] = T::Amax(blocks[i]);
      }
    }
    if (square) {
      float amax = max(max(scale[0], scale[1]), max(scale[2], scale[3]));
      amax = MaxOfSquare(amax, kSquareAlongRows);
#pragma unroll
      for (int i = 0; i < kThreadRows; ++i)
        scale[i] = kWhole || row0_ + RowPlace(i).row < args_.rows ? amax : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) scale[i] = __fmul_rn(scale[i], rows_factor_);
    const uint32_t scales = EncodeE4M3Quad(scale);

    const BlockPlace at = RowPlace(0);
    uint8_t* staged = shared_.scales.rows[buffer_] + ScaleOffset32(at.row, at.block);
    const int64_t stride = CodesStride(args_.k), block = column0_ / kBlock + at.block;
    uint8_t* to = out.codes + (matrix_ * args_.rows + row0_ + at.row) * stride + block * 8;
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i, to += 4 * stride) {
      const uint8_t byte = static_cast<uint8_t>(scales >> 8 * i);
      const float encode = state.encode[byte];
      float2 v[kBlock / 2];
      if constexpr (IsSet(kMode, kHadamard)) {
        T::Hadamard(blocks[i], Signs(), v);
#pragma unroll
        for (int j = 0; j < kBlock / 2; ++j) v[j] = Pair(ThroughBf16(v[j].x), ThroughBf16(v[j].y));
      } else {
#pragma unroll
        for (int j = 0; j < kBlock / 2; ++j) v[j] = T::PairOf(blocks[i], j);
      }
      float y[kBlock];
#pragma unroll
      for (int j = 0; j < kBlock / 2; ++j) {
        const float2 p = Multiply(v[j], Pair(encode, encode));
        y[2 * j] = p.x;
        y[2 * j + 1] = p.y;
      }
      staged[i * 4 * 16] = byte;
      const int64_t row = row0_ + at.row + 4 * i;
      uint2 codes =
          Encode<kMode, kFolded>(y, kStreamRows, matrix_of_example_ * args_.rows + row, block);
      if constexpr (kWhole) {
        *reinterpret_cast<uint2*>(to) = codes;
      } else if (row < args_.rows && block * 8 < stride) {
        if (block >= BlocksOf(args_.k)) codes = make_uint2(0, 0);
        *reinterpret_cast<uint2*>(to) = codes;
      }
    }
  }

  template <int kMode, bool kFolded>
  NVFP4_DEVICE void Columns() {
    const QuantizeOutput& out = args_.along_columns;
    const OutputState& state = shared_.columns;
    const bool square = kColumns == kAny ? out.tile16 : IsSet(kMode, kTile16);
    const BlockPlace at = ColumnPlace();
    const int64_t stride = CodesStride(args_.rows), block = row0_ / kBlock + at.block;
    const int64_t column = column0_ + at.row;
    uint8_t* staged = shared_.scales.columns[buffer_] + ScaleOffset32(at.row, at.block);
    uint8_t* to = out.codes + (matrix_ * args_.k + column) * stride + block * 8;
    typename T::ColumnBlock words;
    if constexpr (T::kHalves) words = shared_.tile.LoadColumns(at, 0);
    float square_amax = 0.0f;
    if (square) {
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        if constexpr (!T::kHalves) words = shared_.tile.LoadColumns(at, part);
        float2 v[kBlock];
        const float2 amax = ColumnAmax<kMode>(words, part, v);
        square_amax = max(square_amax, max(amax.x, amax.y));
      }
      square_amax = MaxOfSquare(square_amax, kSquareAlongColumns);
    }
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      if constexpr (!T::kHalves) words = shared_.tile.LoadColumns(at, part);
      float2 v[kBlock];
      float2 amax = ColumnAmax<kMode>(words, part, v);
      if (square) {
        const int64_t n = args_.k - column - 2 * part;  // columns from here on
        amax = Pair(kWhole || n > 0 ? square_amax : 0.0f, kWhole || n > 1 ? square_amax : 0.0f);
      }
      const float2 scale = Multiply(amax, Pair(columns_factor_, columns_factor_));
      const uint32_t scales = EncodeE4M3Pair(scale.x, scale.y);
      const uint8_t bytes[2] = {static_cast<uint8_t>(scales), static_cast<uint8_t>(scales >> 8)};
      const float2 encode = Pair(state.encode[bytes[0]], state.encode[bytes[1]]);
      if constexpr (IsSet(kMode, kHadamard)) {
#pragma unroll
        for (int r = 0; r < kBlock; ++r) v[r] = Pair(ThroughBf16(v[r].x), ThroughBf16(v[r].y));
      } else {
#pragma unroll
        for (int r = 0; r < kBlock; ++r) v[r] = T::PairOf(words, part, r);
      }
#pragma unroll
      for (int r = 0; r < kBlock; ++r) v[r] = Multiply(v[r], encode);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float y[kBlock];
#pragma unroll
        for (int r = 0; r < kBlock; ++r) y[r] = half == 0 ? v[r].x : v[r].y;
        const int i = 2 * part + half;
        staged[i * 16] = bytes[half];
        uint2 codes = Encode<kMode, kFolded>(y, kStreamColumns,
                                             matrix_of_example_ * args_.k + column + i, block);
        if constexpr (kWhole) {
          *reinterpret_cast<uint2*>(to) = codes;
        } else if (column + i < args_.k && block * 8 < stride) {
          if (block >= BlocksOf(args_.rows)) codes = make_uint2(0, 0);
          *reinterpret_cast<uint2*>(to) = codes;
        }
        to += stride;
      }
    }
  }

  // With the Hadamard transform v is what it gives, not yet rounded.
  template <int kMode>
  NVFP4_DEVICE float2 ColumnAmax(const typename T::ColumnBlock& words, int part,
                                 float2 (&v)[kBlock]) const {
    if constexpr (IsSet(kMode, kHadamard)) {
      T::Hadamard(words, part, Signs(), v);
      const float2 amax = T::AmaxOfColumns(v);
      return Pair(ThroughBf16(amax.x), ThroughBf16(amax.y));
    } else {
      return T::AmaxOfColumns(words, part);
    }
  }

  // Byte of a scale in the scale tiles of this tile.
  static NVFP4_DEVICE int ScaleOffset32(int row, int block) {
    return block / kTileBlocks * kTileBytes + row % 32 * 16 + row / 32 * 4 + block % kTileBlocks;
  }

  // The scale tiles of a result [rows, k] that lie at (row, column), from `first_thread` on.
  NVFP4_DEVICE void StoreScales(const QuantizeOutput& out, const uint8_t* staged, int first_thread,
                                int64_t rows, int64_t k, int64_t row, int64_t column) const {
    constexpr int kLine = 16, kLines = kScaleBytes / kLine;
    const int line = static_cast<int>(threadIdx.x) - first_thread;
    if (line < 0 || line >= kLines) return;
    const int64_t tile_columns = TileColumns(k), tile_column = column / (kTileBlocks * kBlock);
    if (!kWhole && tile_column + line / (kTileBytes / kLine) >= tile_columns) return;
    uint8_t* to = out.scales + matrix_ * ScalesSize(rows, k) +
                  (row / kTileRows * tile_columns + tile_column) * kTileBytes;
    reinterpret_cast<uint4*>(to)[line] = reinterpret_cast<const uint4*>(staged)[line];
  }

  const QuantizeArgs& args_;
  const Grid& grid_;
  Shared<kType>& shared_;
  int64_t matrix_ = 0, matrix_of_example_ = 0, row0_ = 0, column0_ = 0;
  int buffer_ = 0;  // of Staged
  float rows_factor_ = 1.0f, columns_factor_ = 1.0f;
  bool folds_ = true;
  uint32_t key_[2] = {0, 0};
};

template <FloatType kType, int kRows, int kColumns, bool kWhole>
__global__ void __launch_bounds__(kTileThreads, kWhole ? 3 : 1)
    QuantizeKernel(const __grid_constant__ QuantizeArgs args, const __grid_constant__ Grid grid) {
  Quantizer<kType, kRows, kColumns, kWhole>(args, grid).Run();
}

// ---- Launch

using Kernel = void (*)(const QuantizeArgs, const Grid);

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
  return {kRows, kColumns, QuantizeKernel<FloatType::kBf16, kRows, kColumns, true>};
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
      return QuantizeKernel<FloatType::kF32, kAny, kAny, false>;
    case FloatType::kBf16:
      return QuantizeKernel<FloatType::kBf16, kAny, kAny, false>;
    case FloatType::kF16:
      return QuantizeKernel<FloatType::kF16, kAny, kAny, false>;
  }
  return nullptr;
}

}  // namespace

CudaError QuantizeOnCuda(const QuantizeArgs& args, CudaStream stream) {
  if (args.examples == 0) return nullptr;
  const Kernel kernel = KernelOf(args);
  Grid grid{CeilDiv(args.k, kTile), CeilDiv(args.rows, kTile), args.examples * args.batch, 1};
  // Blocks of threads that share their preparations, but enough of them for every chip.
  constexpr int64_t kEnoughBlocks = 2048, kMostTiles = 8;
  grid.tiles_of_block = static_cast<int>(std::clamp<int64_t>(
      grid.tiles_across * grid.tiles_down * grid.matrices / kEnoughBlocks, 1, kMostTiles));
  cudaLaunchConfig_t config = {};
  // At least one block: there are global scales even where there are no elements.
  config.gridDim = dim3(
      static_cast<unsigned>(std::max<int64_t>(1, CeilDiv(grid.tiles_across, grid.tiles_of_block))),
      static_cast<unsigned>(std::clamp<int64_t>(grid.tiles_down, 1, kMaxGridAxis)),
      static_cast<unsigned>(std::clamp<int64_t>(grid.matrices, 1, kMaxGridAxis)));
  config.blockDim = dim3(kTileThreads);
  const bool tile = args.along_columns.codes != nullptr;
  config.dynamicSmemBytes =
      args.type == FloatType::kF32
          ? (sizeof(Shared<FloatType::kF32>) - (tile ? 0 : sizeof(Tile<FloatType::kF32>)))
          : (sizeof(Shared<FloatType::kBf16>) - (tile ? 0 : sizeof(Tile<FloatType::kBf16>)));
  config.stream = stream;
  const cudaError_t error = AllowShared(kernel, config.dynamicSmemBytes);
  if (error != cudaSuccess) return TextOf(error);
  return TextOf(cudaLaunchKernelEx(&config, kernel, args, grid));
}

}  // namespace nvfp4
