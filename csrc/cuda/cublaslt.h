// csrc/cuda/cublaslt.h: the part of cuBLASLt that matmul calls, found when the program runs.
//
// Names, values and signatures are those of NVIDIA's documentation of cuBLASLt 13. Declared here,
// so that neither a build nor an import needs the library or its headers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

struct CUstream_st;  // what the CUDA runtime's cudaStream_t points to

namespace nvfp4::cublaslt {

enum Status : int {
  kSuccess = 0,
  kNotInitialized = 1,
  kAllocFailed = 3,
  kInvalidValue = 7,
  kArchMismatch = 8,
  kExecutionFailed = 13,
  kInternalError = 14,
  kNotSupported = 15,
};

enum DataType : int { kR32F = 0, kR16F = 2, kR16BF = 14, kR4F_E2M1 = 33 };
enum ComputeType : int { kCompute32F = 68 };
enum Operation : int32_t { kOpN = 0, kOpT = 1 };
enum PointerMode : int32_t { kPointerHost = 0, kPointerDevice = 1 };
enum ScaleMode : int32_t { kScalar32F = 0, kVec16UE4M3 = 1 };
enum Epilogue : uint32_t { kEpilogueDefault = 1, kEpilogueBias = 4 };
enum Order : int32_t { kOrderColumn = 0 };
enum ReductionScheme : uint32_t { kReductionComputeType = 2 };

enum DescAttribute : int {
  kComputeTypeAttribute = 0,
  kScaleTypeAttribute = 1,
  kPointerMode = 2,
  kTransA = 3,
  kTransB = 4,
  kEpilogue = 7,
  kBiasPointer = 8,
  kAScalePointer = 17,
  kBScalePointer = 18,
  kDScalePointer = 20,
  kBiasDataType = 26,
  kAScaleMode = 31,
  kBScaleMode = 32,
  kDOutScalePointer = 36,
};

enum LayoutAttribute : int {
  kLayoutType = 0,
  kLayoutOrder = 1,
  kLayoutRows = 2,
  kLayoutColumns = 3,
  kLayoutLeadingDimension = 4,
  kLayoutBatchCount = 5,
};

enum PreferenceAttribute : int {
  kMaxWorkspaceBytes = 1,
  kReductionSchemeMask = 3,
  kMinAlignmentA = 5,
  kMinAlignmentB = 6,
  kMinAlignmentC = 7,
  kMinAlignmentD = 8,
};

enum AlgoAttribute : int { kAlgoId = 0, kAlgoSplitK = 2, kAlgoStages = 6 };
constexpr uint32_t kStages768xAuto = 38;

using Handle = struct HandleOpaque*;
using MatmulDesc = struct MatmulDescOpaque*;
using MatrixLayout = struct MatrixLayoutOpaque*;
using MatmulPreference = struct MatmulPreferenceOpaque*;

struct MatmulAlgo {
  uint64_t data[8];
};

struct HeuristicResult {
  MatmulAlgo algo;
  size_t workspace_size;
  Status state;
  float waves;
  int reserved[4];
};

// X(name without cublasLt, result, parameters)
#define NVFP4_CUBLASLT_FUNCTIONS(X)                                                        \
  X(GetVersion, size_t, ())                                                                \
  X(GetStatusName, const char*, (Status))                                                  \
  X(Create, Status, (Handle*))                                                             \
  X(Destroy, Status, (Handle))                                                             \
  X(MatmulDescCreate, Status, (MatmulDesc*, ComputeType, DataType scale))                  \
  X(MatmulDescDestroy, Status, (MatmulDesc))                                               \
  X(MatmulDescSetAttribute, Status, (MatmulDesc, DescAttribute, const void*, size_t))      \
  X(MatrixLayoutCreate, Status,                                                            \
    (MatrixLayout*, DataType, uint64_t rows, uint64_t columns, int64_t leading_dimension)) \
  X(MatrixLayoutDestroy, Status, (MatrixLayout))                                           \
  X(MatmulPreferenceCreate, Status, (MatmulPreference*))                                   \
  X(MatmulPreferenceDestroy, Status, (MatmulPreference))                                   \
  X(MatmulPreferenceSetAttribute, Status,                                                  \
    (MatmulPreference, PreferenceAttribute, const void*, size_t))                          \
  X(MatmulAlgoGetHeuristic, Status,                                                        \
    (Handle, MatmulDesc, MatrixLayout a, MatrixLayout b, MatrixLayout c, MatrixLayout d,   \
     MatmulPreference, int requested, HeuristicResult*, int* returned))                    \
  X(MatmulAlgoConfigGetAttribute, Status,                                                  \
    (const MatmulAlgo*, AlgoAttribute, void*, size_t, size_t* written))                    \
  X(Matmul, Status,                                                                        \
    (Handle, MatmulDesc, const void* alpha, const void* a, MatrixLayout, const void* b,    \
     MatrixLayout, const void* beta, const void* c, MatrixLayout, void* d, MatrixLayout,   \
     const MatmulAlgo*, void* workspace, size_t workspace_size, CUstream_st*))

// An open library.
struct Library {
  std::string path;
  size_t version;  // major * 10000 + minor * 100 + patch
#define NVFP4_CUBLASLT_POINTER(name, result, parameters) result(*name) parameters;
  NVFP4_CUBLASLT_FUNCTIONS(NVFP4_CUBLASLT_POINTER)
#undef NVFP4_CUBLASLT_POINTER
};

// Before 13.2 kernels for block scales may free Tensor Memory that another kernel uses: results are
// then wrong, without an error.
constexpr size_t kMinVersion = 130200;

std::string VersionText(size_t version);

// Opens the library at `path` (a file, or a name for the dynamic linker to find), which then stays
// open as long as the process. On failure the result is null, and `error` says why.
std::shared_ptr<const Library> Open(const std::string& path, std::string* error);

}  // namespace nvfp4::cublaslt
