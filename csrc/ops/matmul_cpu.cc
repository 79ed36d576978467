// csrc/ops/matmul_cpu.cc: matmul on the CPU: cuts products into panels for the kernels of
// cpu/gemm.h, and finishes the result.
//
// A task owns its part of the result over all of K, so that no bit depends on the threads.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <memory>

#include "cpu/gemm.h"
#include "cpu/isa.h"
#include "ops/matmul.h"

namespace nvfp4 {
namespace {

constexpr int64_t kTaskColumns = 128;  // of the result
// Rows of a packed at once: as many as fit, but for the longest rows so many that packing b, which
// is done again for each such piece, stays a small part.
constexpr int64_t kPackRows = 1024, kMinPackRows = 48, kPackBytes = 32 << 20;

const GemmKernels& CurrentGemmKernels() {
  switch (CurrentIsa()) {
#if defined(__x86_64__)
    case Isa::kAvx2:
      return kAvx2Gemm;
    case Isa::kAvxVnni:
      return kAvxVnniGemm;
    case Isa::kAvx512Vnni:
      return kAvx512VnniGemm;
#elif defined(__aarch64__)
    case Isa::kNeon:
      return kNeonGemm;
#endif
    default:
      return kPortableGemm;
  }
}

// A product with its factor read. XLA would multiply with subnormals flushed to zero; here they
// count.
struct ScaledProduct : MatmulProduct {
  explicit ScaledProduct(const MatmulProduct& p) : MatmulProduct(p) {
    for (const float* alpha : p.alpha)
      if (alpha != nullptr) factor *= *alpha;
  }
  float factor = 1.0f;
};

// Products of two codes that take about 10 microseconds: less is not worth handing out.
constexpr double kTaskWork = 1 << 20;

class SerialParallel final : public Parallel {
 public:
  int threads() const override { return 1; }
  void Run(int64_t n, TaskRef task) const override {
    for (int64_t i = 0; i < n; ++i) task(i);
  }
};

// Memory of this thread, kept for the next call: pages fresh from the system cost more than a small
// product.
enum Slot { kPackedA, kPackedB, kAccumulator, kSlots };

template <typename T>
T* Scratch(Slot slot, int64_t count) {
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };
  struct Buffer {
    std::unique_ptr<void, Free> memory;
    size_t size = 0;
  };
  thread_local Buffer buffers[kSlots];
  constexpr size_t kPage = 4096;
  Buffer& buffer = buffers[slot];
  const size_t size = (static_cast<size_t>(count) * sizeof(T) + kPage - 1) / kPage * kPage;
  if (buffer.size < size) {
    buffer.memory.reset();
    buffer.memory.reset(std::aligned_alloc(kPage, size));
    buffer.size = buffer.memory != nullptr ? size : 0;
    if (buffer.memory == nullptr) std::abort();  // as operator new does without exceptions
  }
  return static_cast<T*>(buffer.memory.get());
}

// n results of a row from (row, column) on.
void Finish(const GemmKernels& kernels, const MatmulShape& shape, const ScaledProduct& p,
            int64_t row, int64_t column, int64_t n, const float* acc) {
  const auto from = [](const void* base, FloatType type, int64_t i) {
    return base != nullptr ? static_cast<const uint8_t*>(base) + i * SizeOf(type) : nullptr;
  };
  const int64_t at = row * shape.n + column;
  kernels.finish(GemmResult{p.factor, shape.out, shape.bias, from(p.bias, shape.bias, column),
                            from(p.accumulate, shape.out, at),
                            static_cast<uint8_t*>(p.y) + at * SizeOf(shape.out)},
                 acc, n);
}

GemmMatrix MatrixOf(const MatmulOperand& operand, int64_t rows, int64_t k) {
  return GemmMatrix{operand.codes, operand.scales, rows,
                    BlocksOf(k),   CodesStride(k), TileColumns(k)};
}

// Few rows of a: packed once, then each task reads some rows of b once.
void Direct(const GemmKernels& kernels, const MatmulShape& shape, const ScaledProduct& p,
            const Parallel& parallel) {
  const GemmMatrix a = MatrixOf(p.a, shape.m, shape.k), b = MatrixOf(p.b, shape.n, shape.k);
  // Packed in whole groups of four blocks.
  const int64_t row_bytes = CeilDiv(a.blocks, kTileBlocks) * kTileBlocks * kDirectBytes;
  uint8_t* packed = Scratch<uint8_t>(kPackedA, shape.m * row_bytes);
  kernels.pack_direct(a, 0, shape.m, packed);
  constexpr int64_t kPairs = 16, kGroups = 4;  // of a tile: 2 rows in each of 4 groups of 32
  parallel.Run(CeilDiv(shape.n, kTileRows), [&](int64_t tile) {
    const int64_t column = tile * kTileRows,
                  columns = std::min<int64_t>(kTileRows, shape.n - column);
    float acc[kDirectRows][kTileRows];
    for (int64_t pair = 0; pair < kPairs && 2 * pair < columns; ++pair) {
      alignas(32) float sums[kDirectRows * 8];
      kernels.direct(shape.m, packed, b, tile, pair, sums);
      for (int64_t r = 0; r < shape.m; ++r)
        for (int64_t i = 0; i < 8; ++i)
          acc[r][2 * pair + i / kGroups + i % kGroups * 32] = sums[r * 8 + i];
    }
    for (int64_t row = 0; row < shape.m; ++row)
      Finish(kernels, shape, p, row, column, columns, acc[row]);
  });
}

// In how many parts to share out the rows: where columns alone do not keep all threads busy,
// packing b once more for each part, which costs about as much as one more panel of a, pays.
int64_t RowTasks(int64_t column_tasks, int64_t panels, int64_t threads) {
  constexpr int64_t kLeastPanels = 4;
  int64_t best = 1, least = INT64_MAX;
  for (int64_t parts = 1; parts <= std::min(2 * threads, CeilDiv(panels, kLeastPanels)); ++parts) {
    const int64_t time = CeilDiv(column_tasks * parts, threads) * (CeilDiv(panels, parts) + 1);
    if (time < least) best = parts, least = time;
  }
  return best;
}

void Tiled(const GemmKernels& kernels, const MatmulShape& shape, const ScaledProduct& p,
           const Parallel& parallel) {
  const GemmMatrix a = MatrixOf(p.a, shape.m, shape.k), b = MatrixOf(p.b, shape.n, shape.k);
  const int64_t blocks = a.blocks;
  const int64_t pack_rows =
      std::clamp(kPackBytes / (blocks * kernels.a_bytes), kMinPackRows, kPackRows);
  for (int64_t row0 = 0; row0 < shape.m; row0 += pack_rows) {
    const int64_t rows = std::min(pack_rows, shape.m - row0), panels = CeilDiv(rows, kernels.rows);
    // Panels of even heights: no thin last one.
    const auto first = [&](int64_t panel) { return panel * rows / panels; };
    uint8_t* packed_a = Scratch<uint8_t>(kPackedA, rows * blocks * kernels.a_bytes);
    // All chunks of a panel lie one after another.
    const auto a_at = [&](int64_t panel, int64_t block) {
      return packed_a +
             (first(panel) * blocks + (first(panel + 1) - first(panel)) * block) * kernels.a_bytes;
    };
    constexpr int64_t kPanelsATask = 8;
    parallel.Run(CeilDiv(panels, kPanelsATask), [&](int64_t task) {
      for (int64_t panel = task * kPanelsATask; panel < std::min(panels, (task + 1) * kPanelsATask);
           ++panel)
        kernels.pack_a(a, row0 + first(panel), first(panel + 1) - first(panel), 0, blocks,
                       a_at(panel, 0));
    });

    const int64_t column_tasks = CeilDiv(shape.n, kTaskColumns);
    const int64_t row_tasks = RowTasks(column_tasks, panels, parallel.threads());
    parallel.Run(column_tasks * row_tasks, [&](int64_t task) {
      const int64_t column = task / row_tasks * kTaskColumns,
                    columns = std::min(kTaskColumns, shape.n - column);
      const int64_t panel0 = task % row_tasks * panels / row_tasks,
                    panel1 = (task % row_tasks + 1) * panels / row_tasks;
      const int64_t b_panels = CeilDiv(columns, kernels.columns), chunk = std::min(kChunk, blocks);
      const int64_t panel_bytes = chunk * kernels.b_bytes;
      uint8_t* packed_b = Scratch<uint8_t>(kPackedB, b_panels * panel_bytes);
      const bool whole = blocks <= kChunk;
      const int64_t acc_rows = first(panel1) - first(panel0);
      float* kept = whole ? nullptr : Scratch<float>(kAccumulator, acc_rows * kTaskColumns);
      for (int64_t block = 0; block < blocks; block += kChunk) {
        const int64_t n = std::min(kChunk, blocks - block);
        const bool last = block + n == blocks;
        for (int64_t j = 0; j < b_panels; ++j)
          kernels.pack_b(b, column + j * kernels.columns, block, n, packed_b + j * panel_bytes);
        for (int64_t panel = panel0; panel < panel1; ++panel) {
          const int64_t height = first(panel + 1) - first(panel);
          for (int64_t j = 0; j < b_panels; ++j) {
            alignas(64) float local[kMaxPanelRows * kMaxPanelColumns];
            const int64_t width = kernels.columns;
            float* acc = local;
            if (!whole) {
              // One panel's sums lie together: b_panels of height x width for each panel of a.
              acc = kept + (first(panel) - first(panel0)) * kTaskColumns + j * height * width;
            }
            if (block == 0) std::fill(acc, acc + height * width, 0.0f);
            kernels.tile(height, n, a_at(panel, block), packed_b + j * panel_bytes, acc);
            if (!last) continue;
            const int64_t at = column + j * width;
            for (int64_t r = 0; r < height; ++r)
              Finish(kernels, shape, p, row0 + first(panel) + r, at, std::min(width, shape.n - at),
                     acc + r * width);
          }
        }
      }
    });
  }
}

void Multiply(const GemmKernels& kernels, const MatmulShape& shape, const ScaledProduct& p,
              const Parallel& parallel) {
  if (shape.k == 0) {
    parallel.Run(shape.m, [&](int64_t row) {
      constexpr float kZeros[kTaskColumns] = {};
      for (int64_t column = 0; column < shape.n; column += kTaskColumns)
        Finish(kernels, shape, p, row, column, std::min(kTaskColumns, shape.n - column), kZeros);
    });
  } else if (kernels.direct != nullptr && shape.m <= kDirectRows && shape.n >= kTileRows) {
    Direct(kernels, shape, p, parallel);
  } else {
    Tiled(kernels, shape, p, parallel);
  }
}

}  // namespace

void MatmulOnCpu(const MatmulShape& shape, const MatmulProduct* products, int64_t count,
                 const Parallel& parallel) {
  MatmulWith(CurrentGemmKernels(), shape, products, count, parallel);
}

void MatmulWith(const GemmKernels& kernels, const MatmulShape& shape, const MatmulProduct* products,
                int64_t count, const Parallel& parallel) {
  if (shape.m == 0 || shape.n == 0) return;
  const FloatEnvironment environment;
  const SerialParallel serial;
  const double work = static_cast<double>(count) * shape.m * shape.n * (shape.k + kBlock);
  const auto tasks = static_cast<int64_t>(
      std::clamp(work / kTaskWork, 1.0, static_cast<double>(std::max<int64_t>(count, 1))));
  if (tasks == 1 || count >= 2 * parallel.threads()) {
    parallel.Run(tasks, [&](int64_t task) {
      for (int64_t i = task * count / tasks; i < (task + 1) * count / tasks; ++i)
        Multiply(kernels, shape, ScaledProduct(products[i]), serial);
    });
  } else {
    for (int64_t i = 0; i < count; ++i)
      Multiply(kernels, shape, ScaledProduct(products[i]), parallel);
  }
}

}  // namespace nvfp4
