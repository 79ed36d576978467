// csrc/ops/matmul_cuda.h: matmul on CUDA: cuBLASLt's GEMM, and the kernels around it.
#pragma once

#include <string>

#include "cuda/stream.h"
#include "ops/matmul.h"

namespace nvfp4 {

// Memory that the GEMM works in: an XLA buffer of this call alone, as calls may run side by side.
struct MatmulWorkspace {
  void* data;
  int64_t size;
};

// Enqueues the products on `stream` of the current device; pointers are the device's, and each
// product has one alpha. On success the result is empty; else it says what failed.
std::string MatmulOnCuda(const MatmulShape& shape, const MatmulProduct* products, int64_t count,
                         const MatmulWorkspace& workspace, CudaStream stream);

// Makes the plans that MatmulOnCuda would make in its first call, and enqueues nothing: cuBLASLt
// should not be asked for them while the stream is being captured into a graph.
std::string PlanMatmulOnCuda(const MatmulShape& shape, const MatmulProduct* products, int64_t count,
                             const MatmulWorkspace& workspace);

// ---- Kernels

// y = source (or alpha * 0) + bias + accumulate, in float32, rounded once.
struct FinishArgs {
  const float* source;  // [rows, columns], or null: a sum over no elements
  int64_t source_stride;
  const float* alpha;
  int64_t rows, columns, stride;  // stride: of y and accumulate
  FloatType type, bias_type;
  const void* bias;        // [columns] or null
  const void* accumulate;  // [rows, columns] or null
  void* y;                 // [rows, columns]; may be accumulate or source
};
CudaError Finish(const FinishArgs& args, CudaStream stream);

// x = code * block scale, which is exact in bfloat16 and in float16: six bits at most, from 2^-10
// to 2688. Rows and elements past the matrix are written as zeros.
struct DequantizePanelArgs {
  const uint8_t* codes;  // [matrix_rows, k] in the layout of core/scale_layout.h
  const uint8_t* scales;
  int64_t matrix_rows, k;
  int64_t first_row, rows;  // of the panel
  FloatType type;           // bfloat16 or float16
  void* x;                  // [rows, k filled to a multiple of 32], aligned to 16 bytes
};
CudaError DequantizePanel(const DequantizePanelArgs& args, CudaStream stream);

// Copies `size` bytes and puts zeros after them. All are multiples of 16.
struct PadArgs {
  const uint8_t* from;
  int64_t size, padded_size;
  uint8_t* to;
};
CudaError Pad(const PadArgs& args, CudaStream stream);

// Two float32 in memory of the current device: 0 and 1.
CudaError ZeroAndOne(const float** values);

}  // namespace nvfp4
