// tests/b200/stubs.cc: a handler that does nothing, in the place of one that needs CUDA. XLA may
// put it into a command buffer.
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

static ffi::Error DoNothing(ffi::RemainingArgs, ffi::RemainingRets, ffi::Dictionary) {
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(Stub, DoNothing,
                              ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attrs(),
                              {ffi::Traits::kCmdBufferCompatible});
