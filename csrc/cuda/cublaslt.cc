// csrc/cuda/cublaslt.cc: opens cuBLASLt and checks its version.
#include "cuda/cublaslt.h"

#include <dlfcn.h>

namespace nvfp4::cublaslt {
namespace {

constexpr char kInstall[] = "pip install 'nvidia-cublas>=13.2'";

}  // namespace

std::string VersionText(size_t version) {
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

std::shared_ptr<const Library> Open(const std::string& path, std::string* error) {
  void* file = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (file == nullptr) {
    const char* reason = dlerror();  // names the file
    *error = std::string(reason != nullptr ? reason : path.c_str()) + "; " + kInstall;
    return nullptr;
  }
  auto library = std::make_shared<Library>();
  library->path = path;
  const char* missing = nullptr;
#define NVFP4_CUBLASLT_FIND(name, result, parameters)                                    \
  library->name = reinterpret_cast<result(*) parameters>(dlsym(file, "cublasLt" #name)); \
  if (library->name == nullptr) missing = "cublasLt" #name;
  NVFP4_CUBLASLT_FUNCTIONS(NVFP4_CUBLASLT_FIND)
#undef NVFP4_CUBLASLT_FIND
  if (missing != nullptr) {
    *error = path + " lacks the function " + missing + "; " + kInstall;
    dlclose(file);
    return nullptr;
  }
  library->version = library->GetVersion();
  if (library->version < kMinVersion) {
    *error = path + " is cuBLASLt " + VersionText(library->version) + ", but versions before " +
             VersionText(kMinVersion) + " give wrong results without an error; " + kInstall;
    dlclose(file);
    return nullptr;
  }
  return library;
}

}  // namespace nvfp4::cublaslt
