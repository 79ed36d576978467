// csrc/core/philox.h: Philox4x32-10, the counter-based generator of Salmon et al., "Parallel random
// numbers: as easy as 1, 2, 3" (2011).
#pragma once

#include "core/bits.h"

namespace nvfp4 {

struct Philox {
  uint32_t word[4];
};

NVFP4_HD Philox Philox4x32(uint32_t key0, uint32_t key1, Philox counter) {
  constexpr uint32_t kMultiplier0 = 0xD2511F53u, kMultiplier1 = 0xCD9E8D57u;
  constexpr uint32_t kWeyl0 = 0x9E3779B9u, kWeyl1 = 0xBB67AE85u;
  uint32_t* c = counter.word;
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = static_cast<uint64_t>(kMultiplier0) * c[0];
    const uint64_t p1 = static_cast<uint64_t>(kMultiplier1) * c[2];
    const uint32_t c0 = static_cast<uint32_t>(p1 >> 32) ^ c[1] ^ key0;
    const uint32_t c2 = static_cast<uint32_t>(p0 >> 32) ^ c[3] ^ key1;
    c[0] = c0;
    c[1] = static_cast<uint32_t>(p1);
    c[2] = c2;
    c[3] = static_cast<uint32_t>(p0);
    key0 += kWeyl0;
    key1 += kWeyl1;
  }
  return counter;
}

}  // namespace nvfp4
