// tests/cpp/cuda_bugs_test.cu: kernels with one bug each, to see that the emulation reports it.
//
//   cuda_bugs_test BUG [SCHEDULE]
//
// Ends with "right" and 0, or "wrong" and 1, where nothing is reported. Bug "none" is right.
#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

constexpr int kThreads = 96, kBlocks = 3, kSize = kThreads * kBlocks;

#define BUGS(X)                     \
  X(none)                           \
  X(missing_barrier)                \
  X(missing_barrier_before_reuse)   \
  X(missing_syncwarp)               \
  X(two_writers)                    \
  X(barrier_in_branch)              \
  X(barrier_at_two_places)          \
  X(return_before_barrier)          \
  X(shared_write_past_end)          \
  X(shared_read_past_end)           \
  X(static_shared_past_end)         \
  X(global_write_past_end)          \
  X(global_read_past_end)           \
  X(global_write_before_begin)      \
  X(wild_pointer)                   \
  X(uninitialised_dynamic_shared)   \
  X(uninitialised_static_shared)    \
  X(shared_of_another_block)        \
  X(uninitialised_global)           \
  X(output_not_written)             \
  X(shuffle_with_ended_lanes)       \
  X(shuffle_from_lane_outside_mask) \
  X(mask_without_caller)            \
  X(shuffle_in_branch)              \
  X(sum_without_atomic)             \
  X(last_block_without_fence)       \
  X(last_block_without_barrier)     \
  X(int_overflow)                   \
  X(shift_by_width)                 \
  X(misaligned_vector)              \
  X(stack_past_end)                 \
  X(too_much_shared)

enum class Bug {
#define X(name) name,
  BUGS(X)
#undef X
};
constexpr const char* kNames[] = {
#define X(name) #name,
    BUGS(X)
#undef X
};

struct Args {
  Bug bug;
  const float* in;    // [kSize]
  float* out;         // [kSize]: each block's inputs, one to the left, + 2 * (sum of the warp)
  float* sums;        // [kBlocks] of the blocks
  unsigned* arrived;  // of the blocks
  float* total;       // of all
  int rows;
  unsigned shift;
};

struct Shared {
  float row[kThreads];
  float left[kThreads];
};

__global__ void __launch_bounds__(kThreads) Kernel(Args args) {
  Shared& shared = *static_cast<Shared*>(cuda_on_cpu::DynamicShared());
  __shared__ float warp_sums[kThreads / 32];
  __shared__ bool last;
  const int t = threadIdx.x, lane = t % 32, at = blockIdx.x * kThreads + t;

  if (args.bug == Bug::return_before_barrier) {
    if (t == 50) return;
  }
  float x = args.in[args.bug == Bug::global_read_past_end ? at + (at == kSize - 1) : at];
  if (args.bug == Bug::shared_of_another_block) {
    if (blockIdx.x == 0) shared.row[t] = x;
  } else if (args.bug == Bug::uninitialised_dynamic_shared) {
    if (t != 7) shared.row[t] = x;
  } else {
    shared.row[args.bug == Bug::shared_write_past_end ? t + (t == 0 ? 6 * args.shift : 0) : t] = x;
  }
  if (args.bug == Bug::two_writers) shared.row[t / 2] = 1.0f;
  if (args.bug == Bug::barrier_in_branch) {
    if (t < 40) __syncthreads();
  } else if (args.bug == Bug::barrier_at_two_places) {
    if (t < 40) {
      __syncthreads();
    } else {
      __syncthreads();
    }
  } else if (args.bug != Bug::missing_barrier) {
    __syncthreads();
  }
  const int from = (t + kThreads - 1) % kThreads;
  shared.left[t] =
      shared.row[args.bug == Bug::shared_read_past_end && t == 9 ? 6 * args.shift : from];

  // Sum of the warp.
  float sum = x;
  if (args.bug == Bug::shuffle_with_ended_lanes) {
    if (lane == 3) return;
  }
  if (args.bug == Bug::shuffle_from_lane_outside_mask) {
    if (lane < 16) sum += __shfl_down_sync(0xFFFFu, sum, 8);
  }
  if (args.bug == Bug::mask_without_caller) sum += __shfl_xor_sync(0xFFFEu, sum, 2);
  if (args.bug == Bug::shuffle_in_branch) {
    if (lane < 16) sum += __shfl_xor_sync(~0u, sum, 2);
  }
  for (int by = 16; by > 0; by /= 2) sum += __shfl_xor_sync(~0u, sum, by);
  if (lane == 0) warp_sums[args.bug == Bug::static_shared_past_end ? t / 16 : t / 32] = sum;
  if (args.bug != Bug::missing_syncwarp) __syncwarp();
  float y = shared.left[t] + 2.0f * warp_sums[t / 32];
  if (args.bug == Bug::uninitialised_static_shared) {
    if (last) y += 1.0f;
  }

  if (args.bug == Bug::int_overflow) {
    const int elements = args.rows * 3000000;
    y += static_cast<float>(elements > 0);
  }
  if (args.bug == Bug::shift_by_width) y += static_cast<float>(1u << args.shift);
  if (args.bug == Bug::misaligned_vector) {
    const float4 four = *reinterpret_cast<const float4*>(args.in + 1);
    y += four.x + four.y + four.z + four.w;
  }
  if (args.bug == Bug::stack_past_end) {
    float local[4] = {x, y, x, y};
    y += local[args.shift / 8 + lane % 2];
  }
  if (args.bug == Bug::uninitialised_global) y += args.out[at];
  if (args.bug == Bug::wild_pointer) {
    if (at == 77) args.out[1 << 20] = y;
  }
  if (args.bug == Bug::global_write_before_begin) {
    if (at == 0) args.out[-1] = y;
  }
  if (!(args.bug == Bug::output_not_written && at == 200))
    args.out[args.bug == Bug::global_write_past_end ? at + (at == kSize - 1) : at] = y;

  // Sum of the block, and by the last one to come, of all.
  if (args.bug != Bug::missing_barrier_before_reuse) __syncthreads();
  shared.row[t] = warp_sums[t / 32];
  __syncthreads();
  if (t == 0) {
    args.sums[blockIdx.x] = shared.row[0] + shared.row[32] + shared.row[64];
    if (args.bug == Bug::sum_without_atomic) {
      *args.arrived = *args.arrived + 1;
      last = *args.arrived == kBlocks;
    } else {
      if (args.bug != Bug::last_block_without_fence) __threadfence();
      last = atomicAdd(args.arrived, 1) == kBlocks - 1;
    }
  }
  if (args.bug != Bug::last_block_without_barrier) __syncthreads();
  if (last && t == 32) {
    float total = 0.0f;
    for (int b = 0; b < kBlocks; ++b) total += args.sums[b];
    *args.total = total;
  }
}

int Test(Bug bug) {
  using cuda_on_cpu::Buffer;
  const Buffer in(kSize * sizeof(float), Buffer::kInput),
      out(kSize * sizeof(float), Buffer::kOutput), sums(kBlocks * sizeof(float), Buffer::kOutput),
      arrived(4, Buffer::kOutput), total(4, Buffer::kOutput);
  for (int i = 0; i < kSize; ++i) in.As<float>()[i] = static_cast<float>(i * 7 % 64);
  cudaMemsetAsync(arrived.As(), 0, 4);
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(kBlocks);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = sizeof(Shared);
  if (bug == Bug::too_much_shared) config.dynamicSmemBytes = 64 << 10;
  const Args args{bug,
                  in.As<float>(),
                  out.As<float>(),
                  sums.As<float>(),
                  arrived.As<unsigned>(),
                  total.As<float>(),
                  1000,
                  32};
  if (const cudaError_t error = cudaLaunchKernelEx(&config, Kernel, args)) {
    fprintf(stderr, "launch: %s\n", cudaGetErrorName(error));
    return 2;
  }
  bool right = true;
  float all = 0.0f;
  for (int at = 0; at < kSize; ++at) {
    const int block = at / kThreads * kThreads, warp = at / 32 * 32;
    float sum = 0.0f;
    for (int i = 0; i < 32; ++i) sum += in.As<float>()[warp + i];
    all += in.As<float>()[at];
    const float left = in.As<float>()[block + (at - block + kThreads - 1) % kThreads];
    right &= out.As<float>()[at] == left + 2.0f * sum;
    for (size_t byte = 0; byte < sizeof(float); ++byte) {
      if (!out.IsWritten(sizeof(float) * at + byte)) {
        fprintf(stderr, "a byte was not written\n");
        return 2;
      }
    }
  }
  right &= *total.As<float>() == all;
  puts(right ? "right" : "wrong");
  return right ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 2) cuda_on_cpu::SetSchedule(static_cast<cuda_on_cpu::Schedule>(atoi(argv[2])), 1);
  for (size_t i = 0; argc > 1 && i < sizeof kNames / sizeof *kNames; ++i)
    if (strcmp(argv[1], kNames[i]) == 0) return Test(static_cast<Bug>(i));
  fprintf(stderr, "usage: cuda_bugs_test BUG [SCHEDULE]\n");
  return 3;
}
