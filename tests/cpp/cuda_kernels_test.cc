// tests/cpp/cuda_kernels_test.cc: the CUDA kernels, emulated, against the CPU backend's plain C++
// kernels: the same bits.
//
//   cuda_kernels_test STEP [FIRST]
//
// Makes every STEP-th call, from FIRST on; prints how many. Fails at the first that differs.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "core/hadamard.h"
#include "core/scale_layout.h"
#include "cpu/quantize.h"
#include "ops/amax.h"
#include "ops/dequantize.h"
#include "ops/quantize.h"
#include "testing/cuda_on_cpu.h"

namespace nvfp4 {

// In place of cpu/quantize.cc.
const QuantizeKernels& CurrentQuantizeKernels() { return PortableQuantizeKernels(); }

namespace {

using cuda_on_cpu::Buffer;

class OneThread final : public Parallel {
 public:
  int threads() const override { return 1; }
  void Run(int64_t n, TaskRef task) const override {
    for (int64_t i = 0; i < n; ++i) task(i);
  }
};

// The same numbers on every machine.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 2 + 1) { Bits(); }
  uint32_t Bits() {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return static_cast<uint32_t>(state_ >> 32);
  }
  int64_t Below(int64_t n) { return Bits() % n; }
  float Symmetric() { return static_cast<float>(static_cast<int32_t>(Bits())) * 0x1p-31f; }

 private:
  uint64_t state_;
};

enum class Data { kBellShaped, kAnyBits, kTies, kSmall, kSubnormal, kHuge, kZeros, kNonFinite };
constexpr int kDataKinds = 8;

float Value(Data data, Random& random) {
  const float x = random.Symmetric() + random.Symmetric() + random.Symmetric();
  switch (data) {
    case Data::kAnyBits: {
      const uint32_t bits = random.Bits();
      return FloatOf((bits & 0x7F800000u) == 0x7F800000u ? bits ^ 0x40000000u : bits);
    }
    case Data::kTies:  // E2M1's grid and its midpoints, with an amax that makes the scales powers
                       // of two
      return static_cast<float>(random.Below(49) - 24) * 0.25f;
    case Data::kSmall:
      return x * 0x1p-120f;
    case Data::kSubnormal:
      return FloatOf(random.Bits() & 0x807FFFFFu);
    case Data::kHuge:
      return x * 1e38f;
    case Data::kZeros:
      return random.Below(3) != 0 ? x * 0.0f : x;
    case Data::kNonFinite:
      return FloatOf(random.Below(60) == 0 ? 0x7F800000u | random.Bits() : BitsOf(x));
    default:
      return x;
  }
}

struct Output {
  bool wanted, tile16, stochastic, hadamard;
};
Output OutputOf(int64_t bits) {  // 0 .. 7, or 8: not wanted
  return {bits < 8, (bits & 1) != 0, (bits & 2) != 0, (bits & 4) != 0};
}

struct Case {
  int64_t examples, batch, rows, k;
  FloatType type;
  Data data;
  Output along_rows, along_columns;
  float amax_factor;  // the operand over the true amax
  bool partner;
  size_t alignment;
  int64_t amax_stride;
  uint64_t seed;
};

std::string TextOf(const Case& c) {
  auto bits = [](const Output& o) {
    return o.wanted ? o.tile16 + 2 * o.stochastic + 4 * o.hadamard : 8;
  };
  char text[300];
  snprintf(text, sizeof text,
           "Case{%d, %d, %d, %d, FloatType(%d), Data(%d), OutputOf(%d), OutputOf(%d), %gf, %d, %d, "
           "%d, %llu}",
           static_cast<int>(c.examples), static_cast<int>(c.batch), static_cast<int>(c.rows),
           static_cast<int>(c.k), static_cast<int>(c.type), static_cast<int>(c.data),
           bits(c.along_rows), bits(c.along_columns), static_cast<double>(c.amax_factor), c.partner,
           static_cast<int>(c.alignment), static_cast<int>(c.amax_stride),
           static_cast<unsigned long long>(c.seed));
  return text;
}

int schedule = 0;

[[noreturn]] void Fail(const std::string& what) { cuda_on_cpu::Fail("differs: " + what); }

// `got` of the device, written in full, is `expected`.
void ExpectSame(const char* what, const Buffer& got, const std::vector<uint8_t>& expected) {
  for (size_t i = 0; i < got.size(); ++i) {
    if (!got.IsWritten(i))
      Fail(std::string(what) + ": byte " + std::to_string(i) + " is not written");
    if (got.As()[i] != expected[i]) {
      Fail(std::string(what) + ": byte " + std::to_string(i) + " of " + std::to_string(got.size()) +
           " is " + std::to_string(got.As()[i]) + ", not " + std::to_string(expected[i]));
    }
  }
}

// The same, of float32; any NaN is as good as another.
void ExpectSameFloats(const char* what, const Buffer& got, const std::vector<float>& expected) {
  for (size_t i = 0; i < expected.size(); ++i) {
    const float g = got.As<float>()[i], e = expected[i];
    for (size_t b = 0; b < 4; ++b)
      if (!got.IsWritten(4 * i + b)) Fail(std::string(what) + ": is not written");
    if (BitsOf(g) != BitsOf(e) && !(g != g && e != e)) {
      char text[100];
      snprintf(text, sizeof text, ": element %d is %a, not %a", static_cast<int>(i),
               static_cast<double>(g), static_cast<double>(e));
      Fail(what + std::string(text));
    }
  }
}

// Calls a handler's function on the device: at most one kernel and one memset.
template <typename Call>
void OnDevice(const Call& call) {
  const cuda_on_cpu::Counts before = cuda_on_cpu::Enqueued();
  if (const char* error = call()) Fail(std::string("an error: ") + error);
  const cuda_on_cpu::Counts after = cuda_on_cpu::Enqueued();
  if (after.kernels - before.kernels > 1 || after.memsets - before.memsets > 1 ||
      after.copies != before.copies)
    Fail("more than one kernel and one memset");
}

bool IsFinite(float x) { return MagnitudeBits(x) < 0x7F800000u; }

// The class of an amax that is not finite: Inf or NaN, which of them is not specified.
float Class(float amax) { return IsFinite(amax) ? amax : FloatOf(0x7FC00000u); }

void CheckAmax(const Case& c, const Buffer& x, int wanted, std::vector<float> (&amax)[3]) {
  AmaxArgs args{};
  args.x = x.As();
  args.type = c.type;
  args.examples = c.examples, args.batch = c.batch, args.rows = c.rows, args.k = c.k;
  args.signs = kHadamardSigns;
  args.stride = (wanted & 1) + (wanted >> 1 & 1) + (wanted >> 2 & 1);
  const size_t count = c.examples * args.stride;
  std::vector<float> expected(count);
  const Buffer got(count * sizeof(float), Buffer::kOutput, 0xE5, 4);
  auto assign = [&](float* out) {
    args.plain = (wanted & 1) != 0 ? out++ : nullptr;
    args.along_rows = (wanted & 2) != 0 ? out++ : nullptr;
    args.along_columns = (wanted & 4) != 0 ? out++ : nullptr;
  };
  assign(expected.data());
  AmaxOnCpu(args, OneThread());
  assign(got.As<float>());
  OnDevice([&] { return AmaxOnCuda(args, nullptr); });
  for (size_t i = 0; i < count; ++i) {
    got.As<float>()[i] = Class(got.As<float>()[i]);
    expected[i] = Class(expected[i]);
  }
  ExpectSameFloats("amax", got, expected);
  int64_t column = 0;
  for (int i = 0; i < 3; ++i) {
    if ((wanted >> i & 1) == 0) continue;
    amax[i].resize(c.examples);
    for (int64_t e = 0; e < c.examples; ++e) amax[i][e] = expected[e * args.stride + column];
    ++column;
  }
}

void CheckDequantize(const Case& c, int64_t rows, int64_t k, const Buffer& codes,
                     const Buffer& scales, const Buffer& global_scale) {
  for (const FloatType type : {FloatType::kF32, FloatType::kBf16, FloatType::kF16}) {
    DequantizeArgs args{codes.As(), scales.As(), global_scale.As<float>(),
                        c.examples, c.batch,     rows,
                        k,          type,        nullptr};
    std::vector<uint8_t> expected(c.examples * c.batch * rows * k * SizeOf(type));
    args.x = expected.data();
    DequantizeOnCpu(args, OneThread());
    const Buffer got(expected.size(), Buffer::kOutput, 0xE5, 16);
    args.x = got.As();
    OnDevice([&] { return DequantizeOnCuda(args, nullptr); });
    ExpectSame("dequantize", got, expected);
  }
}

void Check(const Case& c) {
  cuda_on_cpu::SetContext(TextOf(c) + " schedule " + std::to_string(schedule));
  cuda_on_cpu::SetSchedule(static_cast<cuda_on_cpu::Schedule>(schedule), c.seed);
  const int64_t matrices = c.examples * c.batch, count = matrices * c.rows * c.k;
  Random random(c.seed);
  const Buffer x(count * SizeOf(c.type), Buffer::kInput, 0xE5, c.alignment);
  for (int64_t i = 0; i < count; ++i) {
    const float value = Value(c.data, random);
    if (c.type == FloatType::kF32) x.As<float>()[i] = value;
    if (c.type == FloatType::kBf16) x.As<uint16_t>()[i] = Bf16Of(value);
    if (c.type == FloatType::kF16) x.As<uint16_t>()[i] = F16Of(value);
    if (c.type != FloatType::kF32 && c.data != Data::kNonFinite) {
      uint16_t& half = x.As<uint16_t>()[i];
      const uint16_t exponent = c.type == FloatType::kBf16 ? 0x7F80 : 0x7C00;
      if ((half & exponent) == exponent) half ^= 0x4000;
    }
  }

  std::vector<float> amax[3];
  CheckAmax(c, x, 7, amax);
  std::vector<float> subset[3];
  if (const int wanted = static_cast<int>(c.seed % 6) + 1; c.seed % 2 == 0)
    CheckAmax(c, x, wanted, subset);

  const Buffer key(8 * c.examples, Buffer::kInput, 0, 16), partner(4 * c.examples, Buffer::kInput);
  const Buffer row_amax(4 * c.examples * c.amax_stride, Buffer::kInput),
      column_amax(4 * c.examples * c.amax_stride, Buffer::kInput);
  std::vector<bool> finite(c.examples, true);
  bool all_finite = true;
  for (int64_t e = 0; e < c.examples; ++e) {
    key.As<uint32_t>()[2 * e] = random.Bits();
    key.As<uint32_t>()[2 * e + 1] = random.Bits();
    partner.As<float>()[e] = random.Symmetric();
    const float rows = amax[c.along_rows.hadamard ? 1 : 0][e] * c.amax_factor,
                columns = amax[c.along_columns.hadamard ? 2 : 0][e] * c.amax_factor;
    row_amax.As<float>()[e * c.amax_stride] = rows;
    column_amax.As<float>()[e * c.amax_stride] = columns;
    finite[e] = IsFinite(amax[0][e]) && IsFinite(amax[1][e]) && IsFinite(amax[2][e]) &&
                IsFinite(rows) && IsFinite(columns);
    all_finite &= finite[e];
  }

  QuantizeArgs args{};
  args.x = x.As();
  args.type = c.type;
  args.examples = c.examples, args.batch = c.batch, args.rows = c.rows, args.k = c.k;
  args.amax_stride = c.amax_stride;
  args.key = (c.along_rows.wanted && c.along_rows.stochastic) ||
                     (c.along_columns.wanted && c.along_columns.stochastic)
                 ? key.As<uint32_t>()
                 : nullptr;
  args.signs = kHadamardSigns;
  // In every third call x is a part of a tensor, around its 2^32nd row and column.
  const Buffer origin(4 * (kOriginWords + c.batch), Buffer::kInput);
  if (c.seed % 3 == 0) {
    const QuantizeOrigin first = {static_cast<uint32_t>(16 * random.Below(9)),
                                  static_cast<uint32_t>(16 * random.Below(9)), 0xFFFFFFA0u,
                                  0xFFFFFFA0u};
    std::memcpy(origin.As(), &first, sizeof first);
    for (int64_t i = 0; i < c.batch; ++i)
      origin.As<uint32_t>()[kOriginWords + i] = static_cast<uint32_t>(random.Below(3));
    args.origin = origin.As<uint32_t>();
  }
  struct Side {
    const Output& options;
    const Buffer& amax;
    int64_t rows, k;
    QuantizeOutput& out;
    std::vector<uint8_t> codes, scales;
    std::vector<float> global_scale;
    Buffer device_codes, device_scales, device_global_scale;
    Side(const Case& c, const Output& options, const Buffer& amax, int64_t rows, int64_t k,
         QuantizeOutput& out)
        : options(options),
          amax(amax),
          rows(rows),
          k(k),
          out(out),
          codes(options.wanted ? c.examples * c.batch * rows * CodesStride(k) : 0),
          scales(options.wanted ? c.examples * c.batch * ScalesSize(rows, k) : 0),
          global_scale(options.wanted ? c.examples : 0),
          device_codes(codes.size(), Buffer::kOutput, 0xE5, 16),
          device_scales(scales.size(), Buffer::kOutput, 0xE5, 16),
          device_global_scale(4 * global_scale.size(), Buffer::kOutput, 0xE5, 16) {}
  };
  Side sides[] = {{c, c.along_rows, row_amax, c.rows, c.k, args.along_rows},
                  {c, c.along_columns, column_amax, c.k, c.rows, args.along_columns}};
  for (Side& side : sides) {
    if (!side.options.wanted) continue;
    side.out.tile16 = side.options.tile16;
    side.out.stochastic = side.options.stochastic;
    side.out.hadamard = side.options.hadamard;
    side.out.amax = side.amax.As<float>();
    side.out.partner = c.partner ? partner.As<float>() : nullptr;
    side.codes.reserve(1);  // no null: that would mean an output that is not wanted
    side.out.codes = side.codes.data();
    side.out.scales = side.scales.data();
    side.out.global_scale = side.global_scale.data();
  }
  QuantizeOnCpu(args, OneThread());
  for (Side& side : sides) {
    if (!side.options.wanted) continue;
    side.out.codes = side.device_codes.As();
    side.out.scales = side.device_scales.As();
    side.out.global_scale = side.device_global_scale.As<float>();
  }
  OnDevice([&] { return QuantizeOnCuda(args, nullptr); });
  for (Side& side : sides) {
    if (!side.options.wanted) continue;
    ExpectSameFloats("global scale", side.device_global_scale, side.global_scale);
    // Of examples that are not finite, codes and scales are in range, and no more is said.
    const size_t codes = c.examples > 0 ? side.codes.size() / c.examples : 0,
                 scales = c.examples > 0 ? side.scales.size() / c.examples : 0;
    for (int64_t e = 0; e < c.examples; ++e) {
      if (finite[e]) continue;
      std::copy_n(side.device_codes.As() + e * codes, codes, side.codes.data() + e * codes);
      for (size_t i = e * scales; i < (e + 1) * scales; ++i) {
        if (side.device_scales.As()[i] >= kE4M3Nan) Fail("a scale is out of range");
        side.scales[i] = side.device_scales.As()[i];
      }
    }
    ExpectSame("scales", side.device_scales, side.scales);
    ExpectSame("codes", side.device_codes, side.codes);
    if (all_finite && c.data != Data::kNonFinite)
      CheckDequantize(c, side.rows, side.k, side.device_codes, side.device_scales,
                      side.device_global_scale);
  }
}

// Calls ------------------------------------------------------------------------------------------

std::vector<Case> Cases() {
  std::vector<Case> cases;
  uint64_t seed = 0;
  auto add = [&](Case c) {
    c.seed = ++seed;
    cases.push_back(c);
  };
  Random random(7);
  auto type = [&] { return static_cast<FloatType>(random.Below(3)); };
  auto data = [&] { return static_cast<Data>(random.Below(kDataKinds)); };

  // What recipes ask for, in whole tiles of bfloat16; then with operands that are less aligned.
  constexpr int kRecipes[][2] = {{0, 8}, {0, 0}, {0, 4}, {1, 1}, {2, 8}, {2, 2}, {2, 6}};
  for (const auto& [rows, columns] : kRecipes) {
    for (int i = 0; i < 3; ++i) {
      add({1 + i / 2, 1, 128 * (1 + i % 2), i == 0 ? 128 : 256, FloatType::kBf16,
           i == 0 ? Data::kBellShaped : data(), OutputOf(rows), OutputOf(columns),
           i == 2 ? 0.05f : 1.0f, i == 1, i == 1 ? size_t{256} : size_t{32}, 1 + i, 0});
    }
    add({1, 1, 128, 128, FloatType::kBf16, Data::kBellShaped, OutputOf(rows), OutputOf(columns),
         1.0f, false, 16, 1, 0});
    // An amax so large or so small that factors can not be folded into others.
    for (const Data data : {Data::kHuge, Data::kSmall, Data::kSubnormal})
      add({1, 1, 128, 128, FloatType::kBf16, data, OutputOf(rows), OutputOf(columns), 1.0f, false,
           32, 1, 0});
  }
  // Every pair of options, each type, at a shape with tails.
  for (int64_t rows = 0; rows <= 8; ++rows) {
    for (int64_t columns = 0; columns <= 8; ++columns) {
      if (rows == 8 && columns == 8) continue;
      add({1, 1, 39, 90, static_cast<FloatType>((rows + columns) % 3), Data::kBellShaped,
           OutputOf(rows), OutputOf(columns), 1.0f, false, 16, 1, 0});
    }
  }
  // Tails of all sizes.
  std::vector<int64_t> sizes{0, 127, 128, 129, 144, 160, 255, 256, 257};
  for (int64_t i = 1; i <= 40; ++i) sizes.push_back(i);
  for (const int64_t size : sizes) {
    for (int i = 0; i < 4; ++i) {
      constexpr float kFactors[] = {1.0f, 1.0f, 1.0f, 0.05f, 1e-20f, 3.0f};
      const int64_t other = i == 0 ? 1 : i == 1 ? 1 + random.Below(40) : 8 * random.Below(24);
      const bool along_k = i % 2 == 0;
      int64_t rows = random.Below(9), columns = random.Below(9);
      if (rows == 8 && columns == 8) rows = 0;
      const bool small = size * other < 4000;
      add({small ? random.Below(4) : 1, small ? random.Below(4) : 1, along_k ? other : size,
           along_k ? size : other, type(), data(), OutputOf(rows), OutputOf(columns),
           kFactors[random.Below(6)], random.Below(2) != 0, random.Below(2) != 0 ? 16u : 64u,
           1 + random.Below(3), 0});
    }
  }
  // Tensors of the extremes, each kind of data with each rounding.
  for (int kind = 0; kind < kDataKinds; ++kind) {
    for (int64_t options = 0; options < 8; ++options) {
      add({2, 1, 40, 33, static_cast<FloatType>((kind + options) % 3), static_cast<Data>(kind),
           OutputOf(options), OutputOf((options + 3) % 8), options % 4 == 3 ? 1e-4f : 1.0f, true,
           16, 2, 0});
    }
  }
  // So many tiles that a block of threads takes two.
  add({1, 2048, 1, 129, FloatType::kBf16, Data::kBellShaped, OutputOf(2), OutputOf(4), 1.0f, false,
       16, 1, 0});
  return cases;
}

}  // namespace
}  // namespace nvfp4

int main(int argc, char** argv) {
  const size_t step = argc > 1 ? atoi(argv[1]) : 1, first = argc > 2 ? atoi(argv[2]) : 0;
  if (step == 0) return fprintf(stderr, "usage: cuda_kernels_test STEP [FIRST]\n"), 2;
  const std::vector<nvfp4::Case> cases = nvfp4::Cases();
  int made = 0;
  for (size_t i = first; i < cases.size(); i += step) {
    // The last call is large.
    if (i + 1 == cases.size() && step > 1) continue;
    nvfp4::schedule = static_cast<int>(i / step % 3);
    nvfp4::Check(cases[i]);
    ++made;
  }
  printf("%d\n", made);
  return 0;
}
