#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/base/text/quote.h"
#include "tessera/state/detail/incoming_tensors.h"
#include "tessera/state/detail/optimizer_load.h"
#include "tessera/state/detail/optimizer_parts.h"
#include "tessera/state/detail/saved_optimizer.h"
#include "tessera/state/hyperparameter_values.h"
#include "tessera/state/model_names.h"
#include "tessera/state/optimizer_dict.h"
#include "tessera/state/optimizer_forms.h"
#include "tessera/state/state_dict.h"
#include "tessera/state/state_dict_handler.h"

namespace tessera {
namespace {

// Returns, for each parameter group of `optimizer`, the names that its parameters have in `model`. A shared parameter
// has several names, and all of them are returned.
std::vector<detail::GroupNames> group_names(const optim::Optimizer& optimizer, const ModelTensorNames& model) {
  std::vector<detail::GroupNames> groups;
  for (const auto& group : optimizer.param_groups()) {
    auto& names = groups.emplace_back();
    for (const auto& name : group.params) {
      const auto& parameter = optimizer.slot(name).parameter;
      const auto* entry = model.find(parameter);
      TESSERA_CHECK(
          entry, ErrorKind::kConfig,
          "[state] {} of an optimizer is not a parameter of this model. Pass the model that it was made for, or "
          "make the optimizer after the model is sharded and loaded.",
          quote(name));
      names.push_back({.names = entry->names, .wants_state = parameter.requires_grad()});
    }
  }
  return groups;
}

void check_optimizers(const std::vector<optim::Optimizer*>& optimizers) {
  TESSERA_CHECK(!optimizers.empty() && std::ranges::find(optimizers, nullptr) == optimizers.end(), ErrorKind::kConfig,
                "[state] Optimizers are not passed in, but their state is asked for. Pass at least one optimizer, and "
                "no null pointer.");
}

std::vector<detail::OptimizerNames> optimizer_names(const std::vector<optim::Optimizer*>& optimizers,
                                                    const ModelTensorNames& model) {
  std::vector<detail::OptimizerNames> out;
  for (const auto* optimizer : optimizers) {
    out.push_back({.groups = group_names(*optimizer, model), .is_stateless = keeps_no_state(*optimizer)});
  }
  return out;
}

}  // namespace

StateDict get_optimizer_state_dict(nn::Module& model, const std::vector<optim::Optimizer*>& optimizers,
                                   const StateDictOptions& options) {
  check_options(options);
  check_optimizers(optimizers);
  if (const auto* handler = state_dict_handler(model)) {
    return handler->get_optimizer_state_dict(model, optimizers, options);
  }
  const c10::NoGradGuard no_grad;
  const ModelTensorNames names(model, options);
  StateDict state;
  StateList groups;
  for (const auto* optimizer : optimizers) {
    std::vector<std::string> params;
    for (const auto& group : group_names(*optimizer, names)) {
      for (const auto& parameter : group) params.push_back(parameter.names.front());
    }
    auto named = optimizer_dict_to_names(optimizer_state_dict(*optimizer), params);
    for (auto& [name, value] : named.at("state").dict()) {
      TESSERA_CHECK(!state.contains(name), ErrorKind::kConfig, "[state.get_optimizer] two optimizers hold {}",
                    quote(to_string(name)));
      state.set(name, std::move(value));
    }
    for (auto& group : named.at("param_groups").list()) groups.push_back(std::move(group));
  }
  StateDict out = detail::optimizer_dict_of(std::move(state), std::move(groups));
  if (options.flatten_optimizer_state_dict) out = flatten_optimizer_dict(out);
  out = gather_or_offload(out, names, options);
  verify_optimizer_state_dict(out, options);
  return out;
}

void set_optimizer_state_dict(nn::Module& model, const std::vector<optim::Optimizer*>& optimizers,
                              const StateDict& optimizer_state_dict, const StateDictOptions& options) {
  check_options(options);
  check_optimizers(optimizers);
  if (const auto* handler = state_dict_handler(model)) {
    return handler->set_optimizer_state_dict(model, optimizers, optimizer_state_dict, options);
  }
  const c10::NoGradGuard no_grad;
  const ModelTensorNames names(model, options);
  const auto group = broadcasting_group(names, options, "[state.set_optimizer]");
  const auto device = device_of(names, group.get(), "Device mismatch");
  std::vector<detail::OptimizerLoad> loads;
  // plan_load() calls `plan` on all ranks before the first state is written, and throws an error of one rank on all
  // ranks.
  const auto plan = [&](const StateDict& saved, const detail::IncomingTensors* incoming) {
    verify_optimizer_state_dict(saved, {});
    const auto split = detail::select_optimizers(saved, optimizer_names(optimizers, names), options.strict);
    for (size_t i = 0; i < optimizers.size(); ++i) {
      loads.push_back(detail::plan_optimizer_load(*optimizers[i], split[i]));
    }
    for (const auto& load : loads) {
      for (const auto& copy : load.copies()) {
        const bool is_announced = incoming && incoming->is_announced(copy.source);
        TESSERA_CHECK(is_announced || !copy.source.is_meta(), ErrorKind::kShape,
                      "[state.set_optimizer] a value of {} is on the meta device, without values", copy.state);
      }
    }
  };
  const auto incoming = detail::plan_load(optimizer_state_dict, group.get(), plan);
  std::vector<detail::TensorCopy> copies;
  // OptimizerLoad::begin() needs no communication, so it is called for one optimizer after another. load_copies() then
  // loads the tensors of all optimizers in one pass, because all ranks must receive the tensors in the same order, that
  // of the broadcast dict.
  for (auto& load : loads) {
    load.begin();
    for (const auto& copy : load.copies()) copies.push_back({copy.source, copy.target});
  }
  detail::load_copies(copies, incoming.get(), device);
  for (auto& load : loads) load.finish();
}

// A dict is valid in the flat form (only keys that begin with "state." or "param_groups.") or in the nested form (a
// dict "state" and a list "param_groups").
void verify_optimizer_state_dict(const StateDict& optimizer_state_dict, const StateDictOptions& options) {
  const bool may_be_empty = options.broadcast_from_rank0 || (options.cpu_offload && options.full_state_dict);
  if (optimizer_state_dict.empty() && may_be_empty) return;
  TESSERA_CHECK(!optimizer_state_dict.empty(), ErrorKind::kShape,
                "[state.verify] The option indicates that model state_dict is required to save, or load but optim "
                "state_dict is empty.");
  if (!optimizer_state_dict.contains("state") && !optimizer_state_dict.contains("param_groups")) {
    for (const auto& [key, value] : optimizer_state_dict) {
      const auto text = to_string(key);
      TESSERA_CHECK(text.starts_with("state.") || text.starts_with("param_groups."), ErrorKind::kShape,
                    "[state.verify] {} is not a key of an optimizer's dict, wanted state and param_groups, or keys "
                    "that begin with these and a dot.",
                    quote(text));
    }
    return;
  }
  const auto *state = optimizer_state_dict.find("state"), *groups = optimizer_state_dict.find("param_groups");
  TESSERA_CHECK(state && state->is_dict() && groups && groups->is_list(), ErrorKind::kShape,
                "[state.verify] an optimizer's dict needs a dict \"state\" and a list \"param_groups\"");
}

void verify_state_dict(const StateDict& model_state_dict, const StateDict& optimizer_state_dict,
                       const StateDictOptions& options) {
  verify_model_state_dict(model_state_dict, options);
  verify_optimizer_state_dict(optimizer_state_dict, options);
}

ModelAndOptimizerState get_state_dict(nn::Module& model, const std::vector<optim::Optimizer*>& optimizers,
                                      const StateDictOptions& options) {
  auto weights = get_model_state_dict(model, options);
  return {.model = std::move(weights), .optimizer = get_optimizer_state_dict(model, optimizers, options)};
}

// Loads the optimizers first, then the model, as PyTorch does.
IncompatibleKeys set_state_dict(nn::Module& model, const std::vector<optim::Optimizer*>& optimizers,
                                const StateDict& model_state_dict, const StateDict& optimizer_state_dict,
                                const StateDictOptions& options) {
  set_optimizer_state_dict(model, optimizers, optimizer_state_dict, options);
  return set_model_state_dict(model, model_state_dict, options);
}

}  // namespace tessera
