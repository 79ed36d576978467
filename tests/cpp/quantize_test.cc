// tests/cpp/quantize_test.cc: one line for each of many calls of amax, quantize and dequantize with
// a hash of all they write.
//
//   quantize_test TABLE [STEP]
//
// TABLE is portable or avx2; every STEP-th call is made. The lines of all tables and machines must
// be the same. The program itself fails where a result depends on the threads or on what its memory
// held before, or where NaN or Inf leads to a scale out of range.
#include "ops/quantize.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "core/hadamard.h"
#include "core/scale_layout.h"
#include "cpu/quantize.h"
#include "ops/amax.h"
#include "ops/dequantize.h"

namespace nvfp4 {
namespace {

const QuantizeKernels* kernels = nullptr;
int step = 1;

class Threads final : public Parallel {
 public:
  explicit Threads(int n) : threads_(n) {}
  int threads() const override { return threads_; }
  void Run(int64_t n, TaskRef task) const override {
    std::atomic<int64_t> next{0};
    auto work = [&] {
      const FloatEnvironment environment;
      for (int64_t i; (i = next++) < n;) task(i);
    };
    std::vector<std::thread> others;
    for (int i = 1; i < threads_ && i < n; ++i) others.emplace_back(work);
    work();
    for (std::thread& t : others) t.join();
  }

 private:
  int threads_;
};

// The same numbers on every machine.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 2 + 1) {}
  uint32_t Bits() {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return static_cast<uint32_t>(state_ >> 32);
  }
  int64_t Below(int64_t n) { return Bits() % n; }
  float Symmetric() {
    return static_cast<float>(static_cast<int32_t>(Bits())) * 0x1p-31f;
  }  // [-1, 1]

 private:
  uint64_t state_;
};

uint64_t Hash(uint64_t hash, const void* data, int64_t size) {
  for (int64_t i = 0; i < size; ++i)
    hash = (hash ^ static_cast<const uint8_t*>(data)[i]) * 1099511628211u;
  return hash;
}

enum class Data {
  kBellShaped,
  kWide,
  kTies,
  kSmall,
  kSubnormal,
  kHuge,
  kZeros,
  kSomeZeros,
  kNonFinite,
  kCount
};

float Value(Data data, Random& random) {
  const float x = random.Symmetric() + random.Symmetric() + random.Symmetric();
  switch (data) {
    case Data::kWide: {  // every finite float32
      const uint32_t bits = random.Bits();
      return FloatOf((bits & 0x7F800000u) == 0x7F800000u ? bits ^ 0x40000000u : bits);
    }
    case Data::kTies:
      return static_cast<float>(random.Below(49) - 24) * 0.25f;
    case Data::kSmall:
      return x * 0x1p-120f;
    case Data::kSubnormal:
      return FloatOf(random.Bits() & 0x807FFFFFu);
    case Data::kHuge:
      return x * 1e38f;
    case Data::kZeros:
      return random.Below(2) != 0 ? 0.0f : -0.0f;
    case Data::kSomeZeros:
      return random.Below(3) != 0 ? x * 0.0f : x;
    case Data::kNonFinite:
      return FloatOf(random.Below(40) == 0 ? 0x7F800000u | random.Bits() : BitsOf(x));
    default:
      return x;
  }
}

// Memory of exactly that size, so that a sanitizer sees every access outside of it.
class Bytes {
 public:
  Bytes(int64_t size, int poison)
      : size_(size), data_(static_cast<uint8_t*>(malloc(size + (size == 0)))) {
    memset(data_, poison, size);
  }
  Bytes(const Bytes&) = delete;
  ~Bytes() { free(data_); }
  template <typename T = uint8_t>
  T* As() {
    return reinterpret_cast<T*>(data_);
  }
  int64_t size() const { return size_; }
  uint64_t AddTo(uint64_t hash) const { return Hash(hash, data_, size_); }

 private:
  int64_t size_;
  uint8_t* data_;
};

struct Flags {
  bool wanted, tile16, stochastic, hadamard;
};

struct Case {
  int64_t examples, batch, rows, k;
  FloatType type;
  Data data;
  Flags along_rows, along_columns;
  float amax_factor;  // the operand over the true amax
  bool partner;
  uint64_t seed;
};

void Fail(const Case& c, const char* what) {
  fprintf(stderr, "%s: [%d, %d, %d, %d] seed %d\n", what, static_cast<int>(c.examples),
          static_cast<int>(c.batch), static_cast<int>(c.rows), static_cast<int>(c.k),
          static_cast<int>(c.seed));
  exit(1);
}

uint64_t Run(const Case& c, int threads, int poison) {
  const Threads parallel(threads);
  const int64_t matrices = c.examples * c.batch, count = matrices * c.rows * c.k;
  Random random(c.seed);
  Bytes x(count * SizeOf(c.type), poison);
  for (int64_t i = 0; i < count; ++i) {
    const float value = Value(c.data, random);
    if (c.type == FloatType::kF32) x.As<float>()[i] = value;
    if (c.type == FloatType::kBf16) x.As<uint16_t>()[i] = Bf16Of(value);
    if (c.type == FloatType::kF16) {
      const uint16_t half = F16Of(value);
      x.As<uint16_t>()[i] =
          c.data != Data::kNonFinite && (half & 0x7C00) == 0x7C00 ? half ^ 0x4000 : half;
    }
  }
  const bool finite = c.data != Data::kNonFinite;
  uint64_t hash = 14695981039346656037u;

  Bytes plain(4 * c.examples, poison), rows(4 * c.examples, poison),
      columns(4 * c.examples, poison), alone(4 * c.examples, poison);
  AmaxArgs amax_args{};
  amax_args.x = x.As();
  amax_args.type = c.type;
  amax_args.examples = c.examples, amax_args.batch = c.batch, amax_args.rows = c.rows,
  amax_args.k = c.k;
  amax_args.signs = kHadamardSigns;
  amax_args.stride = 1;
  amax_args.plain = alone.As<float>();
  AmaxOnCpu(amax_args, parallel);
  amax_args.plain = plain.As<float>(), amax_args.along_rows = rows.As<float>(),
  amax_args.along_columns = columns.As<float>();
  AmaxOnCpu(amax_args, parallel);
  bool all_finite = true;
  for (int64_t e = 0; e < c.examples; ++e) {
    for (Bytes* amax : {&plain, &rows, &columns, &alone})
      all_finite &= MagnitudeBits(amax->As<float>()[e]) < 0x7F800000u;
    if (finite && BitsOf(alone.As<float>()[e]) != BitsOf(plain.As<float>()[e]))
      Fail(c, "amax differs");
    const bool nan[] = {plain.As<float>()[e] <= kFloatMax, rows.As<float>()[e] <= kFloatMax,
                        columns.As<float>()[e] <= kFloatMax};
    if (!finite && (nan[0] != nan[1] || nan[0] != nan[2])) Fail(c, "an amax lost NaN or Inf");
  }
  for (Bytes* amax : {&plain, &rows, &columns}) {
    for (int64_t e = 0; e < c.examples; ++e) {
      // The transform of huge numbers may overflow: to Inf or NaN.
      const float value = amax->As<float>()[e] <= kFloatMax ? amax->As<float>()[e] : -1.0f;
      hash = Hash(hash, &value, sizeof value);
    }
  }

  std::vector<uint32_t> key(2 * c.examples);
  std::vector<float> row_amax(c.examples), column_amax(c.examples), partner(c.examples);
  for (int64_t e = 0; e < c.examples; ++e) {
    key[2 * e] = random.Bits();
    key[2 * e + 1] = random.Bits();
    row_amax[e] = (c.along_rows.hadamard ? rows : plain).As<float>()[e] * c.amax_factor;
    column_amax[e] = (c.along_columns.hadamard ? columns : plain).As<float>()[e] * c.amax_factor;
    partner[e] = random.Symmetric();
    all_finite &=
        MagnitudeBits(row_amax[e]) < 0x7F800000u && MagnitudeBits(column_amax[e]) < 0x7F800000u;
  }
  QuantizeArgs args{};
  args.x = x.As();
  args.type = c.type;
  args.examples = c.examples, args.batch = c.batch, args.rows = c.rows, args.k = c.k;
  args.amax_stride = 1;
  args.key = key.data();
  args.signs = kHadamardSigns;
  struct Result {
    Bytes codes, scales, global_scale;
  };
  Result row_result{{matrices * c.rows * CodesStride(c.k), poison},
                    {matrices * ScalesSize(c.rows, c.k), poison},
                    {4 * c.examples, poison}};
  Result column_result{{matrices * c.k * CodesStride(c.rows), poison},
                       {matrices * ScalesSize(c.k, c.rows), poison},
                       {4 * c.examples, poison}};
  auto output = [&](const Flags& f, const std::vector<float>& amax, Result& r) {
    QuantizeOutput out;
    if (!f.wanted) return out;
    out.tile16 = f.tile16, out.stochastic = f.stochastic, out.hadamard = f.hadamard;
    out.amax = amax.data();
    if (c.partner) out.partner = partner.data();
    out.codes = r.codes.As(), out.scales = r.scales.As(),
    out.global_scale = r.global_scale.As<float>();
    return out;
  };
  args.along_rows = output(c.along_rows, row_amax, row_result);
  args.along_columns = output(c.along_columns, column_amax, column_result);
  QuantizeOnCpu(args, parallel);

  for (const bool along_rows : {true, false}) {
    const Flags& f = along_rows ? c.along_rows : c.along_columns;
    Result& r = along_rows ? row_result : column_result;
    if (!f.wanted) continue;
    for (int64_t i = 0; i < r.scales.size(); ++i)
      if (r.scales.As()[i] >= kE4M3Nan) Fail(c, "a scale is out of range");
    if (!all_finite) continue;
    hash = r.global_scale.AddTo(r.scales.AddTo(r.codes.AddTo(hash)));
    const int64_t out_rows = along_rows ? c.rows : c.k, out_k = along_rows ? c.k : c.rows;
    for (const FloatType type : {FloatType::kF32, FloatType::kBf16, FloatType::kF16}) {
      Bytes y(count * SizeOf(type), poison);
      DequantizeOnCpu({r.codes.As(), r.scales.As(), r.global_scale.As<float>(), c.examples, c.batch,
                       out_rows, out_k, type, y.As()},
                      parallel);
      hash = y.AddTo(hash);
    }
  }
  return hash;
}

void Print(const Case& c) {
  static int calls = 0;
  const int index = calls++;
  if (index % step != 0) return;
  const int threads = 1 + index % 3;
  const uint64_t hash = Run(c, threads, 0x5A);
  if (index % 5 == 0 && Run(c, 1 + (index + 1) % 3, 0xA5) != hash)
    Fail(c, "a result depends on threads or on old memory");
  auto bits = [](const Flags& f) {
    return f.wanted + 2 * f.tile16 + 4 * f.stochastic + 8 * f.hadamard;
  };
  printf("%d: [%d, %d, %d, %d] type %d data %d rows %d columns %d amax %g: %016llx\n", index,
         static_cast<int>(c.examples), static_cast<int>(c.batch), static_cast<int>(c.rows),
         static_cast<int>(c.k), static_cast<int>(c.type), static_cast<int>(c.data),
         bits(c.along_rows), bits(c.along_columns), static_cast<double>(c.amax_factor),
         static_cast<unsigned long long>(hash));
}

Flags FlagsOf(int64_t bits) { return {true, (bits & 1) != 0, (bits & 2) != 0, (bits & 4) != 0}; }

// Every pair of options at one shape, then every size of a tail with options of all kinds.
void Calls() {
  uint64_t seed = 0;
  for (int64_t type = 0; type < 3; ++type) {
    for (int64_t bits = 0; bits < 64; ++bits) {
      Print({1, 1, 39, 90, static_cast<FloatType>(type), Data::kBellShaped, FlagsOf(bits % 8),
             FlagsOf(bits / 8), 1.0f, false, ++seed});
    }
  }
  std::vector<int64_t> sizes{127, 128, 129, 130, 255, 256, 257};
  for (int64_t i = 0; i <= 40; ++i) sizes.push_back(i);
  Random random(1);
  auto some = [&](int64_t rows, int64_t k) {
    constexpr float kFactors[] = {1.0f, 1.0f, 1.0f, 0.05f, 1e-20f, 3.0f};
    Case c{1,
           1,
           rows,
           k,
           static_cast<FloatType>(random.Below(3)),
           static_cast<Data>(random.Below(static_cast<int64_t>(Data::kCount))),
           FlagsOf(random.Below(8)),
           FlagsOf(random.Below(8)),
           kFactors[random.Below(6)],
           random.Below(2) != 0,
           ++seed};
    const int64_t which = random.Below(4);
    c.along_rows.wanted = which != 0;
    c.along_columns.wanted = which != 1;
    if (rows * k < 3000) {
      c.examples = 1 + random.Below(3);
      c.batch = 1 + random.Below(3);
    }
    Print(c);
  };
  for (const int64_t size : sizes) {
    for (int i = 0; i < 5; ++i) {
      const int64_t other = i == 0 ? 1 : i < 4 ? 1 + random.Below(40) : 32 + random.Below(120);
      some(size, other);
      some(other, size);
    }
  }
  some(1000, 200);
  some(100, 1000);
  some(260, 530);
}

// Strips far down in a matrix, where the number of a row does not fit 32 bits.
void FarRows() {
  Random random(2);
  std::vector<float> x(kStripRows * kStripColumns);
  for (float& v : x) v = random.Symmetric();
  StripBuffer buffer;
  const Strip strip = buffer.Load(*kernels, {FloatType::kF32, x.data(), kStripRows, kStripColumns},
                                  0, 0, kStripColumns, 0, false);
  const QuantizeSpec spec{TensorScaleOf(1.0f),           false, true, true, kHadamardSigns,
                          {random.Bits(), random.Bits()}};
  constexpr int64_t kFar = int64_t{1} << 32;
  for (const int64_t row : {kFar - 256, kFar - 100, kFar - 7, kFar, 5 * kFar + 3}) {
    for (const int64_t block : {int64_t{0}, int64_t{1} << 20}) {
      Bytes codes(kStripRows * kStripColumns / 2, 0),
          scales(kStripBlocks / kTileBlocks * kTileBytes, 0);
      kernels->rows(spec, strip, row, block, codes.As(), kStripColumns / 2, scales.As());
      uint64_t hash = scales.AddTo(codes.AddTo(0));
      kernels->columns(spec, strip, row, block, codes.As(), kBlock / 2, scales.As());
      hash = scales.AddTo(codes.AddTo(hash));
      printf("row %lld block %lld: %016llx\n", static_cast<long long>(row),
             static_cast<long long>(block), static_cast<unsigned long long>(hash));
    }
  }
}

}  // namespace

// In place of cpu/quantize.cc.
const QuantizeKernels& CurrentQuantizeKernels() { return *kernels; }

}  // namespace nvfp4

int main(int argc, char** argv) {
  const char* table = argc > 1 ? argv[1] : "";
  if (strcmp(table, "portable") == 0) nvfp4::kernels = &nvfp4::PortableQuantizeKernels();
#if defined(__x86_64__)
  if (strcmp(table, "avx2") == 0) nvfp4::kernels = &nvfp4::Avx2QuantizeKernels();
#endif
  if (nvfp4::kernels == nullptr)
    return fprintf(stderr, "usage: quantize_test portable|avx2 [STEP]\n"), 2;
  if (argc > 2) nvfp4::step = atoi(argv[2]);
  nvfp4::Calls();
  nvfp4::FarRows();
  return 0;
}
