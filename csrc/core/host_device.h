// csrc/core/host_device.h: marks a function that must give the same bits on the host and on the
// device.
#pragma once

// On the host with internal linkage: units compiled for different instruction sets include the
// core, and of a plain inline function the linker keeps one copy for all of them, perhaps one that
// this machine can not run.
#if defined(__CUDACC__)
#define NVFP4_HD __host__ __device__ __forceinline__
#else
#define NVFP4_HD static inline
#endif
