// csrc/ops/dequantize_cpu.cc: dequantize on the CPU, a row at a time.
#include <algorithm>

#include "core/scale_layout.h"
#include "cpu/quantize.h"
#include "ops/dequantize.h"

namespace nvfp4 {

void DequantizeOnCpu(const DequantizeArgs& args, const Parallel& parallel) {
  constexpr int64_t kTaskRows = 16, kPieceBlocks = 64;
  const QuantizeKernels& kernels = CurrentQuantizeKernels();
  const int64_t stride = CodesStride(args.k), tile_columns = TileColumns(args.k),
                blocks = BlocksOf(args.k);
  const int64_t tasks = CeilDiv(args.rows, kTaskRows);
  parallel.Run(args.examples * args.batch * tasks, [&](int64_t i) {
    const int64_t matrix = i / tasks, end = std::min(args.rows, (i % tasks + 1) * kTaskRows);
    const uint8_t* tiles = args.scales + matrix * ScalesSize(args.rows, args.k);
    for (int64_t row = i % tasks * kTaskRows; row < end; ++row) {
      const int64_t matrix_row = matrix * args.rows + row;
      for (int64_t block = 0; block < blocks; block += kPieceBlocks) {
        uint8_t scales[kPieceBlocks];
        const int64_t piece = std::min(kPieceBlocks, blocks - block);
        for (int64_t b = 0; b < piece; ++b)
          scales[b] = tiles[ScaleOffset(row, block + b, tile_columns)];
        auto* to = static_cast<uint8_t*>(args.x) +
                   (matrix_row * args.k + block * kBlock) * SizeOf(args.type);
        kernels.dequantize(args.codes + matrix_row * stride + block * kBlock / 2, scales,
                           args.global_scale[matrix / args.batch],
                           std::min(piece * kBlock, args.k - block * kBlock), args.type, to);
      }
    }
  });
}

}  // namespace nvfp4
