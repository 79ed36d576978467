// tests/cpp/gemm_test.cc: every table of matmul kernels against a plain loop, bit by bit.
//
//   gemm_test [STEP]
//
// Makes every STEP-th of many products with each table, one, two and three threads, and prints how
// many. VNNI units are built with NVFP4_EMULATE_VNNI, so that they run on any machine with AVX2.
#include "cpu/gemm.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "core/half.h"

namespace nvfp4 {
namespace {

class Threads final : public Parallel {
 public:
  explicit Threads(int n) : threads_(n) {}
  int threads() const override { return threads_; }
  void Run(int64_t n, TaskRef task) const override {
    std::atomic<int64_t> next{0};
    const auto work = [&] {
      const FloatEnvironment environment;
      for (int64_t i; (i = next++) < n;) task(i);
    };
    std::vector<std::thread> others;
    for (int i = 1; i < threads_; ++i) others.emplace_back(work);
    work();
    for (std::thread& t : others) t.join();
  }

 private:
  int threads_;
};

uint64_t state = 1;
uint32_t Bits() {
  state = state * 6364136223846793005u + 1442695040888963407u;
  return static_cast<uint32_t>(state >> 32);
}

// A matrix with exactly its bytes, so that a checker of memory sees what is read beyond; padding as
// quantize writes it.
struct Matrix {
  int64_t rows, k;
  std::vector<uint8_t> codes, scales;

  Matrix(int64_t rows, int64_t k)
      : rows(rows), k(k), codes(rows * CodesStride(k)), scales(ScalesSize(rows, k)) {
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t i = 0; i < k; ++i)
        codes[r * CodesStride(k) + i / 2] |= static_cast<uint8_t>((Bits() & 15) << i % 2 * 4);
      // All scales but NaN; every eighth block the largest of all codes, so that no sum may
      // overflow.
      for (int64_t b = 0; b < BlocksOf(k); ++b) {
        scales[ScaleOffset(r, b, TileColumns(k))] = static_cast<uint8_t>(Bits() % 0x7F);
        if (Bits() % 8 == 0 && (b + 1) * kBlock <= k)
          std::memset(&codes[r * CodesStride(k) + b * kBlock / 2], (Bits() & 1) != 0 ? 0x77 : 0xFF,
                      kBlock / 2);
      }
    }
  }

  float Code(int64_t r, int64_t i) const {
    return DecodeE2M1(codes[r * CodesStride(k) + i / 2] >> i % 2 * 4 & 15);
  }
  float Scale(int64_t r, int64_t b) const {
    return DecodeE4M3(scales[ScaleOffset(r, b, TileColumns(k))]);
  }
};

float LoadOne(FloatType type, const std::vector<uint8_t>& from, int64_t i) {
  if (type == FloatType::kF32) {
    float v;
    std::memcpy(&v, &from[4 * i], 4);
    return v;
  }
  uint16_t v;
  std::memcpy(&v, &from[2 * i], 2);
  return type == FloatType::kBf16 ? FloatOfBf16(v) : FloatOfF16(v);
}

void StoreOne(FloatType type, std::vector<uint8_t>& to, int64_t i, float v) {
  if (type == FloatType::kF32) {
    std::memcpy(&to[4 * i], &v, 4);
  } else {
    const uint16_t bits = type == FloatType::kBf16 ? Bf16Of(v) : F16Of(v);
    std::memcpy(&to[2 * i], &bits, 2);
  }
}

std::vector<uint8_t> RandomFloats(FloatType type, int64_t n) {
  std::vector<uint8_t> v(n * SizeOf(type));
  for (int64_t i = 0; i < n; ++i)
    StoreOne(type, v, i, static_cast<float>(static_cast<int32_t>(Bits())) * 0x1p-28f);
  return v;
}

struct Case {
  int64_t m, n, k, count;
  FloatType out, bias_type;
  bool bias, accumulate, shared;  // shared: all products have the same a
};

struct Table {
  const char* name;
  const GemmKernels* kernels;
};

const Table kTables[] = {
    {"portable", &kPortableGemm},
#if defined(__x86_64__)
    {"avx2", &kAvx2Gemm},
    {"avxvnni", &kAvxVnniGemm},
    {"avx512vnni", &kAvx512VnniGemm},
#elif defined(__aarch64__)
    {"neon", &kNeonGemm},
#endif
};

void Check(const Case& c) {
  std::vector<Matrix> a, b;
  for (int64_t i = 0; i < (c.shared ? 1 : c.count); ++i) a.emplace_back(c.m, c.k);
  for (int64_t i = 0; i < c.count; ++i) b.emplace_back(c.n, c.k);
  const std::vector<uint8_t> bias = RandomFloats(c.bias_type, c.n),
                             accumulate = RandomFloats(c.out, c.count * c.m * c.n);
  std::vector<uint8_t> expected(c.count * c.m * c.n * SizeOf(c.out));
  for (int64_t p = 0; p < c.count; ++p) {
    const Matrix &x = a[c.shared ? 0 : p], &w = b[p];
    const float alpha = 0.001f * static_cast<float>(p + 1);
    for (int64_t i = 0; i < c.m; ++i) {
      for (int64_t j = 0; j < c.n; ++j) {
        float acc = 0;
        for (int64_t block = 0; block < BlocksOf(c.k); ++block) {
          float sum = 0;
          for (int64_t e = block * kBlock; e < (block + 1) * kBlock && e < c.k; ++e)
            sum += x.Code(i, e) * w.Code(j, e);
          acc += sum * (x.Scale(i, block) * w.Scale(j, block));
        }
        float y = alpha * acc;
        if (c.bias) y += LoadOne(c.bias_type, bias, j);
        const int64_t at = (p * c.m + i) * c.n + j;
        if (c.accumulate) y += LoadOne(c.out, accumulate, at);
        StoreOne(c.out, expected, at, y);
      }
    }
  }
  for (const Table& table : kTables) {
    for (int threads = 1; threads <= 3; ++threads) {
      // The result takes the place of accumulate, as when that is donated; elsewhere its memory is
      // poisoned.
      std::vector<uint8_t> y =
          c.accumulate ? accumulate : std::vector<uint8_t>(expected.size(), 0xCD);
      std::vector<float> alphas;
      for (int64_t p = 0; p < c.count; ++p) alphas.push_back(0.001f * static_cast<float>(p + 1));
      std::vector<MatmulProduct> products;
      for (int64_t p = 0; p < c.count; ++p) {
        uint8_t* at = y.data() + p * c.m * c.n * SizeOf(c.out);
        const Matrix &x = a[c.shared ? 0 : p], &w = b[p];
        products.push_back({{x.codes.data(), x.scales.data()},
                            {w.codes.data(), w.scales.data()},
                            {&alphas[p], nullptr},
                            c.bias ? bias.data() : nullptr,
                            c.accumulate ? at : nullptr,
                            at});
      }
      MatmulWith(*table.kernels, {c.m, c.n, c.k, c.out, c.bias_type}, products.data(), c.count,
                 Threads(threads));
      for (size_t i = 0; i < y.size(); ++i) {
        if (y[i] == expected[i]) continue;
        const int64_t element = static_cast<int64_t>(i) / SizeOf(c.out);
        std::fprintf(stderr,
                     "%s, %d threads, M %lld N %lld K %lld, %lld products: element %lld is %a, "
                     "expected %a\n",
                     table.name, threads, static_cast<long long>(c.m), static_cast<long long>(c.n),
                     static_cast<long long>(c.k), static_cast<long long>(c.count),
                     static_cast<long long>(element), LoadOne(c.out, y, element),
                     LoadOne(c.out, expected, element));
        std::exit(1);
      }
    }
  }
}

// The last step alone, where its rounding is delicate: beside the middle of two results, subnormal,
// overflowing, infinite and not a number; every length of a tail.
void CheckFinish(FloatType out, FloatType bias_type, bool bias, bool accumulate) {
  const uint32_t heads[] = {0,          0x80000000, 0x3F800000, 0x33000000, 0x387FC000, 0x477FE000,
                            0x7F7F8000, 0x7F800000, 0xFF800000, 0x7FC12000, 0x00000001, 0x00008000};
  std::vector<float> acc;
  for (uint32_t head : heads)
    for (uint32_t low : {0u, 1u, 0xFFFu, 0x1000u, 0x1001u, 0x7FFFu, 0x8000u, 0x8001u, 0x18000u})
      acc.push_back(FloatOf(head + low));
  for (int i = 0; i < 100000; ++i) acc.push_back(FloatOf(Bits()));
  const int64_t n = static_cast<int64_t>(acc.size());
  const std::vector<uint8_t> plus = RandomFloats(bias_type, n), and_plus = RandomFloats(out, n);
  std::vector<uint8_t> expected(n * SizeOf(out));
  const auto finish = [&](const GemmKernels& kernels, uint8_t* y, int64_t first, int64_t count) {
    kernels.finish({1.0f, out, bias_type, bias ? &plus[first * SizeOf(bias_type)] : nullptr,
                    accumulate ? &and_plus[first * SizeOf(out)] : nullptr, y},
                   &acc[first], count);
  };
  finish(kPortableGemm, expected.data(), 0, n);
  for (int64_t i = 0; i < n; ++i) {
    float y = acc[i];
    if (bias) y += LoadOne(bias_type, plus, i);
    if (accumulate) y += LoadOne(out, and_plus, i);
    std::vector<uint8_t> one(4);
    StoreOne(out, one, 0, y);
    if (y == y && std::memcmp(one.data(), &expected[i * SizeOf(out)], SizeOf(out)) != 0) {
      std::fprintf(stderr, "portable: finish of %a\n", acc[i]);
      std::exit(1);
    }
  }
  for (const Table& table : kTables) {
    for (int64_t first = 0, count = 1; first + count < n; first += count, count = count % 33 + 1) {
      std::vector<uint8_t> y(count * SizeOf(out));
      finish(*table.kernels, y.data(), first, count);
      for (int64_t i = 0; i < count; ++i) {
        if (std::memcmp(&y[i * SizeOf(out)], &expected[(first + i) * SizeOf(out)], SizeOf(out)) ==
            0)
          continue;
        std::fprintf(stderr, "%s: finish of %a, element %lld of %lld, is %a, expected %a\n",
                     table.name, acc[first + i], static_cast<long long>(i),
                     static_cast<long long>(count), LoadOne(out, y, i),
                     LoadOne(out, expected, first + i));
        std::exit(1);
      }
    }
  }
}

}  // namespace
}  // namespace nvfp4

int main(int argc, char** argv) {
  using namespace nvfp4;
  const int step = argc > 1 ? std::atoi(argv[1]) : 1;
  const int64_t ms[] = {1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 33, 127, 130};
  const int64_t ns[] = {1, 7, 8, 31, 33, 128, 131};
  const int64_t ks[] = {1, 16, 17, 31, 32, 80, 464};
  const FloatType types[] = {FloatType::kF32, FloatType::kBf16, FloatType::kF16};
  std::vector<Case> cases;
  for (int64_t m : ms)
    for (int64_t n : ns)
      for (int64_t k : ks) {
        const int i = static_cast<int>(cases.size());
        cases.push_back(
            {m, n, k, 1, types[i % 3], types[i / 3 % 3], i / 2 % 2 == 0, i / 4 % 2 == 0, false});
      }
  // More blocks than one chunk, more rows than are packed at once, batches, and nothing at all.
  for (FloatType type : types) {
    cases.push_back({9, 40, 16 * 131, 1, type, type, true, true, false});
    cases.push_back({20, 70, 16 * 300 + 5, 1, type, type, false, false, false});
    cases.push_back({1, 260, 16 * 129, 1, type, type, false, true, false});
    cases.push_back({3, 130, 16 * 259, 1, type, type, true, false, false});
    cases.push_back({1029, 40, 48, 1, type, type, false, true, false});
    cases.push_back({5, 9, 40, 7, type, type, true, true, false});
    cases.push_back({18, 33, 64, 3, type, type, false, false, true});
    cases.push_back({4, 6, 0, 2, type, type, true, true, false});
    cases.push_back({0, 6, 32, 2, type, type, true, false, false});
    cases.push_back({6, 0, 32, 2, type, type, true, false, false});
  }
  for (FloatType out : types)
    for (FloatType bias_type : types)
      for (int added = 0; added < 4; ++added)
        CheckFinish(out, bias_type, (added & 1) != 0, (added & 2) != 0);
  // Rows so long that fewer are packed at once.
  cases.push_back({850, 3, 32000, 1, types[0], types[0], true, false, false});
  int made = 0;
  for (size_t i = 0; i < cases.size(); i += step, ++made) Check(cases[i]);
  std::printf("%d products with each of %zu tables\n", made, std::size(kTables));
}
