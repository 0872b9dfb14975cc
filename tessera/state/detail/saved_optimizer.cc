#include "tessera/state/detail/saved_optimizer.h"

#include <algorithm>
#include <unordered_map>

#include "tessera/base/error.h"
#include "tessera/base/text/quote.h"
#include "tessera/state/detail/optimizer_parts.h"
#include "tessera/state/hyperparameter_values.h"
#include "tessera/state/optimizer_forms.h"

namespace tessera::detail {
namespace {

// Whether the keys of `state` are ids. A dict without states is classified by the first parameter of its groups.
bool is_by_id(const StateDict& saved) {
  const auto& state = saved.at("state").dict();
  const auto is_id = [](const auto& item) { return std::holds_alternative<int64_t>(item.first); };
  if (!state.empty()) return std::ranges::all_of(state, is_id);
  for (const auto& group : saved.at("param_groups").list()) {
    for (const auto& param : group.dict().at("params").list()) return param.is_int();
  }
  return false;
}

// Unflattens a flat dict. A shared parameter may be saved under any of its names, so unflatten_optimizer_dict() gets
// all names of each parameter. unflatten_optimizer_dict() leaves out each name for which `flat` has no key.
StateDict unflattened(const StateDict& flat, const std::vector<OptimizerNames>& optimizers) {
  std::vector<std::vector<std::string>> names;
  for (const auto& optimizer : optimizers) {
    for (const auto& group : optimizer.groups) {
      auto& all = names.emplace_back();
      for (const auto& parameter : group) all.insert(all.end(), parameter.names.begin(), parameter.names.end());
    }
  }
  return unflatten_optimizer_dict(flat, names);
}

// Selects the state of one optimizer at a time from a saved dict whose keys are parameter names. The parameter groups
// of the saved run may differ from the optimizer's groups: the state of a parameter is found by its name, and the
// hyper-parameters of a group are taken from the saved groups of the group's parameters, which must have equal
// hyper-parameters.
class OptimizerSelection {
 public:
  struct Rules {
    bool strict;
    bool has_empty_groups;  // false for a flat dict, which has no groups without parameters
    bool several_optimizers;
  };
  OptimizerSelection(const StateDict& saved, const Rules& rules)
      : rules_(rules), state_(saved.at("state").dict()), groups_(saved.at("param_groups").list()) {
    for (size_t i = 0; i < groups_.size(); ++i) {
      const auto& params = groups_[i].dict().at("params").list();
      if (params.empty()) empty_.push_back(i);
      for (const auto& param : params) {
        TESSERA_CHECK(param.is_string(), ErrorKind::kShape,
                      "[state.set_optimizer] params of saved group {}: found a {} among names", i, type_name(param));
        TESSERA_CHECK(group_of_.emplace(param.string(), i).second, ErrorKind::kShape,
                      "[state.set_optimizer] {} is in two saved groups", quote(param.string()));
      }
    }
  }

  StateDict select(const OptimizerNames& optimizer) const {
    StateDict state;
    StateList groups;
    int64_t next_id = 0;
    for (const auto& group : optimizer.groups) {
      StateList ids;
      for (const auto& parameter : group) {
        const auto* saved = state_of(parameter);
        TESSERA_CHECK(saved || !rules_.strict || !parameter.wants_state || optimizer.is_stateless, ErrorKind::kShape,
                      "[state.set_optimizer] Missing optimizer state for parameter '{}' in checkpoint. The parameter "
                      "requires gradients but has no saved optimizer state. To load anyway, use "
                      "StateDictOptions(strict=False).",
                      escape(parameter.names.front()));
        if (saved) state.set(next_id, *saved);
        ids.emplace_back(next_id++);
      }
      StateDict settings = settings_of(group);
      settings.set("params", std::move(ids));
      settings.erase("param_names");
      groups.emplace_back(std::move(settings));
    }
    return optimizer_dict_of(std::move(state), std::move(groups));
  }

 private:
  const StateValue* state_of(const NamedParameterState& parameter) const {
    for (const auto& name : parameter.names) {
      if (const auto* found = state_.find(name)) return found;
    }
    return nullptr;
  }

  const StateDict* settings_of(const NamedParameterState& parameter) const {
    for (const auto& name : parameter.names) {
      const auto found = group_of_.find(name);
      if (found != group_of_.end()) return &groups_[found->second].dict();
    }
    return nullptr;
  }

  // Returns the hyper-parameters of the saved groups that the parameters of `group` were in, which must be equal.
  // Returns an empty dict when no parameter was in a saved group.
  StateDict settings_of(const GroupNames& group) const {
    if (group.empty()) return rules_.has_empty_groups ? only_empty_group() : StateDict();
    const StateDict* settings = nullptr;
    std::string settled_by;
    for (const auto& parameter : group) {
      const auto* own = settings_of(parameter);
      if (own == nullptr || own == settings) continue;
      TESSERA_CHECK(!settings || same_hyperparameters(*settings, *own), ErrorKind::kShape,
                    "[state.set_optimizer] {} and {} are in one parameter group here, but were saved in groups with "
                    "different hyper-parameters. Make the groups as they were saved.",
                    quote(settled_by), quote(parameter.names.front()));
      settings = own;
      settled_by = parameter.names.front();
    }
    return settings ? *settings : StateDict();
  }

  // Saved groups are found by the names of their parameters, which a group without parameters does not have. It can be
  // matched only if the dict has exactly one such group and there is only one optimizer.
  const StateDict& only_empty_group() const {
    TESSERA_CHECK(empty_.size() == 1, ErrorKind::kShape,
                  "[state.set_optimizer] There are param groups that have zero parameters. In such a case, DSD only "
                  "support exactly one param group with zero parameters. But the loaded state_dict has {} param groups "
                  "that have zero parameters.",
                  empty_.size());
    TESSERA_CHECK(!rules_.several_optimizers, ErrorKind::kShape,
                  "[state.set_optimizer] When there is a parameter group that has zero parameters, multiple optimizers "
                  "are not supported.");
    return groups_[empty_.front()].dict();
  }

  Rules rules_;
  const StateDict& state_;
  const StateList& groups_;
  std::unordered_map<std::string, size_t> group_of_;  // index in groups_ of each saved name
  std::vector<size_t> empty_;                         // indices of the saved groups without parameters
};

}  // namespace

std::vector<StateDict> select_optimizers(const StateDict& saved, const std::vector<OptimizerNames>& optimizers,
                                         bool strict) {
  // A flat dict has no key "state"; its keys begin with "state." or "param_groups.". unflattened() first turns a flat
  // dict into a nested dict with the parameter groups of `optimizers`. A dict whose states have parameter ids as keys,
  // and not names, is returned unchanged.
  const bool is_flat = !saved.contains("state");
  if (!is_flat && is_by_id(saved)) {
    TESSERA_CHECK(optimizers.size() == 1, ErrorKind::kShape,
                  "[state.set_optimizer] found a dict by id for {} optimizers. Load each with "
                  "load_optimizer_state_dict.",
                  optimizers.size());
    return {saved};
  }
  const StateDict nested = is_flat ? unflattened(saved, optimizers) : StateDict();
  const OptimizerSelection selection(
      is_flat ? nested : saved,
      {.strict = strict, .has_empty_groups = !is_flat, .several_optimizers = optimizers.size() > 1});
  std::vector<StateDict> out;
  for (const auto& optimizer : optimizers) out.push_back(selection.select(optimizer));
  return out;
}

}  // namespace tessera::detail
