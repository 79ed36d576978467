// csrc/ops/dequantize.h: NVFP4 matrices back to floats.
#pragma once

#include "cpu/parallel.h"
#include "cuda/stream.h"
#include "ops/types.h"

namespace nvfp4 {

struct DequantizeArgs {
  const uint8_t*
      codes;  // [examples, batch] matrices [rows, k] in the layout of core/scale_layout.h
  const uint8_t* scales;
  const float* global_scale;  // [examples]
  int64_t examples, batch, rows, k;
  FloatType type;
  void* x;  // [examples, batch, rows, k]
};

void DequantizeOnCpu(const DequantizeArgs& args, const Parallel& parallel);

// Enqueues one kernel on the stream of the current device; pointers are the device's, and aligned
// to 16 bytes.
CudaError DequantizeOnCuda(const DequantizeArgs& args, CudaStream stream);

}  // namespace nvfp4
