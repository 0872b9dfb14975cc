#include "tessera/fsdp1/state/optim_state_dict.h"

#include <fmt/format.h>

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/base/log.h"
#include "tessera/base/text/quote.h"
#include "tessera/comm/collectives/collectives.h"
#include "tessera/fsdp1/state/flatten_optim_state.h"
#include "tessera/fsdp1/state/saved_states.h"
#include "tessera/fsdp1/state/state_dict_values.h"
#include "tessera/state/broadcast_state.h"
#include "tessera/state/optimizer_dict.h"

namespace tessera {
namespace {

StateDictForm optim_form(const StateDictSettings& settings, const Fsdp1Units& model) {
  const auto full = complete_settings(settings);
  TESSERA_CHECK(full.type != StateDictType::kLocal || !full.device_mesh, ErrorKind::kConfig,
                "[fsdp1.save] Found state_dict_type LOCAL_STATE_DICT. DeviceMesh is not compatible with "
                "LOCAL_STATE_DICT. Please set state_dict_type to SHARDED_STATE_DICT to get DTensor state_dict.");
  return state_dict_form(full, full.optim_state_dict_config, model, "[fsdp1.save]");
}

StateValue offloaded(const StateValue& value, bool offload_to_cpu) {
  if (!offload_to_cpu || !value.is_tensor() || !value.tensor().defined()) return value;
  return value.tensor().cpu();
}

// Returns the state of each original parameter that the optimizer's parameter contains (several for a flat parameter).
// COLLECTIVE over the group.
std::vector<StateDict> unflatten_states(const Fsdp1Units& model, const Fsdp1Units::Parameter& parameter,
                                        const MergedOptimState& merged, const StateDict* state,
                                        const StateDictForm& form) {
  const auto& unit = model.units()[*parameter.unit];
  std::vector<StateDict> unflat(parameter.fqns.size());
  for (size_t i = 0; i < unflat.size(); ++i) {
    for (const auto& [name, dtype] : merged.tensors) {
      const auto layout = unit.member_layout(parameter.first_member + i).named(name);
      unflat[i].set(
          name, to_state_dict_value(layout, local_state_range(model, parameter, i, state, name, dtype), form.values));
    }
    for (const auto& [key, value] : merged.others) {
      unflat[i].set(key, offloaded(clone_state(value), form.values.offload_to_cpu));
    }
  }
  return unflat;
}

// Replaces each id or name in `params` by the names of the original parameters; a flat parameter becomes all its
// members.
StateList unflatten_param_groups(const StateValue& groups, const Fsdp1Units& model,
                                 const std::vector<std::string>& optimizer_parameters) {
  StateList unflat;
  for (const auto& group : groups.list()) {
    StateDict copy = clone_state(group).dict();
    StateList fqns;
    for (const auto& key : copy.at("params").list()) {
      const bool known = key.is_string() || (key.is_int() && key.integer() >= 0 &&
                                             key.integer() < static_cast<int64_t>(optimizer_parameters.size()));
      const auto* parameter =
          known ? model.find(key.is_string() ? key.string() : optimizer_parameters[static_cast<size_t>(key.integer())])
                : nullptr;
      TESSERA_CHECK(parameter, ErrorKind::kShape,
                    "[fsdp1.save] a parameter group has {}, which is not a parameter of this model and optimizer. Pass "
                    "the optimizer of this model.",
                    scalar_text(key));
      for (const auto& fqn : parameter->fqns) fqns.emplace_back(fqn);
    }
    copy.set("params", std::move(fqns));
    unflat.emplace_back(std::move(copy));
  }
  return unflat;
}

// Returns the largest step of the states in a dict.
double largest_step(const StateDict& dict) {
  double largest = 0;
  for (const auto& [key, state] : dict.at("state").dict()) {
    const auto* step = state.is_dict() ? state.dict().find("step") : nullptr;
    if (!step) continue;
    if (step->is_int() || step->is_double()) largest = std::max(largest, step->number());
    const bool scalar = step->is_tensor() && step->tensor().defined() && step->tensor().dim() == 0;
    if (scalar && !step->tensor().is_meta()) largest = std::max(largest, step->tensor().item().toDouble());
  }
  return largest;
}

}  // namespace

StateDict optim_state_dict(const Fsdp1Units& model, const StateDictSettings& settings,
                           const std::vector<std::string>& optimizer_parameters, const StateDict& saved,
                           const std::shared_ptr<comm::Group>& group_or_default) {
  comm::Group& group = group_or_default ? *group_or_default : *model.group();
  StateDictForm form;
  LocalOptimStates local;
  std::optional<StateList> param_groups;
  comm::attempt_together(group, [&] {
    form = optim_form(settings, model);
    local = find_local_optim_states(model, optimizer_parameters, saved);
    if (const auto* groups = saved.find("param_groups")) {
      param_groups = unflatten_param_groups(*groups, model, optimizer_parameters);
    }
  });
  check_same_form(group, form);
  // merge_states_of_ranks gives all ranks one list of parameters and of state names. All ranks therefore call the
  // collectives of unflatten_states in one order, even a rank that has no state or gets no result.
  const auto merged = merge_states_of_ranks(model, local, group);

  const bool to_save = !form.rank0_only || group.rank() == 0;
  StateDict states;
  for (const auto* parameter : merged.parameters) {
    const auto* state = local.state_of(parameter);
    if (parameter->unit) {
      auto unflat = unflatten_states(model, *parameter, merged.states.at(parameter), state, form);
      for (size_t i = 0; to_save && i < unflat.size(); ++i) states.set(parameter->fqns[i], std::move(unflat[i]));
    } else if (to_save && state) {
      StateDict copy;
      for (const auto& [key, value] : *state) copy.set(key, offloaded(clone_state(value), form.values.offload_to_cpu));
      states.set(parameter->fqns[0], std::move(copy));
    }
  }
  if (!to_save) return {};
  for (const auto& key : local.user_keys) {
    log_warning(
        "[fsdp1.save] Found a optim state, {}, that FSDP cannot process. FSDP will directly copy everything to the "
        "returned state_dict. In most cases, this is a user-defined state that is not associated with any particular "
        "parameter.",
        quote(to_string(key)));
    states.set(key, clone_state(saved.at("state").dict().at(key)));
  }
  StateDict result{{"state", std::move(states)}};
  if (param_groups) result.set("param_groups", std::move(*param_groups));
  return result;
}

StateDict optim_state_dict(nn::Module& model, const optim::Optimizer& optimizer, const OptimStateDictOptions& options) {
  const auto units = Fsdp1Units::of(model);
  StateDictSettings settings;
  StateDict saved;
  comm::attempt_together(options.group ? *options.group : *units.group(), [&] {
    settings = get_state_dict_type(model);
    saved = options.optim_state_dict ? *options.optim_state_dict : optimizer_state_dict(optimizer);
  });
  return optim_state_dict(units, settings, optimizer_parameter_names(optimizer), saved, options.group);
}

StateDict optim_state_dict_to_load(nn::Module& model, optim::Optimizer& optimizer, const StateDict& optim_state_dict,
                                   const OptimStateDictToLoadOptions& options) {
  const auto units = Fsdp1Units::of(model);
  comm::Group& group = options.group ? *options.group : *units.group();
  StateDictForm form;
  comm::attempt_together(group, [&] { form = optim_form(get_state_dict_type(model), units); });
  check_equal_on_ranks(group, {{"rank0_only", form.rank0_only ? "true" : "false"}},
                       "Set the same state_dict_type on all ranks.");
  const auto flat =
      flatten_optim_state_dict(units, form.rank0_only && group.rank() != 0 ? StateDict{} : optim_state_dict,
                               {.rank0_only = form.rank0_only,
                                .named_optimizer = options.is_named_optimizer ? &optimizer : nullptr,
                                .partial_units = options.partial_units,
                                .group = options.group});
  StateDict result;
  comm::attempt_together(group, [&] {
    result = rekey_flattened(flat, units, parameter_group_names(optimizer), options.is_named_optimizer);
  });
  if (!options.load_directly) return result;
  comm::attempt_together(group, [&] {
    TESSERA_CHECK(!options.is_named_optimizer, ErrorKind::kConfig,
                  "[fsdp1.load] load_directly and is_named_optimizer cannot be used together: this optimizer takes "
                  "state by ids. Set one.");
    load_optimizer_state_dict(optimizer, result);
  });
  // A rank without elements of any parameter has no `step` in its dict. Therefore every rank's optimizer gets the
  // largest step of all ranks.
  double steps = 0;
  const auto own = fmt::format("{}", largest_step(result));
  for (const auto& text : comm::all_gather_bytes(group, own)) steps = std::max(steps, std::stod(text));
  optimizer.set_step(static_cast<int64_t>(steps));
  return result;
}

}  // namespace tessera
