// The parameters of one wrap_fsdp1 call: one flat parameter, of which this rank holds a range, gathered for forward and
// backward and freed after.
//
// Sharded, users see that range: as one tensor, or as one 1-d piece a member (use_orig_params). Unsharded, the modules'
// members are views of one storage whose memory comes and goes: on an accelerator that of the gather stream, which
// comes behind its last use before it is freed (CommStreams::retire). Without sharding they are views of the flat
// parameter, unless forward computes in another dtype than that. Belongs to one rank.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <vector>

#include "tessera/comm/collectives/collectives.h"
#include "tessera/fsdp1/flat_parameter_layout.h"
#include "tessera/fsdp1/flat_reducer.h"
#include "tessera/parallel/fsdp/gathered_group.h"
#include "tessera/parallel/fsdp/sharded_param.h"
#include "tessera/parallel/fsdp/whole_storage.h"

namespace tessera {

// A parameter on its way into a flat one.
struct FlatSource {
  FlatMember member;
  at::Tensor tensor;
  std::vector<SlotRef> slots;  // more than one: shared
};

struct FlatGroupOptions {
  bool sharded = true;
  std::shared_ptr<comm::Group> replicas = {};                  // FlatReducer::Options
  c10::ScalarType compute_dtype = c10::ScalarType::Undefined;  // of forward and backward; Undefined: the layout's
  c10::ScalarType reduce_dtype = c10::ScalarType::Undefined;   // as above
  bool keep_low_precision_grads = false;
};

inline constexpr const char* kFlatParam = "_flat_param";

class FlatGroup : public GatheredGroup {
 public:
  // Flattens what `layout` was made of, keeps this rank's part, and shows that in the modules; without
  // use_orig_params as a parameter of `module`. No communication.
  FlatGroup(nn::Module& module, std::shared_ptr<comm::Group> group, const FlatGroupOptions& options,
            FlatParameterLayout layout, std::vector<FlatSource> sources);
  ~FlatGroup() override;

  const FlatParameterLayout& layout() const { return layout_; }
  const std::shared_ptr<comm::Group>& group() const { return group_; }
  bool sharded() const { return options_.sharded; }
  // It and the leaves have one version counter, which loads of it bump and optimizers look at.
  const at::Tensor& shard() const { return shard_; }
  std::vector<ShardParamInfo> param_infos() const;  // of this rank
  // What the optimizer sees, one a member or just one. And the tensors that were flattened.
  std::vector<at::Tensor> all_leaves() const;
  using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  const std::vector<WeakTensor>& originals() const { return originals_; }

  void start_unshard() override;
  void finish_unshard() override;
  void reshard() override;
  bool may_be_stale() const override { return has_whole() && state_ == State::kUnsharded; }
  bool changed() const override { return version() != gathered_version_; }
  comm::Group& ranks() const override { return *group_; }
  c10::Device device() const override { return layout_.members()[0].device; }
  void note_order() override { ordered_version_ = version(); }

  void show_whole(const std::vector<at::Tensor>& tensors) override;
  void show_shards() override;
  std::vector<at::Tensor> whole_tensors() const override;  // in order of layout().members()
  std::vector<size_t> trainable() const override;
  std::vector<at::Tensor> leaves(const std::vector<size_t>& trainable) const override;

  void accumulate(const std::vector<size_t>& trainable, std::vector<at::Tensor>&& gradients) override;
  bool start_reduction() override;
  bool advance_reduction(bool at_end) override;
  void drop_gradients() override { reducer_.drop(); }
  int64_t accumulated_bytes() const override { return reducer_.bytes(); }

  // Between the two, the modules have their original parameters in full precision, in memory of their own, as
  // parameters(); elsewhere than `here` nothing changes but that forward is refused. With `gradients` (of
  // use_orig_params), their gradients too, of those that any rank has one for. COLLECTIVE over the group.
  struct ShowFull {
    bool here = true;
    bool on_cpu = false;
    bool gradients = false;
  };
  void show_full(const ShowFull& how);
  // writeback: what they hold now becomes the shard, and the gradients' pieces. Error kShape, with the shards shown and
  // unchanged, for a parameter that was replaced by one of another shape. No communication.
  void hide_full(bool writeback);

 private:
  struct Member {
    std::vector<at::Tensor*> shown;  // what forward reads
    std::vector<SlotRef> slots;      // with use_orig_params
    at::Tensor piece;                // with use_orig_params: the leaf
    at::Tensor whole;                // of the storage; without sharding undefined
  };
  // The slot that a flat parameter has taken away; its member is noted with add_unregistered_member().
  struct RemovedSlot {
    nn::Module* owner;
    size_t index;
    nn::ParameterSlot slot;
    size_t member;
  };
  struct Full {
    ShowFull how;
    std::vector<at::Tensor> shown;  // of each member
    std::optional<nn::ParameterSlot> flat_slot = {};
  };
  // Whether forward reads a storage of its own, not the shard.
  bool has_whole() const { return options_.sharded || compute_dtype() != layout_.dtype(); }
  c10::ScalarType compute_dtype() const {
    return options_.compute_dtype == c10::ScalarType::Undefined ? layout_.dtype() : options_.compute_dtype;
  }
  std::vector<at::Tensor> full_gradients() const;
  void swap_full_in();
  void swap_full_out();
  void make_pieces(const std::vector<FlatSource>& sources);
  void make_flat_parameter(nn::Module& module, const std::vector<FlatSource>& sources);
  void remove_slots(const std::vector<FlatSource>& sources);
  void make_whole_views();
  void check_not_replaced() const;
  at::Tensor to_send(const at::Tensor& gathered);
  void free_whole();
  void set_gradient(const at::Tensor& leaf, const at::Tensor& sum) const;
  uint64_t version() const;
  int64_t whole_bytes() const;
  void on_joined() override;

  std::shared_ptr<comm::Group> group_;
  FlatGroupOptions options_;
  FlatParameterLayout layout_;
  std::vector<WeakTensor> originals_;
  at::Tensor shard_;
  at::Tensor flat_;        // the leaf without use_orig_params, over shard_
  at::Tensor flat_shown_;  // what its slot would have forward read
  SlotRef flat_slot_{};
  std::vector<Member> members_;
  WholeStorage whole_;
  FlatReducer reducer_;
  uint64_t gathered_version_ = 0;           // of the shard, when it was gathered
  uint64_t ordered_version_ = 0;            // and up to which the gather stream comes behind the writes
  at::Tensor cast_shard_;                   // that is on its way
  StreamMark filled_;                       // behind what casts
  std::vector<RemovedSlot> removed_slots_;  // in order
  std::optional<Full> full_;
  comm::Pending pending_;
};

// Whether a tensor lies in the flat parameter of some unit of this process.
bool lies_in_flat_parameter(const at::Tensor& tensor);

}  // namespace tessera
