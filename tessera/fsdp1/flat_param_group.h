// One FSDP1 unit: the parameters of one wrap_fsdp1 call. They form one flat parameter, of which this rank holds a range
// of elements (the shard). The flat parameter is all-gathered for forward and backward and freed afterwards.
//
// While the unit is sharded, parameters() of the module lists the shard as one tensor, or, with use_orig_params, as one
// 1-d piece per original parameter. While it is unsharded, the modules' at::Tensor fields are views of one storage. Its
// memory is allocated for each gather and freed after the last use. On an accelerator the memory belongs to the gather
// stream, which waits for the last use before the memory is freed (CommStreams::retire). Without sharding, the fields
// are views of the flat parameter itself, unless forward computes in another dtype; then they are views of a cast copy.
// A FlatParamGroup is used by one rank only.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <vector>

#include "tessera/comm/collectives/collectives.h"
#include "tessera/fsdp1/flat_grad_reducer.h"
#include "tessera/fsdp1/flat_parameter_layout.h"
#include "tessera/parallel/fsdp/sharded_param.h"
#include "tessera/parallel/fsdp/sharded_param_group.h"
#include "tessera/parallel/fsdp/unsharded_storage.h"

namespace tessera {

// A parameter that is to become part of a flat parameter.
struct OriginalParam {
  FlatMember member;
  at::Tensor tensor;
  std::vector<SlotRef> slots;  // all slots with this tensor; more than one for a shared parameter
};

struct FlatParamGroupOptions {
  bool sharded = true;
  std::shared_ptr<comm::Group> replicas = {};  // see FlatGradReducer::Options
  // Dtype of forward and backward; Undefined: the layout's dtype.
  c10::ScalarType compute_dtype = c10::ScalarType::Undefined;
  c10::ScalarType reduce_dtype = c10::ScalarType::Undefined;  // dtype of the reduction; Undefined: the layout's dtype
  bool keep_low_precision_grads = false;
};

inline constexpr const char* kFlatParam = "_flat_param";

class FlatParamGroup : public ShardedParamGroup {
 public:
  // Flattens `original_params`, from which `layout` was made, and keeps this rank's shard. With use_orig_params each
  // original parameter's slot then has the parameter's piece of the shard; otherwise the slots are replaced by one new
  // parameter of `module`, the shard. No communication.
  FlatParamGroup(nn::Module& module, std::shared_ptr<comm::Group> group, const FlatParamGroupOptions& options,
                 FlatParameterLayout layout, std::vector<OriginalParam> original_params);
  ~FlatParamGroup() override;

  const FlatParameterLayout& layout() const { return layout_; }
  const std::shared_ptr<comm::Group>& group() const { return group_; }
  bool sharded() const { return options_.sharded; }
  // The shard and all_leaves() share one version counter of autograd. A write to either, such as a load, increments it,
  // and optimizers read it to notice that other code has written a parameter.
  const at::Tensor& shard() const { return shard_; }
  std::vector<ShardParamInfo> param_infos() const;  // the pieces of the members on this rank
  // The tensors that the optimizer sees: one piece per member with use_orig_params, otherwise the flat parameter.
  std::vector<at::Tensor> all_leaves() const;
  // The parameters that were flattened, as weak pointers.
  using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  const std::vector<WeakTensor>& originals() const { return originals_; }

  void start_unshard() override;
  void finish_unshard() override;
  void reshard() override;
  bool may_be_stale() const override { return has_unsharded_storage() && state_ == State::kUnsharded; }
  bool changed() const override { return version() != gathered_version_; }
  comm::Group& ranks() const override { return *group_; }
  c10::Device device() const override { return layout_.members()[0].device; }
  void mark_shards_ordered() override { ordered_version_ = version(); }

  void use_unsharded_params(const std::vector<at::Tensor>& tensors) override;
  void use_sharded_params() override;
  std::vector<at::Tensor> unsharded_tensors() const override;  // in order of layout().members()
  std::vector<size_t> trainable() const override;
  std::vector<at::Tensor> leaves(const std::vector<size_t>& trainable) const override;

  void accumulate(const std::vector<size_t>& trainable, std::vector<at::Tensor>&& gradients) override;
  bool start_reduction() override;
  bool advance_reduction(bool at_end) override;
  void drop_gradients() override { reducer_.discard(); }
  int64_t accumulated_bytes() const override { return reducer_.bytes(); }

  // gather_full_params() replaces the modules' parameters by the whole original parameters in full precision, in new
  // memory, until restore_sharded_params(). On ranks with `on_this_rank` = false the parameters stay unchanged, but
  // forward is refused. `gradients` (only with use_orig_params) also sets the whole grad() of each parameter that has a
  // gradient on any rank. COLLECTIVE over the group.
  struct SummonMode {
    bool on_this_rank = true;
    bool on_cpu = false;
    bool gradients = false;
  };
  void gather_full_params(const SummonMode& mode);
  // Restores the sharded parameters. With `writeback` the present values of the whole parameters are also copied into
  // the shard and, if SummonMode::gradients was set, the gradients of the whole parameters into the gradients of the
  // sharded parameters (Member::piece). Error kShape if a whole parameter was replaced by a tensor of another shape;
  // the sharded parameters are then restored with their old values. No communication.
  void restore_sharded_params(bool writeback);

 private:
  struct Member {
    std::vector<at::Tensor*> shown;  // the module members that forward reads
    std::vector<SlotRef> slots;      // only with use_orig_params
    at::Tensor piece;                // only with use_orig_params: the leaf in this rank's shard
    at::Tensor whole;                // view of the gathered storage; undefined without such a storage
  };
  // A parameter slot that the flat parameter replaced. The module's at::Tensor field stays and is registered with
  // add_unregistered_member().
  struct RemovedSlot {
    nn::Module* owner;
    size_t index;
    nn::ParameterSlot slot;
    size_t member;
  };
  struct SummonedParams {
    SummonMode mode;
    std::vector<at::Tensor> shown;  // the whole parameter of each member
    std::optional<nn::ParameterSlot> flat_slot = {};
  };
  // Whether forward reads a separate storage (gathered or cast) and not the shard.
  bool has_unsharded_storage() const { return options_.sharded || compute_dtype() != layout_.dtype(); }
  c10::ScalarType compute_dtype() const {
    return options_.compute_dtype == c10::ScalarType::Undefined ? layout_.dtype() : options_.compute_dtype;
  }
  std::vector<at::Tensor> full_gradients() const;
  void swap_full_in();
  void swap_full_out();
  void make_pieces(const std::vector<OriginalParam>& original_params);
  void make_flat_parameter(nn::Module& module, const std::vector<OriginalParam>& original_params);
  void remove_slots(const std::vector<OriginalParam>& original_params);
  void make_unsharded_views();
  void check_not_replaced() const;
  at::Tensor all_gather_input(const at::Tensor& gathered);
  void free_unsharded();
  void set_gradient(const at::Tensor& leaf, const at::Tensor& sum) const;
  uint64_t version() const;
  int64_t unsharded_bytes() const;
  void on_joined() override;

  std::shared_ptr<comm::Group> group_;
  FlatParamGroupOptions options_;
  FlatParameterLayout layout_;
  std::vector<WeakTensor> originals_;
  at::Tensor shard_;
  at::Tensor flat_;        // the leaf without use_orig_params; its memory is shard_
  at::Tensor flat_shown_;  // the tensor in the flat parameter's slot
  SlotRef flat_slot_{};
  std::vector<Member> members_;
  UnshardedStorage unsharded_storage_;
  FlatGradReducer reducer_;
  uint64_t gathered_version_ = 0;           // version of the shard when it was gathered
  uint64_t ordered_version_ = 0;            // version of the shard up to which the gather stream waits for the writes
  at::Tensor cast_shard_;                   // cast copy of the shard while it is sent
  DeviceEvent cast_done_;                   // event after the cast
  std::vector<RemovedSlot> removed_slots_;  // sorted by module and index
  std::optional<SummonedParams> summoned_;
  comm::PendingCollective pending_;
};

// Returns whether a tensor is part of the flat parameter of any unit in this process.
bool is_in_flat_parameter(const at::Tensor& tensor);

}  // namespace tessera
