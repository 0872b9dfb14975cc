// Makes the state dict of an optimizer of a model under FSDP1, by the names of the original parameters, and loads such
// a dict.
//
//   const auto scope = state_dict_type(*model, {.type = StateDictType::kSharded});
//   StateDict saved = optim_state_dict(*model, *optimizer);
//   // {"state": {"a.weight": {"exp_avg": ShardedTensor, "step": 3}, ...},
//   //  "param_groups": [{"lr": 0.001, "params": ["a.weight", ...]}]}
//   ...
//   optim_state_dict_to_load(*other, *other_optimizer, saved, {.load_directly = true});
//
// Semantics of FullyShardedDataParallel.optim_state_dict and optim_state_dict_to_load. The result can be loaded with
// any other wrapping and world size. The states of one parameter are exchanged at a time; sharded values are sent from
// rank to rank and are never whole. Every function is COLLECTIVE over the FSDP group, also on ranks that get no result
// with rank0_only. An error on one rank is thrown on all ranks.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/fsdp1/state/state_dict_type.h"
#include "tessera/fsdp1/state/units.h"
#include "tessera/nn/module.h"
#include "tessera/optim/optimizer.h"
#include "tessera/state/state_value.h"

namespace tessera {

struct OptimStateDictOptions {
  std::optional<StateDict> optim_state_dict = {};  // the dict to convert, instead of the optimizer's own
  std::shared_ptr<comm::Group> group = {};         // default: the FSDP group
};

// Returns the state in the form of the model's state_dict_type, and {} on ranks that get no result. Keys of `state`
// that are text but no parameter are copied with a warning. Errors kShape: ranks with different states (the message
// names all of them); different scalars of one parameter; with use_orig_params, a trained parameter without state
// although other parameters of its unit have state; state tensors with another number of elements than this rank has of
// the parameter; ids that no parameter has. Error kConfig: LOCAL_STATE_DICT with a device mesh.
StateDict optim_state_dict(nn::Module& model, const optim::Optimizer& optimizer,
                           const OptimStateDictOptions& options = {});
// optim_state_dict() for a caller that has no optimizer object. `saved` is the optimizer's own dict, with ids or names
// as keys. `optimizer_parameters` are the names of the optimizer's parameters in Module::named_parameters, in the order
// of their ids.
StateDict optim_state_dict(const Fsdp1Units& model, const StateDictSettings& settings,
                           const std::vector<std::string>& optimizer_parameters, const StateDict& saved,
                           const std::shared_ptr<comm::Group>& group = {});

struct OptimStateDictToLoadOptions {
  bool is_named_optimizer = false;  // the keys of the result are names
  bool load_directly = false;       // also load the result into the optimizer
  bool partial_units = false;       // see FlattenOptions
  std::shared_ptr<comm::Group> group = {};
};

// Returns the dict that load_optimizer_state_dict takes on this rank, keyed by id or by name. With rank0_only, only
// rank 0's dict is read. Errors kShape: see flatten_optim_state_dict and rekey_flattened.
StateDict optim_state_dict_to_load(nn::Module& model, optim::Optimizer& optimizer, const StateDict& optim_state_dict,
                                   const OptimStateDictToLoadOptions& options = {});

enum class OptimStateKeyType { kParamName, kParamId };
// Converts the keys of a dict between names and ids, for an optimizer of a model without FSDP; a dict with keys of
// `type` is returned unchanged. No communication. Errors kShape: keys of both kinds, keys of no parameter, a parameter
// with several names.
StateDict rekey_optim_state_dict(const StateDict& optim_state_dict, OptimStateKeyType type, nn::Module& model,
                                 const optim::Optimizer& optimizer);
// rekey_optim_state_dict() for a caller that has no optimizer object: `optimizer_parameters` are the names of the
// optimizer's parameters; the position of a name is the parameter's id.
StateDict rekey_optim_state_dict(const StateDict& optim_state_dict, OptimStateKeyType type, nn::Module& model,
                                 const std::vector<std::string>& optimizer_parameters);

}  // namespace tessera
