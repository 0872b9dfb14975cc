#include <set>
#include <unordered_map>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/base/log.h"
#include "tessera/base/text/quote.h"
#include "tessera/fsdp1/state/flatten_optim_state.h"
#include "tessera/fsdp1/state/state_dict_values.h"
#include "tessera/state/hyperparameter_values.h"

namespace tessera {
namespace {

// The key of each parameter in the optimizer's dict (its id or its name), by its name in named_parameters().
using OptimizerKeys = std::unordered_map<std::string, StateKey>;

OptimizerKeys keys_of_optimizer(const ParameterGroupNames& groups, bool by_name) {
  OptimizerKeys keys;
  int64_t id = 0;
  for (const auto& group : groups) {
    for (const auto& name : group) keys.emplace(name, by_name ? StateKey(name) : StateKey(id)), ++id;
  }
  return keys;
}

// The saved parameter groups of an optimizer's state dict. settings_of() finds the groups that contained given
// parameters.
class SavedGroups {
 public:
  SavedGroups(const StateList& groups, const Fsdp1Units& model, const OptimizerKeys& keys) : groups_(groups) {
    for (size_t i = 0; i < groups.size(); ++i) {
      const auto& params = groups[i].dict().at("params").list();
      if (params.empty()) empty_.push_back(i);
      for (const auto& name : params) {
        const auto* parameter = name.is_string() ? model.find_fqn(name.string()) : nullptr;
        TESSERA_CHECK(
            parameter && keys.contains(parameter->name), ErrorKind::kShape,
            "[fsdp1.load] a parameter group names {}, which is not in the model or not in its optimizer. Load the "
            "state of this model.",
            scalar_text(name));
        auto& memberships = memberships_[parameter->name];
        if (memberships.empty() || memberships.back().group != i) memberships.push_back({i, name.string()});
      }
    }
  }

  // Returns the hyper-parameters of the saved groups that contained `parameters`; an empty dict when the parameters
  // were in no saved group. A flat parameter can come from several saved groups, one per member. Error kShape unless
  // these groups have equal hyper-parameters.
  StateDict settings_of(const std::vector<std::string>& parameters) const {
    if (parameters.empty()) return settings_of_empty();
    const GroupMembership* first = nullptr;
    std::set<size_t> compared;
    for (const auto& parameter : parameters) {
      const auto found = memberships_.find(parameter);
      if (found == memberships_.end()) continue;
      for (const auto& membership : found->second) {
        if (!first) first = &membership;
        if (!compared.insert(membership.group).second || membership.group == first->group) continue;
        TESSERA_CHECK(same_hyperparameters(groups_[first->group].dict(), groups_[membership.group].dict()),
                      ErrorKind::kShape,
                      "[fsdp1.load] {} and {} are in one parameter group here, but were saved in groups with different "
                      "hyper-parameters. Make the groups as they were saved, or leave param_groups out of the dict to "
                      "keep this optimizer's.",
                      quote(first->fqn), quote(membership.fqn));
      }
    }
    return first ? groups_[first->group].dict() : StateDict();
  }

 private:
  struct GroupMembership {
    size_t group;
    std::string fqn;  // one parameter of the group, for messages
  };

  StateDict settings_of_empty() const {
    TESSERA_CHECK(empty_.size() <= 1, ErrorKind::kShape,
                  "[fsdp1.load] found {} saved groups without parameters for a group without parameters, expected one "
                  "at most. Leave such groups out.",
                  empty_.size());
    return empty_.empty() ? StateDict() : groups_[empty_.front()].dict();
  }

  const StateList& groups_;
  // For the name of each parameter of the optimizer: the saved groups that contained this parameter. A flat parameter
  // can be in several saved groups, because its original parameters can come from different groups.
  std::unordered_map<std::string, std::vector<GroupMembership>> memberships_;
  std::vector<size_t> empty_;
};

}  // namespace

ParameterGroupNames parameter_group_names(const optim::Optimizer& optimizer) {
  ParameterGroupNames names;
  for (auto& group : optimizer.param_groups()) names.push_back(std::move(group.params));
  return names;
}

StateDict rekey_flattened(const FlattenedOptimState& flat, const Fsdp1Units& model,
                          const ParameterGroupNames& optimizer_groups, bool by_name) {
  const auto keys = keys_of_optimizer(optimizer_groups, by_name);
  StateDict state;
  for (const auto& entry : flat.entries) {
    const auto key = keys.find(entry.parameter);
    if (key == keys.end()) {
      log_warning("[fsdp1.load] {}: the optimizer does not have this parameter, so its state is left out",
                  entry.parameter);
    } else {
      state.set(key->second, entry.state);
    }
  }
  for (const auto& [key, value] : flat.user_state) state.set(key, value);
  StateDict result{{"state", std::move(state)}};
  if (!flat.param_groups) return result;
  const SavedGroups saved(*flat.param_groups, model, keys);
  StateList groups;
  for (const auto& names : optimizer_groups) {
    StateDict group = saved.settings_of(names);
    group.erase("param_names");
    StateList params;
    for (const auto& name : names) params.push_back(to_value(keys.at(name)));
    group.set("params", std::move(params));
    groups.emplace_back(std::move(group));
  }
  result.set("param_groups", std::move(groups));
  return result;
}

}  // namespace tessera
