#include "tessera/fsdp1/materialise.h"

#include <map>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/fsdp1/fsdp1_state.h"

namespace tessera {
namespace {

struct MetaWalk {
  std::vector<std::pair<std::string, nn::Module*>> modules;
  // Slots by the tensor on meta that they showed, which it keeps alive.
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

}  // namespace

void materialise(nn::Module& module, const std::function<void(nn::Module&)>& param_init_fn) {
  MetaWalk walk;
  walk.visit(module, "", true);
  for (const auto& [path, each] : walk.modules) param_init_fn(*each);
  for (const auto& [path, each] : walk.modules) {
    for (const auto& buffer : each->own_buffers()) {
      TESSERA_CHECK(!buffer.slot->defined() || !buffer.slot->is_meta(), ErrorKind::kShape,
                    "[fsdp1.wrap] {}{}: param_init_fn left this buffer on the meta device", path, buffer.name);
    }
  }
  for (const auto& [tensor, slots] : walk.slots) {
    const auto& [first_name, first] = slots[0];
    for (const auto& [name, slot] : slots) {
      TESSERA_CHECK(!slot.get().parameter.is_meta(), ErrorKind::kShape,
                    "[fsdp1.wrap] {}: param_init_fn left it on the meta device. Give it a tensor with "
                    "Module::set_parameter.",
                    name);
      TESSERA_CHECK(slot.get().parameter.is_same(first.get().parameter), ErrorKind::kShape,
                    "[fsdp1.wrap] {} and {}: one tensor before param_init_fn, two after it. Give both the same one.",
                    first_name, name);
    }
  }
}

}  // namespace tessera
