#include "tessera/state/model_names.h"

#include <c10/core/GradMode.h>

#include <algorithm>
#include <optional>
#include <unordered_set>

#include "tessera/base/error.h"
#include "tessera/base/text/quote.h"
#include "tessera/dtensor/tensor/dtensor.h"
#include "tessera/dtensor/tensor/local_tensor.h"
#include "tessera/state/gather_state_dict.h"

namespace tessera {

std::string clean_fqn(const std::string& name) {
  static const std::unordered_set<std::string> kWrappers = {"_orig_mod", "_fsdp_wrapped_module",
                                                            "_checkpoint_wrapped_module"};
  // Drops the components of the name that are wrappers. All other components keep their order and dots.
  std::string out;
  for (size_t begin = 0; begin <= name.size();) {
    const size_t end = std::min(name.find('.', begin), name.size());
    const auto component = name.substr(begin, end - begin);
    if (!kWrappers.contains(component)) {
      if (begin > 0 && !out.empty()) out += '.';
      out += component;
    }
    begin = end + 1;
  }
  return out;
}

ValuesByName values_by_clean_fqn(const StateDict& state_dict, const char* where) {
  ValuesByName values;
  for (const auto& [key, value] : state_dict) {
    const auto name = clean_fqn(to_string(key));
    TESSERA_CHECK(
        values.emplace(name, &value).second, ErrorKind::kShape,
        "{} two values are for {}: two keys differ only in the prefixes of PyTorch's wrappers. Remove one of them.",
        where, quote(name));
  }
  return values;
}

std::string quoted_list(const std::vector<std::string>& names) {
  constexpr size_t kMostShown = 20;
  std::string text;
  for (size_t i = 0; i < std::min(names.size(), kMostShown); ++i) text += (i ? ", " : "") + quote(names[i]);
  return names.size() > kMostShown ? text + fmt::format(" and {} more", names.size() - kMostShown) : text;
}

ModelTensorNames::ModelTensorNames(nn::Module& model, const StateDictOptions& options) {
  visit(model, "", options);
  std::unordered_set<std::string_view> seen;
  for (const auto& [name, entry] : names_) {
    TESSERA_CHECK(seen.insert(name).second, ErrorKind::kConfig,
                  "[state.names] two tensors of the model are named {}. Give each its own name (options.fqn_modifier).",
                  quote(name));
  }
}

// A module that is registered under several names is visited once per name, as in Module.state_dict(), so that its
// tensors get all their names.
void ModelTensorNames::visit(nn::Module& module, const std::string& prefix, const StateDictOptions& options) {
  for (auto& slot : module.own_parameters()) {
    add(prefix + slot.name, {.names = {}, .parameter = &slot, .buffer = nullptr}, options);
  }
  for (auto& buffer : module.own_buffers()) {
    if (buffer.persistent && buffer.slot->defined()) {
      add(prefix + buffer.name, {.names = {}, .parameter = nullptr, .buffer = buffer.slot}, options);
    }
  }
  for (const auto& [name, child] : module.named_children()) visit(*child, prefix + name + ".", options);
}

void ModelTensorNames::add(const std::string& fqn, const NamedTensor& entry, const StateDictOptions& options) {
  // Tensors are recognised by identity (TensorImpl): the second name of a shared tensor is added to its entry.
  const auto name = options.fqn_modifier ? options.fqn_modifier(fqn) : fqn;
  const auto [found, is_new] = by_tensor_.try_emplace(entry.tensor().unsafeGetTensorImpl(), entries_.size());
  if (is_new) entries_.push_back(entry);
  entries_[found->second].names.push_back(name);
  names_.emplace_back(name, found->second);
}

const ModelTensorNames::NamedTensor* ModelTensorNames::find(const at::Tensor& parameter) const {
  const auto found = by_tensor_.find(parameter.unsafeGetTensorImpl());
  return found == by_tensor_.end() ? nullptr : &entries_[found->second];
}

// Without options.group, returns the group of all ranks of the World in which the model's first DTensor lives. The mesh
// of this DTensor is not used: in a model with several meshes (pipeline stages, experts) no mesh has all ranks.
std::shared_ptr<comm::Group> group_of(const ModelTensorNames& model, const StateDictOptions& options) {
  if (options.group) return options.group;
  for (const auto& entry : model.entries()) {
    if (!is_dtensor(entry.tensor())) continue;
    const auto& mesh = device_mesh(entry.tensor());
    return mesh->world()->group(mesh->device_type());
  }
  return nullptr;
}

std::shared_ptr<comm::Group> broadcasting_group(const ModelTensorNames& model, const StateDictOptions& options,
                                                const char* where) {
  if (!options.broadcast_from_rank0) return nullptr;
  auto group = group_of(model, options);
  TESSERA_CHECK(group, ErrorKind::kConfig,
                "{} broadcast_from_rank0 of a model without DTensors: found no group, set options.group", where);
  return group;
}

c10::Device device_of(const ModelTensorNames& model, const comm::Group* group, std::string_view complaint) {
  std::optional<c10::Device> device;
  for (const auto& entry : model.entries()) {
    // All tensors must be on one device, which is returned. Local tensors without dims are not compared with the
    // others, because a scalar (a step, a scale) may be on the CPU although the model is on an accelerator. A meta
    // DTensor counts as on the device of its mesh, where its values will be. A plain meta tensor is not compared,
    // because it has no device yet.
    const c10::NoGradGuard no_grad;
    const at::Tensor part = local_tensor_of(entry.tensor());
    auto own = part.device();
    if (part.is_meta() && is_dtensor(entry.tensor())) own = device_mesh(entry.tensor())->device();
    if (part.dim() == 0 || own.is_meta()) continue;
    TESSERA_CHECK(!device || *device == own, ErrorKind::kShape,
                  "[state.set] {}: parameters are on {} and on {}. Load the parts of the model one by one.", complaint,
                  device->str(), own.str());
    device = own;
  }
  return device.value_or(c10::Device(group ? group->context().accelerator_type : c10::kCPU));
}

void check_options(const StateDictOptions& options) {
  TESSERA_CHECK(!options.broadcast_from_rank0 || options.full_state_dict, ErrorKind::kConfig,
                "[state] full_state_dict must be True when broadcast_from_rank0 is True.");
  TESSERA_CHECK(options.keep_submodule_prefixes || options.submodules.size() == 1, ErrorKind::kConfig,
                "[state] keep_submodule_prefixes is False with {} submodules, wanted exactly one. Without prefixes, "
                "names of several submodules could be equal.",
                options.submodules.size());
}

StateDict gather_or_offload(const StateDict& state_dict, const ModelTensorNames& model,
                            const StateDictOptions& options) {
  // With full_state_dict and cpu_offload only rank 0 of the group gets the result. If there is no group (a model
  // without DTensors and no options.group), every rank gets the result.
  IterateOptions iterate_options{.cpu_offload = options.cpu_offload, .group = options.group};
  if (!options.full_state_dict) {
    return options.cpu_offload ? offload_state_dict_to_cpu(state_dict, iterate_options) : state_dict;
  }
  if (options.cpu_offload) iterate_options.group = group_of(model, options);
  if (options.cpu_offload && iterate_options.group) iterate_options.ranks_only = {0};
  return gather_state_dict(state_dict, iterate_options);
}

}  // namespace tessera
