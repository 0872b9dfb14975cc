// The optimizer state of a model under FSDP1 by the names of its original parameters, and back.
//
//   const auto scope = state_dict_type(*model, {.type = StateDictType::kSharded});
//   StateDict saved = optim_state_dict(*model, *optimizer);
//   // {"state": {"a.weight": {"exp_avg": ShardedTensor, "step": 3}, ...},
//   //  "param_groups": [{"lr": 0.001, "params": ["a.weight", ...]}]}
//   ...
//   optim_state_dict_to_load(*other, *other_optimizer, saved, {.load_directly = true});
//
// Semantics of FullyShardedDataParallel.optim_state_dict and optim_state_dict_to_load. The result fits any other
// wrapping and number of ranks. Values are exchanged one parameter's state at a time; sharded ones go from rank to rank
// and are nowhere whole. Every function is COLLECTIVE over the FSDP group, also where rank0_only drops its result; an
// error on one rank is thrown on all.
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
  std::optional<StateDict> optim_state_dict = {};  // to convert instead of the optimizer's own
  std::shared_ptr<comm::Group> group = {};         // the FSDP group by default
};

// As the model's state_dict_type says. {} on ranks that get nothing. Keys of `state` that are text and no parameter are
// copied with a warning.
// Errors kShape: ranks that lack states of rank 0 or have others (all of them named), ranks with different scalars for
// one parameter, a trained parameter without state beside others of its unit that have some (use_orig_params), states
// that do not lie as the parameter, ids of no parameter. kConfig: LOCAL_STATE_DICT with a device mesh.
StateDict optim_state_dict(nn::Module& model, const optim::Optimizer& optimizer,
                           const OptimStateDictOptions& options = {});
// The same for any optimizer: `optimizer_parameters` are the names of its parameters by id, as Module::named_parameters
// shows them. `saved` may have names for keys instead of ids (named optimizers).
StateDict optim_state_dict(const Fsdp1Units& model, const StateDictSettings& settings,
                           const std::vector<std::string>& optimizer_parameters, const StateDict& saved,
                           const std::shared_ptr<comm::Group>& group = {});

struct OptimStateDictToLoadOptions {
  bool is_named_optimizer = false;  // keys of the result are names
  bool load_directly = false;       // into the optimizer, too
  bool partial_units = false;       // see FlattenOptions
  std::shared_ptr<comm::Group> group = {};
};

// What load_optimizer_state_dict takes on this rank; keyed by id, or name. With rank0_only only rank 0's dict is read.
// Errors kShape: see flatten_optim_state_dict and rekey_flattened.
StateDict optim_state_dict_to_load(nn::Module& model, optim::Optimizer& optimizer, const StateDict& optim_state_dict,
                                   const OptimStateDictToLoadOptions& options = {});

enum class OptimStateKeyType { kParamName, kParamId };
// Keys of the other kind for an optimizer of a model without FSDP; unchanged when they are of that kind already. No
// communication. Errors kShape: keys of both kinds, keys of no parameter, a parameter with several names.
StateDict rekey_optim_state_dict(const StateDict& optim_state_dict, OptimStateKeyType type, nn::Module& model,
                                 const optim::Optimizer& optimizer);
// The same; `optimizer_parameters` by id.
StateDict rekey_optim_state_dict(const StateDict& optim_state_dict, OptimStateKeyType type, nn::Module& model,
                                 const std::vector<std::string>& optimizer_parameters);

}  // namespace tessera
