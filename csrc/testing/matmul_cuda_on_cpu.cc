// csrc/testing/matmul_cuda_on_cpu.cc: matmul's CUDA handlers as FFI targets of the CPU, as a
// library that a test loads: the same checks, plans, panels and kernels, on devices that a test
// describes.
//
// Built with NVFP4_CUDA and csrc/testing/cuda_headers from this file and those of the CUDA backend;
// cuBLASLt is csrc/testing/cublaslt_double.cc. It has a CUDA runtime of its own instead of
// cuda_on_cpu.cc: several devices, and kernels of independent threads only.
#include <map>
#include <mutex>
#include <set>

#include "cuda/library.h"
#include "ops/matmul.cc"  // for the bodies of its handlers
#include "testing/cuda_on_cpu.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

// ---- The CUDA runtime

namespace {

// Kernels run one at a time, as threadIdx and the others are global.
std::recursive_mutex mutex;
thread_local int current_device = 0;
std::map<int, int> capabilities;  // of devices, 10 * major + minor; 100 where none is given
int64_t kernels = 0, calls = 0, failing = -1;
cudaError_t failure = cudaSuccess;

}  // namespace

namespace cuda_on_cpu {

cudaError_t Called() {
  const std::lock_guard<std::recursive_mutex> lock(mutex);
  return calls++ == failing ? failure : cudaSuccess;
}

cudaError_t Run(const cudaLaunchConfig_t& config, const void*, void (*thread)(const void*),
                const void* launch, size_t) {
  const std::lock_guard<std::recursive_mutex> lock(mutex);
  if (const cudaError_t error = Called(); error != cudaSuccess) return error;
  const dim3 grid = config.gridDim, block = config.blockDim;
  if (grid.x == 0 || grid.y == 0 || grid.y > 65535 || grid.z != 1 || block.x > 1024 ||
      block.y != 1 || block.z != 1)
    return cudaErrorInvalidConfiguration;
  ++kernels;
  gridDim = grid;
  blockDim = block;
  for (blockIdx.y = 0; blockIdx.y < grid.y; ++blockIdx.y)
    for (blockIdx.x = 0; blockIdx.x < grid.x; ++blockIdx.x)
      for (threadIdx.x = 0; threadIdx.x < block.x; ++threadIdx.x) thread(launch);
  return cudaSuccess;
}

}  // namespace cuda_on_cpu

const char* cudaGetErrorName(cudaError_t error) {
  return error == cudaErrorNoDevice ? "cudaErrorNoDevice" : "cudaErrorLaunchFailure";
}
const char* cudaGetErrorString(cudaError_t error) { return cudaGetErrorName(error); }
cudaError_t cudaGetDevice(int* device) {
  *device = current_device;
  return cuda_on_cpu::Called();
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  const std::lock_guard<std::recursive_mutex> lock(mutex);
  const auto at = capabilities.find(device);
  const int capability = at == capabilities.end() ? 100 : at->second;
  *value = attribute == cudaDevAttrComputeCapabilityMajor ? capability / 10 : capability % 10;
  return cuda_on_cpu::Called();
}

// ---- For tests

EXPORT void RuntimeReset() {
  const std::lock_guard<std::recursive_mutex> lock(mutex);
  capabilities.clear();
  kernels = calls = 0;
  failing = -1;
}
EXPORT void RuntimeCapability(int device, int capability) { capabilities[device] = capability; }
EXPORT void RuntimeFail(int64_t n) {  // the n-th call from now
  failing = calls + n;
  failure = cudaErrorLaunchFailure;
}
EXPORT int64_t RuntimeKernels() { return kernels; }
EXPORT int64_t RuntimeCalls() { return calls; }
EXPORT int MayAskInCapture() { return cuda_on_cpu_capture_mode == cudaStreamCaptureModeRelaxed; }

// Empty, or an error; valid until the next call.
EXPORT const char* Load(const char* path) {
  static std::string error;
  error = nvfp4::LoadCublasLt(path);
  return error.c_str();
}
EXPORT void Unload() { nvfp4::UnloadCublasLt(); }
EXPORT void SetPaths(const char* first, const char* second) {
  nvfp4::SetCublasLtFinder([paths = std::vector<std::string>{first, second}] { return paths; });
}

// ---- Handlers

namespace nvfp4 {

// matmul.cc has the CPU's handler too, which nobody calls here.
void MatmulOnCpu(const MatmulShape&, const MatmulProduct*, int64_t, const Parallel&) {}

namespace {

ffi::Error RunOnDevice(int32_t device, ffi::AnyBuffer a_codes, ffi::AnyBuffer a_scales,
                       ffi::AnyBuffer b_codes, ffi::AnyBuffer b_scales, ffi::RemainingArgs operands,
                       ffi::Result<ffi::AnyBuffer> y, ffi::Result<ffi::AnyBuffer> workspace,
                       int64_t alphas, bool bias, bool accumulate) {
  const FloatEnvironment environment;  // a GPU keeps subnormals
  current_device = device;
  return Cuda(nullptr, a_codes, a_scales, b_codes, b_scales, operands, y, workspace, alphas, bias,
              accumulate);
}

// The handler of the stage before, in this one.
ffi::Error InitializeOnDevice(int32_t device, ffi::AnyBuffer a_codes, ffi::AnyBuffer a_scales,
                              ffi::AnyBuffer b_codes, ffi::AnyBuffer b_scales,
                              ffi::RemainingArgs operands, ffi::Result<ffi::AnyBuffer> y,
                              ffi::Result<ffi::AnyBuffer> workspace, int64_t alphas, bool bias,
                              bool accumulate) {
  current_device = device;
  return CudaInitialize(a_codes, a_scales, b_codes, b_scales, operands, y, workspace, alphas, bias,
                        accumulate);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(MatmulCudaOnCpu, RunOnDevice,
                              Signature(ffi::Ffi::Bind().Ctx<ffi::DeviceOrdinal>()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(MatmulCudaInitializeOnCpu, InitializeOnDevice,
                              Signature(ffi::Ffi::Bind().Ctx<ffi::DeviceOrdinal>()));

}  // namespace nvfp4
