#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>

#include "tessera/base/error.h"
#include "tessera/base/text/quote.h"
#include "tessera/fsdp1/state/optim_state_dict.h"
#include "tessera/fsdp1/state/saved_states.h"
#include "tessera/state/broadcast_state.h"
#include "tessera/state/model_names.h"
#include "tessera/state/optimizer_dict.h"

namespace tessera {
namespace {

// Returns the number of keys that are names; the keys must be all names or all ids.
size_t count_names(const StateDict& states) {
  const auto names = static_cast<size_t>(std::ranges::count_if(
      states, [](const StateDict::Item& item) { return std::holds_alternative<std::string>(item.first); }));
  const auto keys = [&] {
    std::vector<std::string> all;
    for (const auto& [key, value] : states) all.push_back(to_string(key));
    return all;
  };
  TESSERA_CHECK(names == 0 || names == states.size(), ErrorKind::kShape,
                "[fsdp1.rekey] Invalid parameter keys: [{}]. Expected names only or ids only.", quoted_list(keys()));
  return names;
}

void check_one_name_each(nn::Module& model) {
  std::map<const void*, std::vector<std::string>> names;
  for (const auto& parameter : model.named_parameters(/*all=*/true)) {
    names[parameter.slot->parameter.unsafeGetTensorImpl()].push_back(parameter.name);
  }
  for (const auto& [tensor, each] : names) {
    TESSERA_CHECK(each.size() == 1, ErrorKind::kShape,
                  "[fsdp1.rekey] Each parameter should only map to one parameter name but got {}: [{}]. Untie them, or "
                  "rekey before they are tied.",
                  each.size(), fmt::join(each, ", "));
  }
}

}  // namespace

// Replaces each key of the state and of the groups: an id by a name, or a name by an id. The id of a parameter is the
// position of its name in `optimizer_parameters`. A model that has a parameter with several names is refused, because
// each position of `optimizer_parameters` holds only one name.
StateDict rekey_optim_state_dict(const StateDict& optim_state_dict, OptimStateKeyType type, nn::Module& model,
                                 const std::vector<std::string>& optimizer_parameters) {
  const auto& states = states_of(optim_state_dict, "[fsdp1.rekey]");
  const bool to_names = type == OptimStateKeyType::kParamName;
  if (count_names(states) == (to_names ? states.size() : 0)) return optim_state_dict;
  check_one_name_each(model);
  std::map<std::string, int64_t> ids;
  for (size_t id = 0; id < optimizer_parameters.size(); ++id) ids[optimizer_parameters[id]] = static_cast<int64_t>(id);
  const auto rekeyed = [&](const StateKey& key) -> StateKey {
    if (const auto* id = std::get_if<int64_t>(&key); id && to_names) {
      TESSERA_CHECK(*id >= 0 && *id < static_cast<int64_t>(optimizer_parameters.size()), ErrorKind::kShape,
                    "[fsdp1.rekey] found parameter {}, the optimizer has {}. Pass the optimizer of this state.", *id,
                    optimizer_parameters.size());
      return optimizer_parameters[static_cast<size_t>(*id)];
    }
    const auto found = ids.find(to_string(key));
    TESSERA_CHECK(found != ids.end() && !to_names, ErrorKind::kShape,
                  "[fsdp1.rekey] the optimizer has no parameter {}. Pass the optimizer of this state.",
                  quote(to_string(key)));
    return found->second;
  };
  StateDict rekeyed_state;
  for (const auto& [key, value] : states) rekeyed_state.set(rekeyed(key), value);
  StateDict result{{"state", std::move(rekeyed_state)}};
  const auto* groups = optim_state_dict.find("param_groups");
  if (!groups) return result;
  StateList rekeyed_groups;
  for (const auto& group : groups->list()) {
    StateDict copy = clone_state(group).dict();
    std::vector<StateKey> keys;
    for (const auto& param : copy.at("params").list()) keys.push_back(rekeyed(to_key(param)));
    std::ranges::sort(keys);
    StateList params;
    for (const auto& key : keys) params.push_back(to_value(key));
    copy.set("params", std::move(params));
    rekeyed_groups.emplace_back(std::move(copy));
  }
  result.set("param_groups", std::move(rekeyed_groups));
  return result;
}

StateDict rekey_optim_state_dict(const StateDict& optim_state_dict, OptimStateKeyType type, nn::Module& model,
                                 const optim::Optimizer& optimizer) {
  return rekey_optim_state_dict(optim_state_dict, type, model, optimizer_parameter_names(optimizer));
}

}  // namespace tessera
