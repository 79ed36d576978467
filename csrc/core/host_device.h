// csrc/core/host_device.h: marks a function that must give the same bits on the host and on the device.
#pragma once

#if defined(__CUDACC__)
#define NVFP4_HD __host__ __device__ __forceinline__
#else
#define NVFP4_HD inline
#endif
