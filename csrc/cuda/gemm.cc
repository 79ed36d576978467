// csrc/cuda/gemm.cc: cuBLASLt's descriptors, plans and launches.
#include "cuda/gemm.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <vector>

#include "cuda/library.h"
#include "ops/matmul_cuda.h"

namespace nvfp4 {

using namespace cublaslt;  // NOLINT: this file is about nothing else

namespace {

// ---- The library of this process

struct Process {
  std::mutex mutex;
  std::shared_ptr<const Library> library;
  std::map<int, std::shared_ptr<GemmDevice>> devices;
  std::function<std::vector<std::string>()> finder;
};

// Never destroyed: handles can not be, once the CUDA driver has shut down.
Process& TheProcess() {
  static Process& process = *new Process;
  return process;
}

void Use(std::shared_ptr<const Library> library) {
  Process& process = TheProcess();
  std::map<int, std::shared_ptr<GemmDevice>> old;  // destroyed without the lock
  const std::lock_guard<std::mutex> lock(process.mutex);
  process.library = std::move(library);
  old.swap(process.devices);
}

// The finder runs without the lock: it may take Python's, which a thread that waits for ours may
// hold.
Failure FindLibrary() {
  Process& process = TheProcess();
  std::function<std::vector<std::string>()> finder;
  {
    const std::lock_guard<std::mutex> lock(process.mutex);
    if (process.library != nullptr) return {};
    finder = process.finder;
  }
  std::string tried;
  for (const std::string& path : finder ? finder() : std::vector<std::string>{}) {
    std::string error;
    if (auto library = Open(path, &error)) {
      const std::lock_guard<std::mutex> lock(process.mutex);
      if (process.library == nullptr) process.library = std::move(library);
      return {};
    }
    tried += (tried.empty() ? "" : "\n  ") + error;
  }
  return {"there is no cuBLASLt that it can use: " +
          (tried.empty() ? "none was found; pip install 'nvidia-cublas>=13.2'" : tried)};
}

// ---- The objects of cuBLASLt

template <typename T>
class Owned {
 public:
  explicit Owned(Status (*destroy)(T)) : destroy_(destroy) {}
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  ~Owned() {
    if (value != nullptr) destroy_(value);
  }
  T value = nullptr;

 private:
  Status (*destroy_)(T);
};

// While it lives, this thread may do what a stream capture would forbid: a first call may come
// inside of one, and making handles and plans enqueues nothing.
class RelaxedCapture {
 public:
  RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

Failure RuntimeFailure(const char* call, cudaError_t error) {
  return FailureOf(call, error == cudaSuccess ? nullptr : cudaGetErrorString(error));
}

}  // namespace

std::string LoadCublasLt(const std::string& path) {
  std::string error;
  auto library = Open(path, &error);
  if (library == nullptr) return error;
  Use(std::move(library));
  return "";
}

void SetCublasLtFinder(std::function<std::vector<std::string>()> finder) {
  Process& process = TheProcess();
  const std::lock_guard<std::mutex> lock(process.mutex);
  process.finder = std::move(finder);
}

void UnloadCublasLt() { Use(nullptr); }

struct GemmDevice::GemmPlan {
  explicit GemmPlan(const Library& library)
      : desc(library.MatmulDescDestroy),
        a(library.MatrixLayoutDestroy),
        b(library.MatrixLayoutDestroy),
        result(library.MatrixLayoutDestroy) {}

  Failure refusal;   // that cuBLASLt has no kernel is remembered too
  std::mutex mutex;  // of desc, whose pointers change from call to call
  Owned<MatmulDesc> desc;
  Owned<MatrixLayout> a, b, result;
  MatmulAlgo algo;
};

Failure GemmDevice::Current(std::shared_ptr<GemmDevice>* device) {
  int ordinal = 0;
  if (auto f = RuntimeFailure("cudaGetDevice", cudaGetDevice(&ordinal))) return f;
  if (auto f = FindLibrary()) return f;
  Process& process = TheProcess();
  const std::lock_guard<std::mutex> lock(process.mutex);
  auto& known = process.devices[ordinal];
  if (known == nullptr) {
    if (process.library == nullptr) return {"cuBLASLt was unloaded meanwhile"};
    const RelaxedCapture relaxed;
    std::shared_ptr<GemmDevice> made(new GemmDevice);
    made->library_ = process.library;
    made->ordinal_ = ordinal;
    const auto get = [ordinal](cudaDeviceAttr which, int* value) {
      return RuntimeFailure("cudaDeviceGetAttribute",
                            cudaDeviceGetAttribute(value, which, ordinal));
    };
    if (auto f = get(cudaDevAttrComputeCapabilityMajor, &made->major_)) return f;
    if (auto f = get(cudaDevAttrComputeCapabilityMinor, &made->minor_)) return f;
    if (auto f = FailureOf("cudaGetSymbolAddress", ZeroAndOne(&made->zero_and_one_))) return f;
    if (auto f = made->Check("cublasLtCreate", made->library_->Create(&made->handle_))) return f;
    known = std::move(made);
  }
  *device = known;
  return {};
}

GemmDevice::~GemmDevice() {
  plans_.clear();
  if (handle_ != nullptr) library_->Destroy(handle_);
}

std::string GemmDevice::Name() const {
  return "device " + std::to_string(ordinal_) + " (compute capability " + std::to_string(major_) +
         "." + std::to_string(minor_) + "), cuBLASLt " + VersionText(library_->version) + " (" +
         library_->path + ")";
}

Failure GemmDevice::Check(const char* call, Status status) const {
  if (status == kSuccess) return {};
  return {std::string(call) + " failed with " + library_->GetStatusName(status)};
}

// Algorithms that give wrong results without an error, by NVIDIA's list of known issues.
bool GemmDevice::IsFaulty(const MatmulAlgo& algo) const {
  if (major_ != 10 || minor_ != 3) return false;
  int32_t id = 0, split_k = 1;
  uint32_t stages = 0;
  size_t written = 0;
  const auto get = [&](AlgoAttribute which, void* value) {
    return library_->MatmulAlgoConfigGetAttribute(&algo, which, value, 4, &written) == kSuccess;
  };
  if (!get(kAlgoId, &id) || !get(kAlgoSplitK, &split_k) || !get(kAlgoStages, &stages)) return false;
  return id == 66 && (split_k > 1 || stages == kStages768xAuto);
}

Failure GemmDevice::Make(const GemmSpec& spec, const GemmPointers& pointers, GemmPlan& plan) const {
  const Library& lt = *library_;
  if (auto f = Check("cublasLtMatmulDescCreate",
                     lt.MatmulDescCreate(&plan.desc.value, kCompute32F, kR32F)))
    return f;
  Failure failure;
  const auto set = [&](DescAttribute which, auto value) {
    if (!failure)
      failure = Check("cublasLtMatmulDescSetAttribute",
                      lt.MatmulDescSetAttribute(plan.desc.value, which, &value, sizeof value));
  };
  set(kTransA, kOpT);
  set(kTransB, kOpN);
  set(kPointerMode, kPointerDevice);
  if (spec.operands == kR4F_E2M1) {
    // The pointers come before the question for an algorithm: without them it is refused.
    set(kAScaleMode, kVec16UE4M3);
    set(kBScaleMode, kVec16UE4M3);
    set(kAScalePointer, pointers.a_scales);
    set(kBScalePointer, pointers.b_scales);
  }
  if (spec.has_bias) {
    set(kEpilogue, kEpilogueBias);
    set(kBiasPointer, pointers.bias);
    set(kBiasDataType, spec.bias);
  }
  const auto layout = [&](Owned<MatrixLayout>& to, DataType type, int64_t rows, int64_t columns,
                          int64_t stride) {
    if (!failure)
      failure = Check("cublasLtMatrixLayoutCreate",
                      lt.MatrixLayoutCreate(&to.value, type, static_cast<uint64_t>(rows),
                                            static_cast<uint64_t>(columns), stride));
  };
  layout(plan.a, spec.operands, spec.k, spec.m, spec.k);
  layout(plan.b, spec.operands, spec.k, spec.n, spec.k);
  layout(plan.result, spec.result, spec.m, spec.n, spec.result_stride);
  if (failure) return failure;

  Owned<MatmulPreference> preference(lt.MatmulPreferenceDestroy);
  if (auto f =
          Check("cublasLtMatmulPreferenceCreate", lt.MatmulPreferenceCreate(&preference.value)))
    return f;
  const auto prefer = [&](PreferenceAttribute which, auto value) {
    if (!failure)
      failure =
          Check("cublasLtMatmulPreferenceSetAttribute",
                lt.MatmulPreferenceSetAttribute(preference.value, which, &value, sizeof value));
  };
  prefer(kMaxWorkspaceBytes, static_cast<uint64_t>(spec.workspace_size));
  // Parts of a sum are added in float32: the result is rounded once.
  prefer(kReductionSchemeMask, kReductionComputeType);
  for (const auto which : {kMinAlignmentA, kMinAlignmentB, kMinAlignmentC, kMinAlignmentD})
    prefer(which, kGemmAlign);
  if (failure) return failure;

  constexpr int kCandidates = 8;
  HeuristicResult results[kCandidates] = {};
  int returned = 0;
  const Status status = lt.MatmulAlgoGetHeuristic(
      handle_, plan.desc.value, plan.a.value, plan.b.value, plan.result.value, plan.result.value,
      preference.value, kCandidates, results, &returned);
  failure = Check("cublasLtMatmulAlgoGetHeuristic", status);
  failure.refused = status == kNotSupported || status == kArchMismatch;
  if (failure) return failure;
  for (int i = 0; i < std::min(returned, kCandidates); ++i) {
    if (results[i].state != kSuccess || IsFaulty(results[i].algo)) continue;
    plan.algo = results[i].algo;
    return {};
  }
  return {"cublasLtMatmulAlgoGetHeuristic knows no algorithm", true};
}

Failure GemmDevice::Find(const GemmSpec& spec, const GemmPointers& pointers, GemmPlan** found) {
  const std::lock_guard<std::mutex> lock(mutex_);
  auto at = plans_.find(spec);
  if (at == plans_.end()) {
    const RelaxedCapture relaxed;
    auto plan = std::make_unique<GemmPlan>(*library_);
    plan->refusal = Make(spec, pointers, *plan);
    // Any other failure may pass: it is no plan.
    if (plan->refusal && !plan->refusal.refused) return plan->refusal;
    at = plans_.emplace(spec, std::move(plan)).first;
  }
  *found = at->second.get();
  return (*found)->refusal;
}

Failure GemmDevice::Plan(const GemmSpec& spec, const GemmPointers& pointers) {
  GemmPlan* plan = nullptr;
  return Find(spec, pointers, &plan);
}

Failure GemmDevice::Enqueue(const GemmSpec& spec, const GemmPointers& pointers, CudaStream stream) {
  GemmPlan* plan = nullptr;
  if (auto f = Find(spec, pointers, &plan)) return f;
  const Library& lt = *library_;
  const std::lock_guard<std::mutex> lock(plan->mutex);
  const auto set = [&](DescAttribute which, const void* value) {
    return Check("cublasLtMatmulDescSetAttribute",
                 lt.MatmulDescSetAttribute(plan->desc.value, which, &value, sizeof value));
  };
  if (spec.operands == kR4F_E2M1) {
    if (auto f = set(kAScalePointer, pointers.a_scales)) return f;
    if (auto f = set(kBScalePointer, pointers.b_scales)) return f;
  }
  if (spec.has_bias)
    if (auto f = set(kBiasPointer, pointers.bias)) return f;
  // With beta 0, c is d, in the same layout, and is not read.
  const bool adds = pointers.c != nullptr;
  return Check(
      "cublasLtMatmul",
      lt.Matmul(handle_, plan->desc.value, pointers.alpha, pointers.a, plan->a.value, pointers.b,
                plan->b.value, zero_and_one_ + (adds ? 1 : 0), adds ? pointers.c : pointers.d,
                plan->result.value, pointers.d, plan->result.value, &plan->algo, pointers.workspace,
                static_cast<size_t>(spec.workspace_size), stream));
}

}  // namespace nvfp4
