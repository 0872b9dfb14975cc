// Tensors of a state dict that come one by one, so that no more than one of them is whole beside what is loaded: from
// the first rank of a group, or, for ShardedTensors and models that are not under FSDP1, from the shards of all ranks.
//
//   plan(incoming.message());                                  // tensors that are still to come are on the meta device
//   incoming.each(device, [](const at::Tensor& announced, const at::Tensor& values) { ... });   // COLLECTIVE
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "tessera/comm/group/group.h"
#include "tessera/state/state_value.h"

namespace tessera::detail {

class IncomingTensors {
 public:
  // The dict of rank 0 of the group, whose structure is sent at once; `full` counts there only. COLLECTIVE over the
  // group. Error kShape on all ranks for what no message can hold (encode_state).
  static std::unique_ptr<IncomingTensors> of_first_rank(const StateDict& full, comm::Group& group);
  // Null when the dict, or a dict in it, holds no ShardedTensors. COLLECTIVE over the group of those it holds. Error
  // kConfig on all ranks when their dicts hold different ones.
  static std::unique_ptr<IncomingTensors> of_shards(const StateDict& state_dict);

  // The ranks that take part.
  comm::Group& group() const { return *group_; }
  const StateDict& message() const { return message_; }
  // Whether it is a tensor of the message that is still to come.
  bool announces(const at::Tensor& tensor) const { return position_.contains(tensor.unsafeGetTensorImpl()); }
  // Of two announced tensors, before they come: whether this rank's shards of them differ.
  bool are_known_to_differ(const at::Tensor& a, const at::Tensor& b) const;
  // `announced` is the tensor of the message; values are on the device, or on that of the shards. COLLECTIVE over the
  // ranks that take part, for ShardedTensors over the group of each, in an order that all ranks have.
  void each(c10::Device device,
            const std::function<void(const at::Tensor& announced, const at::Tensor& values)>& take) const;

 private:
  struct Part {
    at::Tensor announced;
    std::shared_ptr<ShardedTensor> shards = {};
    std::string path = {};   // of shards
    at::Tensor values = {};  // without shards, on the first rank
  };
  void announce_shards(StateDict& dict, const std::string& prefix);
  void agree_on_shards() const;
  void index_parts();

  comm::Group* group_ = nullptr;
  StateDict message_;
  std::vector<Part> parts_;
  std::unordered_map<const c10::TensorImpl*, size_t> position_;  // of each announced tensor in parts_
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
void load_copies(const std::vector<TensorCopy>& copies, const IncomingTensors* incoming, c10::Device device);

}  // namespace tessera::detail
