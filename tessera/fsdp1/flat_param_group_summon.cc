// summon_full_params for one unit.
#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <fmt/ranges.h>

#include <utility>

#include "tessera/base/error.h"
#include "tessera/fsdp1/flat_param_group.h"

namespace tessera {
namespace {

// All-gathers the ranks' shards into the whole flat tensor. COLLECTIVE over the group.
at::Tensor gathered_flat(comm::Group& group, const at::Tensor& own, const std::string& subject) {
  const at::Tensor all = at::empty({own.numel() * group.size()}, own.options());
  if (all.numel() > 0) comm::all_gather_into(group, all, own.contiguous(), subject).wait();
  return all;
}

}  // namespace

// Returns the whole gradient of each member, in the parameter's dtype; undefined when no rank has a gradient. Two
// all-gathers give the gradients and, as one number per member, whether a rank has one: zeros alone would not show the
// difference between a zero gradient and none. COLLECTIVE over the group.
std::vector<at::Tensor> FlatParamGroup::full_gradients() const {
  std::vector<at::Tensor> out(members_.size());
  if (!options_.sharded) {
    for (size_t i = 0; i < members_.size(); ++i) {
      const at::Tensor& grad = members_[i].piece.grad();
      if (grad.defined()) out[i] = grad.clone();
    }
    return out;
  }
  const auto infos = param_infos();
  const at::Tensor own = at::zeros_like(shard_);
  const at::Tensor has = at::zeros({static_cast<int64_t>(members_.size())}, own.options());
  for (size_t i = 0; i < members_.size(); ++i) {
    const at::Tensor& grad = members_[i].piece.grad();
    if (!grad.defined()) continue;
    own.narrow(0, infos[i].offset_in_shard, infos[i].numel_in_shard).copy_(grad);
    has.narrow(0, static_cast<int64_t>(i), 1).fill_(1);
  }
  const at::Tensor flat = gathered_flat(*group_, own, name() + ", gradients");
  const at::Tensor anywhere = gathered_flat(*group_, has, name() + ", which gradients")
                                  .view({group_->size(), -1})
                                  .sum(0)
                                  .to(at::kCPU, at::kFloat);
  const auto whole = layout_.unflatten(flat);
  for (size_t i = 0; i < members_.size(); ++i) {
    if (anywhere.const_data_ptr<float>()[i] > 0) out[i] = whole[i].clone(at::MemoryFormat::Preserve);
  }
  return out;
}

void FlatParamGroup::gather_full_params(const SummonMode& mode) {
  TESSERA_CHECK(!summoned_, ErrorKind::kShape, "[fsdp1.summon] {}: its parameters are summoned already. Do it once.",
                name());
  TESSERA_CHECK(!uses_unsharded_params_, ErrorKind::kShape,
                "[fsdp1.summon] {}: called inside a forward pass. Call summon_full_params before or after it.", name());
  check_not_replaced();
  const c10::NoGradGuard no_grad;
  const at::Tensor flat = options_.sharded ? gathered_flat(*group_, shard_, name()) : shard_.clone();
  const auto gradients = mode.gradients ? full_gradients() : std::vector<at::Tensor>(members_.size());
  // summoned_ is set on every rank, so that forward is refused also on ranks that keep their shards.
  summoned_.emplace(SummonedParams{.mode = mode, .shown = {}});
  if (!mode.on_this_rank) return;
  const auto views = layout_.unflatten(mode.on_cpu ? flat.to(at::kCPU) : flat);
  for (size_t i = 0; i < members_.size(); ++i) {
    const bool trained = layout_.use_orig_params() ? members_[i].piece.requires_grad()
                                                   : flat_.requires_grad() && layout_.members()[i].requires_grad;
    summoned_->shown.push_back(views[i].variable_data());
    summoned_->shown.back().set_requires_grad(trained);
    if (gradients[i].defined()) summoned_->shown.back().mutable_grad() = gradients[i];
  }
  swap_full_in();
}

// Puts the whole original parameters into the modules. Without use_orig_params the slot of the flat parameter is
// removed from its module, and the slots of the original parameters (removed_slots_) are inserted again. In each module
// they are inserted in ascending order of their indices, so every slot gets its old index.
void FlatParamGroup::swap_full_in() {
  if (layout_.use_orig_params()) {
    for (size_t i = 0; i < members_.size(); ++i) {
      for (const auto& slot : members_[i].slots) nn::Module::set_parameter(slot.get(), summoned_->shown[i]);
    }
    return;
  }
  auto& own = flat_slot_.owner->own_parameters();
  summoned_->flat_slot = flat_slot_.get();
  own.erase(own.begin() + static_cast<std::ptrdiff_t>(flat_slot_.index));
  for (const auto& removed : removed_slots_) {
    auto& slots = removed.owner->own_parameters();
    const auto at = slots.insert(slots.begin() + static_cast<std::ptrdiff_t>(removed.index), removed.slot);
    nn::Module::set_parameter(*at, summoned_->shown[removed.member]);
  }
}

// Stores the modules' present parameters in summoned_->shown, because the body of summon_full_params may have replaced
// them. Then restores the slots of the sharded parameters in the reverse order of swap_full_in().
void FlatParamGroup::swap_full_out() {
  if (layout_.use_orig_params()) {
    for (size_t i = 0; i < members_.size(); ++i) {
      summoned_->shown[i] = members_[i].slots[0].get().parameter;
      for (const auto& slot : members_[i].slots) nn::Module::set_parameter(slot.get(), members_[i].piece);
    }
    return;
  }
  for (auto removed = removed_slots_.rbegin(); removed != removed_slots_.rend(); ++removed) {
    auto& slots = removed->owner->own_parameters();
    const auto at = slots.begin() + static_cast<std::ptrdiff_t>(removed->index);
    summoned_->shown[removed->member] = at->parameter;
    slots.erase(at);
  }
  auto& own = flat_slot_.owner->own_parameters();
  flat_shown_ = flat_;
  own.insert(own.begin() + static_cast<std::ptrdiff_t>(flat_slot_.index),
             *std::exchange(summoned_->flat_slot, std::nullopt));
  use_sharded_params();
}

void FlatParamGroup::restore_sharded_params(bool writeback) {
  if (!summoned_) return;
  // The slots are restored before anything can throw. All shapes are checked before the shard is written, so an error
  // leaves the shard unchanged.
  if (summoned_->mode.on_this_rank) swap_full_out();
  const auto summoned = *std::exchange(summoned_, std::nullopt);
  if (!summoned.mode.on_this_rank || !writeback) return;
  const c10::NoGradGuard no_grad;
  std::vector<at::Tensor> values;
  for (size_t i = 0; i < members_.size(); ++i) {
    const auto& member = layout_.members()[i];
    TESSERA_CHECK(summoned.shown[i].sizes() == at::IntArrayRef(member.shape), ErrorKind::kShape,
                  "[fsdp1.summon] {}: '{}' was replaced by a tensor of shape [{}], wanted [{}]. Nothing is written "
                  "back.",
                  name(), member.fqn, fmt::join(summoned.shown[i].sizes(), ", "), fmt::join(member.shape, ", "));
    values.push_back(summoned.shown[i].detach().to(member.device, layout_.dtype()));
  }
  const at::Tensor flat = layout_.flatten(values);
  shard_.copy_(options_.sharded ? layout_.shard(flat, group_->rank()) : flat);
  if (!summoned.mode.gradients) return;
  const auto infos = param_infos();
  for (size_t i = 0; i < members_.size(); ++i) {
    const at::Tensor &from = summoned.shown[i].grad(), &to = members_[i].piece.grad();
    if (!from.defined() || !to.defined()) continue;
    if (!options_.sharded) {
      to.copy_(from);
      continue;
    }
    const auto& member = layout_.members()[i];
    // `to` is the gradient of the member's piece of the shard: a range of the member's elements in storage order.
    // `from` is the gradient of the whole member and may have other strides than the member. So `from` is first copied
    // into a tensor with the member's strides.
    at::Tensor strided = at::empty_strided(member.shape, member.strides, from.options());
    strided.copy_(from);
    to.copy_(strided.as_strided({member.numel}, {1}).narrow(0, infos[i].intra_param_start, infos[i].numel_in_shard));
  }
}

}  // namespace tessera
