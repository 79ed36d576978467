// csrc/ops/dequantize.cc: XLA's view of dequantize.
#include "ops/dequantize.h"

#include "core/scale_layout.h"
#include "ffi.h"

namespace nvfp4 {
namespace {

ffi::ErrorOr<DequantizeArgs> Check(ffi::AnyBuffer codes, ffi::AnyBuffer scales,
                                   ffi::AnyBuffer global_scale, ffi::AnyBuffer x) {
  const auto shape = x.dimensions();
  const auto m =
      MatricesOf("nvfp4_dequantize", x, static_cast<int64_t>(global_scale.dimensions().size()));
  if (m.has_error()) return ffi::Unexpected(m.error());
  DequantizeArgs args{};
  args.codes = static_cast<const uint8_t*>(codes.untyped_data());
  args.scales = static_cast<const uint8_t*>(scales.untyped_data());
  args.global_scale = static_cast<const float*>(global_scale.untyped_data());
  args.examples = m->examples;
  args.batch = m->batch;
  args.rows = m->rows;
  args.k = m->k;
  args.type = m->type;
  args.x = x.untyped_data();
  const int64_t matrices = args.examples * args.batch;
  if (codes.element_type() != ffi::U8 ||
      ElementsOf(codes) != matrices * args.rows * CodesStride(args.k) ||
      scales.element_type() != ffi::U8 ||
      ElementsOf(scales) != matrices * ScalesSize(args.rows, args.k) ||
      global_scale.element_type() != ffi::F32 || ElementsOf(global_scale) != args.examples)
    return Invalid("nvfp4_dequantize: codes " + ToString(codes.dimensions()) + " and scales " +
                   ToString(scales.dimensions()) + " do not fit a result of shape " +
                   ToString(shape));
  return args;
}

ffi::Error Cpu(ffi::ThreadPool pool, ffi::AnyBuffer codes, ffi::AnyBuffer scales,
               ffi::AnyBuffer global_scale, ffi::Result<ffi::AnyBuffer> x) {
  const auto args = Check(codes, scales, global_scale, *x);
  if (args.has_error()) return args.error();
  DequantizeOnCpu(*args, XlaParallel(pool));
  return ffi::Error::Success();
}

#if defined(NVFP4_CUDA)
ffi::Error Cuda(CudaStream stream, ffi::AnyBuffer codes, ffi::AnyBuffer scales,
                ffi::AnyBuffer global_scale, ffi::Result<ffi::AnyBuffer> x) {
  const auto args = Check(codes, scales, global_scale, *x);
  if (args.has_error()) return args.error();
  return ErrorOf("nvfp4_dequantize", *x, DequantizeOnCuda(*args, stream));
}
#endif

template <typename Binding>
auto Signature(Binding binding) {
  return std::move(binding)
      .template Arg<ffi::AnyBuffer>()  // codes u8[*examples, *batch, rows, CodesStride(k)]
      .template Arg<ffi::AnyBuffer>()  // scales u8[*examples, *batch, tile rows, tile columns, 512]
      .template Arg<ffi::AnyBuffer>()  // global_scale f32[*examples]
      .template Ret<ffi::AnyBuffer>();  // x [*examples, *batch, rows, k]
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(DequantizeCpu, Cpu,
                              Signature(ffi::Ffi::Bind().Ctx<ffi::ThreadPool>()));
#if defined(NVFP4_CUDA)
XLA_FFI_DEFINE_HANDLER_SYMBOL(DequantizeCuda, Cuda,
                              Signature(ffi::Ffi::Bind().Ctx<ffi::PlatformStream<CudaStream>>()),
                              {ffi::Traits::kCmdBufferCompatible});
#endif

}  // namespace nvfp4
