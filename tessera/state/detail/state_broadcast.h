// A state dict on its way from the first rank of a group: its structure at once, then its tensors one by one.
//
//   StateBroadcast incoming(full, *group);                     // COLLECTIVE
//   plan(incoming.message());                                  // tensors with dims are on the meta device
//   incoming.each(device, [](const at::Tensor& announced, const at::Tensor& values) { ... });   // COLLECTIVE
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

#include "tessera/state/detail/incoming_tensors.h"

namespace tessera::detail {

class StateBroadcast final : public IncomingTensors {
 public:
  // `full` counts on rank 0 of the group and must outlive this. COLLECTIVE over the group. Error kShape on all ranks
  // for what no message can hold (encode_state).
  StateBroadcast(const StateDict& full, comm::Group& group);
  const StateDict& message() const override { return message_; }
  bool announces(const at::Tensor& tensor) const override { return tensor.is_meta(); }
  bool are_known_to_differ(const at::Tensor&, const at::Tensor&) const override { return false; }
  // COLLECTIVE over the group.
  void each(c10::Device device,
            const std::function<void(const at::Tensor& announced, const at::Tensor& values)>& take) override;

 private:
  comm::Group& group_;
  StateDict message_;
  std::vector<at::Tensor> announced_;
  std::vector<at::Tensor> values_;  // rank 0's, in the order of those
};

}  // namespace tessera::detail
