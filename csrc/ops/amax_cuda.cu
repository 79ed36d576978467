// csrc/ops/amax_cuda.cu: amax on CUDA. A maximum of magnitudes as integers does not depend on the
// order, so the threads' atomic updates give the same bits every time.
//
// Reads each element once, whichever of the three results are wanted.
#include <algorithm>

#include "cuda/tile.cuh"
#include "ops/amax.h"

namespace nvfp4 {
namespace {

constexpr int kWarps = kTileThreads / 32;

// A thread's largest magnitudes so far.
struct Largest {
  float plain = 0.0f, along_rows = 0.0f, along_columns = 0.0f;
};

// Of values four times those of the transform.
NVFP4_DEVICE float Finish(float largest) { return RoundToBf16(__fmul_rn(largest, 0.25f)); }

// What all threads of the block found, to a result of `example`.
NVFP4_DEVICE void Raise(float* out, int64_t at, float largest, uint32_t (&of_warps)[kWarps]) {
  if (out == nullptr) return;
  const uint32_t bits = __reduce_max_sync(0xFFFFFFFFu, MagnitudeBits(largest));
  __syncthreads();  // an earlier result may still be read
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = bits;
  __syncthreads();
  if (threadIdx.x != 0) return;
  uint32_t amax = 0;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) amax = max(amax, of_warps[i]);
  atomicMax(reinterpret_cast<unsigned*>(out + at), amax);
}

// ---- Without a transform: an example is a row of elements.

template <FloatType kType>
__global__ void __launch_bounds__(kTileThreads) PlainKernel(const __grid_constant__ AmaxArgs args) {
  using T = Tile<kType>;
  constexpr int kInVector = kBlock;  // elements of a RowBlock
  __shared__ uint32_t of_warps[kWarps];
  const int64_t n = args.batch * args.rows * args.k;
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kTileThreads + threadIdx.x;
  const int64_t threads = static_cast<int64_t>(gridDim.x) * kTileThreads;
  for (int64_t example = blockIdx.y; example < args.examples; example += gridDim.y) {
    const uint8_t* x = static_cast<const uint8_t*>(args.x) + example * n * T::kSize;
    // Elements before the first that is aligned to 16 bytes.
    const int64_t misaligned = static_cast<int64_t>(reinterpret_cast<uintptr_t>(x) % 16);
    const int64_t head = min(n, (16 - misaligned) % 16 / T::kSize);
    const int64_t vectors = (n - head) / kInVector, tail = head + vectors * kInVector;
    float amax = 0.0f;
    const auto take = [&](int64_t i) {
      float v;
      if constexpr (T::kHalves)
        v = Widen<kType, 0>(reinterpret_cast<const uint16_t*>(x)[i]);
      else
        v = reinterpret_cast<const float*>(x)[i];
      amax = MaxMagnitude<true>(amax, v, 0.0f);
    };
    for (int64_t i = thread; i < head; i += threads) take(i);
    for (int64_t i = tail + thread; i < n; i += threads) take(i);
    const uint8_t* from = x + head * T::kSize;
#pragma unroll 4
    for (int64_t i = thread; i < vectors; i += threads)
      amax = MaxMagnitude<true>(
          amax, T::template Amax<true>(T::template Load<16>(from + i * kInVector * T::kSize)),
          0.0f);
    Raise(args.plain, example * args.stride, amax, of_warps);
  }
}

// ---- With one: tiles, as quantize reads them.

struct TileGrid {
  int64_t tiles_across, tiles_down;
  int tiles_of_block;
};

template <FloatType kType>
__global__ void __launch_bounds__(kTileThreads, 2)
    TransformKernel(const __grid_constant__ AmaxArgs args, const __grid_constant__ TileGrid grid) {
  using T = Tile<kType>;
  __shared__ uint32_t of_warps[kWarps];
  T& tile = DynamicShared<T>();
  const int64_t matrices = args.examples * args.batch;
  for (int64_t index = blockIdx.z; index < matrices; index += gridDim.z) {
    const BlockPlace at = RowPlace(0);
    const int64_t row_bytes = args.k * T::kSize, step = kRowStep * row_bytes;
    const auto* matrix = static_cast<const uint8_t*>(args.x) + index * args.rows * row_bytes;
    Largest largest;
    for (int64_t down = blockIdx.y; down < grid.tiles_down; down += gridDim.y) {
      const int64_t first = static_cast<int64_t>(blockIdx.x) * grid.tiles_of_block;
      const int64_t end = min(first + grid.tiles_of_block, grid.tiles_across);
      for (int64_t across = first; across < end; ++across) {
        typename T::RowBlock blocks[kThreadRows];
        const int64_t row = down * kTile + at.row, column = across * kTile + at.block * kBlock;
        T::Load(matrix + row * row_bytes + column * T::kSize, step, args.rows - row,
                args.k - column, row_bytes % 16 == 0, blocks);
        if (args.along_columns != nullptr) {
          __syncthreads();  // the tile before
          tile.Store(T::StorePlace(), blocks);
        }
        if (args.plain != nullptr) {
#pragma unroll
          for (int i = 0; i < kThreadRows; ++i)
            largest.plain =
                MaxMagnitude<true>(largest.plain, T::template Amax<true>(blocks[i]), 0.0f);
        }
        if (args.along_rows != nullptr) {
#pragma unroll
          for (int i = 0; i < kThreadRows; ++i) {
            float2 v[kBlock / 2];
            T::template Hadamard<true>(blocks[i], args.signs, v);
            largest.along_rows =
                MaxMagnitude<true>(largest.along_rows, T::template AmaxOfAll<true>(v), 0.0f);
          }
        }
        if (args.along_columns != nullptr) {
          __syncthreads();
          const typename T::ColumnBlock words = tile.LoadColumns(T::LoadPlace());
#pragma unroll
          for (int part = 0; part < 2; ++part) {
            float2 v[kBlock];
            T::template Hadamard<true>(words, part, args.signs, v);
            largest.along_columns =
                MaxMagnitude<true>(largest.along_columns, T::template AmaxOfAll<true>(v), 0.0f);
          }
        }
      }
    }
    // The factor and rounding to bfloat16 keep the order: they are left to the largest value.
    const int64_t result = index / args.batch * args.stride;
    Raise(args.plain, result, largest.plain, of_warps);
    Raise(args.along_rows, result, Finish(largest.along_rows), of_warps);
    Raise(args.along_columns, result, Finish(largest.along_columns), of_warps);
  }
}

template <FloatType kType>
cudaError_t Launch(const AmaxArgs& args, cudaStream_t stream) {
  cudaLaunchConfig_t config = {};
  config.blockDim = dim3(kTileThreads);
  config.stream = stream;
  constexpr int64_t kEnoughBlocks = 2048;
  if (args.along_rows == nullptr && args.along_columns == nullptr) {
    constexpr int64_t kElementsOfThread = 64;
    const int64_t n = args.batch * args.rows * args.k;
    config.gridDim = dim3(static_cast<unsigned>(std::min(
                              kEnoughBlocks, CeilDiv(n, kTileThreads * kElementsOfThread))),
                          static_cast<unsigned>(std::min(args.examples, kMaxGridAxis)));
    return cudaLaunchKernelEx(&config, &PlainKernel<kType>, args);
  }
  const int64_t matrices = args.examples * args.batch;
  TileGrid grid{CeilDiv(args.k, kTile), CeilDiv(args.rows, kTile), 1};
  grid.tiles_of_block = static_cast<int>(
      std::clamp<int64_t>(grid.tiles_across * grid.tiles_down * matrices / kEnoughBlocks, 1, 8));
  config.gridDim = dim3(static_cast<unsigned>(CeilDiv(grid.tiles_across, grid.tiles_of_block)),
                        static_cast<unsigned>(std::min(grid.tiles_down, kMaxGridAxis)),
                        static_cast<unsigned>(std::min(matrices, kMaxGridAxis)));
  config.dynamicSmemBytes = args.along_columns != nullptr ? sizeof(Tile<kType>) : 0;
  const cudaError_t error = AllowShared(&TransformKernel<kType>, config.dynamicSmemBytes);
  if (error != cudaSuccess) return error;
  return cudaLaunchKernelEx(&config, &TransformKernel<kType>, args, grid);
}

}  // namespace

CudaError AmaxOnCuda(const AmaxArgs& args, CudaStream stream) {
  float* const outs[] = {args.plain, args.along_rows, args.along_columns};
  float* first = nullptr;  // the results are neighbours
  for (float* out : outs)
    if (out != nullptr && (first == nullptr || out < first)) first = out;
  if (first == nullptr || args.examples == 0) return nullptr;
  const cudaError_t error =
      cudaMemsetAsync(first, 0, args.examples * args.stride * sizeof *first, stream);
  if (error != cudaSuccess || args.batch * args.rows * args.k == 0) return TextOf(error);
  switch (args.type) {
    case FloatType::kF32:
      return TextOf(Launch<FloatType::kF32>(args, stream));
    case FloatType::kBf16:
      return TextOf(Launch<FloatType::kBf16>(args, stream));
    case FloatType::kF16:
      return TextOf(Launch<FloatType::kF16>(args, stream));
  }
  return nullptr;
}

}  // namespace nvfp4
