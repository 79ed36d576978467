// csrc/ops/amax_cpu.cc: amax on the CPU. A maximum does not depend on the order, so neither do the
// bits on the threads.
#include <algorithm>
#include <atomic>
#include <vector>

#include "core/scale_layout.h"
#include "cpu/quantize.h"
#include "ops/amax.h"

namespace nvfp4 {
namespace {

constexpr int64_t kTaskRows = 64;
constexpr int64_t kTaskColumns = 1024;
constexpr int64_t kTaskElements = 1 << 16;

struct Largest {
  std::atomic<uint32_t> plain{0}, along_rows{0}, along_columns{0};
};

void Raise(std::atomic<uint32_t>& to, uint32_t value) {
  uint32_t seen = to.load(std::memory_order_relaxed);
  while (seen < value && !to.compare_exchange_weak(seen, value, std::memory_order_relaxed)) {
  }
}

void Store(float* out, int64_t at, const std::atomic<uint32_t>& value) {
  if (out != nullptr) out[at] = FloatOf(value.load(std::memory_order_relaxed));
}

}  // namespace

void AmaxOnCpu(const AmaxArgs& args, const Parallel& parallel) {
  const FloatEnvironment environment;
  const QuantizeKernels& kernels = CurrentQuantizeKernels();
  auto* source = static_cast<const uint8_t*>(args.x);
  const int64_t size = SizeOf(args.type), matrix_size = args.rows * args.k;
  std::vector<Largest> largest(args.examples);
  if (args.along_rows == nullptr && args.along_columns == nullptr) {
    const int64_t example_size = args.batch * matrix_size,
                  tasks = CeilDiv(example_size, kTaskElements);
    parallel.Run(args.examples * tasks, [&](int64_t i) {
      const int64_t example = i / tasks, first = i % tasks * kTaskElements;
      const int64_t n = std::min(kTaskElements, example_size - first);
      Raise(largest[example].plain,
            kernels.amax(args.type, source + (example * example_size + first) * size, n));
    });
  } else {
    // All that are wanted from one strip, in one pass over memory.
    const int64_t column_tasks = CeilDiv(args.k, kTaskColumns),
                  tasks = CeilDiv(args.rows, kTaskRows) * column_tasks;
    parallel.Run(args.examples * args.batch * tasks, [&](int64_t i) {
      const int64_t matrix = i / tasks, row0 = i % tasks / column_tasks * kTaskRows,
                    column0 = i % column_tasks * kTaskColumns;
      const int64_t row_end = std::min(args.rows, row0 + kTaskRows),
                    column_end = std::min(args.k, column0 + kTaskColumns);
      const uint8_t* x = source + matrix * matrix_size * size;
      uint32_t plain = 0, along_rows = 0, along_columns = 0;
      StripBuffer buffer;
      for (int64_t row = row0; row < row_end; row += kStripRows) {
        for (int64_t column = column0; column < column_end; column += kStripColumns) {
          const Strip strip =
              buffer.Load(kernels, {args.type, x, args.rows, args.k}, row, column,
                          std::min(kStripColumns, column_end - column), kStripColumns, false);
          if (args.plain != nullptr) {
            for (int64_t r = 0; r < strip.rows; ++r)
              plain = std::max(plain, kernels.amax(strip.type, strip.x + r * strip.stride,
                                                   strip.blocks * kBlock));
          }
          if (args.along_rows != nullptr)
            along_rows = std::max(along_rows, kernels.amax_rows(strip, args.signs));
          if (args.along_columns != nullptr)
            along_columns = std::max(along_columns, kernels.amax_columns(strip, args.signs));
        }
      }
      Largest& to = largest[matrix / args.batch];
      Raise(to.plain, plain);
      Raise(to.along_rows, along_rows);
      Raise(to.along_columns, along_columns);
    });
  }
  for (int64_t example = 0; example < args.examples; ++example) {
    Store(args.plain, example * args.stride, largest[example].plain);
    Store(args.along_rows, example * args.stride, largest[example].along_rows);
    Store(args.along_columns, example * args.stride, largest[example].along_columns);
  }
}

}  // namespace nvfp4
