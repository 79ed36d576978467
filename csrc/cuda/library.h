// csrc/cuda/library.h: which cuBLASLt this process uses. No CUDA header: for the Python module.
#pragma once

#include <functional>
#include <string>
#include <vector>

namespace nvfp4 {

// Uses the library at `path` from the next matmul on, with plans of its own. The result is empty,
// or says what is wrong with the file.
std::string LoadCublasLt(const std::string& path);

// Lists the paths to try, best first, when a matmul runs and no library is loaded.
void SetCublasLtFinder(std::function<std::vector<std::string>()> finder);

// Forgets the library, its plans and its handles. Calls that run keep theirs until they end.
void UnloadCublasLt();

}  // namespace nvfp4
