// ShardedTensors of a state dict for models that are not under FSDP1: gathered one after the other, each dropped once
// this rank has cut its parts.
//
//   const auto incoming = ShardedValues::of(state_dict);       // COLLECTIVE; null: there are none
#pragma once

#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "tessera/state/detail/incoming_tensors.h"
#include "tessera/state/sharded_tensor.h"

namespace tessera::detail {

class ShardedValues final : public IncomingTensors {
 public:
  // Null when the dict, or a dict in it, holds none. COLLECTIVE over the group of those it holds. Error kConfig on all
  // ranks when their dicts hold different ones.
  static std::unique_ptr<ShardedValues> of(const StateDict& state_dict);

  comm::Group& group() const { return *parts_.front().value->group; }
  const StateDict& message() const override { return message_; }
  bool announces(const at::Tensor& tensor) const override { return position_.contains(tensor.unsafeGetTensorImpl()); }
  // Whether this rank's shards do.
  bool are_known_to_differ(const at::Tensor& a, const at::Tensor& b) const override;
  // Values are on the device of the shards. COLLECTIVE over the group of each; in an order that all ranks have.
  void each(c10::Device device,
            const std::function<void(const at::Tensor& announced, const at::Tensor& values)>& take) override;

 private:
  struct Part {
    std::string path;
    at::Tensor announced;
    std::shared_ptr<ShardedTensor> value;
  };
  void announce(StateDict& dict, const std::string& prefix);
  void agree() const;

  StateDict message_;
  std::vector<Part> parts_;  // by path
  std::unordered_map<const c10::TensorImpl*, size_t> position_;
};

}  // namespace tessera::detail
