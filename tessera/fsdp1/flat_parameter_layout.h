// How the parameters of an FSDP1 unit lie in its flat parameter, and which part of that each rank holds. Arithmetic
// only: no communication, the same on every rank.
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

// A parameter that takes space in the flat one.
struct FlatMember {
  std::string fqn;  // from the module of the unit, without wrapper prefixes
  std::vector<int64_t> shape;
  bool contiguous = true;             // otherwise it lies in storage order and is read back with `strides`
  std::vector<int64_t> strides = {};  // of the parameter; make() sets those of contiguous ones
  int64_t numel = 0;                  // make() sets it
  c10::ScalarType dtype = c10::ScalarType::Float;
  c10::Device device = c10::kCPU;
  bool requires_grad = true;
};

// A name of a parameter that has a place already under another one.
struct SharedFlatMember {
  std::string fqn;
  std::string primary_fqn;
};

struct FlatParameterOptions {
  bool use_orig_params = false;
  // Of forward and backward (MixedPrecision.param_dtype); Undefined: the members' own. Sets the alignment.
  c10::ScalarType compute_dtype = c10::ScalarType::Undefined;
};

// What of one member is in the shard of a rank. Positions count elements.
struct ShardParamInfo {
  bool in_shard = false;
  int64_t offset_in_shard = 0;  // of the piece in the shard; this and the rest only when in_shard
  int64_t numel_in_shard = 0;
  int64_t intra_param_start = 0;  // of the piece in the flattened member
  int64_t intra_param_end = 0;    // inclusive, as upstream
};

class FlatParameterLayout {
 public:
  // Errors kShape, upstream's texts among them: no members, dtypes or devices that differ, integers, mixed
  // requires_grad unless use_orig_params; also strides that leave gaps or overlap, which upstream flattens wrongly.
  static FlatParameterLayout make(std::vector<FlatMember> members, std::vector<SharedFlatMember> shared,
                                  const FlatParameterOptions& options, int64_t world_size);

  const std::vector<FlatMember>& members() const { return members_; }
  const std::vector<SharedFlatMember>& shared() const { return shared_; }
  c10::ScalarType dtype() const { return dtype_; }
  bool use_orig_params() const { return use_orig_params_; }
  bool requires_grad() const { return requires_grad_; }  // of any member
  int64_t world_size() const { return world_size_; }
  // Members and the gaps between them, in order; is_padding says which is which.
  const std::vector<int64_t>& numels_with_padding() const { return numels_with_padding_; }
  const std::vector<bool>& is_padding() const { return is_padding_; }
  int64_t offset(size_t member) const { return offsets_[member]; }  // of a member in the flat parameter
  int64_t unpadded_numel() const { return unpadded_numel_; }        // with alignment gaps, without shard padding
  int64_t sharded_numel() const { return sharded_numel_; }          // of every rank's shard, padded
  int64_t padded_numel() const { return sharded_numel_ * world_size_; }
  int64_t shard_padding(int64_t rank) const;  // zeros at the end of its shard
  std::vector<ShardParamInfo> shard_param_infos(int64_t rank) const;
  std::vector<ShardParamInfo> whole_param_infos() const;  // of a rank that holds everything (NO_SHARD)

  // One tensor a member, each of its shape, in whatever strides; undefined ones count as zeros. Alignment gaps hold 42.
  // Any dtype, all alike.
  at::Tensor flatten(const std::vector<at::Tensor>& tensors) const;
  // The members of a flat tensor of unpadded_numel() or padded_numel() elements; views of it, with the members'
  // strides.
  std::vector<at::Tensor> unflatten(const at::Tensor& flat) const;
  // This rank's part of a flat tensor of unpadded_numel() elements, a copy of sharded_numel() elements.
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
