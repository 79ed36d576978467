// csrc/ops/amax.h: the largest magnitude of a tensor, of its Hadamard transform along K (rows) or
// along R (columns), in one pass.
#pragma once

#include "cpu/parallel.h"
#include "cuda/stream.h"
#include "ops/types.h"

namespace nvfp4 {

struct AmaxArgs {
  const void* x;  // [examples, batch, rows, k]
  FloatType type;
  int64_t examples, batch, rows, k;
  uint32_t signs;  // of the Hadamard transform
  int64_t stride = 1;
  // One for each example, `stride` apart; null where not wanted. NaN and Inf in x give NaN or Inf.
  float* plain;
  float* along_rows;
  float* along_columns;
};

void AmaxOnCpu(const AmaxArgs& args, const Parallel& parallel);

// Enqueues one memset and one kernel on the stream of the current device; pointers are the
// device's, x is aligned to 16 bytes, and the results are neighbours: `stride` of them.
CudaError AmaxOnCuda(const AmaxArgs& args, CudaStream stream);

}  // namespace nvfp4
