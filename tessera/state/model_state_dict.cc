#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>

#include <optional>
#include <unordered_set>

#include "tessera/base/error.h"
#include "tessera/base/log.h"
#include "tessera/base/text/quote.h"
#include "tessera/dtensor/tensor/local_tensor.h"
#include "tessera/parallel/fsdp/fully_shard.h"
#include "tessera/state/detail/incoming_tensors.h"
#include "tessera/state/detail/load_tensor.h"
#include "tessera/state/model_names.h"
#include "tessera/state/state_dict.h"
#include "tessera/state/state_dict_handler.h"
#include "tessera/state/state_dict_structure.h"

namespace tessera {
namespace {

// Plans the loading of a dict into a model: which value goes into which tensor. The constructor collects all faults and
// throws one error that lists them; the model is not changed. copies() gives the plan.
class ModelLoad {
 public:
  // `incoming` knows the tensors of the dict whose values are received later; it is null when this rank has all values.
  ModelLoad(const ModelTensorNames& model, const StateDict& values, const StateDictOptions& options,
            const detail::IncomingTensors* incoming)
      : options_(options), incoming_(incoming) {
    const auto values_by_name = values_by_clean_fqn(values, "[state.set_model]");
    std::unordered_set<std::string_view> known;
    for (const auto& [name, entry] : model.names()) known.insert(name);
    for (const auto& [key, value] : values) {
      if (!known.contains(clean_fqn(to_string(key)))) keys_.unexpected_keys.push_back(to_string(key));
    }
    for (const auto& entry : model.entries()) plan(entry, values_by_name);
    const bool complete = keys_.missing_keys.empty() && keys_.unexpected_keys.empty();
    TESSERA_CHECK(mismatches_.empty() && (complete || !options.strict), ErrorKind::kShape,
                  "[state.set_model] Error(s) in loading state_dict:{}{}{}", mismatches_,
                  keys_.missing_keys.empty() || !options.strict
                      ? ""
                      : fmt::format(" Missing key(s) in state_dict: {}.", quoted_list(keys_.missing_keys)),
                  keys_.unexpected_keys.empty() || !options.strict
                      ? ""
                      : fmt::format(" Unexpected key(s) in state_dict: {}.", quoted_list(keys_.unexpected_keys)));
  }

  const IncompatibleKeys& keys() const { return keys_; }
  bool fills_meta() const { return fills_meta_; }

  // Returns a TensorCopy (source and target) for each value that is loaded. Call this after the model's tensors on the
  // meta device were allocated, because the targets are the tensors that the model has at the time of this call.
  std::vector<detail::TensorCopy> copies() const {
    std::vector<detail::TensorCopy> out;
    for (const auto& [entry, source] : sources_) out.push_back({source, entry->tensor().detach()});
    return out;
  }

 private:
  bool is_announced(const at::Tensor& tensor) const {
    return incoming_ && tensor.defined() && incoming_->is_announced(tensor);
  }

  // Returns whether two values that the dict has under two names of one tensor are known to differ. An announced tensor
  // (IncomingTensors) is a meta tensor in place of a value that is received from other ranks later. Two announced
  // tensors that stand for ShardedTensors differ if this rank's shards of these ShardedTensors differ. In all other
  // cases with a meta tensor the result is false, because its values are unknown. It is also false if one of the two is
  // not a tensor.
  bool differ(const StateValue& a, const StateValue& b) const {
    if (!a.is_tensor() || !b.is_tensor()) return false;
    if (is_announced(a.tensor()) && is_announced(b.tensor())) {
      return incoming_->are_known_to_differ(a.tensor(), b.tensor());
    }
    const bool has_values = !a.tensor().is_meta() && !b.tensor().is_meta();
    return has_values && !same_values(a, b);
  }

  // Returns the value under the first of the tensor's names that is a key of the dict, or null. Values under its other
  // names must be equal, since all of them would be written to the same memory.
  const StateValue* value_of(const ModelTensorNames::NamedTensor& entry, const ValuesByName& values_by_name) {
    const StateValue* value = nullptr;
    for (const auto& name : entry.names) {
      const auto found = values_by_name.find(name);
      if (found == values_by_name.end()) continue;
      TESSERA_CHECK(!value || !differ(*value, *found->second), ErrorKind::kShape,
                    "[state.set_model] {} and {} are one tensor of the model, but the dict has different values",
                    quote(entry.names.front()), quote(name));
      if (!value) value = found->second;
    }
    return value;
  }

  void plan(const ModelTensorNames::NamedTensor& entry, const ValuesByName& values_by_name) {
    const auto& name = entry.names.front();
    const bool is_meta = local_tensor_of(entry.tensor().detach()).is_meta();
    const auto* value = value_of(entry, values_by_name);
    if (!value) {
      const bool may_miss = options_.ignore_frozen_params && entry.parameter && !entry.tensor().requires_grad();
      if (!may_miss) keys_.missing_keys.insert(keys_.missing_keys.end(), entry.names.begin(), entry.names.end());
      if (is_meta) {
        mismatches_ += fmt::format(" {} is on the meta device, and the dict has no value for it.", quote(name));
      }
      return;
    }
    fills_meta_ |= is_meta;
    if (!value->is_tensor()) {
      mismatches_ += fmt::format(" {} is a {}, wanted a Tensor.", quote(name), type_name(*value));
      return;
    }
    const auto mismatch = detail::load_mismatch(entry.tensor(), value->tensor());
    if (!mismatch.empty()) mismatches_ += fmt::format(" size mismatch for {}: it {}.", quote(name), mismatch);
    if (value->tensor().defined() && value->tensor().is_meta() && !is_announced(value->tensor())) {
      mismatches_ += fmt::format(" {} is on the meta device, without values.", quote(name));
    }
    sources_.emplace_back(&entry, value->tensor());
  }

  const StateDictOptions& options_;
  const detail::IncomingTensors* incoming_;
  IncompatibleKeys keys_;
  std::string mismatches_;
  std::vector<std::pair<const ModelTensorNames::NamedTensor*, at::Tensor>> sources_;
  bool fills_meta_ = false;
};

// Allocates the parameters and the persistent buffers that are on the meta device. Non-persistent buffers are put back
// on the meta device: a state dict has no values for them, so their memory would stay uninitialised.
void materialise(nn::Module& model, c10::Device device) {
  std::vector<std::pair<at::Tensor*, at::Tensor>> kept;
  for (const auto& [path, module] : model.named_modules()) {
    for (auto& buffer : module->own_buffers()) {
      if (!buffer.persistent && buffer.slot->defined() && buffer.slot->is_meta()) {
        kept.emplace_back(buffer.slot, *buffer.slot);
      }
    }
  }
  to_empty(model, device);
  for (const auto& [slot, meta] : kept) *slot = meta;
}

bool is_under(const std::string& name, const std::vector<std::string>& prefixes) {
  for (const auto& prefix : prefixes) {
    if (name.starts_with(prefix)) return true;
  }
  return prefixes.empty();
}

std::vector<std::string> submodule_prefixes(nn::Module& model, const StateDictOptions& options) {
  std::vector<std::string> prefixes;
  if (options.submodules.empty()) return prefixes;
  log_warning(
      "[state] Getting submodules only model/optim state_dict is deprecated: filter the result of get_state_dict");
  for (const auto* wanted : options.submodules) {
    const size_t before = prefixes.size();
    for (const auto& [path, module] : model.named_modules()) {
      if (module == wanted) prefixes.push_back(path.empty() ? "" : path + ".");
    }
    TESSERA_CHECK(prefixes.size() > before, ErrorKind::kConfig,
                  "[state.get] one of the submodules is not in the model");
  }
  return prefixes;
}

}  // namespace

const StateDictHandler* state_dict_handler(nn::Module& model) {
  // for_each_module visits a parent before its children, so the first StateDictHandler with parameters is that of the
  // outermost wrapped module.
  const StateDictHandler* found = nullptr;
  model.for_each_module([&](nn::Module& module) {
    const auto* handler = dynamic_cast<const StateDictHandler*>(module.sharding().get());
    if (!found && handler && handler->has_parameters()) found = handler;
  });
  return found;
}

StateDict get_model_state_dict(nn::Module& model, const StateDictOptions& options) {
  check_options(options);
  if (const auto* handler = state_dict_handler(model)) return handler->get_model_state_dict(model, options);
  const c10::NoGradGuard no_grad;
  const ModelTensorNames names(model, options);
  const auto prefixes = submodule_prefixes(model, options);
  StateDict parts;
  // A shared tensor is detached once, so that the dict has the same at::Tensor under all its names. A checkpoint
  // thereby recognises that they are one tensor.
  std::vector<at::Tensor> values;
  for (const auto& entry : names.entries()) values.push_back(entry.tensor().detach());
  for (const auto& [name, index] : names.names()) {
    const auto& entry = names.entries()[index];
    if (options.ignore_frozen_params && entry.parameter && !entry.tensor().requires_grad()) continue;
    if (!is_under(name, prefixes)) continue;
    const bool keeps_prefix = prefixes.empty() || options.keep_submodule_prefixes;
    parts.set(keeps_prefix ? name : name.substr(prefixes.front().size()), values[index]);
  }
  auto out = gather_or_offload(parts, names, options);
  verify_model_state_dict(out, options);
  return out;
}

IncompatibleKeys set_model_state_dict(nn::Module& model, const StateDict& model_state_dict,
                                      const StateDictOptions& options) {
  check_options(options);
  if (const auto* handler = state_dict_handler(model)) {
    return handler->set_model_state_dict(model, model_state_dict, options);
  }
  const c10::NoGradGuard no_grad;
  const ModelTensorNames names(model, options);
  const auto group = broadcasting_group(names, options, "[state.set_model]");
  const auto device = device_of(names, group.get(), "Multiple devices found");
  std::optional<ModelLoad> load;
  const auto plan = [&](const StateDict& values, const detail::IncomingTensors* incoming) {
    if (!group) verify_model_state_dict(model_state_dict, options);
    // With broadcast_from_rank0, `values` has meta tensors instead of rank 0's tensors. So a ModelLoad of `values`
    // cannot check that a tensor with several names has equal values under all of them. Rank 0 therefore first makes a
    // ModelLoad of its own dict, only for this check.
    if (group && group->rank() == 0) ModelLoad(names, model_state_dict, options, nullptr);
    load.emplace(names, values, options, incoming);
  };
  // plan_load has checked the dict on all ranks. Only now are meta tensors allocated and values written.
  const auto incoming = detail::plan_load(model_state_dict, group.get(), plan);
  if (load->fills_meta()) materialise(model, device);
  detail::load_copies(load->copies(), incoming.get(), device);
  return load->keys();
}

void verify_model_state_dict(const StateDict& model_state_dict, const StateDictOptions& options) {
  const bool may_be_empty = !options.submodules.empty() || options.ignore_frozen_params || !options.strict ||
                            options.broadcast_from_rank0 || (options.cpu_offload && options.full_state_dict);
  TESSERA_CHECK(!model_state_dict.empty() || may_be_empty, ErrorKind::kShape,
                "[state.verify] The option indicates that model state_dict is required to save or load, but model "
                "state_dict is empty.");
  for (const auto& [key, value] : model_state_dict) {
    TESSERA_CHECK(to_string(key).find("_flat_param") == std::string::npos, ErrorKind::kShape,
                  "[state.verify] {} contains _flat_param. This can happen if the model is not the root module.",
                  quote(to_string(key)));
  }
}

}  // namespace tessera
