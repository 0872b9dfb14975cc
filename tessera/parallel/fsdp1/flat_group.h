// The parameters of one wrap_fsdp1 call: one flat parameter, of which this rank holds a range, gathered for forward and
// backward and freed after.
//
// Sharded, users see that range: as one tensor, or as one 1-d piece a member (use_orig_params). Unsharded, the modules'
// members are views of one storage whose memory comes and goes. Without sharding they are views of the flat parameter.
// Belongs to one rank.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "tessera/comm/collectives/collectives.h"
#include "tessera/parallel/detail/gathered_group.h"
#include "tessera/parallel/detail/sharded_param.h"
#include "tessera/parallel/detail/whole_storage.h"
#include "tessera/parallel/fsdp1/flat_parameter_layout.h"
#include "tessera/parallel/fsdp1/flat_reducer.h"

namespace tessera::parallel {

// A parameter on its way into a flat one.
struct FlatSource {
  FlatMember member;
  at::Tensor tensor;
  std::vector<SlotRef> slots;  // more than one: shared
};

inline constexpr const char* kFlatParam = "_flat_param";

class FlatGroup : public GatheredGroup {
 public:
  // Flattens what `layout` was made of, keeps this rank's part, and shows that in the modules; without
  // use_orig_params as a parameter of `module`. No communication.
  FlatGroup(nn::Module& module, std::shared_ptr<comm::Group> group, bool sharded, FlatParameterLayout layout,
            std::vector<FlatSource> sources);
  ~FlatGroup() override;

  const FlatParameterLayout& layout() const { return layout_; }
  const std::shared_ptr<comm::Group>& group() const { return group_; }
  bool sharded() const { return sharded_; }
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
  bool may_be_stale() const override { return sharded_ && state_ == State::kUnsharded; }
  bool changed() const override { return version() != gathered_version_; }
  comm::Group& ranks() const override { return *group_; }

  void show_whole(const std::vector<at::Tensor>& tensors) override;
  void show_shards() override;
  std::vector<at::Tensor> whole_tensors() const override;  // in order of layout().members()
  std::vector<size_t> trainable() const override;
  std::vector<at::Tensor> leaves(const std::vector<size_t>& trainable) const override;

  void accumulate(const std::vector<size_t>& trainable, std::vector<at::Tensor>&& gradients) override;
  bool start_reduction() override;
  bool advance_reduction() override;
  void drop_gradients() override { reducer_.drop(); }
  int64_t accumulated_bytes() const override { return reducer_.bytes(); }

 private:
  struct Member {
    std::vector<at::Tensor*> shown;  // what forward reads
    std::vector<SlotRef> slots;      // with use_orig_params
    at::Tensor piece;                // with use_orig_params: the leaf
    at::Tensor whole;                // of the storage; without sharding undefined
  };
  void make_pieces(const std::vector<FlatSource>& sources);
  void make_flat_parameter(nn::Module& module, const std::vector<FlatSource>& sources);
  void make_whole_views();
  void check_not_replaced() const;
  void free_whole();
  void set_gradient(const at::Tensor& leaf, const at::Tensor& values) const;
  uint64_t version() const;
  int64_t whole_bytes() const;
  void on_joined() override;

  std::shared_ptr<comm::Group> group_;
  bool sharded_;
  FlatParameterLayout layout_;
  std::vector<WeakTensor> originals_;
  at::Tensor shard_;
  at::Tensor flat_;        // the leaf without use_orig_params, over shard_
  at::Tensor flat_shown_;  // what its slot would have forward read
  SlotRef flat_slot_{};
  std::vector<Member> members_;
  WholeStorage whole_;
  FlatReducer reducer_;
  uint64_t gathered_version_ = 0;
  comm::Pending pending_;
};

// Whether a tensor lies in the flat parameter of some unit of this process.
bool lies_in_flat_parameter(const at::Tensor& tensor);

}  // namespace tessera::parallel
