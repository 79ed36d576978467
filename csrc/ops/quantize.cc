// csrc/ops/quantize.cc: XLA's view of quantize.
#include "ops/quantize.h"

#include "core/scale_layout.h"
#include "ffi.h"

namespace nvfp4 {
namespace {

// Bits of the attributes `rows` and `columns`, as python/jax_nvfp4_ops/quantize.py packs them;
// above them, which value of amax belongs to the output.
enum OutputFlags : int64_t {
  kWanted = 1,
  kTile16 = 2,
  kStochastic = 4,
  kHadamard = 8,
  kPartner = 16,
  kAmaxIndex = 32
};

// The attribute `origin`: 0, this, or the rows of a segment.
constexpr int64_t kOriginOfMatrices = 1;

ffi::ErrorOr<QuantizeArgs> Check(ffi::AnyBuffer x, ffi::AnyBuffer amax, ffi::RemainingArgs operands,
                                 ffi::RemainingRets results, int64_t rows, int64_t columns,
                                 int64_t signs, int64_t origin) {
  const auto shape = x.dimensions();
  const auto m =
      MatricesOf("nvfp4_quantize", x, static_cast<int64_t>(amax.dimensions().size()) - 1);
  if (m.has_error()) return ffi::Unexpected(m.error());
  QuantizeArgs args{};
  args.x = x.untyped_data();
  args.type = m->type;
  args.examples = m->examples;
  args.batch = m->batch;
  args.rows = m->rows;
  args.k = m->k;
  args.signs = static_cast<uint32_t>(signs);
  BufferReader reader(operands, results);
  QuantizeOutput* const outputs[] = {&args.along_rows, &args.along_columns};
  const int64_t flags[] = {rows, columns};
  const auto amax_shape = amax.dimensions();
  if (amax.element_type() != ffi::F32 || amax_shape.size() == 0 ||
      ElementsOf(amax) != args.examples * amax_shape.back())
    return Invalid("nvfp4_quantize: amax of shape " + ToString(amax_shape) +
                   " does not fit x of shape " + ToString(shape));
  args.amax_stride = amax_shape.back();
  for (int i = 0; i < 2; ++i) {
    const int64_t index = flags[i] / kAmaxIndex;
    if (!(flags[i] & kWanted)) continue;
    if (index >= args.amax_stride)
      return Invalid("nvfp4_quantize: amax has no value " + std::to_string(index));
    outputs[i]->amax = static_cast<const float*>(amax.untyped_data()) + index;
  }
  if ((rows | columns) & kStochastic)
    args.key = reader.Operand<uint32_t>(ffi::U32, 2 * args.examples);
  if (origin != 0) {
    if (origin != kOriginOfMatrices) args.segment = origin;
    if (args.segment < 0 || args.segment % kTileRows != 0 ||
        (args.segment != 0 && (args.rows % args.segment != 0 || args.batch != 1)))
      return Invalid("nvfp4_quantize: segments of " + std::to_string(args.segment) +
                     " rows do not fit x of shape " + ToString(shape));
    const int64_t numbers = args.segment != 0 ? args.rows / args.segment : args.batch;
    args.origin = reader.Operand<uint32_t>(ffi::U32, kOriginWords + numbers);
  }
  for (int i = 0; i < 2; ++i)
    if (flags[i] & kPartner) outputs[i]->partner = reader.Operand<float>(ffi::F32, args.examples);
  for (int i = 0; i < 2; ++i) {
    if (!(flags[i] & kWanted)) continue;
    QuantizeOutput& out = *outputs[i];
    const int64_t out_rows = i == 0 ? args.rows : args.k, out_k = i == 0 ? args.k : args.rows;
    const int64_t matrices = args.examples * args.batch;
    out.tile16 = flags[i] & kTile16;
    out.stochastic = flags[i] & kStochastic;
    out.hadamard = flags[i] & kHadamard;
    out.codes = reader.Result<uint8_t>(ffi::U8, matrices * out_rows * CodesStride(out_k));
    out.scales = reader.Result<uint8_t>(ffi::U8, matrices * ScalesSize(out_rows, out_k));
    out.global_scale = reader.Result<float>(ffi::F32, args.examples);
  }
  if (!reader.Done())
    return Invalid("nvfp4_quantize: operands or results do not fit x of shape " + ToString(shape));
  return args;
}

ffi::Error Cpu(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer amax,
               ffi::RemainingArgs operands, ffi::RemainingRets results, int64_t rows,
               int64_t columns, int64_t signs, int64_t origin) {
  const auto args = Check(x, amax, operands, results, rows, columns, signs, origin);
  if (args.has_error()) return args.error();
  QuantizeOnCpu(*args, XlaParallel(pool));
  return ffi::Error::Success();
}

#if defined(NVFP4_CUDA)
ffi::Error Cuda(CudaStream stream, ffi::AnyBuffer x, ffi::AnyBuffer amax,
                ffi::RemainingArgs operands, ffi::RemainingRets results, int64_t rows,
                int64_t columns, int64_t signs, int64_t origin) {
  const auto args = Check(x, amax, operands, results, rows, columns, signs, origin);
  if (args.has_error()) return args.error();
  return ErrorOf("nvfp4_quantize", x, QuantizeOnCuda(*args, stream));
}
#endif

template <typename Binding>
auto Signature(Binding binding) {
  return std::move(binding)
      .template Arg<ffi::AnyBuffer>()  // x [*examples, *batch, rows, k]
      .template Arg<ffi::AnyBuffer>()  // amax f32[*examples, values]
      .RemainingArgs()  // key u32[*examples, 2], origin u32[4 + numbers], partner of rows, partner
                        // of columns: those wanted
      .RemainingRets()  // codes, scales, global scale of rows, then of columns: those wanted
      .template Attr<int64_t>("rows")
      .template Attr<int64_t>("columns")
      .template Attr<int64_t>("signs")
      .template Attr<int64_t>("origin");
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(QuantizeCpu, Cpu, Signature(ffi::Ffi::Bind().Ctx<ffi::ThreadPool>()));
#if defined(NVFP4_CUDA)
XLA_FFI_DEFINE_HANDLER_SYMBOL(QuantizeCuda, Cuda,
                              Signature(ffi::Ffi::Bind().Ctx<ffi::PlatformStream<CudaStream>>()),
                              {ffi::Traits::kCmdBufferCompatible});
#endif

}  // namespace nvfp4
