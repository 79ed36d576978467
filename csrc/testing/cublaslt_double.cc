// csrc/testing/cublaslt_double.cc: cuBLASLt for a machine without a GPU, as a library to load in
// its place.
//
// Descriptors, layouts and preferences are the real library's (environment NVFP4_REAL_CUBLASLT), as
// none of these needs a GPU. Stood in for are the four functions that do: Create, Destroy,
// MatmulAlgoGetHeuristic and Matmul. These read the request back through the real library, refuse
// what NVIDIA's documentation does not allow, and compute the product on the CPU from the pointers,
// scale tiles and factors that they were given: a block of 16 at a time, in order, as the CPU
// backend does, so that the bits can be compared.
//
// That a request is accepted here means that it is what the documentation asks for. Whether
// cuBLASLt has a kernel for it, only a GPU can tell.
#include <dlfcn.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "core/e2m1.h"
#include "core/e4m3.h"
#include "core/half.h"
#include "cuda/cublaslt.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

using namespace nvfp4;            // NOLINT
using namespace nvfp4::cublaslt;  // NOLINT

// ---- What a test controls and sees

struct State {
  std::mutex mutex;
  std::map<std::string, int> calls, fail_in;  // fail_in: calls that still succeed
  std::map<std::string, Status> fail_with;
  std::string requests, refused;
  int64_t live = 0;
  size_t version = 0;          // 0: the real one
  int faulty = 0;              // algorithms of id 66 with split K before the good one
  int (*may_ask)() = nullptr;  // whether this thread may make handles and ask for algorithms now
};

State& TheState() {
  static State& state = *new State;
  return state;
}

// Counts a call; not kSuccess where a test told it to fail.
Status Called(const char* name) {
  State& state = TheState();
  const std::lock_guard<std::mutex> lock(state.mutex);
  ++state.calls[name];
  const auto at = state.fail_in.find(name);
  if (at == state.fail_in.end() || at->second-- != 0) return kSuccess;
  state.fail_in.erase(at);
  return state.fail_with[name];
}

void Count(int64_t objects) {
  State& state = TheState();
  const std::lock_guard<std::mutex> lock(state.mutex);
  state.live += objects;
}

bool Refuses(const char* what) {
  State& state = TheState();
  const std::lock_guard<std::mutex> lock(state.mutex);
  return state.refused.find(what) != std::string::npos;
}

bool MayAsk() {
  const auto may_ask = TheState().may_ask;
  return may_ask == nullptr || may_ask() != 0;
}

// ---- The real library

template <typename F>
F Real(const char* name) {
  static void* const library = [] {
    const char* path = std::getenv("NVFP4_REAL_CUBLASLT");
    void* file = path == nullptr ? nullptr : dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (file == nullptr) {
      std::fprintf(stderr, "NVFP4_REAL_CUBLASLT must name cuBLASLt: %s\n",
                   path == nullptr ? "it is not set" : dlerror());
      std::abort();
    }
    return file;
  }();
  void* symbol = dlsym(library, name);
  if (symbol == nullptr) {
    std::fprintf(stderr, "the real cuBLASLt lacks %s\n", name);
    std::abort();
  }
  return reinterpret_cast<F>(symbol);
}

template <typename T, typename Object, typename Attribute>
T Get(const char* function, Object object, Attribute which) {
  static_assert(std::is_trivially_copyable_v<T>);
  T value{};
  size_t written = 0;
  const auto get = Real<Status (*)(Object, Attribute, void*, size_t, size_t*)>(function);
  if (get(object, which, &value, sizeof value, &written) != kSuccess || written != sizeof value) {
    std::fprintf(stderr, "%s of %d failed\n", function, static_cast<int>(which));
    std::abort();
  }
  return value;
}

template <typename T>
T OfDesc(MatmulDesc desc, DescAttribute which) {
  return Get<T>("cublasLtMatmulDescGetAttribute", desc, which);
}
template <typename T>
T OfLayout(MatrixLayout layout, LayoutAttribute which) {
  return Get<T>("cublasLtMatrixLayoutGetAttribute", layout, which);
}
template <typename T>
T OfPreference(MatmulPreference preference, PreferenceAttribute which) {
  return Get<T>("cublasLtMatmulPreferenceGetAttribute", preference, which);
}

// ---- Requests

struct Matrix {
  int32_t type, order, batch;
  int64_t rows, columns, stride;
};

Matrix Read(MatrixLayout layout) {
  return {OfLayout<int32_t>(layout, kLayoutType),
          OfLayout<int32_t>(layout, kLayoutOrder),
          OfLayout<int32_t>(layout, kLayoutBatchCount),
          OfLayout<int64_t>(layout, kLayoutRows),
          OfLayout<int64_t>(layout, kLayoutColumns),
          OfLayout<int64_t>(layout, kLayoutLeadingDimension)};
}

struct Request {
  Matrix a, b, c, d;
  bool same_layout;  // of c and d
  int32_t compute, scale, trans_a, trans_b, pointers, a_mode, b_mode, bias_type;
  uint32_t epilogue;
  const void *a_scales, *b_scales, *d_scale, *d_out_scale, *bias;
};

Request Read(MatmulDesc desc, MatrixLayout a, MatrixLayout b, MatrixLayout c, MatrixLayout d) {
  return {Read(a),
          Read(b),
          Read(c),
          Read(d),
          c == d,
          OfDesc<int32_t>(desc, kComputeTypeAttribute),
          OfDesc<int32_t>(desc, kScaleTypeAttribute),
          OfDesc<int32_t>(desc, kTransA),
          OfDesc<int32_t>(desc, kTransB),
          OfDesc<int32_t>(desc, kPointerMode),
          OfDesc<int32_t>(desc, kAScaleMode),
          OfDesc<int32_t>(desc, kBScaleMode),
          OfDesc<int32_t>(desc, kBiasDataType),
          OfDesc<uint32_t>(desc, kEpilogue),
          OfDesc<const void*>(desc, kAScalePointer),
          OfDesc<const void*>(desc, kBScalePointer),
          OfDesc<const void*>(desc, kDScalePointer),
          OfDesc<const void*>(desc, kDOutScalePointer),
          OfDesc<const void*>(desc, kBiasPointer)};
}

int64_t BitsOfType(int32_t type) {
  return type == kR4F_E2M1 ? 4 : type == kR32F ? 32 : type == kR16F || type == kR16BF ? 16 : 0;
}
bool FillsVectors(int64_t elements, int32_t type) { return elements * BitsOfType(type) % 128 == 0; }
bool IsAligned(const void* p, uint64_t to) { return reinterpret_cast<uintptr_t>(p) % to == 0; }

// Null, or what the documentation does not allow.
const char* Objection(const Request& r, Status* status) {
  *status = kNotSupported;
  const bool fp4 = r.a.type == kR4F_E2M1;
  const int64_t k = r.a.rows, m = r.a.columns, n = r.b.columns;
  if (r.a.type != r.b.type) return "a and b must be of one type";
  if (r.compute != kCompute32F || r.scale != kR32F) return "compute and scale type must be float32";
  if (r.b.rows != k || r.d.rows != m || r.d.columns != n || r.c.rows != m || r.c.columns != n)
    return "shapes do not match";
  if (r.a.stride < k || r.b.stride < k || r.c.stride < m || r.d.stride < m)
    return "a leading dimension is smaller than the rows";
  if (r.a.batch != 1 || r.b.batch != 1 || r.c.batch != 1 || r.d.batch != 1)
    return "no stride of block scales is documented for batches";
  if (r.a.order != kOrderColumn || r.b.order != kOrderColumn || r.c.order != kOrderColumn ||
      r.d.order != kOrderColumn)
    return "only column order is documented";
  if (r.trans_a != kOpT || r.trans_b != kOpN) return "the form must be TN";
  if (r.c.type != r.d.type) return "c and d must be of one type";
  if (r.d_scale != nullptr || r.d_out_scale != nullptr) return "a wide d has no scale";
  if (r.pointers != kPointerHost && r.pointers != kPointerDevice)
    return "vectors of alphas are not documented for block scales";
  if (r.epilogue != kEpilogueDefault && r.epilogue != kEpilogueBias)
    return "no other epilogue is documented for block scales";
  if (r.epilogue == kEpilogueBias) {
    if (Refuses("bias")) return "a test refuses the bias";
    if (r.bias == nullptr || !IsAligned(r.bias, 16)) return "no bias, or one that is not aligned";
    if (r.bias_type != (r.d.type == kR32F ? +kR16BF : r.d.type)) return "type of bias";
  }
  if (fp4) {
    if (Refuses("fp4")) return "a test refuses FP4";
    if (r.a_mode != kVec16UE4M3 || r.b_mode != kVec16UE4M3) return "scale modes";
    *status = kInvalidValue;
    if (r.a_scales == nullptr || r.b_scales == nullptr) return "FP4 needs scales";
    *status = kNotSupported;
    if (!IsAligned(r.a_scales, 16) || !IsAligned(r.b_scales, 16)) return "alignment of scales";
    if (r.d.type != kR32F && r.d.type != kR16F && r.d.type != kR16BF) return "type of d";
    if (!FillsVectors(k, kR4F_E2M1)) return "K must be a multiple of 32";
    if (!FillsVectors(r.a.stride, kR4F_E2M1) || !FillsVectors(r.b.stride, kR4F_E2M1))
      return "lda and ldb must be multiples of 32";
    if (!FillsVectors(m, r.d.type) || !FillsVectors(r.d.stride, r.d.type))
      return "a column of d must fill whole 16 bytes";
    if (n == 1 && Refuses("single")) return "a test refuses a single column";
  } else {
    if (r.a_mode != kScalar32F || r.b_mode != kScalar32F || r.a_scales != nullptr ||
        r.b_scales != nullptr)
      return "only narrow types have scales";
    if (r.a.type != kR16F && r.a.type != kR16BF) return "type of a";
    if (r.d.type != kR32F && r.d.type != r.a.type) return "type of d";
  }
  return nullptr;
}

// Whether d shares memory with what is read, or any of them with the workspace.
bool Overlaps(const Request& r, const void* a, const void* b, const void* d, const void* workspace,
              size_t workspace_size) {
  struct Range {
    const uint8_t* begin;
    int64_t size;
  };
  const auto range = [](const Matrix& m, const void* data) {
    const int64_t elements = (m.columns - 1) * m.stride + m.rows;
    return Range{static_cast<const uint8_t*>(data), elements * BitsOfType(m.type) / 8};
  };
  const auto meet = [](const Range& x, const Range& y) {
    return x.begin < y.begin + y.size && y.begin < x.begin + x.size;
  };
  const Range work{static_cast<const uint8_t*>(workspace), static_cast<int64_t>(workspace_size)};
  const Range of_a = range(r.a, a), of_b = range(r.b, b), of_d = range(r.d, d);
  return meet(of_d, of_a) || meet(of_d, of_b) || meet(of_d, work) || meet(of_a, work) ||
         meet(of_b, work);
}

void Record(const char* call, const Request& r, const char* objection) {
  char line[320];
  std::snprintf(line, sizeof line,
                "{\"call\": \"%s\", \"m\": %lld, \"n\": %lld, \"k\": %lld, \"operands\": %d, "
                "\"result\": %d, \"stride\": %lld, \"bias\": %s, \"pointers\": %d, "
                "\"objection\": \"%s\"}\n",
                call, static_cast<long long>(r.d.rows), static_cast<long long>(r.d.columns),
                static_cast<long long>(r.a.rows), r.a.type, r.d.type,
                static_cast<long long>(r.d.stride), r.epilogue == kEpilogueBias ? "true" : "false",
                r.pointers, objection == nullptr ? "" : objection);
  State& state = TheState();
  const std::lock_guard<std::mutex> lock(state.mutex);
  state.requests += line;
}

// ---- Algorithms: what was asked for, to be compared with what is then called

struct Algo {
  uint64_t workspace;
  int64_t m, n, k;
  uint32_t alignment[4];  // of a, b, c, d
  uint16_t id, split_k;
  uint32_t bias_and_types;
};
static_assert(sizeof(Algo) <= sizeof(MatmulAlgo));

uint32_t BiasAndTypes(const Request& r) {
  return static_cast<uint32_t>(r.epilogue << 16 | r.a.type << 8 | r.d.type);
}

// ---- The product

float Load(int32_t type, const void* from, int64_t i) {
  if (type == kR32F) return static_cast<const float*>(from)[i];
  const uint16_t bits = static_cast<const uint16_t*>(from)[i];
  return type == kR16BF ? FloatOfBf16(bits) : FloatOfF16(bits);
}

void Store(int32_t type, void* to, int64_t i, float x) {
  if (type == kR32F) {
    static_cast<float*>(to)[i] = x;
  } else {
    static_cast<uint16_t*>(to)[i] = type == kR16BF ? Bf16Of(x) : F16Of(x);
  }
}

// The scale of a block as the tensor cores find it, by NVIDIA's description of the layout: tiles of
// 128 rows by 4 blocks, in each 32 groups of 16 bytes.
float ScaleAt(const void* scales, int64_t k, int64_t row, int64_t block) {
  const int64_t tiles_in_row = (k / 16 + 3) / 4;
  const int64_t tile = row / 128 * tiles_in_row + block / 4, outer = row % 128, inner = block % 4;
  return DecodeE4M3(static_cast<const uint8_t*>(
      scales)[tile * 512 + (outer % 32) * 16 + (outer / 32) * 4 + inner]);
}

// A column of an operand as it counts: elements, and a factor for each block.
struct Column {
  std::vector<float> elements, factors;
};

Column ReadColumn(const Matrix& m, const void* data, const void* scales, int64_t column) {
  Column c;
  for (int64_t i = 0; i < m.rows; ++i) {
    const int64_t at = column * m.stride + i;
    if (m.type == kR4F_E2M1) {
      const uint8_t pair = static_cast<const uint8_t*>(data)[at / 2];
      c.elements.push_back(DecodeE2M1(at % 2 == 0 ? pair & 15u : pair >> 4));
      if (i % 16 == 0) c.factors.push_back(ScaleAt(scales, m.rows, column, i / 16));
    } else {
      c.elements.push_back(Load(m.type, data, at));
      if (i % 16 == 0) c.factors.push_back(1.0f);
    }
  }
  return c;
}

void Multiply(const Request& r, const void* a, const void* b, float alpha, float beta,
              const void* c, void* d) {
  std::vector<Column> columns_a;
  for (int64_t i = 0; i < r.d.rows; ++i) columns_a.push_back(ReadColumn(r.a, a, r.a_scales, i));
  for (int64_t j = 0; j < r.d.columns; ++j) {
    const Column y = ReadColumn(r.b, b, r.b_scales, j);
    for (int64_t i = 0; i < r.d.rows; ++i) {
      const Column& x = columns_a[i];
      float acc = 0;
      for (int64_t block = 0; block < r.a.rows / 16; ++block) {
        // The sum of a block is exact, and so is its product with the factors.
        double sum = 0;
        for (int64_t e = block * 16; e < block * 16 + 16; ++e)
          sum += static_cast<double>(x.elements[e]) * y.elements[e];
        acc += static_cast<float>(sum * x.factors[block] * y.factors[block]);
      }
      float result = alpha * acc;
      if (r.epilogue == kEpilogueBias) result += Load(r.bias_type, r.bias, i);
      if (beta != 0) result += beta * Load(r.c.type, c, j * r.c.stride + i);
      Store(r.d.type, d, j * r.d.stride + i, result);
    }
  }
}

}  // namespace

// ---- For tests

EXPORT void DoubleReset() {
  State& state = TheState();
  const std::lock_guard<std::mutex> lock(state.mutex);
  state.calls.clear();
  state.fail_in.clear();
  state.requests.clear();
  state.refused.clear();
  state.version = 0;
  state.faulty = 0;
  state.may_ask = nullptr;
}

// The call of `name` after `n` more of them fails.
EXPORT void DoubleFail(const char* name, int n, int status) {
  State& state = TheState();
  const std::lock_guard<std::mutex> lock(state.mutex);
  state.fail_in[name] = n;
  state.fail_with[name] = static_cast<Status>(status);
}

// What is refused besides: any of "bias", "fp4", "single".
EXPORT void DoubleRefuse(const char* what) { TheState().refused = what; }
EXPORT void DoubleVersion(size_t version) { TheState().version = version; }
EXPORT void DoubleFaultyAlgorithms(int n) { TheState().faulty = n; }
// As in a stream capture: what asks the driver for more fails, unless this allows it.
EXPORT void DoubleCapture(int (*may_ask)()) { TheState().may_ask = may_ask; }
EXPORT int64_t DoubleLive() { return TheState().live; }  // objects that were not destroyed
EXPORT int DoubleCalls(const char* name) { return TheState().calls[name]; }
EXPORT const char* DoubleRequests() { return TheState().requests.c_str(); }  // JSON, one a line

// ---- The library's functions

#define REAL(name) Real<decltype(&cublasLt##name)>("cublasLt" #name)
#define CALLED(name) \
  if (const Status failed = Called("cublasLt" #name); failed != kSuccess) return failed

EXPORT size_t cublasLtGetVersion() {
  const size_t version = TheState().version;
  return version != 0 ? version : REAL(GetVersion)();
}
EXPORT const char* cublasLtGetStatusName(Status status) { return REAL(GetStatusName)(status); }

#define FORWARD_CREATE(name, parameters, arguments) \
  EXPORT Status cublasLt##name parameters {         \
    CALLED(name);                                   \
    const Status status = REAL(name) arguments;     \
    if (status == kSuccess) Count(1);               \
    return status;                                  \
  }
#define FORWARD_DESTROY(name, type)      \
  EXPORT Status cublasLt##name(type x) { \
    Count(-1);                           \
    return REAL(name)(x);                \
  }
FORWARD_CREATE(MatmulDescCreate, (MatmulDesc * x, ComputeType compute, DataType scale),
               (x, compute, scale))
FORWARD_DESTROY(MatmulDescDestroy, MatmulDesc)
FORWARD_CREATE(MatrixLayoutCreate,
               (MatrixLayout * x, DataType type, uint64_t rows, uint64_t columns, int64_t stride),
               (x, type, rows, columns, stride))
FORWARD_DESTROY(MatrixLayoutDestroy, MatrixLayout)
FORWARD_CREATE(MatmulPreferenceCreate, (MatmulPreference * x), (x))
FORWARD_DESTROY(MatmulPreferenceDestroy, MatmulPreference)

EXPORT Status cublasLtMatmulDescSetAttribute(MatmulDesc x, DescAttribute which, const void* value,
                                             size_t size) {
  CALLED(MatmulDescSetAttribute);
  return REAL(MatmulDescSetAttribute)(x, which, value, size);
}
EXPORT Status cublasLtMatmulPreferenceSetAttribute(MatmulPreference x, PreferenceAttribute which,
                                                   const void* value, size_t size) {
  CALLED(MatmulPreferenceSetAttribute);
  return REAL(MatmulPreferenceSetAttribute)(x, which, value, size);
}

EXPORT Status cublasLtCreate(Handle* handle) {
  CALLED(Create);
  if (!MayAsk()) return kInternalError;
  *handle = reinterpret_cast<Handle>(new int);
  Count(1);
  return kSuccess;
}
EXPORT Status cublasLtDestroy(Handle handle) {
  delete reinterpret_cast<int*>(handle);
  Count(-1);
  return kSuccess;
}

EXPORT Status cublasLtMatmulAlgoGetHeuristic(Handle, MatmulDesc desc, MatrixLayout a,
                                             MatrixLayout b, MatrixLayout c, MatrixLayout d,
                                             MatmulPreference preference, int requested,
                                             HeuristicResult* results, int* returned) {
  CALLED(MatmulAlgoGetHeuristic);
  if (!MayAsk()) return kInternalError;
  const Request r = Read(desc, a, b, c, d);
  Status status;
  const char* objection = Objection(r, &status);
  const uint32_t schemes = OfPreference<uint32_t>(preference, kReductionSchemeMask);
  if (objection == nullptr && schemes != kReductionComputeType)
    objection = "partial sums must be kept in float32";
  Record("heuristic", r, objection);
  *returned = 0;
  if (objection != nullptr) return status;
  const int faulty = TheState().faulty;
  for (; *returned < requested && *returned <= faulty; ++*returned) {
    const bool good = *returned == faulty;
    const Algo algo{OfPreference<uint64_t>(preference, kMaxWorkspaceBytes),
                    r.d.rows,
                    r.d.columns,
                    r.a.rows,
                    {OfPreference<uint32_t>(preference, kMinAlignmentA),
                     OfPreference<uint32_t>(preference, kMinAlignmentB),
                     OfPreference<uint32_t>(preference, kMinAlignmentC),
                     OfPreference<uint32_t>(preference, kMinAlignmentD)},
                    static_cast<uint16_t>(good ? 1 : 66),
                    static_cast<uint16_t>(good ? 1 : 2),
                    BiasAndTypes(r)};
    HeuristicResult& result = results[*returned];
    result = {};
    std::memcpy(&result.algo, &algo, sizeof algo);
    result.workspace_size = algo.workspace;
    result.state = kSuccess;
  }
  return kSuccess;
}

EXPORT Status cublasLtMatmulAlgoConfigGetAttribute(const MatmulAlgo* from, AlgoAttribute which,
                                                   void* value, size_t size, size_t* written) {
  CALLED(MatmulAlgoConfigGetAttribute);
  Algo algo;
  std::memcpy(&algo, from, sizeof algo);
  const uint32_t v = which == kAlgoId ? algo.id : which == kAlgoSplitK ? algo.split_k : 0u;
  if (size != sizeof v) return kInvalidValue;
  std::memcpy(value, &v, sizeof v);
  *written = sizeof v;
  return kSuccess;
}

EXPORT Status cublasLtMatmul(Handle handle, MatmulDesc desc, const void* alpha, const void* a,
                             MatrixLayout a_layout, const void* b, MatrixLayout b_layout,
                             const void* beta, const void* c, MatrixLayout c_layout, void* d,
                             MatrixLayout d_layout, const MatmulAlgo* chosen, void* workspace,
                             size_t workspace_size, CUstream_st*) {
  CALLED(Matmul);
  const Request r = Read(desc, a_layout, b_layout, c_layout, d_layout);
  Status status;
  const char* objection = Objection(r, &status);
  if (objection == nullptr) {
    status = kInvalidValue;
    Algo algo{};
    if (chosen != nullptr) std::memcpy(&algo, chosen, sizeof algo);
    const void* const matrices[] = {a, b, c, d};
    if (handle == nullptr || chosen == nullptr) objection = "no handle or no algorithm";
    if (alpha == nullptr || beta == nullptr) objection = "no alpha or no beta";
    if (c == d && !r.same_layout) objection = "c is d in another layout";
    if (algo.m != r.d.rows || algo.n != r.d.columns || algo.k != r.a.rows ||
        algo.bias_and_types != BiasAndTypes(r))
      objection = "the algorithm was chosen for another request";
    for (int i = 0; i < 4; ++i)
      if (matrices[i] == nullptr || !IsAligned(matrices[i], algo.alignment[i]) ||
          (r.a.type == kR4F_E2M1 && !IsAligned(matrices[i], 16)))
        objection = "a matrix is not aligned as it was said to be";
    if (workspace_size < algo.workspace || !IsAligned(workspace, 256)) objection = "workspace";
    if (Overlaps(r, a, b, d, workspace, workspace_size)) objection = "overlapping memory";
    if (algo.id == 66) objection = "an algorithm that is known to be faulty";
  }
  Record("matmul", r, objection);
  if (objection != nullptr) return status;
  // What a kernel may leave there.
  std::memset(workspace, 0xCD, workspace_size < 65536 ? workspace_size : 65536);
  Multiply(r, a, b, *static_cast<const float*>(alpha), *static_cast<const float*>(beta), c, d);
  return kSuccess;
}
