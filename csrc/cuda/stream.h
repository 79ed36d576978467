// csrc/cuda/stream.h: what launches kernels says about CUDA, without its headers.
#pragma once

struct CUstream_st;  // what the CUDA runtime's cudaStream_t points to

namespace nvfp4 {

using CudaStream = CUstream_st*;

// Null, or the text of the CUDA error that kept an op from being enqueued.
using CudaError = const char*;

}  // namespace nvfp4
