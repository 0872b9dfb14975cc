#include "tessera/parallel/layers/shown_parameters.h"

#include <algorithm>
#include <iterator>

#include "tessera/fsdp1/flat_group.h"

namespace tessera::parallel {

void ShownParameters::add_own(nn::Module& module) {
  const auto add = [this](at::Tensor* member) {
    const auto found =
        std::find_if(tensors.begin(), tensors.end(), [&](const at::Tensor& each) { return each.is_same(*member); });
    if (found != tensors.end()) {
      members[static_cast<size_t>(found - tensors.begin())].push_back(member);
    } else {
      tensors.push_back(*member);
      members.push_back({member});
    }
  };
  for (const auto& own : module.own_parameters()) add(own.slot);
  for (at::Tensor* member : flat_members_of(module)) {
    if (member->requires_grad()) add(member);
  }
}

ShownParameters shown_parameters(nn::Module& module) {
  ShownParameters out;
  module.for_each_module([&](nn::Module& each) { out.add_own(each); });
  return out;
}

ShowLeaves::ShowLeaves(const ShownParameters& shown, const std::vector<at::Tensor>& leaves) {
  for (size_t i = 0; i < leaves.size(); ++i) {
    for (at::Tensor* member : shown.members[i]) {
      before_.emplace_back(member, *member);
      *member = leaves[i];
    }
  }
}

ShowLeaves::~ShowLeaves() {
  for (auto& [member, shown] : before_) *member = shown;
}

std::vector<at::Tensor> that_require_grad(const std::vector<at::Tensor>& first, const std::vector<at::Tensor>& second) {
  std::vector<at::Tensor> out;
  for (const auto* each : {&first, &second}) {
    std::copy_if(each->begin(), each->end(), std::back_inserter(out),
                 [](const at::Tensor& tensor) { return tensor.defined() && tensor.requires_grad(); });
  }
  return out;
}

std::vector<at::Tensor> leaves_of(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> out;
  for (const auto& tensor : tensors) {
    out.push_back(tensor.defined() ? tensor.detach().set_requires_grad(tensor.requires_grad()) : tensor);
  }
  return out;
}

}  // namespace tessera::parallel
