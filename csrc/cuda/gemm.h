// csrc/cuda/gemm.h: one matrix product on cuBLASLt: plans made once, and launches.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>

#include "cuda/cublaslt.h"
#include "cuda/stream.h"

namespace nvfp4 {

// What went wrong; false where nothing did.
struct Failure {
  std::string what;
  bool refused = false;  // cuBLASLt has no kernel for this; another way may have one
  explicit operator bool() const { return !what.empty(); }
};

inline Failure FailureOf(const char* call, CudaError error) {
  if (error == nullptr) return {};
  return {std::string(call) + " failed with: " + error};
}

// A product as cuBLASLt counts it, all matrices column-major:
// d[m, n] = alpha * a[k, m]^T b[k, n] + beta * c[m, n] (+ bias[m]).
struct GemmSpec {
  int64_t m, n, k;
  cublaslt::DataType operands;  // kR4F_E2M1 has block scales
  cublaslt::DataType result;    // of c and d
  int64_t result_stride;        // elements from one column of c and d to the next
  bool has_bias;
  cublaslt::DataType bias;
  int64_t workspace_size;

  auto Key() const {
    return std::tie(m, n, k, operands, result, result_stride, has_bias, bias, workspace_size);
  }
  bool operator<(const GemmSpec& other) const { return Key() < other.Key(); }
};

// What every pointer of a GEMM is aligned to: plans do not depend on addresses, which change from
// call to call.
constexpr uint32_t kGemmAlign = 16;

struct GemmPointers {
  const void *a, *b, *a_scales, *b_scales, *bias;
  const void* c;  // null: beta is 0
  void* d;
  const float* alpha;  // of the device
  void* workspace;     // aligned to 256 bytes
};

// cuBLASLt on one device. Made with that device current, and used with it current.
class GemmDevice {
 public:
  // Of the library that is loaded, or found now, and the current device.
  static Failure Current(std::shared_ptr<GemmDevice>* device);

  ~GemmDevice();

  int major() const { return major_; }
  int minor() const { return minor_; }
  // "device 0 (compute capability 10.0), cuBLASLt 13.2.0 (libcublasLt.so.13)"
  std::string Name() const;

  // Makes the plan if there is none.
  Failure Plan(const GemmSpec& spec, const GemmPointers& pointers);
  Failure Enqueue(const GemmSpec& spec, const GemmPointers& pointers, CudaStream stream);

 private:
  struct GemmPlan;

  GemmDevice() = default;
  Failure Find(const GemmSpec& spec, const GemmPointers& pointers, GemmPlan** plan);
  Failure Make(const GemmSpec& spec, const GemmPointers& pointers, GemmPlan& plan) const;
  Failure Check(const char* call, cublaslt::Status status) const;
  bool IsFaulty(const cublaslt::MatmulAlgo& algo) const;

  std::shared_ptr<const cublaslt::Library> library_;
  int ordinal_ = 0, major_ = 0, minor_ = 0;
  cublaslt::Handle handle_ = nullptr;
  const float* zero_and_one_ = nullptr;
  std::mutex mutex_;  // of plans_; a plan stays where it is
  std::map<GemmSpec, std::unique_ptr<GemmPlan>> plans_;
};

}  // namespace nvfp4
