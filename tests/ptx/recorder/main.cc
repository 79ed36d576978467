// tests/ptx/recorder/main.cc: calls an op's function for CUDA with the arguments from the standard
// input, as they lie in memory, and prints what it enqueues (cuda_runtime.h beside this file).
//
//   recorder quantize|amax|dequantize
#include <cstdio>
#include <cstring>

#include "ops/amax.h"
#include "ops/dequantize.h"
#include "ops/quantize.h"

namespace {

template <typename Args>
int Record(nvfp4::CudaError (*call)(const Args&, nvfp4::CudaStream)) {
  alignas(Args) char bytes[sizeof(Args)];
  if (fread(bytes, 1, sizeof bytes, stdin) != sizeof bytes || fgetc(stdin) != EOF) {
    fprintf(stderr, "the arguments must be %zu bytes\n", sizeof bytes);
    return 2;
  }
  if (const char* error = call(*reinterpret_cast<const Args*>(bytes), nullptr)) {
    fprintf(stderr, "%s\n", error);
    return 1;
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const char* op = argc > 1 ? argv[1] : "";
  if (strcmp(op, "quantize") == 0) return Record(nvfp4::QuantizeOnCuda);
  if (strcmp(op, "amax") == 0) return Record(nvfp4::AmaxOnCuda);
  if (strcmp(op, "dequantize") == 0) return Record(nvfp4::DequantizeOnCuda);
  fprintf(stderr, "usage: recorder quantize|amax|dequantize\n");
  return 2;
}
