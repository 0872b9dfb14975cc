#include "tessera/fsdp1/original_params.h"

#include <map>
#include <set>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/dtensor/tensor/dtensor.h"
#include "tessera/fsdp1/fsdp1_state.h"

namespace tessera {
namespace {

// Collects the modules of a unit with tensors on the meta device, and the slots that share a meta tensor. After
// param_init_fn these slots must share one real tensor again. Nested units are skipped.
struct MetaTensorCollector {
  std::vector<std::pair<std::string, nn::Module*>> modules;
  // The parameter slots that hold each meta tensor. `alive` keeps the meta tensors alive, so that no address in the map
  // is reused.
  std::map<c10::TensorImpl*, std::vector<std::pair<std::string, SlotRef>>> slots;
  std::vector<at::Tensor> alive;
  std::unordered_set<nn::Module*> visited;

  void visit(nn::Module& module, const std::string& path, bool is_top) {
    if (!visited.insert(&module).second) return;
    if (!is_top && dynamic_cast<Fsdp1State*>(module.sharding().get())) return;
    bool any = false;
    auto& own = module.own_parameters();
    for (size_t i = 0; i < own.size(); ++i) {
      if (!own[i].parameter.is_meta()) continue;
      any = true;
      alive.push_back(own[i].parameter);
      slots[own[i].parameter.unsafeGetTensorImpl()].emplace_back(path + own[i].name, SlotRef{&module, i});
    }
    for (const auto& buffer : module.own_buffers()) any = any || (buffer.slot->defined() && buffer.slot->is_meta());
    if (any) modules.emplace_back(path, &module);
    for (const auto& [name, child] : module.named_children()) visit(*child, path + name + ".", false);
  }
};

// Returns whether the tensor is contiguous and its last dim has stride 1: the test that PyTorch's FSDP uses.
// is_contiguous() ignores the stride of a last dim of size 1, but a view that as_strided makes from the recorded
// strides depends on this stride.
bool is_truly_contiguous(const at::Tensor& tensor) {
  return tensor.is_contiguous() && (tensor.dim() == 0 || tensor.stride(-1) == 1);
}

// Walks the modules in pre-order and collects each parameter once, in the order in which PyTorch's FSDP1 flattens
// parameters. If a parameter is found again, the new name is recorded as a further name of a shared parameter. Each
// slot is recorded once, although a module may be found several times.
struct OriginalParamCollector {
  OriginalParams found;
  std::unordered_set<const c10::TensorImpl*> managed, originals;  // of nested units
  std::unordered_map<const c10::TensorImpl*, size_t> seen;
  std::set<std::pair<nn::Module*, size_t>> slots;

  void check(const std::string& name, const at::Tensor& tensor) const {
    TESSERA_CHECK(!is_in_flat_parameter(tensor), ErrorKind::kShape,
                  "[fsdp1.wrap] {}: Cannot flatten a `FlatParameter`. It is part of one already: wrap nested modules "
                  "before the module around them.",
                  name);
    TESSERA_CHECK(!originals.contains(tensor.unsafeGetTensorImpl()), ErrorKind::kShape,
                  "[fsdp1.wrap] {}: this parameter is shared with a nested unit. Wrap the modules that share it by one "
                  "call.",
                  name);
    TESSERA_CHECK(
        !is_dtensor(tensor), ErrorKind::kShape,
        "[fsdp1.wrap] {}: found a DTensor, wanted a plain tensor. Use fully_shard together with tensor parallelism.",
        name);
    TESSERA_CHECK(!tensor.is_meta(), ErrorKind::kShape,
                  "[fsdp1.wrap] {}: still on the meta device. Set param_init_fn, or call to_empty(module, device) and "
                  "initialise it first.",
                  name);
  }

  void visit(nn::Module& module, const std::string& prefix) {
    auto& own = module.own_parameters();
    for (size_t i = 0; i < own.size(); ++i) {
      const at::Tensor tensor = own[i].parameter;
      if (managed.contains(tensor.unsafeGetTensorImpl())) continue;
      const std::string name = prefix + own[i].name;
      const auto [at, fresh] = seen.emplace(tensor.unsafeGetTensorImpl(), found.params.size());
      if (fresh) {
        check(name, tensor);
        found.params.push_back({.member = {.fqn = name,
                                           .shape = tensor.sizes().vec(),
                                           .contiguous = is_truly_contiguous(tensor),
                                           .strides = tensor.strides().vec(),
                                           .dtype = tensor.scalar_type(),
                                           .device = tensor.device(),
                                           .requires_grad = tensor.requires_grad()},
                                .tensor = tensor,
                                .slots = {}});
      } else {
        found.shared.push_back({name, found.params[at->second].member.fqn});
      }
      if (slots.insert({&module, i}).second) found.params[at->second].slots.push_back({&module, i});
    }
    for (const auto& [name, child] : module.named_children()) visit(*child, prefix + name + ".");
  }
};

}  // namespace

void materialise(nn::Module& module, const std::function<void(nn::Module&)>& param_init_fn) {
  MetaTensorCollector collector;
  collector.visit(module, "", true);
  for (const auto& [path, each] : collector.modules) param_init_fn(*each);
  for (const auto& [path, each] : collector.modules) {
    for (const auto& buffer : each->own_buffers()) {
      TESSERA_CHECK(!buffer.slot->defined() || !buffer.slot->is_meta(), ErrorKind::kShape,
                    "[fsdp1.wrap] {}{}: param_init_fn left this buffer on the meta device", path, buffer.name);
    }
  }
  for (const auto& [tensor, slots] : collector.slots) {
    const auto& [first_name, first] = slots[0];
    for (const auto& [name, slot] : slots) {
      TESSERA_CHECK(!slot.get().parameter.is_meta(), ErrorKind::kShape,
                    "[fsdp1.wrap] {}: param_init_fn left this parameter on the meta device. Replace it with "
                    "Module::set_parameter.",
                    name);
      TESSERA_CHECK(slot.get().parameter.is_same(first.get().parameter), ErrorKind::kShape,
                    "[fsdp1.wrap] {} and {}: one shared tensor before param_init_fn, two tensors after it. Set both to "
                    "one tensor.",
                    first_name, name);
    }
  }
}

OriginalParams collect_original_params(nn::Module& module, const std::vector<FlatParamGroup*>& nested) {
  OriginalParamCollector collector;
  for (const auto* group : nested) {
    for (const auto& leaf : group->all_leaves()) collector.managed.insert(leaf.unsafeGetTensorImpl());
    for (const auto& original : group->originals()) {
      if (!original.expired()) collector.originals.insert(original._unsafe_get_target());
    }
  }
  collector.visit(module, "");
  return std::move(collector.found);
}

}  // namespace tessera
