// csrc/ops/matmul_cuda.cu: the kernels around cuBLASLt's GEMM.
#include <algorithm>

#include "core/e2m1.h"
#include "core/e4m3.h"
#include "core/half.h"
#include "core/scale_layout.h"
#include "cuda/device.cuh"
#include "ops/matmul_cuda.h"

namespace nvfp4 {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMaxGridRows = 65535;

__device__ const float kZeroAndOne[2] = {0.0f, 1.0f};

__device__ __forceinline__ float Load(FloatType type, const void* from, int64_t i) {
  if (type == FloatType::kF32) return static_cast<const float*>(from)[i];
  const uint16_t bits = static_cast<const uint16_t*>(from)[i];
  return type == FloatType::kBf16 ? FloatOfBf16(bits) : FloatOfF16(bits);
}

__device__ __forceinline__ void Store(FloatType type, void* to, int64_t i, float x) {
  if (type == FloatType::kF32) {
    static_cast<float*>(to)[i] = x;
  } else {
    static_cast<uint16_t*>(to)[i] = type == FloatType::kBf16 ? Bf16Of(x) : F16Of(x);
  }
}

__global__ void __launch_bounds__(kThreads) FinishKernel(FinishArgs args) {
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (column >= args.columns) return;
  // NaN and Inf of alpha count in a sum over no elements too.
  const float empty = args.source != nullptr ? 0.0f : *args.alpha * 0.0f;
  const float bias = args.bias != nullptr ? Load(args.bias_type, args.bias, column) : 0.0f;
  for (int64_t row = blockIdx.y; row < args.rows; row += gridDim.y) {
    float y = args.source != nullptr ? args.source[row * args.source_stride + column] : empty;
    const int64_t at = row * args.stride + column;
    if (args.bias != nullptr) y += bias;
    if (args.accumulate != nullptr) y += Load(args.type, args.accumulate, at);
    Store(args.type, args.y, at, y);
  }
}

__device__ __forceinline__ uint32_t HalfOf(FloatType type, float x) {
  return type == FloatType::kBf16 ? Bf16Of(x) : F16Of(x);
}

// A thread writes a block of 16.
__global__ void __launch_bounds__(kThreads) DequantizePanelKernel(DequantizePanelArgs args) {
  const int64_t stride = CodesStride(args.k);  // bytes of codes: two elements each
  const int64_t blocks = stride / (kBlock / 2),
                block = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (block >= blocks) return;
  for (int64_t i = blockIdx.y; i < args.rows; i += gridDim.y) {
    const int64_t row = args.first_row + i;
    uint4 out[2] = {};
    if (row < args.matrix_rows && block < BlocksOf(args.k)) {
      const float scale = DecodeE4M3(args.scales[ScaleOffset(row, block, TileColumns(args.k))]);
      const uint2 codes =
          *reinterpret_cast<const uint2*>(args.codes + row * stride + block * (kBlock / 2));
      uint32_t words[8];
      for (int w = 0; w < 8; ++w) {
        const uint32_t pair = (w < 4 ? codes.x : codes.y) >> w % 4 * 8;
        words[w] = HalfOf(args.type, DecodeE2M1(pair & 15) * scale) |
                   HalfOf(args.type, DecodeE2M1(pair >> 4 & 15) * scale) << 16;
      }
      out[0] = {words[0], words[1], words[2], words[3]};
      out[1] = {words[4], words[5], words[6], words[7]};
    }
    uint4* to = static_cast<uint4*>(args.x) + (i * blocks + block) * 2;
    to[0] = out[0];
    to[1] = out[1];
  }
}

__global__ void __launch_bounds__(kThreads) PadKernel(PadArgs args) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t size = static_cast<int64_t>(sizeof(uint4));
  if (i * size >= args.padded_size) return;
  reinterpret_cast<uint4*>(args.to)[i] =
      i * size < args.size ? reinterpret_cast<const uint4*>(args.from)[i] : uint4{0, 0, 0, 0};
}

// One thread for each of `columns`; rows are shared out over the other axis of the grid.
template <typename Args>
CudaError Launch(void (*kernel)(Args), const Args& args, int64_t columns, int64_t rows,
                 CudaStream stream) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(CeilDiv(columns, kThreads)),
                        static_cast<unsigned>(std::min(rows, kMaxGridRows)));
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  return TextOf(cudaLaunchKernelEx(&config, kernel, args));
}

}  // namespace

CudaError Finish(const FinishArgs& args, CudaStream stream) {
  return Launch(FinishKernel, args, args.columns, args.rows, stream);
}

CudaError DequantizePanel(const DequantizePanelArgs& args, CudaStream stream) {
  return Launch(DequantizePanelKernel, args, CodesStride(args.k) / (kBlock / 2), args.rows, stream);
}

CudaError Pad(const PadArgs& args, CudaStream stream) {
  return Launch(PadKernel, args, args.padded_size / static_cast<int64_t>(sizeof(uint4)), 1, stream);
}

CudaError ZeroAndOne(const float** values) {
  void* address = nullptr;
  const cudaError_t error = cudaGetSymbolAddress(&address, kZeroAndOne);
  *values = static_cast<const float*>(address);
  return TextOf(error);
}

}  // namespace nvfp4
