// csrc/cpu/isa.cc: detection of the instruction sets, and the one in use. Compiled for the baseline
// of the architecture.
#include "cpu/isa.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace nvfp4 {
namespace {

constexpr Isa kBestFirst[] = {Isa::kAvx512Vnni, Isa::kAvxVnni, Isa::kAvx2, Isa::kNeon,
                              Isa::kPortable};
constexpr int kUnset = -1;
std::atomic<int> current{kUnset};  // constant initialization: usable before any constructor runs

#if defined(__x86_64__)
// Each set as the compiler flags of its units name it; __builtin_cpu_supports also asks whether the
// system saves the registers.
bool HasAvx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c") && __builtin_cpu_supports("bmi2");
}

bool HasAvxVnni() {
  unsigned a = 0, b = 0, c = 0, d = 0;  // GCC 12's __builtin_cpu_supports does not know it
  return HasAvx2() && __get_cpuid_count(7, 1, &a, &b, &c, &d) != 0 && (a >> 4 & 1) != 0;
}

bool HasAvx512Vnni() {
  return HasAvx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
}
#endif

bool IsAvailable(Isa isa) {
  switch (isa) {
    case Isa::kPortable:
      return true;
#if defined(__x86_64__)
    case Isa::kAvx2:
      return HasAvx2();
    case Isa::kAvxVnni:
      return HasAvxVnni();
    case Isa::kAvx512Vnni:
      return HasAvx512Vnni();
#elif defined(__aarch64__) && defined(__linux__)
    case Isa::kNeon: {
      constexpr unsigned long kHwcapAsimdDp = 1ul << 20;
      return (getauxval(AT_HWCAP) & kHwcapAsimdDp) != 0;
    }
#endif
    default:
      return false;
  }
}

Isa FirstChoice() {
  const char* wanted = std::getenv("JAX_NVFP4_OPS_ISA");
  const std::vector<Isa> available = AvailableIsas();
  if (wanted == nullptr || *wanted == '\0') return available.front();
  for (Isa isa : available)
    if (std::strcmp(wanted, Name(isa)) == 0) return isa;
  std::fprintf(stderr,
               "JAX_NVFP4_OPS_ISA must name an instruction set that this machine can run; got "
               "'%s'; using '%s'\n",
               wanted, Name(available.front()));
  return available.front();
}

}  // namespace

const char* Name(Isa isa) {
  switch (isa) {
    case Isa::kAvx2:
      return "avx2";
    case Isa::kAvxVnni:
      return "avxvnni";
    case Isa::kAvx512Vnni:
      return "avx512vnni";
    case Isa::kNeon:
      return "neon";
    default:
      return "portable";
  }
}

std::vector<Isa> AvailableIsas() {
  std::vector<Isa> available;
  for (Isa isa : kBestFirst)
    if (IsAvailable(isa)) available.push_back(isa);
  return available;
}

Isa CurrentIsa() {
  const int seen = current.load(std::memory_order_relaxed);
  if (seen != kUnset) return static_cast<Isa>(seen);
  int expected = kUnset;
  const Isa choice = FirstChoice();
  // Two threads may come here at once: whatever is stored first holds, a selection above all.
  return current.compare_exchange_strong(expected, static_cast<int>(choice))
             ? choice
             : static_cast<Isa>(expected);
}

bool Select(Isa isa) {
  if (!IsAvailable(isa)) return false;
  current.store(static_cast<int>(isa), std::memory_order_relaxed);
  return true;
}

}  // namespace nvfp4
