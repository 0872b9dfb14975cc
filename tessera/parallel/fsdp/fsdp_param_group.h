// The parameter group of one fully_shard call. Its parameters are gathered by one all-gather, and their gradients are
// reduced by one reduce-scatter.
//
// Sharded parameters are DTensors in one flat buffer (FlatShards). Unsharded parameters are views of one storage whose
// memory is allocated and freed (UnshardedStorage). The group's GatherPlan says how the shards become the unsharded
// parameters. Belongs to one rank.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "tessera/comm/collectives/collectives.h"
#include "tessera/parallel/data_parallel/flat_gradients.h"
#include "tessera/parallel/data_parallel/reduction_stages.h"
#include "tessera/parallel/fsdp/fixed_address_buffers.h"
#include "tessera/parallel/fsdp/fully_shard.h"
#include "tessera/parallel/fsdp/gather_plan.h"
#include "tessera/parallel/fsdp/sharded_param_group.h"
#include "tessera/parallel/fsdp/shards.h"
#include "tessera/parallel/fsdp/unsharded_storage.h"

namespace tessera {

class FsdpParamGroup : public ShardedParamGroup {
 public:
  // Shards `params` and sets the modules' members to the shards. The caller must have set name, slots, shape, dtype and
  // parameter of each ShardedParam; ShardedParam::parameter is then still the unsharded tensor, possibly on the meta
  // device, or a DTensor of tensor parallelism. on_host: the shards and their gradients are kept in host memory,
  // although the mesh's device is an accelerator. COLLECTIVE over the shard dim of the mesh when its process group does
  // not exist yet.
  FsdpParamGroup(std::vector<ShardedParam> params, MeshPtr mesh, const MixedPrecisionPolicy& policy,
                 bool on_host = false);

  void start_unshard() override;
  void finish_unshard() override;
  void reshard() override;
  bool may_be_stale() const override { return state_ == State::kUnsharded && plan_.method != UnshardMethod::kAlias; }
  bool changed() const override { return shards_.replaced() || shards_.version() != gathered_version_; }
  comm::Group& ranks() const override { return shards_.group(); }
  c10::Device device() const override { return mesh()->device(); }
  void mark_shards_ordered() override { ordered_version_ = shards_.version(); }

  void use_unsharded_params(const std::vector<at::Tensor>& tensors) override;
  void use_sharded_params() override;                          // the DTensors
  std::vector<at::Tensor> unsharded_tensors() const override;  // in order of params()
  std::vector<size_t> trainable() const override { return shards_.trainable(); }
  std::vector<at::Tensor> leaves(const std::vector<size_t>& trainable) const override;

  // Redistributes gradients of tensor-parallel parameters to the placements of their parameters, and adds all gradients
  // to flat_gradients_. COLLECTIVE over the tensor-parallel mesh for gradients whose placements differ from those of
  // their parameter.
  void accumulate(const std::vector<size_t>& trainable, std::vector<at::Tensor>&& gradients) override;
  bool start_reduction() override;
  bool advance_reduction(bool at_end) override;
  void drop_gradients() override;
  int64_t accumulated_bytes() const override { return flat_gradients_.bytes(); }
  // From the next gather on, the unsharded parameters are stored at a fixed address in a buffer from `buffers`. A group
  // whose parameters are freed after forward and after backward uses one of two shared buffers, which are assigned to
  // such groups alternately. Every other group has a buffer of its own. No effect when the unsharded parameters are the
  // shards themselves.
  void use_fixed_buffer(const std::shared_ptr<FixedAddressBuffers>& buffers);
  void set_frees_after_forward(bool on) { frees_after_forward_ = on; }
  // Sets a function that is called after a reduction, with the parameters of the group whose gradients have been
  // written.
  void set_gradients_hook(GradientsHook hook) { gradients_hook_ = std::move(hook); }

  std::vector<ShardedParam>& params() { return shards_.params(); }
  FlatShards& shards() { return shards_; }
  const MeshPtr& mesh() const { return shards_.mesh(); }
  // Weak references to the parameters before sharding. They show whether a slot outside the group is tied to one of
  // these parameters.
  using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  const std::vector<WeakTensor>& originals() const { return originals_; }

 private:
  void allocate_unsharded();
  c10::DataPtr acquire_fixed_buffer();  // null: no fixed buffer is free or wanted
  void abandon_gather();
  void on_joined() override;
  void open_gradients(const std::vector<size_t>& trainable, c10::ScalarType dtype);
  void redistribute_gradients(std::vector<at::Tensor>& gradients) const;
  void set_gradients(const at::Tensor& sum);
  void count(int64_t groups) {
    ShardedParamGroup::count(groups, plan_.method == UnshardMethod::kAlias ? 0 : plan_.unsharded_bytes);
  }

  std::vector<WeakTensor> originals_;
  GatherPlan plan_;
  FlatShards shards_;
  UnshardedStorage whole_;
  std::shared_ptr<FixedAddressBuffers> fixed_buffers_;  // null: any address
  std::optional<size_t> shared_buffer_;
  std::optional<size_t> own_buffer_;
  bool frees_after_forward_ = true;
  uint64_t gathered_version_ = 0;  // version of the shards at the last gather
  uint64_t ordered_version_ = 0;   // version of the shards whose writes come before later gather-stream launches
  at::Tensor gathered_;
  at::Tensor input_;
  DeviceEvent filled_;  // after the writes to `gathered_`, or the copy that is sent
  comm::PendingCollective pending_;
  const std::optional<c10::ScalarType> reduce_dtype_;
  std::shared_ptr<comm::Group> reduce_group_;  // the ranks of shards_.group(); another process group on an accelerator
  FlatGradients flat_gradients_;
  std::vector<size_t> gradient_params_;  // positions in params() of the gradients in flat_gradients_
  ReductionStages reduction_;
  GradientsHook gradients_hook_;
};

}  // namespace tessera
