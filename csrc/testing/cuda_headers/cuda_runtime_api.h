// csrc/testing/cuda_headers/cuda_runtime_api.h: stands in for the toolkit's header of this name
// where CUDA sources are compiled for the CPU.
#pragma once

#include "testing/cuda_on_cpu.h"
