#include "tessera/nn/module.h"

#include <unordered_set>

#include "tessera/base/error.h"

namespace tessera::nn {
namespace {

std::string join(const std::string& prefix, const std::string& name) {
  return prefix.empty() ? name : prefix + "." + name;
}

// Depth-first. A module that several parents share is listed under the first path only.
void collect_modules(Module& module, const std::string& prefix, std::unordered_set<Module*>& seen,
                     std::vector<std::pair<std::string, Module*>>& out) {
  if (!seen.insert(&module).second) return;
  out.emplace_back(prefix, &module);
  for (const auto& [name, child] : module.named_children()) collect_modules(*child, join(prefix, name), seen, out);
}

void visit_modules(Module& module, std::unordered_set<Module*>& seen, const std::function<void(Module&)>& visit) {
  if (!seen.insert(&module).second) return;
  visit(module);
  for (const auto& [name, child] : module.named_children()) visit_modules(*child, seen, visit);
}

}  // namespace

std::vector<std::pair<std::string, Module*>> Module::named_modules() {
  std::vector<std::pair<std::string, Module*>> out;
  std::unordered_set<Module*> seen;
  collect_modules(*this, "", seen, out);
  return out;
}

void Module::for_each_module(const std::function<void(Module&)>& visit) {
  std::unordered_set<Module*> seen;
  visit_modules(*this, seen, visit);
}

// Tied weights are one TensorImpl in the slots of two modules, so the TensorImpl identifies a parameter.
std::vector<NamedParameter> Module::named_parameters(bool all) {
  std::vector<NamedParameter> out;
  std::unordered_set<const at::TensorImpl*> seen;
  for (const auto& [prefix, module] : named_modules()) {
    for (auto& slot : module->own_parameters()) {
      if (!seen.insert(slot.parameter.unsafeGetTensorImpl()).second && !all) continue;
      out.push_back({join(prefix, slot.name), &slot, module});
    }
  }
  return out;
}

std::vector<at::Tensor> Module::parameters() {
  std::vector<at::Tensor> out;
  for (const auto& named : named_parameters()) out.push_back(named.slot->parameter);
  return out;
}

void Module::set_parameter(ParameterSlot& slot, const at::Tensor& value) {
  slot.parameter = value;
  *slot.slot = value;
}

void Module::train(bool on) {
  for (const auto& [name, module] : named_modules()) module->training_ = on;
}

void Module::zero_grad() {
  for (const auto& named : named_parameters()) named.slot->parameter.mutable_grad().reset();
}

void Module::set_requires_grad(bool on) {
  for (const auto& named : named_parameters()) named.slot->parameter.set_requires_grad(on);
}

int Module::register_forward_pre_hook(ForwardPreHook hook) {
  pre_hooks_.emplace_back(next_hook_id_, std::move(hook));
  return next_hook_id_++;
}

// child_slots_[i] is a function that puts a replacement for children_[i] into the parent's member. If the replacement
// is not of the member's type, child_slots_[i] changes nothing and returns false.
void Module::replace_child(const std::string& name, const std::shared_ptr<Module>& replacement) {
  for (size_t i = 0; i < children_.size(); ++i) {
    if (children_[i].first != name) continue;
    TESSERA_CHECK(child_slots_[i] && child_slots_[i](replacement), ErrorKind::kConfig,
                  "[nn.module] child '{}' cannot be replaced: {}", name,
                  child_slots_[i] ? "its member holds another type of module. Derive from that type."
                                  : "it was registered without the parent's member. Register it with its member.");
    if (replacement) {
      children_[i].second = replacement;
    } else {
      children_.erase(children_.begin() + static_cast<std::ptrdiff_t>(i));
      child_slots_.erase(child_slots_.begin() + static_cast<std::ptrdiff_t>(i));
    }
    return;
  }
  raise(ErrorKind::kConfig, "[nn.module] there is no child '{}'. named_children() lists them.", name);
}

int Module::register_forward_hook(ForwardHook hook) {
  return register_forward_hook(
      [hook = std::move(hook)](Module& module, const TensorRefs&, TensorRefs& outputs) { hook(module, outputs); });
}

int Module::register_forward_hook(ForwardHookWithInputs hook) {
  post_hooks_.emplace_back(next_hook_id_, std::move(hook));
  return next_hook_id_++;
}

void Module::remove_hook(int id) {
  std::erase_if(pre_hooks_, [id](const auto& hook) { return hook.first == id; });
  std::erase_if(post_hooks_, [id](const auto& hook) { return hook.first == id; });
}

at::Tensor Module::register_parameter(std::string name, at::Tensor& slot, at::Tensor value, bool decay,
                                      double initial) {
  for (const auto& own : parameters_) {
    TESSERA_CHECK(own.name != name, ErrorKind::kInternal, "[nn.module] parameter '{}' is registered twice", name);
  }
  value.set_requires_grad(true);
  // By default, only parameters with at least two dims (matrices) have weight decay.
  parameters_.push_back({std::move(name), &slot, value, decay && value.dim() >= 2, initial});
  slot = value;
  return value;
}

at::Tensor Module::register_buffer(std::string name, at::Tensor& slot, at::Tensor value, bool persistent) {
  buffers_.push_back({std::move(name), &slot, persistent});
  slot = value;
  return value;
}

void Module::run_pre_hooks(TensorRefs& inputs) {
  for (size_t i = 0; i < pre_hooks_.size(); ++i) pre_hooks_[i].second(*this, inputs);
}

void Module::run_post_hooks(const TensorRefs& inputs, TensorRefs& outputs) {
  for (size_t i = 0; i < post_hooks_.size(); ++i) post_hooks_[i].second(*this, inputs, outputs);
}

}  // namespace tessera::nn
