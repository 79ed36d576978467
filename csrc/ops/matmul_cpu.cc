// csrc/ops/matmul_cpu.cc: matmul on the CPU: cuts products into panels for the kernels of
// cpu/gemm.h, and finishes the result.
//
// A task owns its part of the result over all of K, so that no bit depends on the threads.
#include <algorithm>
#include <cstdlib>
#include <memory>

#include "core/half.h"
#include "cpu/gemm.h"
#include "cpu/isa.h"
#include "ops/matmul.h"

namespace nvfp4 {
namespace {

constexpr int64_t kTaskColumns = 128;  // of the result
constexpr int64_t kPackRows = 1024;    // rows of a packed at once

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

float Load(FloatType type, const void* from, int64_t i) {
  switch (type) {
    case FloatType::kF32:
      return static_cast<const float*>(from)[i];
    case FloatType::kBf16:
      return FloatOfBf16(static_cast<const uint16_t*>(from)[i]);
    case FloatType::kF16:
      return FloatOfF16(static_cast<const uint16_t*>(from)[i]);
  }
  return 0.0f;
}

// n results of a row from (row, column) on.
void Finish(const MatmulShape& shape, const ScaledProduct& p, int64_t row, int64_t column,
            int64_t n, const float* acc) {
  if (shape.out == FloatType::kF32 && p.bias == nullptr && p.accumulate == nullptr) {
    float* to = static_cast<float*>(p.y) + row * shape.n + column;
    for (int64_t i = 0; i < n; ++i) to[i] = p.factor * acc[i];
    return;
  }
  constexpr int64_t kPiece = 128;
  float y[kPiece];
  for (int64_t first = 0; first < n; first += kPiece) {
    const int64_t count = std::min(kPiece, n - first), at = row * shape.n + column + first;
    for (int64_t i = 0; i < count; ++i) y[i] = p.factor * acc[first + i];
    if (p.bias != nullptr)
      for (int64_t i = 0; i < count; ++i) y[i] += Load(shape.bias, p.bias, column + first + i);
    if (p.accumulate != nullptr)
      for (int64_t i = 0; i < count; ++i) y[i] += Load(shape.out, p.accumulate, at + i);
    switch (shape.out) {
      case FloatType::kF32:
        std::copy(y, y + count, static_cast<float*>(p.y) + at);
        break;
      case FloatType::kBf16:
        for (int64_t i = 0; i < count; ++i) static_cast<uint16_t*>(p.y)[at + i] = Bf16Of(y[i]);
        break;
      case FloatType::kF16:
        for (int64_t i = 0; i < count; ++i) static_cast<uint16_t*>(p.y)[at + i] = F16Of(y[i]);
        break;
    }
  }
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
  for (int64_t row = 0; row < shape.m; row += kDirectRows)
    kernels.pack_direct(a, row, std::min(kDirectRows, shape.m - row), packed + row * row_bytes);
  constexpr int64_t kPairs = 16, kGroups = 4;  // of a tile: 2 rows in each of 4 groups of 32
  parallel.Run(CeilDiv(shape.n, kTileRows), [&](int64_t tile) {
    const int64_t column = tile * kTileRows,
                  columns = std::min<int64_t>(kTileRows, shape.n - column);
    float* acc = Scratch<float>(kAccumulator, shape.m * kTileRows);
    for (int64_t pair = 0; pair < kPairs && 2 * pair < columns; ++pair) {
      for (int64_t row = 0; row < shape.m; row += kDirectRows) {
        const int64_t rows = std::min(kDirectRows, shape.m - row);
        alignas(32) float sums[kDirectRows * 8];
        kernels.direct(rows, packed + row * row_bytes, b, tile, pair, sums);
        for (int64_t r = 0; r < rows; ++r)
          for (int64_t i = 0; i < 8; ++i)
            acc[(row + r) * kTileRows + 2 * pair + i / kGroups + i % kGroups * 32] =
                sums[r * 8 + i];
      }
    }
    for (int64_t row = 0; row < shape.m; ++row)
      Finish(shape, p, row, column, columns, acc + row * kTileRows);
  });
}

void Tiled(const GemmKernels& kernels, const MatmulShape& shape, const ScaledProduct& p,
           const Parallel& parallel) {
  const GemmMatrix a = MatrixOf(p.a, shape.m, shape.k), b = MatrixOf(p.b, shape.n, shape.k);
  const int64_t blocks = a.blocks;
  for (int64_t row0 = 0; row0 < shape.m; row0 += kPackRows) {
    const int64_t rows = std::min(kPackRows, shape.m - row0), panels = CeilDiv(rows, kernels.rows);
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
    // Few columns: share the rows out too, and pack b more than once.
    const int64_t wanted = parallel.threads() > 1 ? 3 * parallel.threads() : 1;
    const int64_t row_tasks = std::clamp<int64_t>(wanted / column_tasks, 1, CeilDiv(panels, 8));
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
              Finish(shape, p, row0 + first(panel) + r, at, std::min(width, shape.n - at),
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
        Finish(shape, p, row, column, std::min(kTaskColumns, shape.n - column), kZeros);
    });
  } else if (kernels.direct != nullptr && shape.m <= kernels.direct_rows) {
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
  if (count >= 2 * parallel.threads()) {
    parallel.Run(count, [&](int64_t i) {
      Multiply(kernels, shape, ScaledProduct(products[i]), SerialParallel());
    });
  } else {
    for (int64_t i = 0; i < count; ++i)
      Multiply(kernels, shape, ScaledProduct(products[i]), parallel);
  }
}

}  // namespace nvfp4
