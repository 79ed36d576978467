// csrc/ops/dequantize_cuda.cu: dequantize on CUDA, 128 x 128 elements at a time.
//
// A thread has four blocks of 16, in the places of cuda/tile.cuh: a warp reads codes and writes
// values of whole rows. The scale tiles of them go through shared memory, as whole lines.
#include <algorithm>

#include "cuda/tile.cuh"
#include "ops/dequantize.h"

namespace nvfp4 {
namespace {

struct TileGrid {
  int64_t tiles_across, tiles_down;
};

constexpr int kLine = 16;
constexpr int kLines = kTileBytes / kLine;  // of one scale tile
constexpr int kScaleTiles = kTileBlocksAcross / kTileBlocks;

template <FloatType kType>
NVFP4_DEVICE uint32_t PackHalves(float2 v) {
  if constexpr (kType == FloatType::kBf16)
    return Bf16PairOf(v.x, v.y);
  else
    return F16PairOf(v.x, v.y);
}

// n of a block's values, to a place that is aligned to their size. kWide: all 16, to 16 bytes.
template <FloatType kType>
NVFP4_DEVICE void StoreBlock(uint8_t* to, const float2 (&v)[kBlock / 2], int64_t n, bool wide) {
  using T = Tile<kType>;
  typename T::RowBlock b;
#pragma unroll
  for (int i = 0; i < kBlock / 2; ++i) {
    if constexpr (T::kHalves) {
      b.w[i] = PackHalves<kType>(v[i]);
    } else {
      b.w[2 * i] = BitsOf(v[i].x);
      b.w[2 * i + 1] = BitsOf(v[i].y);
    }
  }
  if (wide) {
#pragma unroll
    for (int i = 0; i < T::kBlockWords / 4; ++i)
      reinterpret_cast<uint4*>(to)[i] =
          make_uint4(b.w[4 * i], b.w[4 * i + 1], b.w[4 * i + 2], b.w[4 * i + 3]);
    return;
  }
#pragma unroll
  for (int i = 0; i < kBlock; ++i) {
    if (i >= n) continue;
    if constexpr (T::kHalves)
      reinterpret_cast<uint16_t*>(to)[i] = static_cast<uint16_t>(b.w[i / 2] >> i % 2 * 16);
    else
      reinterpret_cast<uint32_t*>(to)[i] = b.w[i];
  }
}

template <FloatType kType>
__global__ void __launch_bounds__(kTileThreads)
    DequantizeKernel(const __grid_constant__ DequantizeArgs args,
                     const __grid_constant__ TileGrid grid) {
  using T = Tile<kType>;
  __shared__ uint4 scales[kScaleTiles * kLines];
  const int64_t matrices = args.examples * args.batch, tile_columns = TileColumns(args.k),
                stride = CodesStride(args.k), column0 = static_cast<int64_t>(blockIdx.x) * kTile,
                first_tile = static_cast<int64_t>(blockIdx.x) * kScaleTiles;
  for (int64_t matrix = blockIdx.z; matrix < matrices; matrix += gridDim.z) {
    const float global_scale = args.global_scale[matrix / args.batch];
    for (int64_t down = blockIdx.y; down < grid.tiles_down; down += gridDim.y) {
      const BlockPlace at = RowPlace(0);
      const int64_t block = column0 / kBlock + at.block, column = block * kBlock;
      const int64_t row0 = matrix * args.rows + down * kTile + at.row;
      const int rows = static_cast<int>(min(args.rows - down * kTile, int64_t{kTile})) - at.row;
      const bool inside = column < args.k;
      uint2 codes[kThreadRows] = {};
#pragma unroll
      for (int i = 0; i < kThreadRows; ++i)
        if (inside && i * kRowStep < rows)
          codes[i] = __ldg(reinterpret_cast<const uint2*>(
              args.codes + (row0 + i * kRowStep) * stride + block * (kBlock / 2)));
      __syncthreads();  // the scales of the tile before
      const int line = static_cast<int>(threadIdx.x);
      if (line < kScaleTiles * kLines && first_tile + line / kLines < tile_columns)
        scales[line] = __ldg(
            reinterpret_cast<const uint4*>(args.scales + matrix * ScalesSize(args.rows, args.k) +
                                           (down * tile_columns + first_tile) * kTileBytes) +
            line);
      __syncthreads();
      const auto* staged = reinterpret_cast<const uint8_t*>(scales) +
                           at.block / kTileBlocks * kTileBytes + at.row % 32 * kLine +
                           at.row / 32 * kTileBlocks + at.block % kTileBlocks;
      const bool wide = args.k * T::kSize % 16 == 0 && args.k - column >= kBlock;
#pragma unroll
      for (int i = 0; i < kThreadRows; ++i) {
        if (!inside || i * kRowStep >= rows) continue;
        const float scale = __fmul_rn(DecodeE4M3(staged[i * kRowStep * kLine]), global_scale);
        float2 v[kBlock / 2];
        DecodeE2M1x8(codes[i].x, &v[0]);
        DecodeE2M1x8(codes[i].y, &v[kBlock / 4]);
#pragma unroll
        for (int j = 0; j < kBlock / 2; ++j) v[j] = Multiply(v[j], Pair(scale, scale));
        StoreBlock<kType>(
            static_cast<uint8_t*>(args.x) + ((row0 + i * kRowStep) * args.k + column) * T::kSize, v,
            args.k - column, wide);
      }
    }
  }
}

}  // namespace

CudaError DequantizeOnCuda(const DequantizeArgs& args, CudaStream stream) {
  const int64_t matrices = args.examples * args.batch;
  if (matrices * args.rows * args.k == 0) return nullptr;
  const TileGrid grid{CeilDiv(args.k, kTile), CeilDiv(args.rows, kTile)};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(grid.tiles_across),
                        static_cast<unsigned>(std::min(grid.tiles_down, kMaxGridAxis)),
                        static_cast<unsigned>(std::min(matrices, kMaxGridAxis)));
  config.blockDim = dim3(kTileThreads);
  config.stream = stream;
  switch (args.type) {
    case FloatType::kF32:
      return TextOf(cudaLaunchKernelEx(&config, &DequantizeKernel<FloatType::kF32>, args, grid));
    case FloatType::kBf16:
      return TextOf(cudaLaunchKernelEx(&config, &DequantizeKernel<FloatType::kBf16>, args, grid));
    case FloatType::kF16:
      return TextOf(cudaLaunchKernelEx(&config, &DequantizeKernel<FloatType::kF16>, args, grid));
  }
  return nullptr;
}

}  // namespace nvfp4
