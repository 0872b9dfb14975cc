#include "tessera/parallel/layers/forward_parameters.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <mutex>
#include <set>

namespace tessera {
namespace {

// Members that forward reads but that are not registered parameters (see add_unregistered_member). `mutex` guards
// `of_module`, because ranks may be threads of one process.
struct UnregisteredMembers {
  std::mutex mutex;
  std::map<const nn::Module*, std::set<at::Tensor*>> of_module;
};
UnregisteredMembers& unregistered_members() {
  static UnregisteredMembers members;
  return members;
}

}  // namespace

void add_unregistered_member(const nn::Module& module, at::Tensor* member) {
  auto& members = unregistered_members();
  const std::lock_guard lock(members.mutex);
  members.of_module[&module].insert(member);
}

void remove_unregistered_member(const nn::Module& module, at::Tensor* member) {
  auto& members = unregistered_members();
  const std::lock_guard lock(members.mutex);
  const auto found = members.of_module.find(&module);
  if (found == members.of_module.end()) return;
  found->second.erase(member);
  if (found->second.empty()) members.of_module.erase(found);
}

// A tied parameter is one entry of `tensors` with several members. LeafParametersScope puts one leaf into all these
// members, so this leaf gets the gradients of all uses of the parameter.
void ForwardParameters::add_own(nn::Module& module) {
  const auto add = [this](at::Tensor* member) {
    const auto found = std::ranges::find_if(tensors, [&](const at::Tensor& each) { return each.is_same(*member); });
    if (found != tensors.end()) {
      members[static_cast<size_t>(found - tensors.begin())].push_back(member);
    } else {
      tensors.push_back(*member);
      members.push_back({member});
    }
  };
  for (const auto& own : module.own_parameters()) add(own.slot);
  auto& unregistered = unregistered_members();
  const std::lock_guard lock(unregistered.mutex);
  const auto found = unregistered.of_module.find(&module);
  if (found == unregistered.of_module.end()) return;
  for (at::Tensor* member : found->second) {
    if (member->requires_grad()) add(member);
  }
}

ForwardParameters forward_parameters(nn::Module& module) {
  ForwardParameters out;
  module.for_each_module([&](nn::Module& each) { out.add_own(each); });
  return out;
}

// Replaces only the modules' tensor members. The registered ParameterSlots keep the parameters, so parameters() still
// returns them.
LeafParametersScope::LeafParametersScope(const ForwardParameters& parameters, const std::vector<at::Tensor>& leaves) {
  for (size_t i = 0; i < leaves.size(); ++i) {
    for (at::Tensor* member : parameters.members[i]) {
      before_.emplace_back(member, *member);
      *member = leaves[i];
    }
  }
}

LeafParametersScope::~LeafParametersScope() {
  for (auto& [member, tensor] : before_) *member = tensor;
}

std::vector<at::Tensor> tensors_requiring_grad(const std::vector<at::Tensor>& first,
                                               const std::vector<at::Tensor>& second) {
  std::vector<at::Tensor> out;
  for (const auto* each : {&first, &second}) {
    std::copy_if(each->begin(), each->end(), std::back_inserter(out),
                 [](const at::Tensor& tensor) { return tensor.defined() && tensor.requires_grad(); });
  }
  return out;
}

std::vector<at::Tensor> as_leaves(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> out;
  for (const auto& tensor : tensors) {
    out.push_back(tensor.defined() ? tensor.detach().set_requires_grad(tensor.requires_grad()) : tensor);
  }
  return out;
}

}  // namespace tessera
