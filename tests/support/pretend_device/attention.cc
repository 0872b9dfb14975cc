// scaled_dot_product_attention takes the fused kernel where the CPU would.
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_fused_sdp_choice_native.h>

#include "tests/support/pretend_device/registration.h"

namespace tessera::pretend {

void register_attention() {
  at::native::_fused_sdp_choice_stub.set_privateuse1_dispatch_ptr(&at::native::_fused_sdp_choice_cpp);
}

}  // namespace tessera::pretend
