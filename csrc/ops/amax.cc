// csrc/ops/amax.cc: XLA's view of amax.
#include "ops/amax.h"

#include "ffi.h"

namespace nvfp4 {
namespace {

// Bits of the attribute `outputs`, as python/jax_nvfp4_ops/amax.py packs them.
enum Outputs : int64_t { kPlain = 1, kAlongRows = 2, kAlongColumns = 4 };

ffi::ErrorOr<AmaxArgs> Check(ffi::AnyBuffer x, ffi::AnyBuffer amax, int64_t example_ndim,
                             int64_t outputs, int64_t signs) {
  const auto shape = x.dimensions();
  const auto m = MatricesOf("nvfp4_amax", x, example_ndim);
  if (m.has_error()) return ffi::Unexpected(m.error());
  AmaxArgs args{};
  args.x = x.untyped_data();
  args.type = m->type;
  args.examples = m->examples;
  args.batch = m->batch;
  args.rows = m->rows;
  args.k = m->k;
  args.signs = static_cast<uint32_t>(signs);
  args.stride = (outputs & kPlain ? 1 : 0) + (outputs & kAlongRows ? 1 : 0) +
                (outputs & kAlongColumns ? 1 : 0);
  if (amax.element_type() != ffi::F32 || ElementsOf(amax) != args.examples * args.stride)
    return Invalid("nvfp4_amax: a result of shape " + ToString(amax.dimensions()) +
                   " does not fit x of shape " + ToString(shape));
  auto* next = static_cast<float*>(amax.untyped_data());
  if (outputs & kPlain) args.plain = next++;
  if (outputs & kAlongRows) args.along_rows = next++;
  if (outputs & kAlongColumns) args.along_columns = next++;
  return args;
}

ffi::Error Cpu(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> amax,
               int64_t example_ndim, int64_t outputs, int64_t signs) {
  const auto args = Check(x, *amax, example_ndim, outputs, signs);
  if (args.has_error()) return args.error();
  AmaxOnCpu(*args, XlaParallel(pool));
  return ffi::Error::Success();
}

#if defined(NVFP4_CUDA)
ffi::Error Cuda(CudaStream stream, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> amax,
                int64_t example_ndim, int64_t outputs, int64_t signs) {
  const auto args = Check(x, *amax, example_ndim, outputs, signs);
  if (args.has_error()) return args.error();
  return ErrorOf("nvfp4_amax", x, AmaxOnCuda(*args, stream));
}
#endif

template <typename Binding>
auto Signature(Binding binding) {
  return std::move(binding)
      .template Arg<ffi::AnyBuffer>()  // x [*examples, *batch, rows, k]
      .template Ret<ffi::AnyBuffer>()  // f32 [*examples, outputs]: plain, along rows, along
                                       // columns: those wanted
      .template Attr<int64_t>("example_ndim")
      .template Attr<int64_t>("outputs")
      .template Attr<int64_t>("signs");
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(AmaxCpu, Cpu, Signature(ffi::Ffi::Bind().Ctx<ffi::ThreadPool>()));
#if defined(NVFP4_CUDA)
XLA_FFI_DEFINE_HANDLER_SYMBOL(AmaxCuda, Cuda,
                              Signature(ffi::Ffi::Bind().Ctx<ffi::PlatformStream<CudaStream>>()),
                              {ffi::Traits::kCmdBufferCompatible});
#endif

}  // namespace nvfp4
