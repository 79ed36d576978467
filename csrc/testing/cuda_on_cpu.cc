// csrc/testing/cuda_on_cpu.cc: the fibers, the scheduler and the checks behind cuda_on_cpu.h.
//
// Never compiled with -fsanitize=thread: what it reads and writes are not accesses of a kernel.
//   CUDA_ON_CPU_CHECK_ACCESSES: the kernels are, and this file is the runtime that they call.
//   CUDA_ON_CPU_THREAD_SANITIZER: the kernels are, and ThreadSanitizer itself is linked.
#include "testing/cuda_on_cpu.h"

#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <unordered_map>
#include <vector>

#include "cpu/parallel.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(CUDA_ON_CPU_THREAD_SANITIZER)
#include <sanitizer/tsan_interface.h>
#endif
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace cuda_on_cpu {
namespace {

#if defined(CUDA_ON_CPU_CHECK_ACCESSES)
constexpr bool kCheckAccesses = true;
#else
constexpr bool kCheckAccesses = false;
#endif

constexpr unsigned kWarp = 32, kMaxThreads = 1024;
constexpr size_t kMaxStaticShared = 48 << 10, kMaxDynamicShared = 227 << 10;
constexpr size_t kGuard = 64;  // bytes beside a buffer and beside shared memory
constexpr int kGuardByte = 0xA7;
constexpr int kFailureStatus = 70;

std::string TextOf(const Where& where) {
  return std::string(where.file_name()) + ":" + std::to_string(where.line());
}

std::string TextOf(const uint3& index) {
  return "(" + std::to_string(index.x) + ", " + std::to_string(index.y) + ", " +
         std::to_string(index.z) + ")";
}

bool Same(const Where& a, const Where& b) {
  return a.line() == b.line() && a.column() == b.column();
}

// ---- ThreadSanitizer: what orders accesses

void Release([[maybe_unused]] void* token) {
#if defined(CUDA_ON_CPU_THREAD_SANITIZER)
  __tsan_release(token);
#endif
}

void Acquire([[maybe_unused]] void* token) {
#if defined(CUDA_ON_CPU_THREAD_SANITIZER)
  __tsan_acquire(token);
#endif
}

// ---- Memory with guards

void Protect([[maybe_unused]] uint8_t* from, [[maybe_unused]] size_t size) {
#if defined(__SANITIZE_ADDRESS__)
  ASAN_POISON_MEMORY_REGION(from, size);
#endif
}

void Unprotect([[maybe_unused]] uint8_t* from, [[maybe_unused]] size_t size) {
#if defined(__SANITIZE_ADDRESS__)
  ASAN_UNPOISON_MEMORY_REGION(from, size);
#endif
}

// `size` bytes with guards around them, at an odd multiple of `alignment`.
class Guarded {
 public:
  Guarded(size_t size, size_t alignment, const char* what)
      : size_(size), what_(what), all_(2 * alignment + 2 * kGuard + size, uint8_t{kGuardByte}) {
    auto address = reinterpret_cast<uintptr_t>(all_.data()) + kGuard;
    address += (3 * alignment - address % (2 * alignment)) % (2 * alignment);
    data_ = all_.data() + (address - reinterpret_cast<uintptr_t>(all_.data()));
    Protect(all_.data(), Before());
    Protect(data_ + size_, After());
  }
  Guarded(const Guarded&) = delete;
  ~Guarded() {
    Unprotect(all_.data(), Before());
    Unprotect(data_ + size_, After());
    Check();
  }

  uint8_t* data() const { return data_; }

  void Check() const {
    for (size_t i = 0; i < all_.size(); ++i) {
      if ((i < Before() || i >= Before() + size_) && all_[i] != kGuardByte) {
        Fail("a write outside of " + std::string(what_) + " of " + std::to_string(size_) +
             " bytes: at byte " + std::to_string(static_cast<int64_t>(i - Before())));
      }
    }
  }

 private:
  size_t Before() const { return data_ - all_.data(); }
  size_t After() const { return all_.size() - Before() - size_; }

  size_t size_;
  const char* what_;
  std::vector<uint8_t> all_;
  uint8_t* data_;
};

// ---- Fibers

#if defined(__SANITIZE_ADDRESS__) || defined(CUDA_ON_CPU_THREAD_SANITIZER)
constexpr size_t kStack = 512 << 10;
#else
constexpr size_t kStack = 128 << 10;
#endif

#if defined(__x86_64__)
// Pushes the registers that a function must keep, stores the stack pointer, takes the other. noipa:
// a compiler that looked inside would not see that all other registers change.
[[gnu::naked, gnu::noipa]] void SwitchStack(void** /*rdi*/, void* /*rsi*/) {
  asm("push %rbp\n push %rbx\n push %r12\n push %r13\n push %r14\n push %r15\n"
      "mov %rsp, (%rdi)\n mov %rsi, %rsp\n"
      "pop %r15\n pop %r14\n pop %r13\n pop %r12\n pop %rbx\n pop %rbp\n ret\n");
}
#endif

// A stack and where its function stopped. Without Start: the stack of whoever calls SwitchTo.
class Fiber {
 public:
  Fiber() = default;
  Fiber(const Fiber&) = delete;
  ~Fiber() {
    if (stack_ == nullptr) return;
    munmap(stack_, kStack);
#if defined(CUDA_ON_CPU_THREAD_SANITIZER)
    __tsan_destroy_fiber(sanitizer_);
#endif
  }

  // `entry` is to begin with Arrived, and to end with SwitchTo(.., true).
  void Start(void (*entry)()) {
    if (stack_ == nullptr) {
      stack_ = mmap(nullptr, kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      if (stack_ == MAP_FAILED) Fail("out of memory for stacks");
      mprotect(stack_, kPage, PROT_NONE);
      low_ = static_cast<uint8_t*>(stack_) + kPage;
#if defined(CUDA_ON_CPU_THREAD_SANITIZER)
      sanitizer_ = __tsan_create_fiber(0);  // once, as it takes long
#endif
    }
#if defined(__x86_64__)
    auto* top = reinterpret_cast<void**>(static_cast<uint8_t*>(stack_) + kStack);
    *--top = nullptr;  // a return address: the ABI has entry see a stack that is 8 off 16
    *--top = reinterpret_cast<void*>(entry);
    pointer_ = top - 6;
#else
    getcontext(&context_);
    context_.uc_stack.ss_sp = const_cast<void*>(static_cast<const void*>(low_));
    context_.uc_stack.ss_size = kStack - kPage;
    context_.uc_link = nullptr;
    makecontext(&context_, entry, 0);
#endif
  }

  void SwitchTo(Fiber& to, [[maybe_unused]] bool for_good = false) {
#if defined(CUDA_ON_CPU_THREAD_SANITIZER)
    if (stack_ == nullptr) sanitizer_ = __tsan_get_current_fiber();
    __tsan_switch_to_fiber(to.sanitizer_, __tsan_switch_to_fiber_no_sync);
#endif
#if defined(__SANITIZE_ADDRESS__)
    void* fake = nullptr;
    __sanitizer_start_switch_fiber(for_good ? nullptr : &fake, to.low_,
                                   to.stack_ != nullptr ? kStack - kPage : to.size_);
    Jump(to);
    Arrived(fake, to);
#else
    Jump(to);
#endif
  }

  static void Arrived([[maybe_unused]] void* fake, [[maybe_unused]] Fiber& from) {
#if defined(__SANITIZE_ADDRESS__)
    const void* low = nullptr;
    size_t size = 0;
    __sanitizer_finish_switch_fiber(fake, &low, &size);
    if (from.stack_ == nullptr) from.low_ = low, from.size_ = size;
#endif
  }

  bool Holds(uintptr_t address) const {
    return address - reinterpret_cast<uintptr_t>(stack_) < kStack;
  }

 private:
  static constexpr size_t kPage = 4096;

#if defined(__x86_64__)
  void Jump(Fiber& to) { SwitchStack(&pointer_, to.pointer_); }
  void* pointer_ = nullptr;
#else
  void Jump(Fiber& to) { swapcontext(&context_, &to.context_); }
  ucontext_t context_{};
#endif
  void* stack_ = nullptr;
  const void* low_ = nullptr;
  [[maybe_unused]] size_t size_ = 0;  // of a stack that is not ours
  [[maybe_unused]] void* sanitizer_ = nullptr;
};

// ---- The threads of the block that runs

enum class State { kReady, kAtBarrier, kInWarp, kEnded };

struct Thread {
  Fiber fiber;
  uint3 index{};
  State state = State::kReady;
  Where where;
  uint32_t warp_epoch = 0;  // how often its warp ordered its accesses since the last barrier
};

// Lanes that meet: those of a mask, at one place.
struct Meeting {
  unsigned mask = 0, arrived = 0;
  Where where;
  uint64_t brought[kWarp] = {}, shown[kWarp] = {};
};

struct Block {
  uint32_t number = 0;  // counted over all launches, from 1
  uint32_t epoch = 0;   // barriers that it has passed
};

// While it lives, accesses are not those of a kernel. What the standard library's inline functions
// do may be seen even here: of theirs the linker keeps one copy, perhaps one from a kernel's file.
class Quiet {
 public:
  Quiet() { now = true; }
  Quiet(const Quiet&) = delete;
  ~Quiet() { now = before_; }
  static inline bool now = false;

 private:
  const bool before_ = now;
};

class Scheduler {
 public:
  Schedule schedule = Schedule::kInOrder;
  std::mt19937 random;

  std::vector<unsigned> Order(unsigned n) {
    std::vector<unsigned> order(n);
    std::iota(order.begin(), order.end(), 0u);
    if (schedule == Schedule::kReverse) std::reverse(order.begin(), order.end());
    if (schedule == Schedule::kRandom) std::shuffle(order.begin(), order.end(), random);
    return order;
  }

  void RunBlock(void (*thread)(const void*), const void* launch) {
    body_ = thread, launch_ = launch;
    size_ = blockDim.x * blockDim.y * blockDim.z;
    while (threads_.size() < size_) threads_.push_back(std::make_unique<Thread>());
    meetings_.assign((size_ + kWarp - 1) / kWarp, {});
    alive_ = size_, waiting_ = 0;
    ++block.number, block.epoch = 0;
    for (unsigned t = 0; t < size_; ++t) {
      Thread& now = *threads_[t];
      now.index = {t % blockDim.x, t / blockDim.x % blockDim.y, t / (blockDim.x * blockDim.y)};
      now.state = State::kReady;
      now.warp_epoch = 0;
      now.fiber.Start(&Scheduler::Entry);
    }
    Release(&begin_);
    std::vector<unsigned> order = Order(size_);
    while (alive_ > 0) {
      if (schedule == Schedule::kRandom) order = Order(size_);
      bool progress = false;
      for (unsigned t : order) {
        if (threads_[t]->state != State::kReady) continue;
        progress = true;
        current_ = t;
        threadIdx = threads_[t]->index;
        scheduler_.SwitchTo(threads_[t]->fiber);
        current_ = kNobody;
      }
      if (!progress) Fail(Deadlock());
    }
    Acquire(&end_);
  }

  int Barrier(bool vote, Where where) {
    const Quiet quiet;
    Thread& self = Self();
    if (waiting_ == 0) where_ = where, votes_ = 0;
    if (!Same(where, where_)) {
      Fail("a barrier that not all threads reach: some wait at " + TextOf(where_) +
           ", this one at " + TextOf(where));
    }
    votes_ += vote;
    ++waiting_;
    self.state = State::kAtBarrier, self.where = where;
    Release(this);
    FinishBarrier();
    Yield();
    Acquire(this);
    return result_;
  }

  const uint64_t* Exchange(unsigned mask, uint64_t value, bool orders_memory, Where where) {
    const Quiet quiet;
    Thread& self = Self();
    const unsigned lane = current_ % kWarp, warp = current_ / kWarp;
    if ((mask >> lane & 1) == 0) Fail("a mask without the lane that calls: " + TextOf(where));
    if (warp * kWarp + std::bit_width(mask) > size_)
      Fail("a mask names lanes that the block does not have: " + TextOf(where));
    Meeting& meeting = MeetingOf(warp, mask);
    if (meeting.arrived == 0) meeting.where = where;
    if (!Same(where, meeting.where)) {
      Fail("lanes of one mask at different places: some wait at " + TextOf(meeting.where) +
           ", this one at " + TextOf(where));
    }
    meeting.brought[lane] = value;
    meeting.arrived |= 1u << lane;
    if (orders_memory) Release(&meeting);
    self.state = State::kInWarp, self.where = where;
    if (meeting.arrived == mask) {
      std::copy_n(meeting.brought, kWarp, meeting.shown);
      meeting.arrived = 0;
      for (unsigned l = 0; l < kWarp; ++l) {
        if ((mask >> l & 1) == 0) continue;
        Thread& other = *threads_[warp * kWarp + l];
        other.state = State::kReady;
        // Lanes outside of the mask see no order; then nor do we for those inside.
        if (orders_memory && mask == WholeWarp(warp)) ++other.warp_epoch;
      }
    }
    if (self.state != State::kReady || schedule == Schedule::kRandom) Yield();
    if (orders_memory) Acquire(&meeting);
    return meeting.shown;
  }

  bool InKernel() const { return current_ != kNobody; }
  unsigned current() const { return current_; }
  Thread& Self() {
    if (!InKernel()) Fail("a function of kernels was called outside of one");
    return *threads_[current_];
  }

  Block block;

 private:
  static constexpr unsigned kNobody = ~0u;

  static void Entry();

  void Main() {
    Fiber::Arrived(nullptr, scheduler_);
    Quiet::now = false;
    Acquire(&begin_);
    body_(launch_);
    const Quiet quiet;
    Release(&end_);
    Self().state = State::kEnded;
    --alive_;
    FinishBarrier();
    Self().fiber.SwitchTo(scheduler_, true);
  }

  void Yield() {
    Self().fiber.SwitchTo(scheduler_);
    Quiet::now = true;
  }

  void FinishBarrier() {
    if (waiting_ == 0 || waiting_ < alive_) return;
    if (alive_ < size_)
      Fail("a barrier that not all threads reach: some ended before " + TextOf(where_));
    result_ = votes_;
    waiting_ = 0;
    ++block.epoch;
    for (unsigned t = 0; t < size_; ++t) {
      threads_[t]->state = State::kReady;
      threads_[t]->warp_epoch = 0;
    }
  }

  unsigned WholeWarp(unsigned warp) const {
    const unsigned lanes = std::min(kWarp, size_ - warp * kWarp);
    return lanes == kWarp ? ~0u : (1u << lanes) - 1;
  }

  Meeting& MeetingOf(unsigned warp, unsigned mask) {
    for (auto& meeting : meetings_[warp])
      if (meeting->mask == mask) return *meeting;
    meetings_[warp].push_back(std::make_shared<Meeting>());
    meetings_[warp].back()->mask = mask;
    return *meetings_[warp].back();
  }

  std::string Deadlock() const {
    std::string text = "threads wait for others that do not come:";
    unsigned listed = 0;
    for (unsigned t = 0; t < size_ && listed < 4; ++t) {
      const Thread& thread = *threads_[t];
      if (thread.state != State::kAtBarrier && thread.state != State::kInWarp) continue;
      text += " " + TextOf(thread.index) + " at " + TextOf(thread.where) + ";";
      ++listed;
    }
    return text + " " + std::to_string(size_ - alive_) + " threads have ended";
  }

  Fiber scheduler_;
  std::vector<std::unique_ptr<Thread>> threads_;
  std::vector<std::vector<std::shared_ptr<Meeting>>> meetings_;  // of each warp
  void (*body_)(const void*) = nullptr;
  const void* launch_ = nullptr;
  unsigned size_ = 0, alive_ = 0, waiting_ = 0, current_ = kNobody;
  int votes_ = 0, result_ = 0;
  Where where_;
  char begin_ = 0, end_ = 0;  // tokens: the begin and the end of all threads of a block
};

Scheduler scheduler;

void Scheduler::Entry() { scheduler.Main(); }

// ---- What the program has been told, and has done

std::string context;
Counts counts;
int64_t calls = 0, failing_call = -1;
cudaError_t failing_error = cudaSuccess, last_error = cudaSuccess;
std::unordered_map<const void*, int> max_dynamic_shared;
uint64_t last_blocks = 0;  // RunLastBlocks
uint8_t* dynamic_shared = nullptr;

cudaError_t Report(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

// ---- Accesses

// Who touched a byte last. `thread` and `warp` are kMany where there are several in the same epoch.
struct Access {
  static constexpr uint16_t kMany = 0xFFFF;
  uint32_t block = 0, epoch = 0, warp_epoch = 0;
  uint16_t thread = 0, warp = 0;
  bool atomic = false, many_blocks = false;
};

struct Byte {
  Access written, read;
  bool is_written = false;
};

struct Region {
  enum Kind { kGlobal, kParameters, kDynamicShared, kStaticShared } kind;
  uintptr_t begin;
  std::vector<Byte> bytes;

  bool IsShared() const { return kind == kDynamicShared || kind == kStaticShared; }
  const char* Name() const {
    constexpr const char* kNames[] = {"a buffer", "the parameters", "dynamic shared memory",
                                      "static shared memory"};
    return kNames[kind];
  }
};

class Accesses {
 public:
  void Add(Region::Kind kind, const void* data, size_t size, bool is_written) {
    const auto begin = reinterpret_cast<uintptr_t>(data);
    Region& region = regions_[begin];
    region = Region{kind, begin, std::vector<Byte>(size)};
    for (Byte& byte : region.bytes) byte.is_written = is_written;
  }
  void Remove(const void* data) { regions_.erase(reinterpret_cast<uintptr_t>(data)); }

  Region* Find(uintptr_t address) {
    auto after = regions_.upper_bound(address);
    if (after == regions_.begin()) return nullptr;
    Region& region = std::prev(after)->second;
    return address - region.begin < region.bytes.size() ? &region : nullptr;
  }

  void StartLaunch() {
    first_block_ = scheduler.block.number + 1;
    releases_.clear();
    acquired_.clear();
  }

  void Touch(uintptr_t address, size_t size, bool write, bool atomic) {
    if (!scheduler.InKernel() || Quiet::now) return;
    const Quiet quiet;
    Thread& self = scheduler.Self();
    if (self.fiber.Holds(address) || IsBuiltin(address)) return;
    Region* region = Find(address);
    if (region == nullptr && InStatic(address)) region = &StaticShared();
    if (region == nullptr) {
      if (!write && IsConstant(address)) return;
      Fail("a " + Verb(write, atomic, size) + " outside of all buffers");
    }
    if (write && region->kind == Region::kParameters) Fail("a write to the kernel's parameters");
    const size_t at = address - region->begin;
    if (at + size > region->bytes.size()) {
      Fail("a " + Verb(write, atomic, size) + " past the end of " + Describe(*region, at));
    }
    if (region->kind == Region::kParameters) return;
    const unsigned thread = scheduler.current();
    const Access now{scheduler.block.number,
                     scheduler.block.epoch,
                     self.warp_epoch,
                     static_cast<uint16_t>(thread),
                     static_cast<uint16_t>(thread / kWarp),
                     atomic,
                     false};
    for (size_t i = at; i < at + size; ++i) {
      Byte& byte = region->bytes[i];
      if (region->IsShared() && byte.written.block != now.block) byte = Byte{};
      if (!write || atomic) {
        if (!byte.is_written)
          Fail("a " + Verb(write, atomic, size) +
               " of what was never written: " + Describe(*region, i));
      }
      if (!(byte.written.atomic && atomic) && !Ordered(byte.written, now))
        Race(*region, i, byte.written, "wrote", now, write);
      if (write) {
        if (!Ordered(byte.read, now)) Race(*region, i, byte.read, "read", now, write);
        byte.written = now;
        byte.is_written = true;
      } else {
        Read(&byte.read, now);
      }
    }
  }

  void Written(const void* to, size_t size) {
    if (size == 0) return;
    const auto address = reinterpret_cast<uintptr_t>(to);
    Region* region = Find(address);
    if (region == nullptr || address - region->begin + size > region->bytes.size())
      Fail("a memset or copy of " + std::to_string(size) + " bytes outside of all buffers");
    for (size_t i = 0; i < size; ++i) {
      Byte& byte = region->bytes[address - region->begin + i];
      byte = Byte{};
      byte.is_written = true;
    }
  }

  void Fence() { fenced_ = scheduler.block.number; }

  // An atomic at `address` by a block that has fenced hands on what it and those before it there
  // have written, and takes over what others have handed on there.
  void Synchronize(uintptr_t address) {
    const uint32_t block = scheduler.block.number;
    const unsigned thread = scheduler.current();
    auto& released = releases_[address];
    auto& acquired = acquired_[block];
    for (const auto& [from, until] : released)
      acquired.try_emplace(from, Acquired{until, {scheduler.block.epoch, thread}});
    if (fenced_ != block) return;
    for (const auto& [from, what] : acquired) released.try_emplace(from, what.until);
    released.insert_or_assign(block, Moment{scheduler.block.epoch, thread});
  }

 private:
  struct Moment {
    uint32_t epoch;
    unsigned thread;
  };
  struct Acquired {
    Moment until;  // what the other block did before
    Moment since;  // is seen by what this block does after
  };

  static std::string Verb(bool write, bool atomic, size_t size) {
    return (atomic  ? "atomic update"
            : write ? "write"
                    : "read") +
           std::string(" of ") + std::to_string(size) + " bytes";
  }

  static std::string Describe(const Region& region, size_t at) {
    return "byte " + std::to_string(at) + " of " + region.Name() + " of " +
           std::to_string(region.bytes.size()) + " bytes";
  }

  bool Ordered(const Access& before, const Access& now) const {
    if (before.block < first_block_) return true;
    if (before.many_blocks) return false;
    if (before.block != now.block) {
      const auto block = acquired_.find(now.block);
      if (block == acquired_.end()) return false;
      const auto found = block->second.find(before.block);
      if (found == block->second.end()) return false;
      const auto& [until, since] = found->second;
      return (before.epoch < until.epoch || before.thread == until.thread) &&
             (now.epoch > since.epoch || now.thread == since.thread);
    }
    if (before.epoch < now.epoch || before.thread == now.thread) return true;
    return before.warp == now.warp && before.warp_epoch < now.warp_epoch;
  }

  void Read(Access* read, const Access& now) const {
    if (read->block < first_block_ ||
        (read->block == now.block && read->epoch < now.epoch && !read->many_blocks)) {
      *read = now;
      return;
    }
    if (read->block != now.block) read->many_blocks = true;
    if (read->thread != now.thread) read->thread = Access::kMany;
    if (read->warp != now.warp) read->warp = Access::kMany;
    read->warp_epoch = std::max(read->warp_epoch, now.warp_epoch);
  }

  [[noreturn]] static void Race(const Region& region, size_t at, const Access& before,
                                const char* did, const Access& now, bool write) {
    const std::string who = before.thread == Access::kMany
                                ? std::string("other threads")
                                : "thread " + std::to_string(before.thread);
    const std::string whose = before.block == now.block ? "" : " of another block";
    Fail("a race: " + who + whose + " " + did + ", and this thread " +
         (write ? "writes" : "reads") + ", with no barrier between, " + Describe(region, at));
  }

  // Writable static memory of the program: for kernels it is their static shared memory.
  static bool InStatic(uintptr_t address);
  static bool IsConstant(uintptr_t address);
  Region& StaticShared();

  static bool IsBuiltin(uintptr_t address) {
    auto inside = [=](const auto& variable) {
      return address - reinterpret_cast<uintptr_t>(&variable) < sizeof variable;
    };
    return inside(threadIdx) || inside(blockIdx) || inside(blockDim) || inside(gridDim);
  }

  std::map<uintptr_t, Region> regions_;
  std::unique_ptr<Region> static_shared_;
  uint32_t first_block_ = 1, fenced_ = 0;
  std::map<uintptr_t, std::map<uint32_t, Moment>> releases_;
  std::map<uint32_t, std::map<uint32_t, Acquired>> acquired_;
};

Accesses& TheAccesses() {
  static Accesses accesses;
  return accesses;
}

#if defined(CUDA_ON_CPU_CHECK_ACCESSES)
extern "C" char __executable_start, __data_start, _end;  // from the linker

uintptr_t AddressOf(const char& symbol) { return reinterpret_cast<uintptr_t>(&symbol); }

bool Accesses::InStatic(uintptr_t address) {
  return address >= AddressOf(__data_start) && address < AddressOf(_end);
}

bool Accesses::IsConstant(uintptr_t address) {
  return address >= AddressOf(__executable_start) && address < AddressOf(__data_start);
}

Region& Accesses::StaticShared() {
  if (static_shared_ == nullptr) {
    const uintptr_t begin = AddressOf(__data_start);
    static_shared_ = std::make_unique<Region>(
        Region{Region::kStaticShared, begin, std::vector<Byte>(AddressOf(_end) - begin)});
  }
  return *static_shared_;
}
#else
bool Accesses::InStatic(uintptr_t) { return false; }
bool Accesses::IsConstant(uintptr_t) { return false; }
Region& Accesses::StaticShared() { return *static_shared_; }
#endif

}  // namespace

// ---- For tests

void SetSchedule(Schedule schedule, uint32_t seed) {
  scheduler.schedule = schedule;
  scheduler.random.seed(seed);
}

void SetContext(std::string text) { context = std::move(text); }

void Fail(const std::string& message) {
  const Quiet quiet;
  std::string text = "cuda_on_cpu: " + message;
  if (scheduler.InKernel())
    text += " [block " + TextOf(blockIdx) + ", thread " + TextOf(threadIdx) + "]";
  if (!context.empty()) text += " [" + context + "]";
  std::fprintf(stderr, "%s\n", text.c_str());
  std::fflush(nullptr);
  std::_Exit(kFailureStatus);
}

void FailShuffle() { Fail("a shuffle reads a lane that its mask does not name"); }

Counts Enqueued() { return counts; }
int64_t Calls() { return calls; }

void FailCall(int64_t n, cudaError_t error) {
  failing_call = calls + n;
  failing_error = error;
}

cudaError_t Called() { return Report(calls++ == failing_call ? failing_error : cudaSuccess); }

class Buffer::Memory : public Guarded {
  using Guarded::Guarded;
};

Buffer::Buffer(size_t size, Use use, int fill, size_t alignment)
    : size_(size), memory_(std::make_unique<Memory>(size, alignment, "a buffer")) {
  data_ = memory_->data();
  std::memset(data_, fill, size);
  if (kCheckAccesses) TheAccesses().Add(Region::kGlobal, data_, size, use == kInput);
}

Buffer::~Buffer() {
  if (kCheckAccesses) TheAccesses().Remove(data_);
}

bool Buffer::IsWritten(size_t i) const {
  if (!kCheckAccesses) return true;
  return TheAccesses().Find(reinterpret_cast<uintptr_t>(data_))->bytes[i].is_written;
}

// ---- For kernels

void* DynamicShared() { return dynamic_shared; }
unsigned Lane() { return scheduler.current() % kWarp; }
int BlockBarrier(bool vote, Where where) { return scheduler.Barrier(vote, where); }

const uint64_t* WarpExchange(unsigned mask, uint64_t value, bool orders_memory, Where where) {
  return scheduler.Exchange(mask, value, orders_memory, where);
}

void Fence() {
  if (kCheckAccesses) TheAccesses().Fence();
}

void BeforeAtomic(void* address, size_t size) {
  if (reinterpret_cast<uintptr_t>(address) % size != 0) Fail("an atomic at a misaligned address");
  Acquire(address);
  Release(address);
  if (!kCheckAccesses) return;
  TheAccesses().Touch(reinterpret_cast<uintptr_t>(address), size, true, true);
  const Quiet quiet;
  TheAccesses().Synchronize(reinterpret_cast<uintptr_t>(address));
}

void RunLastBlocks(uint64_t count) { last_blocks = count; }

cudaError_t SetMaxDynamicShared(const void* kernel, int bytes) {
  if (const cudaError_t error = Called(); error != cudaSuccess) return error;
  if (bytes < 0 || static_cast<size_t>(bytes) > kMaxDynamicShared)
    return Report(cudaErrorInvalidValue);
  max_dynamic_shared[kernel] = bytes;
  return cudaSuccess;
}

cudaError_t Run(const cudaLaunchConfig_t& config, const void* kernel, void (*thread)(const void*),
                const void* launch, size_t launch_size) {
  static std::mutex one_at_a_time;
  const std::lock_guard<std::mutex> lock(one_at_a_time);
  if (const cudaError_t error = Called(); error != cudaSuccess) return error;
  const dim3 &grid = config.gridDim, &block = config.blockDim;
  const uint64_t threads = uint64_t{block.x} * block.y * block.z;
  if (threads == 0 || threads > kMaxThreads || block.z > 64 || grid.x == 0 || grid.y == 0 ||
      grid.z == 0 || grid.x > 0x7FFFFFFFu || grid.y > 65535 || grid.z > 65535)
    return Report(cudaErrorInvalidConfiguration);
  const auto found = max_dynamic_shared.find(kernel);
  const size_t limit =
      found != max_dynamic_shared.end() ? static_cast<size_t>(found->second) : kMaxStaticShared;
  if (config.dynamicSmemBytes > limit) return Report(cudaErrorInvalidValue);

  ++counts.kernels;
  const nvfp4::FloatEnvironment environment;
  gridDim = grid, blockDim = block;
  if (kCheckAccesses) {
    TheAccesses().StartLaunch();
    TheAccesses().Add(Region::kParameters, launch, launch_size, true);
  }
  const int fill = scheduler.schedule == Schedule::kInOrder   ? 0xFF
                   : scheduler.schedule == Schedule::kReverse ? 0x7F
                                                              : 0x3C;
  const unsigned blocks = grid.x * grid.y * grid.z;
  const unsigned first = last_blocks == 0 || last_blocks > blocks ? 0 : blocks - last_blocks;
  for (unsigned i : scheduler.Order(blocks - first)) {
    const unsigned b = first + i;
    blockIdx = {b % grid.x, b / grid.x % grid.y, b / (grid.x * grid.y)};
    const Guarded shared(config.dynamicSmemBytes, 1024, "dynamic shared memory");
    dynamic_shared = shared.data();
    std::memset(dynamic_shared, fill, config.dynamicSmemBytes);
    if (kCheckAccesses)
      TheAccesses().Add(Region::kDynamicShared, dynamic_shared, config.dynamicSmemBytes, false);
    scheduler.RunBlock(thread, launch);
    if (kCheckAccesses) TheAccesses().Remove(dynamic_shared);
  }
  dynamic_shared = nullptr;
  if (kCheckAccesses) TheAccesses().Remove(launch);
  return cudaSuccess;
}

}  // namespace cuda_on_cpu

// ---- Runtime API

using cuda_on_cpu::Called;

cudaError_t cudaPeekAtLastError() { return cuda_on_cpu::last_error; }
cudaError_t cudaGetLastError() { return std::exchange(cuda_on_cpu::last_error, cudaSuccess); }

const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
#define CUDA_ON_CPU_NAME(name) \
  case name:                   \
    return #name
    CUDA_ON_CPU_NAME(cudaSuccess);
    CUDA_ON_CPU_NAME(cudaErrorInvalidValue);
    CUDA_ON_CPU_NAME(cudaErrorMemoryAllocation);
    CUDA_ON_CPU_NAME(cudaErrorInvalidConfiguration);
    CUDA_ON_CPU_NAME(cudaErrorNoDevice);
    CUDA_ON_CPU_NAME(cudaErrorInvalidDevice);
    CUDA_ON_CPU_NAME(cudaErrorNoKernelImageForDevice);
    CUDA_ON_CPU_NAME(cudaErrorIllegalAddress);
    CUDA_ON_CPU_NAME(cudaErrorLaunchOutOfResources);
    CUDA_ON_CPU_NAME(cudaErrorLaunchFailure);
#undef CUDA_ON_CPU_NAME
  }
  return "unrecognized error code";
}

const char* cudaGetErrorString(cudaError_t error) { return cudaGetErrorName(error); }

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return Called();
}
cudaError_t cudaSetDevice(int device) { return device == 0 ? Called() : cudaErrorInvalidDevice; }
cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return Called();
}

// A B200.
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  if (device != 0) return cuda_on_cpu::Report(cudaErrorInvalidDevice);
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount:
      *value = 148;
      break;
    case cudaDevAttrComputeCapabilityMajor:
      *value = 10;
      break;
    case cudaDevAttrComputeCapabilityMinor:
      *value = 0;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = cuda_on_cpu::kMaxDynamicShared;
      break;
  }
  return Called();
}

cudaError_t cudaStreamSynchronize(cudaStream_t) { return Called(); }
cudaError_t cudaDeviceSynchronize() { return Called(); }
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return Called();
}

namespace cuda_on_cpu {
namespace {
std::map<void*, std::unique_ptr<Buffer>> allocated;
}  // namespace
}  // namespace cuda_on_cpu

cudaError_t cudaMalloc(void** pointer, size_t size) {
  if (const cudaError_t error = Called(); error != cudaSuccess) return error;
  auto buffer =
      std::make_unique<cuda_on_cpu::Buffer>(size, cuda_on_cpu::Buffer::kOutput, 0xE5, 256);
  *pointer = buffer->As();
  cuda_on_cpu::allocated[*pointer] = std::move(buffer);
  return cudaSuccess;
}

cudaError_t cudaFree(void* pointer) {
  if (pointer != nullptr && cuda_on_cpu::allocated.erase(pointer) == 0)
    return cuda_on_cpu::Report(cudaErrorInvalidValue);
  return Called();
}

cudaError_t cudaMemsetAsync(void* to, int value, size_t size, cudaStream_t) {
  if (const cudaError_t error = Called(); error != cudaSuccess) return error;
  ++cuda_on_cpu::counts.memsets;
  if (cuda_on_cpu::kCheckAccesses) cuda_on_cpu::TheAccesses().Written(to, size);
  if (size > 0) std::memset(to, value, size);
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size, cudaMemcpyKind kind,
                            cudaStream_t) {
  if (const cudaError_t error = Called(); error != cudaSuccess) return error;
  ++cuda_on_cpu::counts.copies;
  if (cuda_on_cpu::kCheckAccesses && kind != cudaMemcpyDeviceToHost)
    cuda_on_cpu::TheAccesses().Written(to, size);
  if (size > 0) std::memcpy(to, from, size);
  return cudaSuccess;
}

// ---- What code compiled with -fsanitize=thread calls

#if defined(CUDA_ON_CPU_CHECK_ACCESSES)
extern "C" {
#define CUDA_ON_CPU_ACCESS(name, size, write)                                                   \
  void __tsan_##name(void* address) {                                                           \
    if (reinterpret_cast<uintptr_t>(address) % size != 0 && cuda_on_cpu::scheduler.InKernel())  \
      cuda_on_cpu::Fail("a misaligned access of " #size " bytes");                              \
    cuda_on_cpu::TheAccesses().Touch(reinterpret_cast<uintptr_t>(address), size, write, false); \
  }
#define CUDA_ON_CPU_ACCESSES(size)            \
  CUDA_ON_CPU_ACCESS(read##size, size, false) \
  CUDA_ON_CPU_ACCESS(write##size, size, true)
CUDA_ON_CPU_ACCESSES(1)
CUDA_ON_CPU_ACCESSES(2)
CUDA_ON_CPU_ACCESSES(4)
CUDA_ON_CPU_ACCESSES(8)
CUDA_ON_CPU_ACCESSES(16)
void __tsan_read_range(void* address, size_t size) {
  cuda_on_cpu::TheAccesses().Touch(reinterpret_cast<uintptr_t>(address), size, false, false);
}
void __tsan_write_range(void* address, size_t size) {
  cuda_on_cpu::TheAccesses().Touch(reinterpret_cast<uintptr_t>(address), size, true, false);
}
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
}
#endif
