#include "tessera/fsdp1/flat_sources.h"

#include <set>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/dtensor/tensor/dtensor.h"

namespace tessera {
namespace {

// Upstream's test: for as_strided a last dim of one element with another stride matters.
bool is_truly_contiguous(const at::Tensor& tensor) {
  return tensor.is_contiguous() && (tensor.dim() == 0 || tensor.stride(-1) == 1);
}

struct FlatWalk {
  FlatSources found;
  std::unordered_set<const c10::TensorImpl*> managed, originals;  // of nested units
  std::unordered_map<const c10::TensorImpl*, size_t> seen;
  std::set<std::pair<nn::Module*, size_t>> slots;

  void check(const std::string& name, const at::Tensor& tensor) const {
    TESSERA_CHECK(!lies_in_flat_parameter(tensor), ErrorKind::kShape,
                  "[fsdp1.wrap] {}: Cannot flatten a `FlatParameter`. It is part of one already: wrap nested modules "
                  "before the module around them.",
                  name);
    TESSERA_CHECK(!originals.contains(tensor.unsafeGetTensorImpl()), ErrorKind::kShape,
                  "[fsdp1.wrap] {}: shared with a parameter of a nested unit. Wrap the modules that share it by one "
                  "call.",
                  name);
    TESSERA_CHECK(
        !is_dtensor(tensor), ErrorKind::kShape,
        "[fsdp1.wrap] {}: found a DTensor, wanted a plain tensor. Take fully_shard beside tensor parallelism.", name);
    TESSERA_CHECK(
        !tensor.is_meta(), ErrorKind::kShape,
        "[fsdp1.wrap] {}: still on the meta device. Give param_init_fn, or to_empty(module, device) and initialise it "
        "first.",
        name);
  }

  void visit(nn::Module& module, const std::string& prefix) {
    auto& own = module.own_parameters();
    for (size_t i = 0; i < own.size(); ++i) {
      const at::Tensor tensor = own[i].parameter;
      if (managed.contains(tensor.unsafeGetTensorImpl())) continue;
      const std::string name = prefix + own[i].name;
      const auto [at, fresh] = seen.emplace(tensor.unsafeGetTensorImpl(), found.sources.size());
      if (fresh) {
        check(name, tensor);
        found.sources.push_back({.member = {.fqn = name,
                                            .shape = tensor.sizes().vec(),
                                            .contiguous = is_truly_contiguous(tensor),
                                            .strides = tensor.strides().vec(),
                                            .dtype = tensor.scalar_type(),
                                            .device = tensor.device(),
                                            .requires_grad = tensor.requires_grad()},
                                 .tensor = tensor,
                                 .slots = {}});
      } else {
        found.shared.push_back({name, found.sources[at->second].member.fqn});
      }
      if (slots.insert({&module, i}).second) found.sources[at->second].slots.push_back({&module, i});
    }
    for (const auto& [name, child] : module.named_children()) visit(*child, prefix + name + ".");
  }
};

}  // namespace

FlatSources flat_sources(nn::Module& module, const std::vector<FlatGroup*>& nested) {
  FlatWalk walk;
  for (const auto* group : nested) {
    for (const auto& leaf : group->all_leaves()) walk.managed.insert(leaf.unsafeGetTensorImpl());
    for (const auto& original : group->originals()) {
      if (!original.expired()) walk.originals.insert(original._unsafe_get_target());
    }
  }
  walk.visit(module, "");
  return std::move(walk.found);
}

}  // namespace tessera
