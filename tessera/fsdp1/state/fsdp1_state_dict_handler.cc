// The functions of state_dict.h for a model under FSDP1.
#include <algorithm>
#include <functional>
#include <optional>
#include <string_view>
#include <unordered_set>

#include "tessera/base/error.h"
#include "tessera/base/text/quote.h"
#include "tessera/comm/collectives/agreement.h"
#include "tessera/fsdp1/fsdp1_state.h"
#include "tessera/fsdp1/fully_sharded_data_parallel.h"
#include "tessera/fsdp1/state/flatten_optim_state.h"
#include "tessera/fsdp1/state/model_state_dict.h"
#include "tessera/fsdp1/state/optim_state_dict.h"
#include "tessera/fsdp1/state/state_dict_type.h"
#include "tessera/fsdp1/state/units.h"
#include "tessera/state/hyperparameter_values.h"
#include "tessera/state/model_names.h"
#include "tessera/state/optimizer_forms.h"

namespace tessera {
namespace {

enum class StateDictDirection { kGet, kSet };

// Maps the options to FSDP1's settings: full_state_dict to FULL_STATE_DICT, otherwise SHARDED_STATE_DICT. The device
// mesh of the model's present settings is kept.
StateDictSettings fsdp1_settings(nn::Module& model, const StateDictOptions& options, StateDictDirection direction) {
  StateDictSettings settings{.device_mesh = get_state_dict_type(model).device_mesh};
  if (!options.full_state_dict) {
    settings.type = StateDictType::kSharded;
    settings.state_dict_config = ShardedStateDictConfig{.offload_to_cpu = options.cpu_offload};
    settings.optim_state_dict_config = ShardedOptimStateDictConfig{.offload_to_cpu = options.cpu_offload};
    return settings;
  }
  const bool rank0_only = direction == StateDictDirection::kGet ? options.cpu_offload : options.broadcast_from_rank0;
  settings.state_dict_config = FullStateDictConfig{.offload_to_cpu = options.cpu_offload, .rank0_only = rank0_only};
  settings.optim_state_dict_config =
      FullOptimStateDictConfig{.offload_to_cpu = options.cpu_offload, .rank0_only = rank0_only};
  return settings;
}

optim::Optimizer& only_optimizer(const std::vector<optim::Optimizer*>& optimizers) {
  TESSERA_CHECK(optimizers.size() == 1, ErrorKind::kConfig,
                "[state] found {} optimizers of a model under FSDP1, wanted one optimizer of the whole model",
                optimizers.size());
  return *optimizers.front();
}

// Sets the state_dict_type that the options ask for, for as long as the object exists.
struct StateDictTypeForOptions {
  using Plan = std::function<void(const Fsdp1Units& units)>;
  // Checks the options and calls `plan`. COLLECTIVE: an error on one rank is thrown on all ranks.
  StateDictTypeForOptions(nn::Module& model, const StateDictOptions& options, StateDictDirection direction,
                          const Plan& plan = {}) {
    const auto units = Fsdp1Units::of(model);
    comm::attempt_together(*units.group(), [&] {
      TESSERA_CHECK(!options.fqn_modifier && options.submodules.empty(), ErrorKind::kConfig,
                    "[state] a model under FSDP1 takes neither fqn_modifier nor submodules");
      scope.emplace(model, fsdp1_settings(model, options, direction));
      if (plan) plan(units);
    });
  }
  std::optional<StateDictTypeScope> scope;
};

// Returns the names of the original parameters in each parameter group of the optimizer.
ParameterGroupNames original_groups(const Fsdp1Units& units, const optim::Optimizer& optimizer) {
  ParameterGroupNames groups;
  for (const auto& group : parameter_group_names(optimizer)) {
    auto& names = groups.emplace_back();
    for (const auto& name : group) {
      const auto* parameter = units.find(name);
      TESSERA_CHECK(parameter, ErrorKind::kConfig,
                    "[state] the optimizer's '{}' is not a parameter of the model. Pass the optimizer of this model.",
                    name);
      names.insert(names.end(), parameter->fqns.begin(), parameter->fqns.end());
    }
  }
  return groups;
}

// Throws unless every parameter that needs a gradient has a state, under any of its names.
void check_has_states(const Fsdp1Units& units, const optim::Optimizer& optimizer, const StateDict& states) {
  const auto check = [](bool has, const std::string& name) {
    TESSERA_CHECK(has, ErrorKind::kShape,
                  "[state.set_optimizer] Missing optimizer state for parameter '{}' in checkpoint. The parameter "
                  "requires gradients but has no saved optimizer state. To load anyway, use "
                  "StateDictOptions(strict=False).",
                  escape(name));
  };
  const auto names = optimizer.parameter_names();
  const std::unordered_set<std::string_view> held(names.begin(), names.end());
  std::vector<std::vector<bool>> trained;
  for (const auto& unit : units.units()) trained.push_back(unit.trained());
  for (const auto& parameter : units.parameters()) {
    if (!held.contains(parameter.name)) continue;
    if (!parameter.unit) {
      check(!optimizer.slot(parameter.name).parameter.requires_grad() || parameter.find_in(states), parameter.name);
      continue;
    }
    const auto& unit = units.units()[*parameter.unit];
    for (size_t i = 0; i < parameter.fqns.size(); ++i) {
      const size_t member = parameter.first_member + i;
      const bool wants = trained[*parameter.unit][member] && unit.member_layout(member).numel() > 0;
      const auto names_of_member = unit.names(member);
      const auto is_there = [&](const std::string& name) { return states.contains(name); };
      check(!wants || std::ranges::any_of(names_of_member, is_there), names_of_member[0]);
    }
  }
}

}  // namespace

StateDict Fsdp1State::get_model_state_dict(nn::Module& model, const StateDictOptions& options) const {
  const StateDictTypeForOptions type_scope(model, options, StateDictDirection::kGet);
  auto out = fsdp1_state_dict(model, options.ignore_frozen_params);
  verify_model_state_dict(out, options);
  return out;
}

IncompatibleKeys Fsdp1State::set_model_state_dict(nn::Module& model, const StateDict& values,
                                                  const StateDictOptions& options) const {
  const StateDictTypeForOptions type_scope(model, options, StateDictDirection::kSet);
  return load_fsdp1_state_dict(model, values,
                               {.strict = options.strict, .ignore_frozen_params = options.ignore_frozen_params});
}

StateDict Fsdp1State::get_optimizer_state_dict(nn::Module& model, const std::vector<optim::Optimizer*>& optimizers,
                                               const StateDictOptions& options) const {
  const StateDictTypeForOptions type_scope(model, options, StateDictDirection::kGet,
                                           [&](const auto&) { only_optimizer(optimizers); });
  auto out = optim_state_dict(model, only_optimizer(optimizers));
  if (!options.flatten_optimizer_state_dict || out.empty()) return out;
  return flatten_optimizer_dict(out);
}

void Fsdp1State::set_optimizer_state_dict(nn::Module& model, const std::vector<optim::Optimizer*>& optimizers,
                                          const StateDict& values, const StateDictOptions& options) const {
  StateDict nested;
  const StateDictTypeForOptions type_scope(model, options, StateDictDirection::kSet, [&](const Fsdp1Units& units) {
    const auto& optimizer = only_optimizer(optimizers);
    if (options.broadcast_from_rank0 && units.group()->rank() != 0) return;
    const bool is_flat = !values.contains("state");
    nested = is_flat ? unflatten_optimizer_dict(values, original_groups(units, optimizer)) : values;
    const auto& states = nested.at("state");  // a value that is not a dict of names is refused where it is read
    const bool is_named = states.is_dict() && std::ranges::none_of(states.dict(), [](const auto& item) {
                            return std::holds_alternative<int64_t>(item.first);
                          });
    if (options.strict && is_named && !keeps_no_state(optimizer)) check_has_states(units, optimizer, states.dict());
  });
  optim_state_dict_to_load(model, only_optimizer(optimizers), nested,
                           {.load_directly = true, .partial_units = !options.strict});
}

}  // namespace tessera
