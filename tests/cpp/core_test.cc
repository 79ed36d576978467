// tests/cpp/core_test.cc: runs one function of csrc/core over records, so that a test can compare
// it with NumPy.
//
//   core_test FUNCTION < inputs > outputs         records of the types below, one after the other
//   core_test FUNCTION FIRST COUNT > outputs      inputs are the u32 words FIRST .. FIRST + COUNT -
//   1
//
// It knows no expected value: tests/test_core.py has those, for this machine and for others under
// emulation.
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "core/block.h"
#include "core/hadamard.h"
#include "core/scale_layout.h"

namespace nvfp4 {
namespace {

// One function: a record's bytes in and out. Run reads and writes unaligned memory.
struct Function {
  const char* name;
  size_t in, out;
  void (*run)(const char* in, char* out);
};

template <typename In, typename Out, Out (*kCall)(const In&)>
void Run(const char* in, char* out) {
  In input;
  memcpy(&input, in, sizeof input);
  const Out output = kCall(input);
  memcpy(out, &output, sizeof output);
}

uint8_t CallEncodeE2M1(const float& x) { return static_cast<uint8_t>(EncodeE2M1(x)); }
uint8_t CallEncodeE4M3(const float& x) { return EncodeE4M3(x); }
uint16_t CallBf16Of(const float& x) { return Bf16Of(x); }
uint16_t CallF16Of(const float& x) { return F16Of(x); }
float CallDecodeE2M1(const uint8_t& code) { return DecodeE2M1(code); }
float CallDecodeE4M3(const uint8_t& code) { return DecodeE4M3(code); }
float CallFloatOfBf16(const uint16_t& bits) { return FloatOfBf16(bits); }
float CallFloatOfF16(const uint16_t& bits) { return FloatOfF16(bits); }

struct PhiloxIn {
  uint32_t key[2], counter[4];
};
Philox CallPhilox(const PhiloxIn& in) {
  return Philox4x32(in.key[0], in.key[1],
                    Philox{{in.counter[0], in.counter[1], in.counter[2], in.counter[3]}});
}

struct Position {
  uint32_t key[2];
  int64_t row, block;
  uint32_t stream, unused;
};
struct Bits16 {
  uint32_t u[16];
};
Bits16 CallBlockRandom(const Position& in) {
  const Philox random = BlockRandom(in.key, in.stream, in.row, in.block);
  Bits16 out;
  for (int i = 0; i < 16; ++i) out.u[i] = ElementRandom(random, i);
  return out;
}

struct StochasticIn {
  float y;
  uint32_t random;
};
uint8_t CallEncodeStochastic(const StochasticIn& in) {
  return static_cast<uint8_t>(EncodeE2M1Stochastic(in.y, in.random));
}

struct HadamardIn {
  float x[16];
  uint32_t signs;
};
struct Values16 {
  float x[16];
};
Values16 CallHadamard(const HadamardIn& in) {
  float x[16];
  memcpy(x, in.x, sizeof x);
  Hadamard16(x, in.signs);
  Values16 out;
  memcpy(out.x, x, sizeof x);
  return out;
}

struct BlockIn {
  float tensor_amax, block_amax, x;
};
struct BlockOut {
  float global_scale, encode, value;
  uint32_t scale, code;
};
BlockOut CallBlock(const BlockIn& in) {
  const TensorScale tensor = TensorScaleOf(in.tensor_amax);
  const uint8_t scale = BlockScale(in.block_amax, tensor);
  const float encode = BlockEncode(scale, tensor);
  const uint32_t code = EncodeE2M1(in.x * encode);
  return BlockOut{tensor.decode, encode, Dequantize(code, scale, tensor.decode), scale, code};
}

struct LayoutIn {
  int64_t rows, k, row, block;
};
struct LayoutOut {
  int64_t codes_stride, blocks, tile_columns, scales_size, scale_offset;
};
LayoutOut CallLayout(const LayoutIn& in) {
  const int64_t tiles = TileColumns(in.k);
  return LayoutOut{CodesStride(in.k), BlocksOf(in.k), tiles, ScalesSize(in.rows, in.k),
                   ScaleOffset(in.row, in.block, tiles)};
}

#define FUNCTION(name, in, out, call) {name, sizeof(in), sizeof(out), Run<in, out, call>}
constexpr Function kFunctions[] = {
    FUNCTION("encode_e2m1", float, uint8_t, CallEncodeE2M1),
    FUNCTION("encode_e4m3", float, uint8_t, CallEncodeE4M3),
    FUNCTION("encode_bf16", float, uint16_t, CallBf16Of),
    FUNCTION("encode_f16", float, uint16_t, CallF16Of),
    FUNCTION("decode_e2m1", uint8_t, float, CallDecodeE2M1),
    FUNCTION("decode_e4m3", uint8_t, float, CallDecodeE4M3),
    FUNCTION("decode_bf16", uint16_t, float, CallFloatOfBf16),
    FUNCTION("decode_f16", uint16_t, float, CallFloatOfF16),
    FUNCTION("philox", PhiloxIn, Philox, CallPhilox),
    FUNCTION("block_random", Position, Bits16, CallBlockRandom),
    FUNCTION("encode_stochastic", StochasticIn, uint8_t, CallEncodeStochastic),
    FUNCTION("hadamard", HadamardIn, Values16, CallHadamard),
    FUNCTION("block", BlockIn, BlockOut, CallBlock),
    FUNCTION("layout", LayoutIn, LayoutOut, CallLayout),
};
#undef FUNCTION

int RunRecords(const Function& f) {
  constexpr size_t kRecords = 1 << 16;
  std::vector<char> in(kRecords * f.in), out(kRecords * f.out);
  size_t records;
  while ((records = fread(in.data(), f.in, kRecords, stdin)) > 0) {
    for (size_t i = 0; i < records; ++i) f.run(&in[i * f.in], &out[i * f.out]);
    if (fwrite(out.data(), f.out, records, stdout) != records) return 1;
  }
  return ferror(stdin) != 0;
}

int RunRange(const Function& f, uint64_t first, uint64_t count) {
  std::vector<char> out(count * f.out);
  for (uint64_t i = 0; i < count; ++i) {
    const uint32_t word = static_cast<uint32_t>(first + i);
    char in[sizeof word];
    memcpy(in, &word, sizeof word);
    f.run(in, &out[i * f.out]);
  }
  return fwrite(out.data(), f.out, count, stdout) != count;
}

int Main(int argc, char** argv) {
  for (const Function& f : kFunctions) {
    if (argc < 2 || strcmp(f.name, argv[1]) != 0) continue;
    if (argc == 2) return RunRecords(f);
    if (argc == 4 && f.in == sizeof(uint32_t)) {
      return RunRange(f, strtoull(argv[2], nullptr, 0), strtoull(argv[3], nullptr, 0));
    }
  }
  fprintf(stderr, "core_test: unknown function or arguments\n");
  return 2;
}

}  // namespace
}  // namespace nvfp4

int main(int argc, char** argv) { return nvfp4::Main(argc, argv); }
