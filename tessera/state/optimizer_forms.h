// The three forms of an optimizer's dict, and the ways between them. No communication; values are shared, not copied.
//
//   by id    {"state": {0: {...}}, "param_groups": [{"lr": ..., "params": [0, 1]}]}        torch.optim
//   by name  {"state": {"a.weight": {...}}, "param_groups": [{"lr": ..., "params": ["a.weight", "a.bias"]}]}
//   flat     {"state.a.weight.step": ..., "param_groups.a.weight.lr": ...}                 any split of the model
//
//   StateDict named = optimizer_dict_to_names(optimizer_state_dict(*optimizer), optimizer_parameter_names(*optimizer));
//   StateDict flat = flatten_optimizer_dict(named);
//   named = unflatten_optimizer_dict(flat, {{"a.weight", "a.bias"}});
//   StateDict by_id = optimizer_dict_to_ids(named);
//
// Each takes time linear in the number of parameters, states and groups. Errors are kShape.
#pragma once

#include <string>
#include <vector>

#include "tessera/state/state_value.h"

namespace tessera {

// names: of the parameters over all groups in order. Keys of state that are in no group stay. Errors: another number of
// names, one name twice, an id that is in two groups.
StateDict optimizer_dict_to_names(const StateDict& by_id, const std::vector<std::string>& names);

// Ids are positions over all groups. Keys of state that are in no group stay.
StateDict optimizer_dict_to_ids(const StateDict& by_name);

// Hyper-parameters are repeated for each parameter; membership of groups, and groups without parameters, are not kept.
// Errors: states other than tensors, numbers and dicts of these; two values of one key.
StateDict flatten_optimizer_dict(const StateDict& by_name);

// groups: names of the parameters of each group. Keys of other parameters are left out, and so are parameters that no
// key names (their groups are shorter). What has no state gets no entry. Error: parameters of one group whose
// hyper-parameters differ.
StateDict unflatten_optimizer_dict(const StateDict& flat, const std::vector<std::vector<std::string>>& groups);

}  // namespace tessera
