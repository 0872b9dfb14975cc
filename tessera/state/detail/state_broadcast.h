// A state dict on its way from the first rank of a group: its structure at once, then its tensors one by one.
//
//   StateBroadcast incoming(full, *group);                     // COLLECTIVE
//   plan(incoming.message());                                  // tensors with dims are on the meta device
//   incoming.each(device, [](const at::Tensor& announced, const at::Tensor& values) { ... });   // COLLECTIVE
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

#include "tessera/comm/group/group.h"
#include "tessera/state/state_value.h"

namespace tessera::detail {

class StateBroadcast {
 public:
  // `full` counts on rank 0 of the group and must outlive this. COLLECTIVE over the group. Error kShape on all ranks
  // for what no message can hold (encode_state).
  StateBroadcast(const StateDict& full, comm::Group& group);
  const StateDict& message() const { return message_; }
  // `announced` is the tensor of the message. COLLECTIVE over the group.
  void each(c10::Device device, const std::function<void(const at::Tensor& announced, const at::Tensor& values)>& take);

 private:
  comm::Group& group_;
  StateDict message_;
  std::vector<at::Tensor> announced_;
  std::vector<at::Tensor> values_;  // rank 0's, in the order of those
};

// One tensor of a dict and where it goes.
struct TensorCopy {
  at::Tensor source;  // whole, or lying as the target; one of the message when it is still to come
  at::Tensor target;
};
// load_tensor for each. COLLECTIVE over the group of `incoming`, unless that is null.
void load_copies(const std::vector<TensorCopy>& copies, StateBroadcast* incoming, c10::Device device);

}  // namespace tessera::detail
