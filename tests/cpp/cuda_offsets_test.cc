// tests/cpp/cuda_offsets_test.cc: the CUDA kernels, emulated, at the end of tensors of more than
// 2^31 and 2^32 elements: the last rows have the bits that the CPU backend gives them as a tensor
// of their own.
//
//   cuda_offsets_test ROWS K
//
// The tensors are address space; memory is only where the last blocks of threads read and write.
#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
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

class OneThread final : public Parallel {
 public:
  int threads() const override { return 1; }
  void Run(int64_t n, TaskRef task) const override {
    for (int64_t i = 0; i < n; ++i) task(i);
  }
};

// Zeros, until they are written.
uint8_t* Sparse(int64_t size) {
  void* p = mmap(nullptr, static_cast<size_t>(size), PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) perror("mmap"), exit(2);
  return static_cast<uint8_t*>(p);
}

void Check(CudaError error) {
  if (error != nullptr) fprintf(stderr, "%s\n", error), exit(1);
}

void Same(const char* what, const uint8_t* got, const uint8_t* expected, int64_t size) {
  if (memcmp(got, expected, static_cast<size_t>(size)) != 0)
    fprintf(stderr, "%s differ\n", what), exit(1);
}

void Run(int64_t rows, int64_t k) {
  // Of the end, two bands of tiles; the second may be cut short.
  const int64_t first = (rows - 1) / kTileRows * kTileRows - kTileRows, end = rows - first;
  auto* const x = reinterpret_cast<uint16_t*>(Sparse(rows * k * 2));
  uint64_t state = 1;
  bool any = false;
  for (int64_t i = first * k; i < rows * k; ++i) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    x[i] = static_cast<uint16_t>((state >> 48 & 0x80FF) | 0x3F00);  // +-[0.5, 2) in bfloat16
    any |= x[i] != x[first * k];
  }
  if (!any) fprintf(stderr, "all values are equal\n"), exit(1);
  const float amax = 8.0f;  // after the transform of 16 values too
  const uint32_t key[2] = {0x12345678u, 0x9ABCDEF0u};

  QuantizeArgs args{};
  args.x = x;
  args.type = FloatType::kBf16;
  args.examples = args.batch = 1;
  args.rows = rows, args.k = k;
  args.key = key;
  args.signs = kHadamardSigns;
  QuantizeOutput* const outputs[] = {&args.along_rows, &args.along_columns};
  float global_scale[2];
  for (int i = 0; i < 2; ++i) {
    const int64_t out_rows = i == 0 ? rows : k, out_k = i == 0 ? k : rows;
    outputs[i]->stochastic = true;
    outputs[i]->hadamard = i == 1;
    outputs[i]->amax = &amax;
    outputs[i]->codes = Sparse(out_rows * CodesStride(out_k));
    outputs[i]->scales = Sparse(ScalesSize(out_rows, out_k));
    outputs[i]->global_scale = &global_scale[i];
  }
  const int64_t across = CeilDiv(k, kTileRows);
  cuda_on_cpu::RunLastBlocks(static_cast<uint64_t>(across));  // at least one band, one tile a block
  Check(QuantizeOnCuda(args, nullptr));

  // The same rows by themselves, at their place.
  struct {
    QuantizeOrigin origin;
    uint32_t number;
  } place = {
      {static_cast<uint32_t>(first), 0, static_cast<uint32_t>(rows), static_cast<uint32_t>(k)}, 0};
  QuantizeArgs part = args;
  part.x = x + first * k;
  part.rows = end;
  part.origin = &place.origin.row;
  std::vector<uint8_t> codes[2], scales[2];
  float part_global_scale[2];
  QuantizeOutput* const parts[] = {&part.along_rows, &part.along_columns};
  for (int i = 0; i < 2; ++i) {
    const int64_t out_rows = i == 0 ? end : k, out_k = i == 0 ? k : end;
    codes[i].resize(out_rows * CodesStride(out_k));
    scales[i].resize(ScalesSize(out_rows, out_k));
    parts[i]->codes = codes[i].data();
    parts[i]->scales = scales[i].data();
    parts[i]->global_scale = &part_global_scale[i];
  }
  QuantizeOnCpu(part, OneThread());

  // The last band: all of its blocks have run.
  const int64_t row = first + kTileRows, stride = CodesStride(k);
  Same("codes along rows", args.along_rows.codes + row * stride,
       codes[0].data() + kTileRows * stride, (rows - row) * stride);
  const int64_t band = TileColumns(k) * kTileBytes;
  Same("scales along rows", args.along_rows.scales + row / kTileRows * band,
       scales[0].data() + band, band);
  const int64_t columns = CodesStride(rows - row);
  for (int64_t c = 0; c < k; ++c)
    Same("codes along columns", args.along_columns.codes + c * CodesStride(rows) + row / 2,
         codes[1].data() + c * CodesStride(end) + kTileRows / 2, columns);
  const int64_t tiles = TileColumns(rows), part_tiles = TileColumns(end),
                from = row / (kTileBlocks * kBlock);
  for (int64_t t = 0; t < CeilDiv(k, kTileRows); ++t)
    Same("scales along columns", args.along_columns.scales + (t * tiles + from) * kTileBytes,
         scales[1].data() + (t * part_tiles + 2) * kTileBytes, (tiles - from) * kTileBytes);

  // And back.
  DequantizeArgs back{};
  back.codes = args.along_rows.codes;
  back.scales = args.along_rows.scales;
  back.global_scale = &part_global_scale[0];  // the first block, which stores it, has not run
  back.examples = back.batch = 1;
  back.rows = rows, back.k = k;
  back.type = FloatType::kBf16;
  back.x = Sparse(rows * k * 2);
  Check(DequantizeOnCuda(back, nullptr));
  DequantizeArgs part_back = back;
  std::vector<uint16_t> expected(end * k);
  part_back.codes = codes[0].data();
  part_back.scales = scales[0].data();
  part_back.rows = end;
  part_back.x = expected.data();
  DequantizeOnCpu(part_back, OneThread());
  // The last tile, which the last block has dequantized.
  const int64_t column = (k - 1) / kTileRows * kTileRows;
  const auto* const got = static_cast<const uint16_t*>(back.x);
  for (int64_t r = row; r < rows; ++r)
    Same("values", reinterpret_cast<const uint8_t*>(got + r * k + column),
         reinterpret_cast<const uint8_t*>(expected.data() + (r - first) * k + column),
         (k - column) * 2);
}

}  // namespace
}  // namespace nvfp4

int main(int argc, char** argv) {
  if (argc != 3) return fprintf(stderr, "usage: cuda_offsets_test ROWS K\n"), 2;
  nvfp4::Run(atoll(argv[1]), atoll(argv[2]));
  puts("right");
}
