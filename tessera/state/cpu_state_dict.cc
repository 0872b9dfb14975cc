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

namespace tessera {
namespace {

class CpuCopies {
 public:
  explicit CpuCopies(bool pin) : pin_(pin) {}
  ~CpuCopies() = default;

  StateValue of(const StateValue& value, const std::string& name) {
    if (value.is_tensor()) return of(value.tensor(), name);
    if (value.is_sharded() && value.sharded()) {
      const auto& shards = value.sharded()->local_shards;
      TESSERA_CHECK(shards.size() <= 1, ErrorKind::kShape,
                    "[state.get_cpu] {}: a ShardedTensor with {} local shards, wanted one. Gather it first.",
                    quote(name), shards.size());
      if (shards.empty()) return at::empty({0}, at::TensorOptions(value.sharded()->dtype));
      return of(shards.front().tensor, name);
    }
    if (value.is_list()) return all_of(value.list(), name);
    if (value.is_tuple()) return StateTuple{all_of(std::get<StateTuple>(value.variant()).items, name)};
    if (value.is_dict()) return all_of(value.dict(), name);
    return value;
  }

  StateDict all_of(const StateDict& dict, const std::string& prefix) {
    StateDict out;
    for (const auto& [key, value] : dict) {
      out.set(key, of(value, prefix.empty() ? to_string(key) : prefix + "." + to_string(key)));
    }
    return out;
  }

  void wait() const { detail::wait_for_copies(device_); }

 private:
  StateList all_of(const StateList& items, const std::string& name) {
    StateList out;
    for (const auto& item : items) out.push_back(of(item, name));
    return out;
  }

  at::Tensor of(const at::Tensor& tensor, const std::string& name) {
    TESSERA_CHECK(tensor.defined(), ErrorKind::kShape, "[state.get_cpu] {}: an undefined tensor", quote(name));
    const at::Tensor local = to_local_if_dtensor(tensor);
    TESSERA_CHECK(!local.is_meta(), ErrorKind::kShape,
                  "[state.get_cpu] {}: on the meta device, without values. Call to_empty and load it.", quote(name));
    at::Tensor copy = detail::empty_on_cpu(local, pin_ && local.dim() > 0);
    copy.copy_(local, /*non_blocking=*/!local.is_cpu());
    if (!local.is_cpu()) device_ = local.device();
    return copy;
  }

  bool pin_;
  std::optional<c10::Device> device_;  // from which copies may still be under way
};

}  // namespace

at::Tensor to_local_if_dtensor(const at::Tensor& tensor) {
  const c10::NoGradGuard no_grad;
  return tensor.defined() && is_dtensor(tensor) ? to_local(tensor) : tensor;
}

StateDict get_cpu_state_dict(const StateDict& state_dict, bool pin_memory) {
  const c10::NoGradGuard no_grad;
  CpuCopies copies(pin_memory);
  auto out = copies.all_of(state_dict, "");
  copies.wait();
  return out;
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
  const at::Tensor local = to_local(tensor.detach());
  TESSERA_CHECK(!local.is_meta(), ErrorKind::kShape,
                "[state.to_cpu] a DTensor on the meta device has no values. Call to_empty and load it.");
  const auto device = device_mesh(tensor)->device();
  const at::Tensor placed =
      local.device().type() == device.type() ? tensor.detach() : detail::with_local(tensor.detach(), local.to(device));
  return full_tensor(placed).cpu();
}

}  // namespace tessera
