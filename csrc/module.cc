// csrc/module.cc: the Python module `_native`: the FFI targets of each platform, and the CPU's
// instruction set.
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "cpu/isa.h"
#if defined(NVFP4_CUDA)
#include "cuda/library.h"
#endif
#include "xla/ffi/api/ffi.h"

namespace nb = nanobind;

namespace nvfp4 {

XLA_FFI_DECLARE_HANDLER_SYMBOL(AmaxCpu);
XLA_FFI_DECLARE_HANDLER_SYMBOL(QuantizeCpu);
XLA_FFI_DECLARE_HANDLER_SYMBOL(DequantizeCpu);
XLA_FFI_DECLARE_HANDLER_SYMBOL(MatmulCpu);
#if defined(NVFP4_CUDA)
XLA_FFI_DECLARE_HANDLER_SYMBOL(AmaxCuda);
XLA_FFI_DECLARE_HANDLER_SYMBOL(QuantizeCuda);
XLA_FFI_DECLARE_HANDLER_SYMBOL(DequantizeCuda);
XLA_FFI_DECLARE_HANDLER_SYMBOL(MatmulCuda);
XLA_FFI_DECLARE_HANDLER_SYMBOL(MatmulCudaInitialize);
#endif

namespace {

using Finder = nb::typed<nb::callable, std::vector<std::string>()>;
using Stages = std::map<std::string, nb::capsule>;
using Targets = std::map<std::string, Stages>;

nb::capsule Handler(XLA_FFI_Handler* handler) {
  return nb::capsule(reinterpret_cast<void*>(handler));
}

Stages Execute(XLA_FFI_Handler* handler) { return {{"execute", Handler(handler)}}; }

// The version in a name changes with the operands: programs in a compilation cache do not see this
// library change.
std::map<std::string, Targets> RegistrationsByPlatform() {
  std::map<std::string, Targets> platforms;
  platforms["cpu"] = {{"nvfp4_amax_v1", Execute(AmaxCpu)},
                      {"nvfp4_quantize_v1", Execute(QuantizeCpu)},
                      {"nvfp4_dequantize_v1", Execute(DequantizeCpu)},
                      {"nvfp4_matmul_v1", Execute(MatmulCpu)}};
#if defined(NVFP4_CUDA)
  Stages matmul = Execute(MatmulCuda);
  matmul["initialize"] = Handler(MatmulCudaInitialize);
  platforms["CUDA"] = {{"nvfp4_amax_v1", Execute(AmaxCuda)},
                       {"nvfp4_quantize_v1", Execute(QuantizeCuda)},
                       {"nvfp4_dequantize_v1", Execute(DequantizeCuda)},
                       {"nvfp4_matmul_v1", matmul}};
#endif
  return platforms;
}

#if defined(NVFP4_CUDA)
void LoadLibrary(const std::string& path) {
  const std::string error = LoadCublasLt(path);
  if (!error.empty()) throw nb::import_error(error.c_str());
}

// The finder lives as long as the process: when it could be given up, the interpreter may be gone.
void SetFinder(Finder finder) {
  PyObject* const object = finder.release().ptr();
  SetCublasLtFinder([object] {
    const nb::gil_scoped_acquire python;
    try {
      return nb::cast<std::vector<std::string>>(nb::handle(object)());
    } catch (nb::python_error& error) {  // XLA, which called, knows no exceptions
      error.discard_as_unraisable("looking for cuBLASLt");
      return std::vector<std::string>();
    }
  });
}
#else
void LoadLibrary(const std::string&) {
  throw nb::import_error("load_cublaslt: this build of jax_nvfp4_ops has no CUDA backend");
}

void SetFinder(Finder) {}  // nobody asks it
#endif

std::vector<std::string> InstructionSets() {
  std::vector<std::string> names;
  for (Isa isa : AvailableIsas()) names.push_back(Name(isa));
  return names;
}

std::string SelectInstructionSet(const std::string& name) {
  const std::string previous = Name(CurrentIsa());
  for (Isa isa : AvailableIsas())
    if (name == Name(isa)) {
      Select(isa);
      return previous;
    }
  std::string available;
  for (Isa isa : AvailableIsas())
    available += (available.empty() ? "" : ", ") + std::string(Name(isa));
  throw nb::value_error(
      ("select_instruction_set: name must be one of " + available + "; got '" + name + "'")
          .c_str());
}

}  // namespace

NB_MODULE(_native, m) {
  m.doc() = "The compiled half of jax_nvfp4_ops.";
  m.def("registrations", RegistrationsByPlatform,
        "FFI handlers by platform, then by target name, then by stage.");
  m.def(
      "xla_ffi_version", [] { return std::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR); },
      "Version of the XLA FFI that this module was built with.");
  m.def("instruction_sets", InstructionSets,
        "Instruction sets that the CPU backend can use here, best first.");
  m.def("select_instruction_set", SelectInstructionSet, nb::arg("name"),
        "Makes the CPU backend of this process use an instruction set, and returns the name of the "
        "one before. "
        "All give the same bits.");
  m.def("load_cublaslt", LoadLibrary, nb::arg("path"), nb::call_guard<nb::gil_scoped_release>(),
        "Makes matmul on CUDA use the cuBLASLt at this path from its next call on; raises "
        "ImportError if it can not.");
  m.def(
      "set_cublaslt_finder", SetFinder, nb::arg("finder"),
      "Sets what lists the paths of cuBLASLt to try, best first, when matmul first runs on CUDA.");
}

}  // namespace nvfp4
