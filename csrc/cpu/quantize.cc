// csrc/cpu/quantize.cc: the quantize kernels of the instruction set in use.
#include "cpu/quantize.h"

#include "cpu/isa.h"

namespace nvfp4 {

const QuantizeKernels& CurrentQuantizeKernels() {
  switch (CurrentIsa()) {
#if defined(__x86_64__)
    case Isa::kAvx2:
    case Isa::kAvxVnni:
    case Isa::kAvx512Vnni:
      return Avx2QuantizeKernels();
#endif
    default:
      return PortableQuantizeKernels();
  }
}

}  // namespace nvfp4
