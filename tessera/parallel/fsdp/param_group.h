// The parameters of one fully_shard call: one all-gather, one reduce-scatter, and the state between them.
//
// Sharded, they are DTensors in one flat buffer (Shards). Unsharded, they are views of one storage whose memory comes
// and goes (WholeStorage). How one becomes the other is the group's GatherPlan. Belongs to one rank.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "tessera/comm/collectives/collectives.h"
#include "tessera/parallel/data_parallel/flat_gradients.h"
#include "tessera/parallel/data_parallel/reduction_stages.h"
#include "tessera/parallel/fsdp/fixed_places.h"
#include "tessera/parallel/fsdp/fully_shard.h"
#include "tessera/parallel/fsdp/gather_plan.h"
#include "tessera/parallel/fsdp/gathered_group.h"
#include "tessera/parallel/fsdp/shards.h"
#include "tessera/parallel/fsdp/whole_storage.h"

namespace tessera {

class ParamGroup : public GatheredGroup {
 public:
  // Shards `params` (name, slots, shape, dtype and parameter are set; parameter is the whole tensor, meta included,
  // or a DTensor of tensor parallelism)
  // and shows the shards in the modules. COLLECTIVE over the shard dim of the mesh where its group is not made yet.
  // on_host: the shards and their gradients lie there, though the mesh is of accelerators.
  ParamGroup(std::vector<ShardedParam> params, MeshPtr mesh, const MixedPrecisionPolicy& policy, bool on_host = false);

  void start_unshard() override;
  void finish_unshard() override;
  void reshard() override;
  bool may_be_stale() const override { return state_ == State::kUnsharded && plan_.way != GatherWay::kAlias; }
  bool changed() const override { return shards_.replaced() || shards_.version() != gathered_version_; }
  comm::Group& ranks() const override { return shards_.group(); }
  c10::Device device() const override { return mesh()->device(); }
  void note_order() override { ordered_version_ = shards_.version(); }

  void show_whole(const std::vector<at::Tensor>& tensors) override;
  void show_shards() override;                             // the DTensors
  std::vector<at::Tensor> whole_tensors() const override;  // in order of params()
  std::vector<size_t> trainable() const override { return shards_.trainable(); }
  std::vector<at::Tensor> leaves(const std::vector<size_t>& trainable) const override;

  // COLLECTIVE over the tensor-parallel mesh of gradients that lie in another way than their parameter.
  void accumulate(const std::vector<size_t>& trainable, std::vector<at::Tensor>&& gradients) override;
  bool start_reduction() override;
  bool advance_reduction(bool at_end) override;
  void drop_gradients() override;
  int64_t accumulated_bytes() const override { return flat_gradients_.bytes(); }
  // From the next gather on the whole parameters have a place there: one in turn with others while forwards and
  // backwards free them, else one of its own.
  void fix_place(const std::shared_ptr<FixedPlaces>& places);
  void set_frees_after_forward(bool on) { frees_after_forward_ = on; }
  // Called with the parameters that have been handed gradients.
  void set_gradients_hook(GradientsHook hook) { gradients_hook_ = std::move(hook); }

  std::vector<ShardedParam>& params() { return shards_.params(); }
  Shards& shards() { return shards_; }
  const MeshPtr& mesh() const { return shards_.mesh(); }
  // The tensors that were sharded, to recognise other slots that are tied to them.
  using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  const std::vector<WeakTensor>& originals() const { return originals_; }

 private:
  void fill_whole();
  c10::DataPtr place_to_fill();  // null: none
  void give_up_gather();
  void on_joined() override;
  void open_gradients(const std::vector<size_t>& trainable, c10::ScalarType dtype);
  void bring_to_parameters(std::vector<at::Tensor>& gradients) const;
  void set_gradients(const at::Tensor& sum);
  void count(int64_t groups) { GatheredGroup::count(groups, plan_.way == GatherWay::kAlias ? 0 : plan_.whole_bytes); }

  std::vector<WeakTensor> originals_;
  GatherPlan plan_;
  Shards shards_;
  WholeStorage whole_;
  std::shared_ptr<FixedPlaces> places_;  // null: anywhere
  std::optional<size_t> place_in_turn_;
  std::optional<size_t> own_place_;
  bool frees_after_forward_ = true;
  uint64_t gathered_version_ = 0;  // of the shards, when they were gathered
  uint64_t ordered_version_ = 0;   // and up to which the gather stream comes behind the writes
  at::Tensor gathered_;
  at::Tensor input_;
  StreamMark filled_;  // behind what fills `gathered_`, or copies what is sent
  comm::Pending pending_;
  const std::optional<c10::ScalarType> reduce_dtype_;
  std::shared_ptr<comm::Group> reduces_over_;  // the ranks that gather
  FlatGradients flat_gradients_;
  std::vector<size_t> with_gradients_;  // positions in params() of what accumulates there, or is reduced
  ReductionStages reduction_;
  GradientsHook gradients_hook_;
};

}  // namespace tessera
