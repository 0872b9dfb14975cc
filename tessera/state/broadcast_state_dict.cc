#include "tessera/state/broadcast_state_dict.h"

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>

#include <unordered_map>

#include "tessera/base/error.h"
#include "tessera/base/text/quote.h"
#include "tessera/dtensor/tensor/dtensor.h"
#include "tessera/state/detail/incoming_tensors.h"
#include "tessera/state/detail/load_tensor.h"
#include "tessera/state/detail/map_tensors.h"

namespace tessera {
namespace {

bool holds_dtensor(const StateValue& value) {
  return value.is_tensor() && value.tensor().defined() && is_dtensor(value.tensor());
}

// Throws when a value of the flat dict is a container or a ShardedTensor, or does not fit the DTensor that it is loaded
// into.
void check_entry(const StateKey& key, const StateValue& value, const StateDict& local) {
  TESSERA_CHECK(value.is_tensor() || (!value.is_dict() && !value.is_sharded()), ErrorKind::kShape,
                "[state.broadcast] {}: a {} in a flat dict. Flatten it first (flatten_state_dict).",
                quote(to_string(key)), type_name(value));
  const auto* target = local.find(key);
  if (!value.is_tensor() || !target || !holds_dtensor(*target)) return;
  const auto mismatch = detail::load_mismatch(target->tensor(), value.tensor());
  TESSERA_CHECK(mismatch.empty(), ErrorKind::kShape, "[state.broadcast] {}: {}", quote(to_string(key)), mismatch);
}

bool is_written_in_place(const StateValue& target, const at::Tensor& values, c10::Device device) {
  if (!target.is_tensor() || !target.tensor().defined()) return false;
  const at::Tensor& tensor = target.tensor();
  return !is_dtensor(tensor) && tensor.sizes() == values.sizes() && tensor.scalar_type() == values.scalar_type() &&
         tensor.device() == device;
}

// Loads the whole tensor `values` into `target`. If `can_take_values`, no one else uses the memory of `values`, so
// `target` may become `values` itself instead of a copy.
void load_whole_tensor(StateValue& target, const at::Tensor& values, c10::Device device, bool can_take_values) {
  if (holds_dtensor(target)) {
    const at::Tensor tensor = target.tensor();
    const at::Tensor local = to_local(tensor.detach());
    if (!local.is_meta()) {
      detail::load_tensor(tensor, values);
      return;
    }
    // A DTensor on the meta device has no memory to write into, so it is replaced by a DTensor with a new local tensor.
    const at::Tensor part = is_dtensor(values) ? to_local(values) : detail::local_shard_of(values, tensor);
    target = detail::dtensor_with_local(tensor, part.to(device).clone(c10::MemoryFormat::Contiguous));
    return;
  }
  if (is_written_in_place(target, values, device)) {
    target.tensor().detach().copy_(values);
  } else {
    const at::Tensor placed = values.detach().to(device);
    target = !can_take_values && placed.is_alias_of(values) ? placed.clone() : placed;
  }
}

}  // namespace

void broadcast_state_dict(const StateDict& full, StateDict& local, const BroadcastStateOptions& options) {
  TESSERA_CHECK(options.group, ErrorKind::kConfig,
                "[state.broadcast] found no group, wanted the ranks that take part in options.group");
  const c10::NoGradGuard no_grad;
  // plan_load() calls `check` on all ranks before any tensor is sent. If `check` throws on one rank, plan_load() throws
  // on all ranks. For each tensor with dims, incoming->message() has a meta tensor, and receive_each() passes this meta
  // tensor together with the values. So `keys` finds the key of received values by the TensorImpl of the meta tensor.
  // All other values are in incoming->message() themselves, and the loop below stores them at once.
  const auto check = [&](const StateDict& message, const detail::IncomingTensors*) {
    for (const auto& [key, value] : message) check_entry(key, value, local);
  };
  const auto incoming = detail::plan_load(full, options.group.get(), check);
  std::unordered_map<const c10::TensorImpl*, StateKey> keys;
  for (const auto& [key, value] : incoming->message()) {
    if (value.is_tensor() && value.tensor().is_meta()) {
      keys.emplace(value.tensor().unsafeGetTensorImpl(), key);
    } else if (auto* target = local.find(key)) {
      if (value.is_tensor() && holds_dtensor(*target)) {
        load_whole_tensor(*target, value.tensor(), options.device, /*can_take_values=*/true);
      } else {
        *target = value;
      }
    }
  }
  // On rank 0 `values` may share memory with a tensor of `full`, which the caller keeps. So on rank 0 a tensor of
  // `local` that is not a DTensor gets a copy of `values`. On the other ranks `values` is a new tensor, which `local`
  // may keep.
  const bool is_source = options.group->rank() == 0;
  incoming->receive_each(options.device, [&](const at::Tensor& announced, const at::Tensor& values) {
    const auto found = keys.find(announced.unsafeGetTensorImpl());
    if (found == keys.end()) return;
    if (auto* target = local.find(found->second)) load_whole_tensor(*target, values, options.device, !is_source);
  });
  if (options.strict) {
    StateDict kept;
    for (const auto& [key, value] : local) {
      if (incoming->message().contains(key)) kept.set(key, value);
    }
    local = std::move(kept);
  }
  if (!options.cpu_offload) return;
  for (auto& [key, value] : local) {
    value = detail::map_local_parts(value, [](const at::Tensor& part) { return part.cpu(); });
  }
}

void distribute_state_dict(const StateDict& full, StateDict& local, c10::Device device) {
  const c10::NoGradGuard no_grad;
  for (const auto& [key, value] : full) check_entry(key, value, local);
  for (const auto& [key, value] : full) {
    auto* target = local.find(key);
    if (target == nullptr) continue;
    if (value.is_tensor() && (value.tensor().dim() > 0 || holds_dtensor(*target))) {
      load_whole_tensor(*target, value.tensor(), device, /*can_take_values=*/false);
    } else {
      *target = value.is_tensor() ? StateValue(value.tensor().detach().to(c10::kCPU, value.tensor().scalar_type(),
                                                                          /*non_blocking=*/false, /*copy=*/true))
                                  : value;
    }
  }
}

}  // namespace tessera
