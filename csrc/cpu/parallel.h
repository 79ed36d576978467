// csrc/cpu/parallel.h: how CPU code asks for threads, and the floating point environment it runs
// in.
#pragma once

#include <cstdint>

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace nvfp4 {

// A non-owning reference to a callable that takes the number of a task.
class TaskRef {
 public:
  template <typename F>
  TaskRef(const F& f)
      : object_(&f),
        call_([](const void* object, int64_t i) { (*static_cast<const F*>(object))(i); }) {}
  void operator()(int64_t i) const { call_(object_, i); }

 private:
  const void* object_;
  void (*call_)(const void*, int64_t);
};

// Runs tasks 0 .. n-1, each once, on any threads; returns when all are done.
class Parallel {
 public:
  virtual ~Parallel() = default;
  virtual int threads() const = 0;
  virtual void Run(int64_t n, TaskRef task) const = 0;
};

// While it lives, this thread rounds to nearest even and keeps subnormals, whatever mode the caller
// runs in (XLA's CPU threads flush them to zero). Whoever runs tasks for Parallel sets it around
// them.
class FloatEnvironment {
 public:
#if defined(__SSE2__)
  FloatEnvironment() : saved_(_mm_getcsr()) { _mm_setcsr(0x1F80); }
  ~FloatEnvironment() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#elif defined(__aarch64__)
  FloatEnvironment() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" : : "r"(uint64_t{0}));
  }
  ~FloatEnvironment() { asm volatile("msr fpcr, %0" : : "r"(saved_)); }

 private:
  uint64_t saved_;
#else
  FloatEnvironment() {}
#endif
 public:
  FloatEnvironment(const FloatEnvironment&) = delete;
  FloatEnvironment& operator=(const FloatEnvironment&) = delete;
};

}  // namespace nvfp4
