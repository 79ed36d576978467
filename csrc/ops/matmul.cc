// csrc/ops/matmul.cc: XLA's view of matmul.
#include "ops/matmul.h"

#include <vector>

#include "core/scale_layout.h"
#include "ffi.h"
#if defined(NVFP4_CUDA)
#include "ops/matmul_cuda.h"
#endif

namespace nvfp4 {
namespace {

// An operand's place in each product of the batch. Its leading axes are those of the result, or 1
// where it is repeated; an operand may have fewer of them (alpha), which then are the first ones.
class Broadcast {
 public:
  Broadcast(const ffi::AnyBuffer& buffer, size_t trailing, ffi::AnyBuffer::Dimensions batch) {
    const auto shape = buffer.dimensions();
    ok_ = shape.size() >= trailing && shape.size() - trailing <= batch.size();
    if (!ok_) return;
    const size_t leading = shape.size() - trailing;
    size_ = Product(shape, leading, shape.size());
    strides_.assign(batch.size(), 0);
    int64_t stride = 1;
    for (size_t i = leading; i-- > 0;) {
      ok_ = ok_ && (shape[i] == batch[i] || shape[i] == 1);
      if (shape[i] != 1) strides_[i] = stride;
      stride *= shape[i];
    }
    batch_.assign(batch.begin(), batch.end());
  }

  bool ok() const { return ok_; }
  int64_t size() const { return size_; }  // elements of one product

  // Where in the buffer, in elements, the part of a product begins.
  int64_t At(int64_t product) const {
    int64_t index = 0;
    for (size_t i = batch_.size(); i-- > 0; product /= batch_[i])
      index += product % batch_[i] * strides_[i];
    return index * size_;
  }

 private:
  bool ok_;
  int64_t size_ = 0;
  std::vector<int64_t> strides_, batch_;
};

struct Call {
  MatmulShape shape;
  std::vector<MatmulProduct> products;
};

ffi::ErrorOr<Call> Check(ffi::AnyBuffer a_codes, ffi::AnyBuffer a_scales, ffi::AnyBuffer b_codes,
                         ffi::AnyBuffer b_scales, ffi::RemainingArgs operands, ffi::AnyBuffer y,
                         int64_t alphas, bool has_bias, bool has_accumulate) {
  const auto y_shape = y.dimensions();
  const auto out = FloatTypeOf(y.element_type());
  if (!out || y_shape.size() < 2)
    return Invalid("nvfp4_matmul: the result must be f32, bf16 or f16 with two axes or more");
  const ffi::AnyBuffer::Dimensions batch(y_shape.begin(), y_shape.size() - 2);
  // K with the zeros that fill a row of codes: they add nothing.
  const auto a_shape = a_codes.dimensions();
  const int64_t k = a_shape.size() == 0 ? 0 : 2 * a_shape.back();
  Call call{{y_shape[batch.size()], y_shape[batch.size() + 1], k, *out}, {}};
  MatmulShape& shape = call.shape;

  const auto misfit = [&](const char* name, const ffi::AnyBuffer& buffer) {
    return Invalid("nvfp4_matmul: " + std::string(name) + " of shape " +
                   ToString(buffer.dimensions()) + " does not fit a result of shape " +
                   ToString(y_shape) + " with K = " + std::to_string(k));
  };
  const Broadcast a_codes_at(a_codes, 2, batch), a_scales_at(a_scales, 3, batch);
  const Broadcast b_codes_at(b_codes, 2, batch), b_scales_at(b_scales, 3, batch);
  const auto fits = [](const ffi::AnyBuffer& buffer, const Broadcast& at, int64_t size) {
    return buffer.element_type() == ffi::U8 && at.ok() && at.size() == size;
  };
  if (!fits(a_codes, a_codes_at, shape.m * CodesStride(k))) return misfit("a_codes", a_codes);
  if (!fits(a_scales, a_scales_at, ScalesSize(shape.m, k))) return misfit("a_scales", a_scales);
  if (!fits(b_codes, b_codes_at, shape.n * CodesStride(k))) return misfit("b_codes", b_codes);
  if (!fits(b_scales, b_scales_at, ScalesSize(shape.n, k))) return misfit("b_scales", b_scales);

  const size_t expected =
      static_cast<size_t>(alphas) + (has_bias ? 1 : 0) + (has_accumulate ? 1 : 0);
  if (alphas < 0 || alphas > 2 || operands.size() != expected)
    return Invalid("nvfp4_matmul: operands do not fit the attributes");
  const int64_t count = Product(batch, 0, batch.size());
  call.products.resize(count);
  for (int64_t i = 0; i < count; ++i) {
    MatmulProduct& p = call.products[i];
    p = {{static_cast<const uint8_t*>(a_codes.untyped_data()) + a_codes_at.At(i),
          static_cast<const uint8_t*>(a_scales.untyped_data()) + a_scales_at.At(i)},
         {static_cast<const uint8_t*>(b_codes.untyped_data()) + b_codes_at.At(i),
          static_cast<const uint8_t*>(b_scales.untyped_data()) + b_scales_at.At(i)},
         {nullptr, nullptr},
         nullptr,
         nullptr,
         static_cast<uint8_t*>(y.untyped_data()) + i * shape.m * shape.n * SizeOf(*out)};
  }
  size_t next = 0;
  for (int64_t j = 0; j < alphas; ++j) {
    const auto alpha = operands.get<ffi::AnyBuffer>(next++);
    if (alpha.has_error()) return ffi::Unexpected(alpha.error());
    const Broadcast at(*alpha, 0, batch);
    if (alpha->element_type() != ffi::F32 || !at.ok()) return misfit("alpha", *alpha);
    for (int64_t i = 0; i < count; ++i)
      call.products[i].alpha[j] = static_cast<const float*>(alpha->untyped_data()) + at.At(i);
  }
  if (has_bias) {
    const auto bias = operands.get<ffi::AnyBuffer>(next++);
    if (bias.has_error()) return ffi::Unexpected(bias.error());
    const Broadcast at(*bias, 1, batch);
    const auto type = FloatTypeOf(bias->element_type());
    if (!type || !at.ok() || at.size() != shape.n) return misfit("bias", *bias);
    shape.bias = *type;
    for (int64_t i = 0; i < count; ++i)
      call.products[i].bias =
          static_cast<const uint8_t*>(bias->untyped_data()) + at.At(i) * SizeOf(*type);
  }
  if (has_accumulate) {
    const auto accumulate = operands.get<ffi::AnyBuffer>(next++);
    if (accumulate.has_error()) return ffi::Unexpected(accumulate.error());
    if (accumulate->element_type() != y.element_type() ||
        ElementsOf(*accumulate) != count * shape.m * shape.n)
      return misfit("accumulate", *accumulate);
    for (int64_t i = 0; i < count; ++i)
      call.products[i].accumulate = static_cast<const uint8_t*>(accumulate->untyped_data()) +
                                    i * shape.m * shape.n * SizeOf(*out);
  }
  return call;
}

ffi::Error Cpu(ffi::ThreadPool pool, ffi::AnyBuffer a_codes, ffi::AnyBuffer a_scales,
               ffi::AnyBuffer b_codes, ffi::AnyBuffer b_scales, ffi::RemainingArgs operands,
               ffi::Result<ffi::AnyBuffer> y, ffi::Result<ffi::AnyBuffer> /*workspace*/,
               int64_t alphas, bool bias, bool accumulate) {
  const auto call =
      Check(a_codes, a_scales, b_codes, b_scales, operands, *y, alphas, bias, accumulate);
  if (call.has_error()) return call.error();
  MatmulOnCpu(call->shape, call->products.data(), static_cast<int64_t>(call->products.size()),
              XlaParallel(pool));
  return ffi::Error::Success();
}

#if defined(NVFP4_CUDA)
// Two alphas would take a kernel of their own: XLA multiplies them before.
ffi::ErrorOr<Call> CheckCuda(ffi::AnyBuffer a_codes, ffi::AnyBuffer a_scales,
                             ffi::AnyBuffer b_codes, ffi::AnyBuffer b_scales,
                             ffi::RemainingArgs operands, ffi::AnyBuffer y,
                             ffi::AnyBuffer workspace, int64_t alphas, bool bias, bool accumulate) {
  if (alphas != 1) return Invalid("nvfp4_matmul: on CUDA there must be one alpha");
  if (workspace.element_type() != ffi::U8) return Invalid("nvfp4_matmul: the workspace must be u8");
  return Check(a_codes, a_scales, b_codes, b_scales, operands, y, alphas, bias, accumulate);
}

MatmulWorkspace WorkspaceIn(ffi::AnyBuffer buffer) {
  return {buffer.untyped_data(), ElementsOf(buffer)};
}

ffi::Error ErrorOf(const std::string& what) {
  return what.empty() ? ffi::Error::Success() : ffi::Error::Internal(what);
}

ffi::Error Cuda(CudaStream stream, ffi::AnyBuffer a_codes, ffi::AnyBuffer a_scales,
                ffi::AnyBuffer b_codes, ffi::AnyBuffer b_scales, ffi::RemainingArgs operands,
                ffi::Result<ffi::AnyBuffer> y, ffi::Result<ffi::AnyBuffer> workspace,
                int64_t alphas, bool bias, bool accumulate) {
  const auto call = CheckCuda(a_codes, a_scales, b_codes, b_scales, operands, *y, *workspace,
                              alphas, bias, accumulate);
  if (call.has_error()) return call.error();
  return ErrorOf(MatmulOnCuda(call->shape, call->products.data(),
                              static_cast<int64_t>(call->products.size()), WorkspaceIn(*workspace),
                              stream));
}

// XLA calls it before each run, outside of any stream capture.
ffi::Error CudaInitialize(ffi::AnyBuffer a_codes, ffi::AnyBuffer a_scales, ffi::AnyBuffer b_codes,
                          ffi::AnyBuffer b_scales, ffi::RemainingArgs operands,
                          ffi::Result<ffi::AnyBuffer> y, ffi::Result<ffi::AnyBuffer> workspace,
                          int64_t alphas, bool bias, bool accumulate) {
  const auto call = CheckCuda(a_codes, a_scales, b_codes, b_scales, operands, *y, *workspace,
                              alphas, bias, accumulate);
  if (call.has_error()) return call.error();
  return ErrorOf(PlanMatmulOnCuda(call->shape, call->products.data(),
                                  static_cast<int64_t>(call->products.size()),
                                  WorkspaceIn(*workspace)));
}
#endif

template <typename Binding>
auto Signature(Binding binding) {
  return std::move(binding)
      .template Arg<ffi::AnyBuffer>()  // a_codes u8[*batch or 1, M, CodesStride(K)]
      .template Arg<ffi::AnyBuffer>()  // a_scales u8[*batch or 1, tile rows, tile columns, 512]
      .template Arg<ffi::AnyBuffer>()  // b_codes u8[*batch or 1, N, CodesStride(K)]
      .template Arg<ffi::AnyBuffer>()  // b_scales u8[*batch or 1, tile rows, tile columns, 512]
      .RemainingArgs()  // alphas f32 [first axes of batch or 1], bias [*batch or 1, N], accumulate
                        // [*batch, M, N]: those there are
      .template Ret<ffi::AnyBuffer>()  // y [*batch, M, N]
      .template Ret<ffi::AnyBuffer>()  // workspace u8
      .template Attr<int64_t>("alphas")
      .template Attr<bool>("bias")
      .template Attr<bool>("accumulate");
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(MatmulCpu, Cpu, Signature(ffi::Ffi::Bind().Ctx<ffi::ThreadPool>()));
#if defined(NVFP4_CUDA)
XLA_FFI_DEFINE_HANDLER_SYMBOL(MatmulCuda, Cuda,
                              Signature(ffi::Ffi::Bind().Ctx<ffi::PlatformStream<CudaStream>>()),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(MatmulCudaInitialize, CudaInitialize,
                              Signature(ffi::Ffi::BindInitialize()));
#endif

}  // namespace nvfp4
