// csrc/ops/matmul.h: y[M, N] = alpha * a[M, K] b[N, K]^T (+ bias) (+ accumulate) on quantized
// operands, batched.
#pragma once

#include "cpu/parallel.h"
#include "ops/types.h"

namespace nvfp4 {

// One operand: matrices [rows, k] in the layout of core/scale_layout.h. A batch stride of 0 repeats
// a matrix.
struct MatmulOperand {
  const uint8_t* codes;
  const uint8_t* scales;
};

// One product of the batch. Products are independent; the caller lists them, so that any
// broadcasting costs nothing here.
struct MatmulProduct {
  MatmulOperand a, b;
  const float* alpha[2];   // their product scales the result; null counts as 1
  const void* bias;        // [n] of type MatmulShape::bias, or null
  const void* accumulate;  // [m, n] of the output's type, or null; may be y itself
  void* y;                 // [m, n]
};

struct MatmulShape {
  int64_t m, n, k;
  FloatType out;
  FloatType bias = FloatType::kF32;
};

// Rounds as docs/numerics.md says: the same bits for every thread count and instruction set.
void MatmulOnCpu(const MatmulShape& shape, const MatmulProduct* products, int64_t count,
                 const Parallel& parallel);

}  // namespace nvfp4
