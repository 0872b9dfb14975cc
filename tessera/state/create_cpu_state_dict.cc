#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include "tessera/dtensor/tensor/dtensor.h"
#include "tessera/state/detail/cpu_memory.h"
#include "tessera/state/detail/map_tensors.h"
#include "tessera/state/gather_state_dict.h"

namespace tessera {

StateDict create_cpu_state_dict(const StateDict& state_dict, const CpuStateDictOptions& options) {
  const c10::NoGradGuard no_grad;
  const auto make = [&](const at::Tensor& local) {
    const auto plain = at::TensorOptions().dtype(local.scalar_type()).device(c10::kCPU);
    if (local.dim() == 0 || local.numel() == 0) return at::zeros(local.sizes(), plain);
    return options.share_memory ? detail::empty_in_shared_memory(local, options.pin_memory)
                                : detail::empty_on_cpu(local, options.pin_memory);
  };
  const auto each = [&](const StateValue& value) { return detail::map_local_parts(value, make); };
  // Contiguous whatever the strides, so that no other memory is needed.
  const auto parts = [&](const StateValue& value) -> StateValue {
    const at::Tensor& tensor = value.tensor();
    return from_local(make(to_local(tensor)), device_mesh(tensor), placements(tensor),
                      FromLocalOptions::contiguous(tensor.sizes().vec()));
  };
  return iterate_state_dict(state_dict, {.sharded_tensor_func = each, .dtensor_func = parts, .tensor_func = each});
}

}  // namespace tessera
