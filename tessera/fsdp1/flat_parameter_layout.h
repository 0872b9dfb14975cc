// The layout of an FSDP1 unit's parameters in its flat parameter, and the range of elements that each rank holds. The
// layout is pure arithmetic: no communication, and the same result on every rank.
//
//   auto layout = FlatParameterLayout::make(members, {.dtype = at::kFloat, .use_orig_params = true}, world_size);
//   at::Tensor flat = layout.flatten(parameters);            // [unpadded_numel()], alignment gaps hold 42
//   at::Tensor shard = layout.shard(flat, rank);             // [sharded_numel()], padded with zeros on the right
//   for (const auto& info : layout.shard_param_infos(rank)) ...
//
// Semantics of torch.distributed.fsdp._flat_param.FlatParamHandle (docs/design/fsdp1.md).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

namespace tessera {

// A member of the flat parameter: one original parameter.
struct FlatMember {
  std::string fqn;  // name below the unit's module, without wrapper prefixes
  std::vector<int64_t> shape;
  bool contiguous = true;             // false: the elements are stored in storage order, and views use `strides`
  std::vector<int64_t> strides = {};  // of the parameter; make() sets them for contiguous parameters
  int64_t numel = 0;                  // set by make()
  c10::ScalarType dtype = c10::ScalarType::Float;
  c10::Device device = c10::kCPU;
  bool requires_grad = true;
};

// A further name of a shared parameter, which is stored once, under its first name.
struct SharedFlatMember {
  std::string fqn;
  std::string primary_fqn;
};

struct FlatParameterOptions {
  bool use_orig_params = false;
  // Dtype of forward and backward (MixedPrecision.param_dtype); Undefined: the dtype of the members. With
  // use_orig_params each member starts at a multiple of 16 bytes in this dtype.
  c10::ScalarType compute_dtype = c10::ScalarType::Undefined;
};

// The part of one member in a rank's shard. Positions count elements.
struct ShardParamInfo {
  bool in_shard = false;
  int64_t offset_in_shard = 0;  // of the piece in the shard; this and the later fields are set only when in_shard
  int64_t numel_in_shard = 0;
  int64_t intra_param_start = 0;  // of the piece in the flattened member
  int64_t intra_param_end = 0;    // inclusive, as upstream
};

class FlatParameterLayout {
 public:
  // Makes the layout of the flat parameter of `members`, which is sharded over `world_size` ranks. Errors kShape, with
  // PyTorch's messages where PyTorch has the check: no members; members of different dtypes or devices; dtypes that are
  // not floating point; mixed requires_grad without use_orig_params; strides that leave gaps or overlap (PyTorch
  // flattens such members wrongly).
  static FlatParameterLayout make(std::vector<FlatMember> members, std::vector<SharedFlatMember> shared,
                                  const FlatParameterOptions& options, int64_t world_size);

  const std::vector<FlatMember>& members() const { return members_; }
  const std::vector<SharedFlatMember>& shared() const { return shared_; }
  c10::ScalarType dtype() const { return dtype_; }
  bool use_orig_params() const { return use_orig_params_; }
  bool requires_grad() const { return requires_grad_; }  // whether any member requires a gradient
  int64_t world_size() const { return world_size_; }
  // Sizes of the members and of the padding between them, in order; is_padding() marks the padding.
  const std::vector<int64_t>& numels_with_padding() const { return numels_with_padding_; }
  const std::vector<bool>& is_padding() const { return is_padding_; }
  int64_t offset(size_t member) const { return offsets_[member]; }  // of a member in the flat parameter
  // Number of elements with the padding between members, without the padding at the end of the shards.
  int64_t unpadded_numel() const { return unpadded_numel_; }
  int64_t sharded_numel() const { return sharded_numel_; }  // of every rank's shard, with its padding
  int64_t padded_numel() const { return sharded_numel_ * world_size_; }
  int64_t shard_padding(int64_t rank) const;  // zeros at the end of the rank's shard
  std::vector<ShardParamInfo> shard_param_infos(int64_t rank) const;
  std::vector<ShardParamInfo> whole_param_infos() const;  // for a rank with the whole flat parameter (NO_SHARD)

  // Returns a flat tensor of unpadded_numel() elements. `tensors` has one tensor per member, of the member's shape and
  // any strides. All have one dtype, which may differ from dtype(). Undefined tensors become zeros; the padding between
  // members is filled with 42.
  at::Tensor flatten(const std::vector<at::Tensor>& tensors) const;
  // Returns the members as views of a flat tensor of unpadded_numel() or padded_numel() elements, with the members'
  // shapes and strides.
  std::vector<at::Tensor> unflatten(const at::Tensor& flat) const;
  // Returns a copy of the rank's shard, of sharded_numel() elements. `flat` has unpadded_numel() elements.
  at::Tensor shard(const at::Tensor& flat, int64_t rank) const;

 private:
  std::vector<ShardParamInfo> param_infos(int64_t begin, int64_t end) const;
  at::Tensor member_view(const at::Tensor& flat, size_t member) const;

  std::vector<FlatMember> members_;
  std::vector<SharedFlatMember> shared_;
  std::vector<int64_t> numels_with_padding_;
  std::vector<bool> is_padding_;
  std::vector<int64_t> offsets_;
  c10::ScalarType dtype_ = c10::ScalarType::Float;
  bool use_orig_params_ = false;
  bool requires_grad_ = false;
  int64_t world_size_ = 1;
  int64_t unpadded_numel_ = 0;
  int64_t sharded_numel_ = 0;
};

}  // namespace tessera
