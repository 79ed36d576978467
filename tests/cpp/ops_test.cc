// tests/cpp/ops_test.cc: runs quantize, amax or dequantize on the CPU into poisoned memory of the
// exact size, so that a sanitizer sees every access outside of it and a test every byte that was
// not written.
//
//   ops_test isas                                                            > names of instruction
//   sets ops_test quantize ISA BATCH ROWS K TYPE FLAGS FLAGS AMAX AMAX KEY KEY    < x > per
//   orientation codes, scales, global scale ops_test amax ISA BATCH ROWS K TYPE < x > plain, rows,
//   columns f32 ops_test dequantize ISA BATCH ROWS K TYPE                                < codes,
//   scales, global scale > x
//
// TYPE is 0 f32, 1 bf16, 2 f16. FLAGS, for the rows and for the columns: 1 wanted, 2 16x16 blocks,
// 4 stochastic, 8 Hadamard.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "core/hadamard.h"
#include "core/scale_layout.h"
#include "cpu/isa.h"
#include "ops/amax.h"
#include "ops/dequantize.h"
#include "ops/quantize.h"

namespace nvfp4 {
namespace {

// Tasks one by one, the last one first: no result may depend on their order.
class Backwards final : public Parallel {
 public:
  int threads() const override { return 3; }
  void Run(int64_t n, TaskRef task) const override {
    const FloatEnvironment environment;
    while (n-- > 0) task(n);
  }
};

// Not a vector: its capacity would hide an access past its end.
template <typename T>
class Poisoned {
 public:
  explicit Poisoned(int64_t count)
      : size_(count * sizeof(T)), data_(static_cast<T*>(malloc(size_))) {
    if (size_ != 0) memset(data_, 0xFF, size_);
  }
  ~Poisoned() { free(data_); }
  Poisoned(const Poisoned&) = delete;
  T* data() { return data_; }
  void Read() {
    if (size_ != 0 && fread(data_, 1, size_, stdin) != size_) exit(3);
  }
  void Write() {
    if (size_ != 0 && fwrite(data_, 1, size_, stdout) != size_) exit(3);
  }

 private:
  size_t size_;
  T* data_;
};

struct Arguments {
  char** next;
  int64_t Int() { return strtoll(*next++, nullptr, 0); }
  float Float() { return strtof(*next++, nullptr); }
};

struct Shape {
  explicit Shape(Arguments& in)
      : batch(in.Int()), rows(in.Int()), k(in.Int()), type(static_cast<FloatType>(in.Int())) {}
  int64_t Bytes() const { return batch * rows * k * SizeOf(type); }
  int64_t batch, rows, k;
  FloatType type;
};

void Quantize(Arguments in) {
  const Shape s(in);
  const int64_t flags[2] = {in.Int(), in.Int()};
  const float amax[2] = {in.Float(), in.Float()};
  const uint32_t key[2] = {static_cast<uint32_t>(in.Int()), static_cast<uint32_t>(in.Int())};
  Poisoned<uint8_t> x(s.Bytes());
  x.Read();
  QuantizeArgs args{};
  args.x = x.data();
  args.type = s.type;
  args.examples = 1;
  args.batch = s.batch;
  args.rows = s.rows;
  args.k = s.k;
  args.key = key;
  args.signs = kHadamardSigns;
  const int64_t rows[2] = {s.rows, s.k}, k[2] = {s.k, s.rows};
  const auto size = [&](int i, int64_t bytes) { return (flags[i] & 1) != 0 ? bytes : 0; };
  Poisoned<uint8_t> codes0(size(0, s.batch * rows[0] * CodesStride(k[0])));
  Poisoned<uint8_t> codes1(size(1, s.batch * rows[1] * CodesStride(k[1])));
  Poisoned<uint8_t> scales0(size(0, s.batch * ScalesSize(rows[0], k[0])));
  Poisoned<uint8_t> scales1(size(1, s.batch * ScalesSize(rows[1], k[1])));
  Poisoned<float> global0(size(0, 1)), global1(size(1, 1));
  QuantizeOutput* out[2] = {&args.along_rows, &args.along_columns};
  Poisoned<uint8_t>*codes[2] = {&codes0, &codes1}, *scales[2] = {&scales0, &scales1};
  Poisoned<float>* global[2] = {&global0, &global1};
  for (int i = 0; i < 2; ++i) {
    if ((flags[i] & 1) == 0) continue;
    out[i]->tile16 = (flags[i] & 2) != 0;
    out[i]->stochastic = (flags[i] & 4) != 0;
    out[i]->hadamard = (flags[i] & 8) != 0;
    out[i]->amax = &amax[i];
    out[i]->codes = codes[i]->data();
    out[i]->scales = scales[i]->data();
    out[i]->global_scale = global[i]->data();
  }
  QuantizeOnCpu(args, Backwards());
  for (int i = 0; i < 2; ++i) {
    codes[i]->Write();
    scales[i]->Write();
    global[i]->Write();
  }
}

void Amax(Arguments in) {
  const Shape s(in);
  Poisoned<uint8_t> x(s.Bytes());
  x.Read();
  Poisoned<float> plain(1), rows(1), columns(1);
  AmaxArgs args{};
  args.x = x.data();
  args.type = s.type;
  args.examples = 1;
  args.batch = s.batch;
  args.rows = s.rows;
  args.k = s.k;
  args.signs = kHadamardSigns;
  args.plain = plain.data();
  args.along_rows = rows.data();
  args.along_columns = columns.data();
  AmaxOnCpu(args, Backwards());
  plain.Write();
  rows.Write();
  columns.Write();
}

void Dequantize(Arguments in) {
  const Shape s(in);
  Poisoned<uint8_t> codes(s.batch * s.rows * CodesStride(s.k)),
      scales(s.batch * ScalesSize(s.rows, s.k));
  Poisoned<float> global_scale(1);
  codes.Read();
  scales.Read();
  global_scale.Read();
  Poisoned<uint8_t> x(s.Bytes());
  DequantizeArgs args{};
  args.codes = codes.data();
  args.scales = scales.data();
  args.global_scale = global_scale.data();
  args.examples = 1;
  args.batch = s.batch;
  args.rows = s.rows;
  args.k = s.k;
  args.type = s.type;
  args.x = x.data();
  DequantizeOnCpu(args, Backwards());
  x.Write();
}

int Main(int argc, char** argv) {
  const std::string op = argc > 1 ? argv[1] : "";
  if (op == "isas") {
    for (const Isa isa : AvailableIsas()) puts(Name(isa));
    return 0;
  }
  bool selected = false;
  for (const Isa isa : AvailableIsas())
    if (argc > 2 && std::string(argv[2]) == Name(isa)) selected = Select(isa);
  const Arguments in{argv + 3};
  if (selected && op == "quantize" && argc == 13) return Quantize(in), 0;
  if (selected && op == "amax" && argc == 7) return Amax(in), 0;
  if (selected && op == "dequantize" && argc == 7) return Dequantize(in), 0;
  fprintf(stderr, "ops_test: unknown op, instruction set or arguments\n");
  return 2;
}

}  // namespace
}  // namespace nvfp4

int main(int argc, char** argv) { return nvfp4::Main(argc, argv); }
