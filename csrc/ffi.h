// csrc/ffi.h: what the FFI handlers share: shapes and messages, buffers as raw memory, XLA's thread
// pool as Parallel.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "cpu/parallel.h"
#include "cuda/stream.h"
#include "ops/types.h"
#include "xla/ffi/api/ffi.h"

namespace nvfp4 {

namespace ffi = xla::ffi;

inline std::string ToString(ffi::AnyBuffer::Dimensions shape) {
  std::string text = "(";
  for (size_t i = 0; i < shape.size(); ++i) text += (i != 0 ? ", " : "") + std::to_string(shape[i]);
  return text + ")";
}

// The checks of a handler. Shapes and types were checked while tracing, with a message for the
// user; a handler checks again only what keeps its memory accesses inside of the buffers.
inline ffi::Unexpected<ffi::Error> Invalid(const std::string& what) {
  return ffi::Unexpected(ffi::Error::InvalidArgument(what));
}

inline int64_t Product(ffi::AnyBuffer::Dimensions shape, size_t first, size_t last) {
  int64_t product = 1;
  for (size_t i = first; i < last; ++i) product *= shape[i];
  return product;
}

inline int64_t ElementsOf(const ffi::AnyBuffer& buffer) {
  return Product(buffer.dimensions(), 0, buffer.dimensions().size());
}

inline std::optional<FloatType> FloatTypeOf(ffi::DataType type) {
  switch (type) {
    case ffi::DataType::F32:
      return FloatType::kF32;
    case ffi::DataType::BF16:
      return FloatType::kBf16;
    case ffi::DataType::F16:
      return FloatType::kF16;
    default:
      return std::nullopt;
  }
}

// A buffer of floats as matrices [*examples, *batch, rows, k].
struct Matrices {
  FloatType type;
  int64_t examples, batch, rows, k;
};

inline ffi::ErrorOr<Matrices> MatricesOf(const char* op, const ffi::AnyBuffer& x,
                                         int64_t example_ndim) {
  const auto shape = x.dimensions();
  const auto type = FloatTypeOf(x.element_type());
  const int64_t ndim = static_cast<int64_t>(shape.size());
  if (!type || example_ndim < 0 || ndim < example_ndim + 2)
    return Invalid(std::string(op) +
                   ": matrices must be f32, bf16 or f16 with two axes beside their examples; got "
                   "shape " +
                   ToString(shape));
  return Matrices{*type, Product(shape, 0, example_ndim), Product(shape, example_ndim, ndim - 2),
                  shape[ndim - 2], shape[ndim - 1]};
}

// What a handler returns when its kernel has been enqueued, or could not be.
inline ffi::Error ErrorOf(const char* op, const ffi::AnyBuffer& x, CudaError error) {
  if (error == nullptr) return ffi::Error::Success();
  const auto type = FloatTypeOf(x.element_type());
  return ffi::Error::Internal(std::string(op) + ": no kernel was enqueued for x of type " +
                              (type ? Name(*type) : "unknown") + " and shape " +
                              ToString(x.dimensions()) + ": " + error);
}

// Takes the buffers that a handler's attributes say there are from XLA's lists, checking type and
// number of elements.
class BufferReader {
 public:
  explicit BufferReader(ffi::RemainingRets rets) : rets_(rets) {}
  BufferReader(ffi::RemainingArgs args, ffi::RemainingRets rets) : args_(args), rets_(rets) {}

  template <typename T>
  const T* Operand(ffi::DataType type, int64_t size) {
    const auto operand = args_->get<ffi::AnyBuffer>(arg_++);
    return static_cast<const T*>(Take(operand.has_value() ? &*operand : nullptr, type, size));
  }

  template <typename T>
  T* Result(ffi::DataType type, int64_t size) {
    auto result = rets_.get<ffi::AnyBuffer>(ret_++);
    return static_cast<T*>(Take(result.has_value() ? &**result : nullptr, type, size));
  }

  // Every buffer was as expected, and there are no more.
  bool Done() const { return ok_ && arg_ == (args_ ? args_->size() : 0) && ret_ == rets_.size(); }

 private:
  void* Take(const ffi::AnyBuffer* buffer, ffi::DataType type, int64_t size) {
    if (buffer == nullptr || buffer->element_type() != type || ElementsOf(*buffer) != size)
      ok_ = false;
    return ok_ ? buffer->untyped_data() : nullptr;
  }

  std::optional<ffi::RemainingArgs> args_;
  ffi::RemainingRets rets_;
  size_t arg_ = 0, ret_ = 0;
  bool ok_ = true;
};

// Tasks on XLA's own threads. The caller works too, and waits only for tasks that a thread has
// begun: a thread that comes late, or never, finds nothing left. So it can not deadlock when the
// caller is itself one of the pool's threads.
class XlaParallel final : public Parallel {
 public:
  explicit XlaParallel(ffi::ThreadPool pool)
      : pool_(pool), threads_(static_cast<int>(pool.num_threads())) {}

  int threads() const override { return threads_ < 1 ? 1 : threads_; }

  void Run(int64_t n, TaskRef task) const override {
    const int64_t helpers = std::min<int64_t>(threads() - 1, n - 1);
    if (helpers <= 0) {
      const FloatEnvironment environment;
      for (int64_t i = 0; i < n; ++i) task(i);
      return;
    }
    auto work = std::make_shared<Work>(n, task);
    for (int64_t i = 0; i < helpers; ++i) pool_.Schedule([work] { work->Drain(); });
    work->Drain();
    work->Wait();
  }

 private:
  struct Work {
    Work(int64_t n, TaskRef task) : n(n), task(task) {}

    void Drain() {
      int64_t finished = 0;
      {
        std::optional<FloatEnvironment> environment;
        for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < n; ++finished) {
          if (!environment) environment.emplace();
          task(i);
        }
      }
      if (finished != 0 && done.fetch_add(finished, std::memory_order_acq_rel) + finished == n) {
        const std::lock_guard<std::mutex> lock(mutex);
        all_done.notify_one();
      }
    }

    void Wait() {
      std::unique_lock<std::mutex> lock(mutex);
      all_done.wait(lock, [this] { return done.load(std::memory_order_acquire) == n; });
    }

    const int64_t n;
    const TaskRef task;  // valid until Wait returns: a late thread takes no task
    std::atomic<int64_t> next{0};
    std::atomic<int64_t> done{0};
    std::mutex mutex;
    std::condition_variable all_done;
  };

  mutable ffi::ThreadPool pool_;
  int threads_;
};

}  // namespace nvfp4
