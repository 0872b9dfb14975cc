// Tensors of a state dict whose values come from other ranks, one tensor at a time. At most one of them is whole in
// memory in addition to the tensors that are loaded. The values come from rank 0 of a group, or, for ShardedTensors,
// from the shards of all ranks (for models that are not under FSDP1). A tensor whose values have not been received is
// announced: it is in message() as a meta tensor.
//
//   plan(incoming.message());                                  // announced tensors are on the meta device
//   incoming.receive_each(device, [](const at::Tensor& announced, const at::Tensor& values) { ... });   // COLLECTIVE
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
  // Broadcasts the structure of rank 0's dict; `full` is read on rank 0 only. COLLECTIVE over the group. Error kShape
  // on all ranks for a value that a message cannot hold (encode_state) and for a meta tensor.
  static std::unique_ptr<IncomingTensors> of_first_rank(const StateDict& full, comm::Group& group);
  // Makes an IncomingTensors that receives the ShardedTensors of the dict from the shards of all ranks. Its message()
  // is the dict with a meta tensor in place of each ShardedTensor that has a process group, also in dicts inside the
  // dict. Returns null when there is no such ShardedTensor. COLLECTIVE over the group of the ShardedTensors. Error
  // kConfig on all ranks when the ranks' ShardedTensors differ in name, dtype, size or ranks.
  static std::unique_ptr<IncomingTensors> of_shards(const StateDict& state_dict);

  // The group whose ranks load the dict together.
  comm::Group& group() const { return *group_; }
  const StateDict& message() const { return message_; }
  // Returns whether `tensor` is one of the meta tensors in message() whose values come from other ranks.
  bool is_announced(const at::Tensor& tensor) const { return position_.contains(tensor.unsafeGetTensorImpl()); }
  // `a` and `b` are meta tensors of the dict that message() returns. Returns true if both stand for ShardedTensors and
  // this rank's shards of the two ShardedTensors differ. The shards are compared before any values are received.
  // Returns false for tensors whose values come from rank 0, because this rank has no shards of them to compare.
  bool are_known_to_differ(const at::Tensor& a, const at::Tensor& b) const;
  // Receives the values of the announced tensors (is_announced()), one tensor at a time, and calls `take` with each
  // announced tensor and its values. The values are on `device`, or, for a ShardedTensor, on the device of its shards.
  // COLLECTIVE over group(), and for a ShardedTensor over the tensor's own group; all ranks use the same order of
  // tensors.
  void receive_each(c10::Device device,
                    const std::function<void(const at::Tensor& announced, const at::Tensor& values)>& take) const;

 private:
  struct ReceivedTensor {
    at::Tensor announced;
    std::shared_ptr<ShardedTensor> shards = {};
    std::string path = {};   // path of the ShardedTensor in the dict
    at::Tensor values = {};  // rank 0's tensor, on rank 0 only, when there are no shards
  };
  void announce_shards(StateDict& dict, const std::string& prefix);
  void agree_on_shards() const;
  void index_tensors();

  comm::Group* group_ = nullptr;
  StateDict message_;
  std::vector<ReceivedTensor> tensors_;
  std::unordered_map<const c10::TensorImpl*, size_t> position_;  // index in tensors_ of each announced tensor
};

// Plans a load of the dict. With a `group` the tensors come from its rank 0, and without one from the shards of the
// dict's ShardedTensors. Calls `plan` with two arguments. The first is the dict, which has a meta tensor (an announced
// tensor) in place of each tensor whose values are received later. The second is the IncomingTensors `incoming`, which
// is null when the dict on this rank has all values. COLLECTIVE over the ranks that load: an exception of `plan` on one
// rank is thrown on all ranks. Returns `incoming`.
using PlanLoad = std::function<void(const StateDict& values, const IncomingTensors* incoming)>;
std::unique_ptr<IncomingTensors> plan_load(const StateDict& state_dict, comm::Group* group, const PlanLoad& plan);

// A tensor of a dict and the tensor that it is loaded into.
struct TensorCopy {
  at::Tensor source;  // the whole tensor, a DTensor laid out as the target, or an announced tensor
  at::Tensor target;
};
// Loads each source into its target with load_tensor. COLLECTIVE over the ranks of `incoming`, unless `incoming` is
// null.
void load_copies(const std::vector<TensorCopy>& copies, const IncomingTensors* incoming, c10::Device device);

}  // namespace tessera::detail
