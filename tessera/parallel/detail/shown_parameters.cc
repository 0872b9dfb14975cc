#include "tessera/parallel/detail/shown_parameters.h"

#include <algorithm>
#include <iterator>

#include "tessera/parallel/fsdp1/flat_group.h"

namespace tessera::parallel {

ShownParameters shown_parameters(nn::Module& module) {
  ShownParameters out;
  const auto add = [&](at::Tensor* member) {
    const auto found = std::find_if(out.tensors.begin(), out.tensors.end(),
                                    [&](const at::Tensor& each) { return each.is_same(*member); });
    if (found != out.tensors.end()) {
      out.members[static_cast<size_t>(found - out.tensors.begin())].push_back(member);
    } else {
      out.tensors.push_back(*member);
      out.members.push_back({member});
    }
  };
  for (const auto& named : module.named_parameters(/*all=*/true)) add(named.slot->slot);
  for (const auto& [path, child] : module.named_modules()) {
    for (at::Tensor* member : flat_members_of(*child)) {
      if (member->requires_grad()) add(member);
    }
  }
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
