#include "tessera/state/cpu_state_dict.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>

#include <optional>

#include "tessera/base/error.h"
#include "tessera/base/text/quote.h"
#include "tessera/dtensor/tensor/dtensor.h"
#include "tessera/state/detail/cpu_memory.h"
#include "tessera/state/detail/map_tensors.h"
#include "tessera/state/sharded_tensor.h"
#include "tessera/state/state_dict_structure.h"

namespace tessera {

at::Tensor to_local_if_dtensor(const at::Tensor& tensor) {
  const c10::NoGradGuard no_grad;
  return tensor.defined() && is_dtensor(tensor) ? to_local(tensor) : tensor;
}

StateDict get_cpu_state_dict(const StateDict& state_dict, bool pin_memory) {
  const c10::NoGradGuard no_grad;
  std::optional<c10::Device> device;  // device of copies that may still be running
  const auto copied = [&](const at::Tensor& tensor, const std::string& name) {
    TESSERA_CHECK(tensor.defined(), ErrorKind::kShape, "[state.get_cpu] {}: found an undefined tensor", quote(name));
    const at::Tensor local = to_local_if_dtensor(tensor);
    TESSERA_CHECK(!local.is_meta(), ErrorKind::kShape,
                  "[state.get_cpu] {}: on the meta device, without values. Call to_empty and load it.", quote(name));
    // The copies from an accelerator are non-blocking; one wait at the end covers all of them.
    at::Tensor copy = detail::empty_on_cpu(local, pin_memory && local.dim() > 0);
    copy.copy_(local, /*non_blocking=*/!local.is_cpu());
    if (!local.is_cpu()) device = local.device();
    return copy;
  };
  auto out = map_leaves(state_dict, [&](const StateValue& leaf, const std::string& name) -> StateValue {
    if (leaf.is_tensor()) return copied(leaf.tensor(), name);
    if (!leaf.is_sharded() || !leaf.sharded()) return leaf;
    const auto& shards = leaf.sharded()->local_shards;
    TESSERA_CHECK(shards.size() <= 1, ErrorKind::kShape,
                  "[state.get_cpu] {}: a ShardedTensor with {} local shards, wanted at most one. Gather it first "
                  "(gather_state_dict).",
                  quote(name), shards.size());
    // A rank without a shard gets an empty tensor, so that every rank returns the same keys.
    if (shards.empty()) return at::empty({0}, at::TensorOptions(leaf.sharded()->dtype));
    return copied(shards.front().tensor, name);
  });
  detail::wait_for_copies(device);
  return std::move(out.dict());
}

StateDict get_cpu_state_dict(const std::vector<std::pair<std::string, at::Tensor>>& named_tensors, bool pin_memory) {
  StateDict dict;
  for (const auto& [name, tensor] : named_tensors) dict.set(name, tensor);
  return get_cpu_state_dict(dict, pin_memory);
}

StateValue to_cpu(const StateValue& value) {
  if (!value.is_tensor() || !value.tensor().defined()) return value;
  const c10::NoGradGuard no_grad;
  const at::Tensor& tensor = value.tensor();
  if (!is_dtensor(tensor)) return tensor.is_cpu() ? value : StateValue(tensor.detach().cpu());
  return detail::gather_full_tensor(tensor, "[state.to_cpu]").cpu();
}

}  // namespace tessera
