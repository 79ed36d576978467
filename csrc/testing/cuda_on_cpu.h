// csrc/testing/cuda_on_cpu.h: CUDA C++ for the CPU: kernels and what launches them, compiled as
// ordinary C++20, to be tested without a GPU.
//
// Compile the unchanged .cu with `-x c++ -std=c++20 -ffp-contract=off -Icsrc
// -Icsrc/testing/cuda_headers` (that folder's cuda_runtime.h is this file) and link cuda_on_cpu.cc.
//
// Every CUDA thread is a fiber. Blocks run one after another, the threads of a block until they
// wait for others: at barriers and in functions of a warp. All is deterministic, in one of three
// orders (Schedule). What a program may not do ends it with a message (Fail): barriers that not all
// threads reach, or at different places; a function of a warp without a lane that its mask names; a
// write just outside of dynamic shared memory or of a buffer. With the kernels compiled by
// -fsanitize=thread and cuda_on_cpu.cc with -DCUDA_ON_CPU_CHECK_ACCESSES every load and store is
// seen, and so are also: accesses outside of all buffers, reads of memory that was never written,
// and races in shared and in global memory. Address and undefined behaviour sanitizers work as in
// any program.
//
// What differs from nvcc: a block's dynamic shared memory is cuda_on_cpu::DynamicShared(); kernels
// are launched by cudaLaunchKernelEx; there is no inline PTX.
#pragma once

#if defined(__CUDACC__)
#error "cuda_on_cpu.h stands in for nvcc; nvcc must not see it"
#endif

#include <algorithm>
#include <bit>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <source_location>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

// ---- Language

#define __global__
#define __device__
#define __host__
#define __constant__ const
#define __shared__ static  // one block at a time: what is static is the block's
#define __grid_constant__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) alignas(n)

#define CUDA_ON_CPU_VECTOR(type, name)                     \
  struct name##1 { type x; };                              \
  struct alignas(2 * sizeof(type)) name##2 { type x, y; }; \
  struct name##3 { type x, y, z; };                        \
  struct alignas(4 * sizeof(type) > 16 ? 16 : 4 * sizeof(type)) name##4 { type x, y, z, w; }
CUDA_ON_CPU_VECTOR(signed char, char);
CUDA_ON_CPU_VECTOR(unsigned char, uchar);
CUDA_ON_CPU_VECTOR(short, short);
CUDA_ON_CPU_VECTOR(unsigned short, ushort);
CUDA_ON_CPU_VECTOR(int, int);
CUDA_ON_CPU_VECTOR(unsigned, uint);
CUDA_ON_CPU_VECTOR(long long, longlong);
CUDA_ON_CPU_VECTOR(unsigned long long, ulonglong);
CUDA_ON_CPU_VECTOR(float, float);
#undef CUDA_ON_CPU_VECTOR

#define CUDA_ON_CPU_MAKE(type, name)                                  \
  constexpr name##2 make_##name##2(type x, type y) { return {x, y}; } \
  constexpr name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }
CUDA_ON_CPU_MAKE(unsigned, uint)
CUDA_ON_CPU_MAKE(int, int)
CUDA_ON_CPU_MAKE(float, float)
CUDA_ON_CPU_MAKE(unsigned short, ushort)
CUDA_ON_CPU_MAKE(unsigned char, uchar)
#undef CUDA_ON_CPU_MAKE

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

inline uint3 threadIdx, blockIdx;  // of the thread that runs
inline dim3 blockDim, gridDim;
inline constexpr int warpSize = 32;

// ---- Runtime API: what is asynchronous is done when the function returns.

enum cudaError_t : int {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorNoDevice = 100,
  cudaErrorInvalidDevice = 101,
  cudaErrorNoKernelImageForDevice = 209,
  cudaErrorIllegalAddress = 700,
  cudaErrorLaunchOutOfResources = 701,
  cudaErrorLaunchFailure = 719,
};
enum cudaMemcpyKind {
  cudaMemcpyHostToDevice = 1,
  cudaMemcpyDeviceToHost,
  cudaMemcpyDeviceToDevice
};
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone = 0 };
enum cudaStreamCaptureMode {
  cudaStreamCaptureModeGlobal = 0,
  cudaStreamCaptureModeThreadLocal = 1,
  cudaStreamCaptureModeRelaxed = 2,
};
enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount = 16,
  cudaDevAttrComputeCapabilityMajor = 75,
  cudaDevAttrComputeCapabilityMinor = 76,
  cudaDevAttrMaxSharedMemoryPerBlockOptin = 97,
};
using cudaStream_t = struct CUstream_st*;

struct cudaLaunchAttribute;  // none is known
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};

cudaError_t cudaGetLastError();
cudaError_t cudaPeekAtLastError();
const char* cudaGetErrorName(cudaError_t error);
const char* cudaGetErrorString(cudaError_t error);
cudaError_t cudaGetDevice(int* device);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaGetDeviceCount(int* count);
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaDeviceSynchronize();
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status);
cudaError_t cudaMalloc(void** pointer, size_t size);  // see cuda_on_cpu::Buffer
cudaError_t cudaFree(void* pointer);
cudaError_t cudaMemsetAsync(void* to, int value, size_t size, cudaStream_t stream = nullptr);
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size, cudaMemcpyKind kind,
                            cudaStream_t stream = nullptr);

// Nothing is captured; what a thread may do meanwhile is kept all the same.
inline thread_local cudaStreamCaptureMode cuda_on_cpu_capture_mode = cudaStreamCaptureModeGlobal;
inline cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, cuda_on_cpu_capture_mode);
  return cudaSuccess;
}

namespace cuda_on_cpu {

// ---- For tests

// The order of blocks, and of the threads of a block between two points where they wait.
enum class Schedule { kInOrder, kReverse, kRandom };

void SetSchedule(Schedule schedule, uint32_t seed = 0);

// Ends the program with this message, the text of SetContext and, in a kernel, block and thread.
[[noreturn]] void Fail(const std::string& message);

void SetContext(std::string context);

// Of the launches from now on only so many blocks run, the last ones of the grid; 0: all. For
// tensors that are too large to be worked on whole.
void RunLastBlocks(uint64_t count);

// What has been enqueued so far, in any stream.
struct Counts {
  int64_t kernels = 0, memsets = 0, copies = 0;
};
Counts Enqueued();

// The n-th of the runtime functions above, counted from now (0 is the next), fails, with `error`.
void FailCall(int64_t n, cudaError_t error);
int64_t Calls();  // of runtime functions that can fail, so far

// Device memory of this size, up to the byte, at an address that is aligned to no more than
// `alignment`, with what it holds at first: kInput memory is as good as written, kOutput is not.
class Buffer {
 public:
  enum Use { kInput, kOutput };
  Buffer(size_t size, Use use, int fill = 0xE5, size_t alignment = 16);
  Buffer(const Buffer&) = delete;
  ~Buffer();
  template <typename T = uint8_t>
  T* As() const {
    return reinterpret_cast<T*>(data_);
  }
  size_t size() const { return size_; }
  // Whether a kernel or memset wrote the byte; always true unless accesses are checked.
  bool IsWritten(size_t i) const;

 private:
  class Memory;
  size_t size_;
  std::unique_ptr<Memory> memory_;
  uint8_t* data_;
};

// ---- For what follows

using Where = std::source_location;

void* DynamicShared();
unsigned Lane();
int BlockBarrier(bool vote, Where where);
// Waits for all lanes of `mask`; then slot l has what lane l brought. With `orders_memory` their
// accesses before come before their accesses after.
const uint64_t* WarpExchange(unsigned mask, uint64_t value, bool orders_memory, Where where);
void Fence();
void BeforeAtomic(void* address, size_t size);
cudaError_t Run(const cudaLaunchConfig_t& config, const void* kernel, void (*thread)(const void*),
                const void* launch, size_t launch_size);
cudaError_t SetMaxDynamicShared(const void* kernel, int bytes);
[[noreturn]] void FailShuffle();
cudaError_t Called();  // counts a call of the runtime, which may be told to fail

// Not an access of the kernel.
#define CUDA_ON_CPU_UNSEEN __attribute__((noinline, no_sanitize_thread))

template <typename T>
CUDA_ON_CPU_UNSEEN T Shuffle(unsigned mask, T value, unsigned source, Where where) {
  static_assert(sizeof(T) <= sizeof(uint64_t) && std::is_trivially_copyable_v<T>);
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  const uint64_t* slots = WarpExchange(mask, bits, false, where);
  if ((mask >> source & 1) == 0) FailShuffle();
  std::memcpy(&value, slots + source, sizeof value);
  return value;
}

template <typename T, typename Fold>
CUDA_ON_CPU_UNSEEN T Reduce(unsigned mask, T value, Where where, Fold fold) {
  const uint64_t* slots = WarpExchange(mask, static_cast<uint64_t>(value), false, where);
  bool first = true;
  T result{};
  for (unsigned lane = 0; lane < 32; ++lane) {
    if ((mask >> lane & 1) == 0) continue;
    const T other = static_cast<T>(slots[lane]);
    result = first ? other : fold(result, other);
    first = false;
  }
  return result;
}

// One OS thread runs all: a plain update is atomic.
template <typename T, typename Update>
CUDA_ON_CPU_UNSEEN T AtomicUpdate(T* address, Update update) {
  BeforeAtomic(address, sizeof(T));
  const T old = *address;
  *address = static_cast<T>(update(old));
  return old;
}

template <typename... Parameters>
struct Launch {
  void (*kernel)(Parameters...);
  std::tuple<std::remove_cv_t<Parameters>...> arguments;
  static void Thread(const void* launch) {
    const auto& self = *static_cast<const Launch*>(launch);
    std::apply(self.kernel, self.arguments);
  }
};

}  // namespace cuda_on_cpu

template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments&&... arguments) {
  using Launch = cuda_on_cpu::Launch<Parameters...>;
  const Launch launch{kernel, {static_cast<Parameters>(std::forward<Arguments>(arguments))...}};
  return cuda_on_cpu::Run(*config, reinterpret_cast<const void*>(kernel), &Launch::Thread, &launch,
                          sizeof launch);
}

template <typename... Parameters>
cudaError_t cudaFuncSetAttribute(void (*kernel)(Parameters...), cudaFuncAttribute attribute,
                                 int value) {
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaErrorInvalidValue;
  return cuda_on_cpu::SetMaxDynamicShared(reinterpret_cast<const void*>(kernel), value);
}

template <typename T>
cudaError_t cudaGetSymbolAddress(void** address, const T& symbol) {
  *address = const_cast<void*>(static_cast<const void*>(&symbol));
  return cuda_on_cpu::Called();
}

// ---- Functions of a block and of a warp. `where` is where the kernel calls them.

#define CUDA_ON_CPU_WHERE cuda_on_cpu::Where where = cuda_on_cpu::Where::current()

inline void __syncthreads(CUDA_ON_CPU_WHERE) { cuda_on_cpu::BlockBarrier(false, where); }
inline int __syncthreads_count(int vote, CUDA_ON_CPU_WHERE) {
  return cuda_on_cpu::BlockBarrier(vote != 0, where);
}
inline int __syncthreads_or(int vote, CUDA_ON_CPU_WHERE) {
  return cuda_on_cpu::BlockBarrier(vote != 0, where) != 0;
}
inline int __syncthreads_and(int vote, CUDA_ON_CPU_WHERE) {
  return cuda_on_cpu::BlockBarrier(vote == 0, where) == 0;
}
inline void __syncwarp(unsigned mask = ~0u, CUDA_ON_CPU_WHERE) {
  cuda_on_cpu::WarpExchange(mask, 0, true, where);
}

// Lane `source` of the caller's group of `width`; if it lies outside, the caller's own.
template <typename T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32, CUDA_ON_CPU_WHERE) {
  const unsigned first = cuda_on_cpu::Lane() & ~static_cast<unsigned>(width - 1);
  return cuda_on_cpu::Shuffle(mask, value, first + (static_cast<unsigned>(source) & (width - 1)),
                              where);
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32, CUDA_ON_CPU_WHERE) {
  const unsigned lane = cuda_on_cpu::Lane(), source = lane ^ static_cast<unsigned>(bits);
  const bool inside = source <= (lane | static_cast<unsigned>(width - 1)) && source < 32;
  return cuda_on_cpu::Shuffle(mask, value, inside ? source : lane, where);
}
template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned by, int width = 32, CUDA_ON_CPU_WHERE) {
  const unsigned lane = cuda_on_cpu::Lane();
  const bool inside = (lane & (width - 1)) + by < static_cast<unsigned>(width);
  return cuda_on_cpu::Shuffle(mask, value, inside ? lane + by : lane, where);
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned by, int width = 32, CUDA_ON_CPU_WHERE) {
  const unsigned lane = cuda_on_cpu::Lane();
  const bool inside = (lane & (width - 1)) >= by;
  return cuda_on_cpu::Shuffle(mask, value, inside ? lane - by : lane, where);
}

inline unsigned __ballot_sync(unsigned mask, int vote, CUDA_ON_CPU_WHERE) {
  const unsigned bit = vote != 0 ? 1u << cuda_on_cpu::Lane() : 0u;
  return cuda_on_cpu::Reduce(mask, bit, where, std::bit_or<unsigned>());
}
inline int __any_sync(unsigned mask, int vote, CUDA_ON_CPU_WHERE) {
  return __ballot_sync(mask, vote, where) != 0;
}
inline int __all_sync(unsigned mask, int vote, CUDA_ON_CPU_WHERE) {
  return __ballot_sync(mask, vote, where) == mask;
}
// A compiler may have the lanes of a warp diverge wherever it likes: the least that holds.
inline unsigned __activemask() { return 1u << cuda_on_cpu::Lane(); }

template <typename T>
concept CudaOnCpuWord = std::same_as<T, unsigned> || std::same_as<T, int>;

template <CudaOnCpuWord T>
T __reduce_max_sync(unsigned mask, T value, CUDA_ON_CPU_WHERE) {
  return cuda_on_cpu::Reduce(mask, value, where, [](T a, T b) { return std::max(a, b); });
}
template <CudaOnCpuWord T>
T __reduce_min_sync(unsigned mask, T value, CUDA_ON_CPU_WHERE) {
  return cuda_on_cpu::Reduce(mask, value, where, [](T a, T b) { return std::min(a, b); });
}
template <CudaOnCpuWord T>
T __reduce_add_sync(unsigned mask, T value, CUDA_ON_CPU_WHERE) {
  return cuda_on_cpu::Reduce(mask, value, where, [](T a, T b) {
    return static_cast<T>(static_cast<unsigned>(a) + static_cast<unsigned>(b));
  });
}
inline unsigned __reduce_or_sync(unsigned mask, unsigned value, CUDA_ON_CPU_WHERE) {
  return cuda_on_cpu::Reduce(mask, value, where, std::bit_or<unsigned>());
}
inline unsigned __reduce_and_sync(unsigned mask, unsigned value, CUDA_ON_CPU_WHERE) {
  return cuda_on_cpu::Reduce(mask, value, where, std::bit_and<unsigned>());
}
inline unsigned __reduce_xor_sync(unsigned mask, unsigned value, CUDA_ON_CPU_WHERE) {
  return cuda_on_cpu::Reduce(mask, value, where, std::bit_xor<unsigned>());
}

// ---- Memory

inline void __threadfence() { cuda_on_cpu::Fence(); }
inline void __threadfence_block() {}

template <typename T>
T __ldg(const T* from) {
  return *from;
}
template <typename T>
T __ldcs(const T* from) {
  return *from;
}
template <typename T>
T __ldcg(const T* from) {
  return *from;
}
template <typename T>
void __stcs(T* to, T value) {
  *to = value;
}
template <typename T>
void __stcg(T* to, T value) {
  *to = value;
}

template <typename T>
T atomicAdd(T* to, std::type_identity_t<T> value) {
  return cuda_on_cpu::AtomicUpdate(to, [=](T old) { return old + value; });
}
template <typename T>
T atomicMax(T* to, std::type_identity_t<T> value) {
  return cuda_on_cpu::AtomicUpdate(to, [=](T old) { return std::max(old, value); });
}
template <typename T>
T atomicMin(T* to, std::type_identity_t<T> value) {
  return cuda_on_cpu::AtomicUpdate(to, [=](T old) { return std::min(old, value); });
}
template <typename T>
T atomicOr(T* to, std::type_identity_t<T> value) {
  return cuda_on_cpu::AtomicUpdate(to, [=](T old) { return old | value; });
}
template <typename T>
T atomicAnd(T* to, std::type_identity_t<T> value) {
  return cuda_on_cpu::AtomicUpdate(to, [=](T old) { return old & value; });
}
template <typename T>
T atomicExch(T* to, std::type_identity_t<T> value) {
  return cuda_on_cpu::AtomicUpdate(to, [=](T) { return value; });
}
template <typename T>
T atomicCAS(T* to, std::type_identity_t<T> expected, std::type_identity_t<T> value) {
  return cuda_on_cpu::AtomicUpdate(to, [=](T old) { return old == expected ? value : old; });
}
inline unsigned atomicInc(unsigned* to, unsigned limit) {
  return cuda_on_cpu::AtomicUpdate(to, [=](unsigned old) { return old >= limit ? 0 : old + 1; });
}

// ---- Arithmetic: each function one rounding

template <std::integral T>
constexpr T max(T a, T b) {
  return a < b ? b : a;
}
template <std::integral T>
constexpr T min(T a, T b) {
  return b < a ? b : a;
}
inline float max(float a, float b) { return std::fmax(a, b); }
inline float min(float a, float b) { return std::fmin(a, b); }

inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
inline float __int_as_float(int x) { return std::bit_cast<float>(x); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>(static_cast<uint64_t>(a) * b >> 32);
}
inline int __popc(unsigned x) { return std::popcount(x); }
inline int __clz(unsigned x) { return std::countl_zero(x); }
inline int __ffs(unsigned x) { return x != 0 ? std::countr_zero(x) + 1 : 0; }
inline unsigned __brev(unsigned x) {
  unsigned reversed = 0;
  for (int i = 0; i < 32; ++i) reversed |= (x >> i & 1) << (31 - i);
  return reversed;
}
// Byte i of the result is the byte of b:a that nibble i of the selector names; its bit 3 asks for
// eight copies of that byte's sign instead.
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned nibble = selector >> 4 * i;
    const unsigned byte = static_cast<unsigned>(bytes >> 8 * (nibble & 7)) & 0xFF;
    result |= ((nibble & 8) != 0 ? (byte >> 7) * 0xFF : byte) << 8 * i;
  }
  return result;
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned by) {
  return static_cast<unsigned>((static_cast<uint64_t>(high) << 32 | low) << (by & 31) >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned by) {
  return static_cast<unsigned>((static_cast<uint64_t>(high) << 32 | low) >> (by & 31));
}

#undef CUDA_ON_CPU_WHERE
