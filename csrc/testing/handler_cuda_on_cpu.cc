// csrc/testing/handler_cuda_on_cpu.cc: the CUDA handler of one op as an FFI target of the CPU, as a
// library that a test loads: the same checks, launches and kernels, in the bodies of cuda_on_cpu.h.
//
// Built with NVFP4_CUDA and csrc/testing/cuda_headers from this file, cuda_on_cpu.cc and the op's
// .cu, for amax with -DNVFP4_OP_FILE="ops/amax.cc" -DNVFP4_OP=Amax.
#include NVFP4_OP_FILE

#include "testing/cuda_on_cpu.h"

#define JOIN(a, b) JOIN_EXPANDED(a, b)
#define JOIN_EXPANDED(a, b) a##b

namespace {

struct NoStream {};

}  // namespace

template <>
struct xla::ffi::CtxDecoding<NoStream> {
  using Type = nvfp4::CudaStream;
  static std::optional<Type> Decode(const XLA_FFI_Api*, XLA_FFI_ExecutionContext*,
                                    DiagnosticEngine&) {
    return nullptr;
  }
};

namespace nvfp4 {

// The op's file has the handler of the CPU too, which nobody calls here.
void JOIN(NVFP4_OP, OnCpu)(const JOIN(NVFP4_OP, Args) &, const Parallel&) {}

XLA_FFI_DEFINE_HANDLER_SYMBOL(CudaOnCpu, Cuda, Signature(ffi::Ffi::Bind().Ctx<NoStream>()));

}  // namespace nvfp4

// ---- For tests

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT void FailCall(int64_t n) { cuda_on_cpu::FailCall(n, cudaErrorLaunchFailure); }
EXPORT int64_t Calls() { return cuda_on_cpu::Calls(); }
EXPORT int64_t Kernels() { return cuda_on_cpu::Enqueued().kernels; }
EXPORT int64_t Memsets() { return cuda_on_cpu::Enqueued().memsets; }
EXPORT int64_t Copies() { return cuda_on_cpu::Enqueued().copies; }
