// csrc/cpu/isa.h: which instruction set the CPU kernels use, chosen at run time.
//
// The bits of a result never depend on it. So the choice is one variable of the process that a test
// may change at any time: a call that has begun finishes with what it found.
#pragma once

#include <cstdint>
#include <vector>

namespace nvfp4 {

enum class Isa : uint8_t { kPortable, kAvx2, kAvxVnni, kAvx512Vnni, kNeon };

// As in the environment variable JAX_NVFP4_OPS_ISA: "portable", "avx2", "avxvnni", "avx512vnni",
// "neon".
const char* Name(Isa isa);

// What this machine can run, best first. The last one is Isa::kPortable.
std::vector<Isa> AvailableIsas();

// The one in use: the last one selected, at first the one that JAX_NVFP4_OPS_ISA names, else the
// best.
Isa CurrentIsa();

// False, and no change, if this machine can not run it.
bool Select(Isa isa);

}  // namespace nvfp4
