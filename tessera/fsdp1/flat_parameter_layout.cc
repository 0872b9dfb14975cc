#include "tessera/fsdp1/flat_parameter_layout.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/util/accumulate.h>
#include <c10/util/strides.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <utility>

#include "tessera/base/error.h"

namespace tessera {
namespace {

constexpr int64_t kAlignBytes = 16;
// PyTorch fills the padding between members with this value. No computation uses it.
constexpr int kPaddingValue = 42;

// Number of elements from `numel` to the next multiple of `unit`.
int64_t padding_to_multiple(int64_t numel, int64_t unit) { return (unit - numel % unit) % unit; }

// Whether the elements fill their memory without gaps or overlaps; the dims may be in any order. This is so if the
// stride of each dim is the product of the sizes of all dims with smaller strides. Dims of size 1 are ignored.
bool is_dense(const FlatMember& member) {
  std::vector<std::pair<int64_t, int64_t>> dims;  // stride, size
  for (size_t i = 0; i < member.shape.size(); ++i) {
    if (member.shape[i] > 1) dims.emplace_back(member.strides[i], member.shape[i]);
  }
  std::ranges::sort(dims);
  int64_t expected = 1;
  for (const auto& [stride, size] : dims) {
    if (stride != expected) return false;
    expected *= size;
  }
  return true;
}

void complete(FlatMember& member) {
  member.numel = c10::multiply_integers(member.shape);
  if (member.contiguous) {
    const auto strides = c10::contiguous_strides(member.shape);
    member.strides.assign(strides.begin(), strides.end());
    return;
  }
  TESSERA_CHECK(member.strides.size() == member.shape.size() && (member.numel == 0 || is_dense(member)),
                ErrorKind::kShape,
                "[fsdp1.flatten] {}: strides {} of shape {} leave gaps or overlap. Call contiguous() on it.",
                member.fqn, fmt::join(member.strides, ","), fmt::join(member.shape, "x"));
}

void check_uniform(const std::vector<FlatMember>& members, bool use_orig_params) {
  TESSERA_CHECK(!members.empty(), ErrorKind::kShape,
                "[fsdp1.flatten] Cannot construct a FlatParamHandle with an empty parameter list: Expects non-empty "
                "`params`. Wrap a module that has parameters of its own.");
  const auto& first = members[0];
  TESSERA_CHECK(c10::isFloatingType(first.dtype), ErrorKind::kShape,
                "[fsdp1.flatten] {}: Cannot flatten integer dtype tensors, found {}. Make it a buffer.", first.fqn,
                c10::toString(first.dtype));
  for (const auto& member : members) {
    TESSERA_CHECK(member.dtype == first.dtype, ErrorKind::kShape,
                  "[fsdp1.flatten] Must flatten tensors with uniform dtype but got {} ({}) and {} ({}). Wrap these "
                  "modules separately.",
                  c10::toString(first.dtype), first.fqn, c10::toString(member.dtype), member.fqn);
    TESSERA_CHECK(use_orig_params || member.requires_grad == first.requires_grad, ErrorKind::kShape,
                  "[fsdp1.flatten] Must flatten tensors with uniform `requires_grad` when `use_orig_params=False`: {} "
                  "has {}, {} has {}. Set use_orig_params, or wrap frozen modules separately.",
                  first.fqn, first.requires_grad, member.fqn, member.requires_grad);
    TESSERA_CHECK(member.device == first.device, ErrorKind::kShape,
                  "[fsdp1.flatten] Must flatten tensors on the same device but got both {} ({}) and {} ({}). Move the "
                  "module first.",
                  first.device.str(), first.fqn, member.device.str(), member.fqn);
  }
}

}  // namespace

FlatParameterLayout FlatParameterLayout::make(std::vector<FlatMember> members, std::vector<SharedFlatMember> shared,
                                              const FlatParameterOptions& options, int64_t world_size) {
  TESSERA_CHECK(world_size > 0, ErrorKind::kShape, "[fsdp1.flatten] found {} ranks, wanted at least one", world_size);
  check_uniform(members, options.use_orig_params);
  FlatParameterLayout layout;
  layout.dtype_ = members[0].dtype;
  layout.use_orig_params_ = options.use_orig_params;
  layout.world_size_ = world_size;
  const auto compute = options.compute_dtype == c10::ScalarType::Undefined ? layout.dtype_ : options.compute_dtype;
  const int64_t unit = options.use_orig_params ? kAlignBytes / static_cast<int64_t>(c10::elementSize(compute)) : 1;
  int64_t total = 0;
  // The offset of a member is the total size of all members and padding before it. With use_orig_params each member
  // starts at a multiple of 16 bytes of the compute dtype, and the total size is a multiple of the number of ranks.
  const auto append = [&](int64_t numel, bool padding) {
    if (padding && numel == 0) return;
    layout.numels_with_padding_.push_back(numel);
    layout.is_padding_.push_back(padding);
    total += numel;
  };
  for (auto& member : members) {
    complete(member);
    append(padding_to_multiple(total, unit), true);
    layout.offsets_.push_back(total);
    append(member.numel, false);
    layout.requires_grad_ = layout.requires_grad_ || member.requires_grad;
  }
  if (options.use_orig_params) append(padding_to_multiple(total, world_size), true);
  layout.members_ = std::move(members);
  layout.shared_ = std::move(shared);
  layout.unpadded_numel_ = total;
  layout.sharded_numel_ = (total + world_size - 1) / world_size;
  return layout;
}

// The part of the shard after the end of the flat parameter. It can be the whole shard on the last ranks.
int64_t FlatParameterLayout::shard_padding(int64_t rank) const {
  return sharded_numel_ - std::clamp<int64_t>(unpadded_numel_ - rank * sharded_numel_, 0, sharded_numel_);
}

// Intersects the range [begin, end) of the flat parameter with each member. intra_param_end is inclusive, as in
// PyTorch.
std::vector<ShardParamInfo> FlatParameterLayout::param_infos(int64_t begin, int64_t end) const {
  std::vector<ShardParamInfo> out;
  const int64_t last = end - 1;
  for (size_t i = 0; i < members_.size(); ++i) {
    const int64_t first_of = offsets_[i], last_of = offsets_[i] + members_[i].numel - 1;
    ShardParamInfo info;
    // PyTorch tests with inclusive ends whether a member overlaps the shard, and so does this condition. An empty
    // member fulfils the condition only if its offset is after the shard's first element.
    if (begin <= last_of && last >= first_of) {
      info.in_shard = true;
      info.offset_in_shard = std::max<int64_t>(first_of - begin, 0);
      info.intra_param_start = std::max<int64_t>(begin - first_of, 0);
      info.intra_param_end = std::min(last_of, last) - first_of;
      info.numel_in_shard = info.intra_param_end - info.intra_param_start + 1;
    }
    out.push_back(info);
  }
  return out;
}

std::vector<ShardParamInfo> FlatParameterLayout::shard_param_infos(int64_t rank) const {
  TESSERA_CHECK(rank >= 0 && rank < world_size_, ErrorKind::kShape, "[fsdp1.shard] rank {}, wanted one of {}", rank,
                world_size_);
  return param_infos(rank * sharded_numel_, (rank + 1) * sharded_numel_);
}

std::vector<ShardParamInfo> FlatParameterLayout::whole_param_infos() const { return param_infos(0, unpadded_numel_); }

at::Tensor FlatParameterLayout::member_view(const at::Tensor& flat, size_t member) const {
  const auto& info = members_[member];
  return flat.as_strided(info.shape, info.strides, flat.storage_offset() + offsets_[member]);
}

at::Tensor FlatParameterLayout::flatten(const std::vector<at::Tensor>& tensors) const {
  const c10::NoGradGuard no_grad;
  TESSERA_CHECK(tensors.size() == members_.size(), ErrorKind::kShape,
                "[fsdp1.flatten] found {} tensors, wanted one for each of {} parameters", tensors.size(),
                members_.size());
  auto options = at::TensorOptions().dtype(dtype_).device(members_[0].device);
  // The flat tensor gets the dtype and device of the first defined tensor in `tensors`.
  for (size_t i = tensors.size(); i-- > 0;) {
    if (tensors[i].defined()) options = at::TensorOptions().dtype(tensors[i].dtype()).device(tensors[i].device());
  }
  const at::Tensor flat = at::empty({unpadded_numel_}, options);
  for (size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor place = flat.narrow(0, offsets_[i], members_[i].numel);
    if (!tensors[i].defined()) {
      place.zero_();
      continue;
    }
    TESSERA_CHECK(
        tensors[i].sizes() == at::IntArrayRef(members_[i].shape) && tensors[i].scalar_type() == flat.scalar_type(),
        ErrorKind::kShape, "[fsdp1.flatten] {}: found {} of shape {}, wanted {} of shape {}", members_[i].fqn,
        c10::toString(tensors[i].scalar_type()), fmt::join(tensors[i].sizes(), "x"), c10::toString(flat.scalar_type()),
        fmt::join(members_[i].shape, "x"));
    member_view(flat, i).copy_(tensors[i]);
  }
  int64_t offset = 0;
  for (size_t i = 0; i < is_padding_.size(); offset += numels_with_padding_[i++]) {
    if (is_padding_[i]) flat.narrow(0, offset, numels_with_padding_[i]).fill_(kPaddingValue);
  }
  return flat;
}

std::vector<at::Tensor> FlatParameterLayout::unflatten(const at::Tensor& flat) const {
  TESSERA_CHECK(
      flat.dim() == 1 && flat.is_contiguous() && (flat.numel() == unpadded_numel_ || flat.numel() == padded_numel()),
      ErrorKind::kShape, "[fsdp1.unflatten] found shape {} and strides {}, wanted {} elements, or {} with padding",
      fmt::join(flat.sizes(), "x"), fmt::join(flat.strides(), ","), unpadded_numel_, padded_numel());
  std::vector<at::Tensor> out;
  for (size_t i = 0; i < members_.size(); ++i) out.push_back(member_view(flat, i));
  return out;
}

at::Tensor FlatParameterLayout::shard(const at::Tensor& flat, int64_t rank) const {
  const c10::NoGradGuard no_grad;
  TESSERA_CHECK(flat.dim() == 1 && flat.numel() == unpadded_numel_, ErrorKind::kShape,
                "[fsdp1.shard] found shape {}, wanted {} elements", fmt::join(flat.sizes(), "x"), unpadded_numel_);
  TESSERA_CHECK(rank >= 0 && rank < world_size_, ErrorKind::kShape, "[fsdp1.shard] rank {}, wanted one of {}", rank,
                world_size_);
  const at::Tensor out = at::zeros({sharded_numel_}, flat.options());
  const int64_t own = sharded_numel_ - shard_padding(rank);
  if (own > 0) out.narrow(0, 0, own).copy_(flat.narrow(0, rank * sharded_numel_, own));
  return out;
}

}  // namespace tessera
