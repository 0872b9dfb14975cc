// The three forms of an optimizer's dict, and the conversions between the forms. No communication; tensors are shared,
// not copied.
//
//   by id    {"state": {0: {...}}, "param_groups": [{"lr": ..., "params": [0, 1]}]}        torch.optim
//   by name  {"state": {"a.weight": {...}}, "param_groups": [{"lr": ..., "params": ["a.weight", "a.bias"]}]}
//   flat     {"state.a.weight.step": ..., "param_groups.a.weight.lr": ...}                 checkpoints
//
//   StateDict named = optimizer_dict_to_names(optimizer_state_dict(*optimizer), optimizer_parameter_names(*optimizer));
//   StateDict flat = flatten_optimizer_dict(named);
//   named = unflatten_optimizer_dict(flat, {{"a.weight", "a.bias"}});
//   StateDict by_id = optimizer_dict_to_ids(named);
//
// Each key of the flat form belongs to one parameter, so this form does not depend on how the parameters are
// divided into parameter groups and pipeline stages.
//
// The time of each function is linear in the number of parameters, states and groups. All errors are kShape.
#pragma once

#include <string>
#include <vector>

#include "tessera/state/state_value.h"

namespace tessera {

// Replaces each parameter id by a name. `names` are the names of the parameters over all groups, in order. Keys of the
// dict `state` that are in no group are kept. Errors: `names` has more or fewer entries than the groups have
// parameters, a name occurs twice, or an id is in two groups.
StateDict optimizer_dict_to_names(const StateDict& by_id, const std::vector<std::string>& names);

// Replaces each name by its position over all groups. Keys of `state` that are in no group are kept.
StateDict optimizer_dict_to_ids(const StateDict& by_name);

// Repeats the hyper-parameters of a group for each of its parameters. The flat form does not keep which parameters
// share a group, nor groups without parameters. Errors: a state that is not a tensor, a number or a dict of these; two
// values for one key.
StateDict flatten_optimizer_dict(const StateDict& by_name);

// Converts the flat form to the form by name. `groups` lists the names of the parameters of each group. Keys of `flat`
// that belong to no parameter in `groups` are ignored. A parameter for which `flat` has no key is left out of its
// group. A parameter for which `flat` has only "param_groups" keys gets no entry in `state`. Errors: two parameters of
// one group have different hyper-parameters, a name occurs twice, a key is not text, or a state has both a value and
// values below it ("state.w.a" and "state.w.a.b").
StateDict unflatten_optimizer_dict(const StateDict& flat, const std::vector<std::vector<std::string>>& groups);

}  // namespace tessera
