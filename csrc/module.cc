// csrc/module.cc: the Python module `_native`: the FFI targets of each platform, and the CPU's
// instruction set.
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "cpu/isa.h"
#include "xla/ffi/api/ffi.h"

namespace nb = nanobind;

namespace nvfp4 {

XLA_FFI_DECLARE_HANDLER_SYMBOL(AmaxCpu);
XLA_FFI_DECLARE_HANDLER_SYMBOL(QuantizeCpu);
XLA_FFI_DECLARE_HANDLER_SYMBOL(DequantizeCpu);
XLA_FFI_DECLARE_HANDLER_SYMBOL(MatmulCpu);

namespace {

using Targets = std::map<std::string, nb::capsule>;

nb::capsule Handler(XLA_FFI_Handler* handler) {
  return nb::capsule(reinterpret_cast<void*>(handler));
}

// The version in a name changes with the operands: programs in a compilation cache do not see this
// library change.
std::map<std::string, Targets> RegistrationsByPlatform() {
  return {{"cpu",
           {
               {"nvfp4_amax_v1", Handler(AmaxCpu)},
               {"nvfp4_quantize_v1", Handler(QuantizeCpu)},
               {"nvfp4_dequantize_v1", Handler(DequantizeCpu)},
               {"nvfp4_matmul_v1", Handler(MatmulCpu)},
           }}};
}

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
  m.def("registrations", RegistrationsByPlatform, "FFI handlers by platform, then by target name.");
  m.def(
      "xla_ffi_version", [] { return std::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR); },
      "Version of the XLA FFI that this module was built with.");
  m.def("instruction_sets", InstructionSets,
        "Instruction sets that the CPU backend can use here, best first.");
  m.def("select_instruction_set", SelectInstructionSet, nb::arg("name"),
        "Makes the CPU backend of this process use an instruction set, and returns the name of the "
        "one before. "
        "All give the same bits.");
}

}  // namespace nvfp4
