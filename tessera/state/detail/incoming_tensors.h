// Tensors of a state dict that come one by one, so that no more than one of them is whole beside what is loaded: from
// the first rank (state_broadcast.h), or from the shards of all (sharded_values.h).
//
//   plan(incoming.message());                                  // tensors that are still to come are on the meta device
//   incoming.each(device, [](const at::Tensor& announced, const at::Tensor& values) { ... });   // COLLECTIVE
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <vector>

#include "tessera/comm/group/group.h"
#include "tessera/state/state_value.h"

namespace tessera::detail {

class IncomingTensors {
 public:
  virtual ~IncomingTensors() = default;
  virtual const StateDict& message() const = 0;
  // Whether it is a tensor of the message that is still to come.
  virtual bool announces(const at::Tensor& tensor) const = 0;
  // Of two announced tensors, before they come.
  virtual bool are_known_to_differ(const at::Tensor& a, const at::Tensor& b) const = 0;
  // `announced` is the tensor of the message. COLLECTIVE over the ranks that take part.
  virtual void each(c10::Device device,
                    const std::function<void(const at::Tensor& announced, const at::Tensor& values)>& take) = 0;
};

// Plans a load of the dict, or of the message of its tensors that are still to come: from rank 0 of `group`, where
// there is one, else from the shards of ShardedTensors. `incoming` is null for tensors that are all here. COLLECTIVE
// over the ranks that take part: what `plan` throws on one of them is thrown on all. Returns `incoming`.
using PlanLoad = std::function<void(const StateDict& values, const IncomingTensors* incoming)>;
std::unique_ptr<IncomingTensors> plan_load(const StateDict& state_dict, comm::Group* group, const PlanLoad& plan);

// One tensor of a dict and where it goes.
struct TensorCopy {
  at::Tensor source;  // whole, or lying as the target; one of the message when it is still to come
  at::Tensor target;
};
// load_tensor for each. COLLECTIVE over the ranks of `incoming`, unless that is null.
void load_copies(const std::vector<TensorCopy>& copies, IncomingTensors* incoming, c10::Device device);

}  // namespace tessera::detail
