#include "tessera/parallel/tensor_parallel/style.h"

#include <ATen/core/Tensor.h>

#include <algorithm>

#include "tessera/base/error.h"

namespace tessera {

TiedParameters::TiedParameters(nn::Module& root) {
  for (const auto& named : root.named_parameters(/*all=*/true)) {
    kept_.push_back(named.slot->parameter);
    by_tensor_[named.slot->parameter.unsafeGetTensorImpl()].push_back(named.slot);
  }
}

std::vector<nn::ParameterSlot*> TiedParameters::of(nn::ParameterSlot& slot) const {
  const auto found = by_tensor_.find(slot.parameter.unsafeGetTensorImpl());
  return found == by_tensor_.end() ? std::vector<nn::ParameterSlot*>{&slot} : found->second;
}

// All tied slots get the same new tensor, so they stay tied.
void StyleContext::replace_tied(nn::ParameterSlot& slot, at::Tensor made) const {
  made.set_requires_grad(slot.parameter.requires_grad());
  for (auto* each : tied == nullptr ? std::vector<nn::ParameterSlot*>{&slot} : tied->of(slot)) {
    nn::Module::set_parameter(*each, made);
  }
}

void StyleContext::distribute(nn::ParameterSlot& slot, const Placement& placement) const {
  // If the parameter is tied, an earlier call for another slot may have made it a DTensor already. Its placement must
  // then be equal to `placement`.
  const at::Tensor old = slot.parameter;
  if (is_dtensor(old)) {
    TESSERA_CHECK(*device_mesh(old) == *mesh && placements(old) == Placements{placement}, ErrorKind::kConfig,
                  "[parallel.style] {}.{}: found a DTensor with placements {} over {}, wanted {} over {}. Tied "
                  "parameters need styles with the same placement.",
                  path, slot.name, to_string(placements(old)), device_mesh(old)->to_string(), to_string(placement),
                  mesh->to_string());
    return;
  }
  replace_tied(slot, distribute_tensor(old.detach(), mesh, {placement}, src_data_rank));
}

void StyleContext::replicate_plain(nn::Module& module) const {
  for (auto& slot : module.own_parameters()) {
    if (!is_dtensor(slot.parameter)) replace_tied(slot, from_local(slot.parameter.detach(), mesh, {Replicate()}));
  }
  for (auto& buffer : module.own_buffers()) {
    if (buffer.slot->defined() && !is_dtensor(*buffer.slot)) {
      *buffer.slot = from_local(*buffer.slot, mesh, {Replicate()});
    }
  }
}

ParallelPlan::ParallelPlan(std::initializer_list<std::pair<std::string, StylePtr>> entries) {
  for (const auto& [pattern, style] : entries) set(pattern, style);
}

void ParallelPlan::set(const std::string& pattern, StylePtr style) {
  const auto found = std::ranges::find_if(entries_, [&](const auto& entry) { return entry.first == pattern; });
  if (found != entries_.end()) {
    found->second = std::move(style);
  } else {
    entries_.emplace_back(pattern, std::move(style));
  }
}

void ParallelPlan::update(const ParallelPlan& other) {
  for (const auto& [pattern, style] : other.entries_) set(pattern, style);
}

void ParallelPlan::erase(const std::string& pattern) {
  std::erase_if(entries_, [&](const auto& entry) { return entry.first == pattern; });
}

const ParallelStyle* ParallelPlan::find(const std::string& pattern) const {
  const auto found = std::ranges::find_if(entries_, [&](const auto& entry) { return entry.first == pattern; });
  return found == entries_.end() ? nullptr : found->second.get();
}

}  // namespace tessera
