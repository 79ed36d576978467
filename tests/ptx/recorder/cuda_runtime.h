// tests/ptx/recorder/cuda_runtime.h: a CUDA runtime that prints what is enqueued, in JSON, instead
// of doing it. So the PTX interpreter launches what the launching code asks for: kernel, grid,
// shared memory, parameters.
#pragma once

#include <cstdio>
#include <type_traits>

#include "testing/cuda_on_cpu.h"

int main(int argc, char** argv);

namespace recorder {

// Appends a parameter as a kernel finds it: at a multiple of its alignment.
template <typename T>
void Append(std::string* bytes, const T& value) {
  static_assert(std::is_trivially_copyable_v<T>);
  bytes->resize((bytes->size() + alignof(T) - 1) / alignof(T) * alignof(T));
  bytes->append(reinterpret_cast<const char*>(&value), sizeof value);
}

// `kernel` is printed as its distance from main, by which `nm` tells its name.
template <typename... Parameters, typename... Arguments>
cudaError_t Launch(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                   Arguments&&... arguments) {
  std::string bytes;
  (Append<std::remove_cv_t<Parameters>>(&bytes, arguments), ...);
  std::printf(
      "{\"kernel\": %lld, \"grid\": [%u, %u, %u], \"threads\": %u, \"shared\": %zu, "
      "\"parameters\": \"",
      static_cast<long long>(reinterpret_cast<intptr_t>(kernel) -
                             reinterpret_cast<intptr_t>(&main)),
      config->gridDim.x, config->gridDim.y, config->gridDim.z,
      config->blockDim.x * config->blockDim.y * config->blockDim.z, config->dynamicSmemBytes);
  for (const char byte : bytes) std::printf("%02x", static_cast<unsigned char>(byte));
  std::printf("\"}\n");
  return cudaSuccess;
}

inline cudaError_t Memset(void* to, int value, size_t size, cudaStream_t) {
  std::printf("{\"memset\": %llu, \"value\": %d, \"size\": %zu}\n",
              static_cast<unsigned long long>(reinterpret_cast<uintptr_t>(to)), value, size);
  return cudaSuccess;
}

}  // namespace recorder

#define cudaLaunchKernelEx recorder::Launch
#define cudaMemsetAsync recorder::Memset
