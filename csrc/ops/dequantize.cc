// csrc/ops/dequantize.cc: XLA's view of dequantize.
#include "ops/dequantize.h"

#include "core/scale_layout.h"
#include "ffi.h"

namespace nvfp4 {
namespace {

ffi::ErrorOr<DequantizeArgs> Check(ffi::AnyBuffer codes, ffi::AnyBuffer scales,
                                   ffi::AnyBuffer global_scale, ffi::AnyBuffer x) {
  const auto shape = x.dimensions();
  const auto type = FloatTypeOf(x.element_type());
  const int64_t ndim = static_cast<int64_t>(shape.size());
  const int64_t example_ndim = static_cast<int64_t>(global_scale.dimensions().size());
  if (!type || ndim < example_ndim + 2)
    return Invalid(
        "nvfp4_dequantize: the result must be f32, bf16 or f16 with two axes beside its examples; "
        "got shape " +
        ToString(shape));
  DequantizeArgs args{};
  args.codes = static_cast<const uint8_t*>(codes.untyped_data());
  args.scales = static_cast<const uint8_t*>(scales.untyped_data());
  args.global_scale = static_cast<const float*>(global_scale.untyped_data());
  args.examples = Product(shape, 0, example_ndim);
  args.batch = Product(shape, example_ndim, ndim - 2);
  args.rows = shape[ndim - 2];
  args.k = shape[ndim - 1];
  args.type = *type;
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

}  // namespace nvfp4
