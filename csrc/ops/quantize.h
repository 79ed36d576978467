// csrc/ops/quantize.h: float matrices to NVFP4, along K (rows), along R (columns: the transpose,
// quantized), or both in one pass.
#pragma once

#include "cpu/parallel.h"
#include "cuda/stream.h"
#include "ops/types.h"

namespace nvfp4 {

// One of the two results. Absent where amax is null (codes may be null for lack of elements).
struct QuantizeOutput {
  bool tile16 = false;      // one scale for 16 rows x 16 elements, else for 1 x 16
  bool stochastic = false;  // SR, else RNE
  bool hadamard = false;    // transform first
  const float* amax =
      nullptr;  // one for each example, QuantizeArgs::amax_stride apart; after the transform
  const float* partner =
      nullptr;  // [examples] or null: a factor of global_scale, to make the alpha of a GEMM
  uint8_t* codes = nullptr;  // [examples, batch] matrices in the layout of core/scale_layout.h
  uint8_t* scales = nullptr;
  float* global_scale = nullptr;  // [examples]
};

// Where x lies in the tensor that it is a part of (a device's shard): random bits belong to places
// in the whole tensor.
struct QuantizeOrigin {
  uint32_t row, column;    // of the whole matrices, where those of x begin; multiples of 16
  uint32_t rows, columns;  // of the whole matrices
  // Behind it: for each matrix of x in an example, its number among the example's matrices. Or, if
  // x is one matrix that was put together of several, one below the other (`segment` rows of each):
  // for each of these its number.
};

constexpr int64_t kOriginWords = sizeof(QuantizeOrigin) / sizeof(uint32_t);

struct QuantizeArgs {
  const void* x;  // [examples, batch, rows, k]; an example has an amax and a key of its own
  FloatType type;
  int64_t examples, batch, rows, k;
  int64_t amax_stride = 1;
  const uint32_t* key;               // [examples, 2], or null without SR
  const uint32_t* origin = nullptr;  // a QuantizeOrigin; null: x is all of the tensor
  int64_t segment = 0;  // of origin: rows, a multiple of 128; 0: a matrix of x is one of the tensor
  uint32_t signs;       // of the Hadamard transform
  QuantizeOutput along_rows;     // matrices [rows, k]
  QuantizeOutput along_columns;  // matrices [k, rows]
};

void QuantizeOnCpu(const QuantizeArgs& args, const Parallel& parallel);

// Enqueues one kernel on the stream of the current device; pointers are the device's, and aligned
// to 16 bytes.
CudaError QuantizeOnCuda(const QuantizeArgs& args, CudaStream stream);

}  // namespace nvfp4
